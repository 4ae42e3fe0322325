//! The locks of installers on a node: the lock of all changes, and the lock of the agent that leads.

use super::{NodeFiles, open, state_path};
use crate::agent::install::atomic;
use crate::agent::install::error::InstallError;
use crate::host_path::HostPath;
use crate::trusted_file::{FileId, create_directories, open_lock};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// A file lock on the node, released when this value is dropped.
#[derive(Debug)]
pub struct InstallLock(#[expect(dead_code, reason = "held, never read")] File);

/// The lock of the agent that leads on the node, which it holds while it runs.
#[derive(Debug)]
pub struct Leadership(#[expect(dead_code, reason = "held, never read")] File);

impl NodeFiles {
    /// Waits for the lock under which installers change the node.
    ///
    /// # Errors
    /// The state directory can't be written.
    pub fn lock(&self) -> Result<InstallLock, InstallError> {
        self.lock_at(&lock_file()).map(InstallLock)
    }

    /// Releases the lock, and removes its file if nothing is installed. Another process that waits for the lock
    /// creates a new file.
    pub fn forget_lock(&self, lock: InstallLock) {
        if self.record().is_ok_and(|record| record.is_none()) {
            let path = lock_file();
            let removed = self.root.reach_entry(&path).and_then(|path| atomic::remove(&path));
            if let Err(error) = removed {
                tracing::warn!("can't remove {path}: {error}");
            }
        }
        drop(lock);
    }

    fn lock_at(&self, path: &HostPath) -> Result<File, InstallError> {
        let lock = || loop {
            let (file, reached) = self.open_lock(path)?;
            file.lock()?;
            // Another process may have removed the file before it was locked.
            if is_at(&file, &reached)? {
                return Ok(file);
            }
        };
        lock().map_err(|error| InstallError::file("lock", path, &error))
    }

    fn open_lock(&self, path: &HostPath) -> io::Result<(File, PathBuf)> {
        let reached = self.root.reach_entry(path)?;
        create_directories(reached.parent().unwrap_or(Path::new("/")))?;
        Ok((open_lock(&reached)?, reached))
    }

    /// Returns the lock of the agent that leads; `None` while another agent holds it.
    ///
    /// # Errors
    /// The state directory can't be written.
    pub fn lead(&self) -> Result<Option<Leadership>, InstallError> {
        let path = leadership_file();
        let lock = || loop {
            let (file, reached) = self.open_lock(&path)?;
            match file.try_lock() {
                Ok(()) if is_at(&file, &reached)? => return Ok(Some(Leadership(file))),
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        };
        lock().map_err(|error: io::Error| InstallError::file("lock", &path, &error))
    }

    /// Whether an agent leads.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        let file = self.root.reach_entry(&leadership_file()).and_then(|path| open(&path));
        file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Removes the file of the lock if no agent leads, or if this one does.
    pub fn forget_leadership(&self, own: Option<Leadership>) {
        let path = leadership_file();
        let forget = || -> io::Result<()> {
            let reached = self.root.reach_entry(&path)?;
            // The lock is held during the removal: an agent that starts now creates a new file.
            let is_free = own.is_some() || {
                let file = open(&reached)?;
                file.try_lock().is_ok() && is_at(&file, &reached)?
            };
            if is_free { atomic::remove(&reached) } else { Ok(()) }
        };
        match forget() {
            Err(error) if error.kind() != ErrorKind::NotFound => tracing::warn!("can't remove {path}: {error}"),
            _ => {}
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
