//! The locks of installers on a node: the lock of all changes, and the lock of the agent that leads.

use super::{NodeFiles, open, state_path};
use crate::agent::install::error::InstallError;
use crate::agent::install::record::InstallRecord;
use crate::host_path::HostPath;
use crate::trusted_file::{self, FileId, create_directories};
use rustix::fs::OFlags;
use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// The lock of the agent that leads on the node, which it holds while it runs.
#[derive(Debug)]
pub struct Leadership(#[expect(dead_code, reason = "held, never read")] File);

impl NodeFiles {
    /// Waits for the lock under which installers change the node. It is released when the file is closed.
    pub(super) fn lock(&self) -> Result<File, InstallError> {
        let wait = |file: &File| file.lock().map_err(TryLockError::Error);
        self.locked(&lock_file(), wait).map_err(|error| InstallError::file("lock", &lock_file(), &error))
    }

    /// Removes the file of the lock, which this process holds, if nothing is installed, and that of a killed agent. Another
    /// process that waits for a lock creates a new file.
    pub(super) fn remove_locks(&self, installed: &InstallRecord) {
        if installed.is_empty() {
            self.remove_lock(&lock_file());
        }
        if self.has(&leadership_file()) && self.lead().is_ok_and(|free| free.is_some()) {
            self.remove_lock(&leadership_file());
        }
    }

    /// Returns the lock of the agent that leads; `None` while another agent holds it.
    ///
    /// # Errors
    /// The state directory can't be written.
    pub fn lead(&self) -> Result<Option<Leadership>, InstallError> {
        match self.locked(&leadership_file(), File::try_lock) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            locked => locked
                .map(|file| Some(Leadership(file)))
                .map_err(|error| InstallError::file("lock", &leadership_file(), &error)),
        }
    }

    /// Whether an agent leads.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        let file = self.root.reach_entry(&leadership_file()).and_then(|path| open(&path));
        file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Ends the lead of this agent. The lock is held while its file is removed: an agent that starts now creates a new one.
    pub fn end_lead(&self, own: Leadership) {
        self.remove_lock(&leadership_file());
        drop(own);
    }

    /// Locks a file with `lock`; creates it if it is missing.
    fn locked(&self, path: &HostPath, lock: impl Fn(&File) -> Result<(), TryLockError>) -> io::Result<File> {
        loop {
            let reached = self.root.reach_entry(path)?;
            create_directories(reached.parent().unwrap_or(Path::new("/")))?;
            // Opening it for writing would wake processes that watch the directory.
            let file = trusted_file::open(&reached, OFlags::RDONLY | OFlags::CREATE)?;
            // A user who can open a file can also hold its lock.
            if file.metadata()?.mode() & 0o077 != 0 {
                file.set_permissions(Permissions::from_mode(0o600))?;
            }
            lock(&file)?;
            // Another process may have removed the file before it was locked.
            if is_at(&file, &reached)? {
                return Ok(file);
            }
        }
    }

    fn remove_lock(&self, path: &HostPath) {
        if let Err(error) = self.remove(path) {
            tracing::warn!("can't remove {path}: {error}");
        }
    }
}

fn lock_file() -> HostPath {
    state_path("install.lock")
}

fn leadership_file() -> HostPath {
    state_path("agent.lock")
}

/// Whether `path` still refers to `file`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match fs::metadata(path) {
        Ok(found) => Ok(FileId::of(&found) == FileId::of(&own)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
