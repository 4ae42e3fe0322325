//! The locks of installers on a node: the lock of all changes, and the lock of the agent that leads.

use super::{NodeFiles, open, state_path};
use crate::agent::install::error::InstallError;
use crate::agent::install::record::InstallRecord;
use crate::trusted_file::{self, FileId, create_directories};
use rustix::fs::OFlags;
use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// The lock under which installers change the node.
const CHANGES: &str = "install.lock";
/// The lock of the agent that leads on the node, which it holds while it runs.
const LEADERSHIP: &str = "agent.lock";

/// The lock of the agent that leads on the node.
#[derive(Debug)]
pub struct Leadership(#[expect(dead_code, reason = "held, never read")] File);

impl NodeFiles {
    /// Waits for the lock under which installers change the node. It is released when the file is closed.
    pub(super) fn lock(&self) -> Result<File, InstallError> {
        self.locked(CHANGES, |file| file.lock().map_err(TryLockError::Error))
            .map_err(|error| InstallError::file("lock", &state_path(CHANGES), &error))
    }

    /// Returns the lock of the agent that leads; `None` while another agent holds it.
    ///
    /// # Errors
    /// The state directory can't be written.
    pub fn lead(&self) -> Result<Option<Leadership>, InstallError> {
        match self.locked(LEADERSHIP, File::try_lock) {
            Ok(file) => Ok(Some(Leadership(file))),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(InstallError::file("lock", &state_path(LEADERSHIP), &error)),
        }
    }

    /// Removes the file of the lock, which this process holds, if nothing is installed, and that of a killed agent. Another
    /// process that waits for a lock creates a new file.
    pub(super) fn remove_locks(&self, installed: &InstallRecord) {
        if installed.is_empty() {
            self.remove_lock(CHANGES);
        }
        if self.has(&state_path(LEADERSHIP)) && !self.has_agent() {
            self.remove_lock(LEADERSHIP);
        }
    }

    /// Whether an agent leads.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        let file = self.root.reach_entry(&state_path(LEADERSHIP)).and_then(|path| open(&path));
        file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Ends the lead of this agent. The lock is held while its file is removed: an agent that starts now creates a new one.
    pub fn end_lead(&self, own: Leadership) {
        self.remove_lock(LEADERSHIP);
        drop(own);
    }

    /// Locks a file with `lock`; creates it if it is missing.
    fn locked(&self, name: &str, lock: impl Fn(&File) -> Result<(), TryLockError>) -> io::Result<File> {
        loop {
            let path = self.root.reach_entry(&state_path(name))?;
            create_directories(path.parent().unwrap_or(Path::new("/")))?;
            // Opening it for writing would wake processes that watch the directory.
            let file = trusted_file::open(&path, OFlags::RDONLY | OFlags::CREATE)?;
            let own = file.metadata()?;
            // A user who can open a file can also hold its lock.
            if own.mode() & 0o077 != 0 {
                file.set_permissions(Permissions::from_mode(0o600))?;
            }
            lock(&file)?;
            // Another process may have removed the file before it was locked.
            if fs::metadata(&path).is_ok_and(|found| FileId::of(&found) == FileId::of(&own)) {
                return Ok(file);
            }
        }
    }

    fn remove_lock(&self, name: &str) {
        if let Err(error) = self.remove(&state_path(name)) {
            tracing::warn!("can't remove {}: {error}", state_path(name));
        }
    }
}
