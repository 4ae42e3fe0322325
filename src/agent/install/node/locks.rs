//! The locks of installers on a node: the lock of all changes, and the files that show which agents run.

use super::{NodeFiles, open};
use crate::agent::install::atomic;
use crate::agent::install::error::InstallError;
use crate::agent::install::release::Release;
use crate::host_path::HostPath;
use crate::trusted_file::{self, FileId, create_directories, open_lock};
use rustix::fs::OFlags;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// The suffix of the file that an agent holds locked while it runs.
const PRESENCE_SUFFIX: &str = ".present";

/// A file lock on the node, released when this value is dropped.
#[derive(Debug)]
pub struct InstallLock(#[expect(dead_code, reason = "held, never read")] File);

/// The presence of a running agent: a file that it keeps locked. Other agents read from it whether this one requires the
/// node's taint.
#[derive(Debug)]
pub struct Presence {
    installer: String,
    name: String,
    path: PathBuf,
    #[expect(dead_code, reason = "held, never read")]
    lock: File,
}

/// The maximum length of the key of a taint.
const MAX_KEY: u64 = 512;

impl Presence {
    /// Returns the name of the agent.
    #[must_use]
    pub fn installer(&self) -> &str {
        &self.installer
    }

    /// Records the key of the taint that the node must have because the plugin is not ready; `None` if it is ready.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn require_taint(&self, key: Option<&str>) -> io::Result<()> {
        let key = key.unwrap_or_default();
        if required_taint(&open(&self.path)?)? != key {
            // Closing the file wakes the other agents, which watch the directory.
            trusted_file::open(&self.path, OFlags::WRONLY | OFlags::TRUNC)?.write_all(key.as_bytes())?;
        }
        Ok(())
    }
}

/// Returns the content of a presence file.
fn required_taint(file: &File) -> io::Result<String> {
    let mut key = String::new();
    file.take(MAX_KEY).read_to_string(&mut key).map(|_| key)
}

impl NodeFiles {
    /// Waits for the lock under which installers change the node.
    ///
    /// # Errors
    /// The state directory can't be written.
    pub fn lock(&self) -> Result<InstallLock, InstallError> {
        self.lock_at(&self.lock_file()).map(InstallLock)
    }

    /// Releases the lock, and removes its file if nothing is installed. Another process that waits for the lock
    /// creates a new file.
    pub fn forget_lock(&self, lock: InstallLock) {
        if self.releases().is_ok_and(|releases| releases.is_empty()) {
            let removed = self.root.reach_entry(&self.lock_file()).and_then(|path| atomic::remove(&path));
            if let Err(error) = removed {
                tracing::warn!("can't remove {}: {error}", self.lock_file());
            }
        }
        drop(lock);
    }

    fn lock_file(&self) -> HostPath {
        self.state.join("install.lock")
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
        let path = self.presence(installer);
        let (lock, reached) = (self.lock_at(&path)?, self.reach(&path)?);
        let presence = Presence { installer: installer.to_owned(), name: path.name(), path: reached, lock };
        // A killed agent of the same name may have left a key.
        presence.require_taint(None).map_err(|error| InstallError::file("write", &path, &error))?;
        Ok(presence)
    }

    /// Whether another running agent requires the taint `key`.
    #[must_use]
    pub fn is_taint_required(&self, key: &str, own: &Presence) -> bool {
        let requires = |name: &String| -> io::Result<bool> {
            let file = open(&self.root.reach_entry(&self.state.join(name))?)?;
            Ok(required_taint(&file)? == key && matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
        };
        let names = self.names(&self.state).unwrap_or_default();
        let mut others = names.iter().filter(|name| name.ends_with(PRESENCE_SUFFIX) && **name != own.name);
        others.any(|name| requires(name).unwrap_or(false))
    }

    /// Returns the other releases on the node whose agent is running.
    ///
    /// # Errors
    /// An installation record can't be read.
    pub fn present_releases(&self) -> Result<Vec<Release>, InstallError> {
        let mut present = Vec::new();
        for release in self.releases()?.into_iter().filter(|release| *release != self.release) {
            let installer = self.record(&release)?.installer;
            if self.of_release(release.clone()).is_present(&installer) {
                present.push(release);
            }
        }
        Ok(present)
    }

    /// Whether `installer` is running.
    #[must_use]
    pub fn is_present(&self, installer: &str) -> bool {
        let file = self.root.reach_entry(&self.presence(installer)).and_then(|path| open(&path));
        file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Removes the file that [`NodeFiles::be_present`] created.
    pub fn forget_presence(&self, installer: &str) {
        // A file that could not be removed is soon unlocked, so it has no effect.
        let _ = self.root.reach_entry(&self.presence(installer)).and_then(|path| atomic::remove(&path));
    }

    /// Removes the files that [`NodeFiles::be_present`] created for agents that were killed.
    pub fn forget_absent(&self) {
        let forget = |name: &str| -> io::Result<()> {
            let path = self.root.reach_entry(&self.state.join(name))?;
            let file = open(&path)?;
            // The lock is held during the removal: an agent of that name that starts now creates a new file.
            if file.try_lock().is_ok() && is_at(&file, &path)? {
                atomic::remove(&path)?;
            }
            Ok(())
        };
        for name in self.names(&self.state).unwrap_or_default() {
            if name.ends_with(PRESENCE_SUFFIX)
                && let Err(error) = forget(&name)
            {
                tracing::warn!("can't remove {}: {error}", self.state.join(&name));
            }
        }
    }

    fn presence(&self, installer: &str) -> HostPath {
        // Agents of two releases may have the same host name.
        let release = if self.release == Release::default() { String::new() } else { format!(".{}", self.release) };
        self.state.join(&format!("{}{release}{PRESENCE_SUFFIX}", installer.replace('/', "_")))
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_path::HostRoot;

    #[test]
    fn a_running_agent_of_any_release_can_require_the_taint() {
        let directory = std::env::temp_dir().join(format!("detour-presence-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("created");
        let node = NodeFiles::new(HostRoot::new(&directory), HostPath::new("/").expect("a path"));
        let other = node.of_release("other".parse().expect("a name"));
        // Two agents with the same host name.
        let (first, second) = (node.be_present("host").expect("present"), other.be_present("host").expect("present"));
        assert!(node.is_present("host") && other.is_present("host"));
        assert!(!node.is_taint_required("key", &first));
        second.require_taint(Some("key")).expect("written");
        assert!(node.is_taint_required("key", &first) && !node.is_taint_required("another", &first));
        assert!(!other.is_taint_required("key", &second), "its own file does not count");
        second.require_taint(None).expect("written");
        assert!(!node.is_taint_required("key", &first));
        second.require_taint(Some("key")).expect("written");
        drop(second);
        assert!(!node.is_taint_required("key", &first), "that agent was killed");
        let second = other.be_present("host").expect("present");
        assert!(!node.is_taint_required("key", &first), "the next one starts without it");
        drop((first, second));
        fs::remove_dir_all(&directory).expect("removed");
    }
}
