//! The locks of installers on a node: the lock of all changes, and the files that show which agents run.

use super::{NodeFiles, open, state_path};
use crate::agent::install::atomic;
use crate::agent::install::error::InstallError;
use crate::host_path::HostPath;
use crate::trusted_file::{FileId, create_directories, open_lock};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::Path;

/// The suffix of the file that an agent holds locked while it runs.
const PRESENCE_SUFFIX: &str = ".present";

/// A file lock on the node, released when this value is dropped.
#[derive(Debug)]
pub struct InstallLock(#[expect(dead_code, reason = "held, never read")] File);

/// The presence of a running agent: a file that it keeps locked.
#[derive(Debug)]
pub struct Presence(#[expect(dead_code, reason = "held, never read")] File);

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
        let lock = || {
            let reached = self.root.reach_entry(path)?;
            create_directories(reached.parent().unwrap_or(Path::new("/")))?;
            loop {
                let file = open_lock(&reached)?;
                file.lock()?;
                // Another process may have removed the file before it was locked, as `forget_absent` does.
                if is_at(&file, &reached)? {
                    return Ok(file);
                }
            }
        };
        lock().map_err(|error| InstallError::file("lock", path, &error))
    }

    /// Marks `installer` as running until the result is dropped.
    ///
    /// # Errors
    /// The state directory can't be written.
    pub fn be_present(&self, installer: &str) -> Result<Presence, InstallError> {
        self.lock_at(&presence(installer)).map(Presence)
    }

    /// Whether `installer` is running.
    #[must_use]
    pub fn is_present(&self, installer: &str) -> bool {
        let file = self.root.reach_entry(&presence(installer)).and_then(|path| open(&path));
        file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Whether any agent is running.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        let names = self.names(&lock_file().parent()).unwrap_or_default();
        names.iter().filter_map(|name| name.strip_suffix(PRESENCE_SUFFIX)).any(|installer| self.is_present(installer))
    }

    /// Removes the file that [`NodeFiles::be_present`] created.
    pub fn forget_presence(&self, installer: &str) {
        // A file that could not be removed is soon unlocked, so it has no effect.
        let _ = self.root.reach_entry(&presence(installer)).and_then(|path| atomic::remove(&path));
    }

    /// Removes the files that [`NodeFiles::be_present`] created for agents that were killed.
    pub fn forget_absent(&self) {
        let forget = |name: &str| -> io::Result<()> {
            let path = self.root.reach_entry(&state_path(name))?;
            let file = open(&path)?;
            // The lock is held during the removal: an agent of that name that starts now creates a new file.
            if file.try_lock().is_ok() && is_at(&file, &path)? {
                atomic::remove(&path)?;
            }
            Ok(())
        };
        for name in self.names(&lock_file().parent()).unwrap_or_default() {
            if name.ends_with(PRESENCE_SUFFIX)
                && let Err(error) = forget(&name)
            {
                tracing::warn!("can't remove {}: {error}", state_path(&name));
            }
        }
    }
}

fn lock_file() -> HostPath {
    state_path("install.lock")
}

fn presence(installer: &str) -> HostPath {
    state_path(&format!("{}{PRESENCE_SUFFIX}", installer.replace('/', "_")))
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
