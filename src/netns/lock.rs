//! The lock of a network namespace: a file that only root can open. The namespace file itself can't be the lock:
//! every user can open it where it is mounted, and every process inside has it in `/proc/self/ns`.

use crate::{trusted_file, wait};
use rustix::fs::OFlags;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The directory of the lock files: one file `DEVICE-INODE` for each namespace in use.
pub(super) const DIRECTORY: &str = "/run/detour/locks";
/// The intervals between two attempts to take the lock: flock(2) has no timeout.
const POLL_INTERVALS: wait::Intervals = [Duration::from_millis(1), Duration::from_millis(20)];

/// The identity of a network namespace, which does not depend on the path that opens it.
pub use crate::trusted_file::FileId as NetnsId;

/// A lock that this process holds. Dropping it removes the lock file.
#[derive(Debug)]
pub(super) struct NetnsLock {
    path: PathBuf,
    /// Closing it releases the lock, after the file is removed.
    _file: File,
}

impl NetnsLock {
    /// Takes the lock of a network namespace; waits up to `timeout`, and returns `None` if another process holds it for
    /// longer. Creates the directory if `create` is set.
    pub(super) fn acquire(directory: &Path, id: NetnsId, create: bool, timeout: Duration) -> io::Result<Option<Self>> {
        let path = directory.join(format!("{}-{}", id.device, id.inode));
        let open = || trusted_file::open(&path, OFlags::WRONLY | OFlags::CREATE);
        let acquire = || {
            let file = match open() {
                Err(error) if error.kind() == ErrorKind::NotFound && create => {
                    create_directory(directory).and_then(|()| open())
                }
                opened => opened,
            };
            Self::try_acquire(&path, file?)
        };
        wait::until(timeout, POLL_INTERVALS, acquire)
    }

    /// Takes the lock, unless another process holds it or has removed its file in the meantime.
    fn try_acquire(path: &Path, file: File) -> io::Result<Option<Self>> {
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Interrupted => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let is_removed = file.metadata()?.nlink() == 0;
        Ok((!is_removed).then(|| Self { path: path.to_owned(), _file: file }))
    }
}

impl Drop for NetnsLock {
    fn drop(&mut self) {
        // If this fails, the next call in this namespace uses the file, or `remove_stale_locks` removes it.
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes the lock files of killed calls; skips files in use without waiting for them.
pub fn remove_stale_locks() {
    remove_stale_locks_in(Path::new(DIRECTORY));
}

fn remove_stale_locks_in(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        if let Ok(file) = trusted_file::open(&path, OFlags::WRONLY) {
            // Dropping the lock removes the file.
            let _ = NetnsLock::try_acquire(&path, file);
        }
    }
}

/// Creates the directory for root only. Its parent is shared with the saved state, so it gets explicit permissions:
/// a runtime's umask may be 0.
fn create_directory(path: &Path) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const ID: NetnsId = NetnsId { device: 4, inode: 4_026_531_840 };
    const LONG: Duration = Duration::from_secs(60);

    /// A lock directory that does not exist yet, and neither does its parent.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("detour-lock-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            Self(root.join("detour/locks"))
        }

        fn acquire(&self, timeout: Duration) -> io::Result<Option<NetnsLock>> {
            NetnsLock::acquire(&self.0, ID, true, timeout)
        }

        fn files(&self) -> Vec<PathBuf> {
            fs::read_dir(&self.0).expect("it exists").map(|entry| entry.expect("readable").path()).collect()
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(self.0.ancestors().nth(2).expect("a root"));
        }
    }

    #[test]
    fn only_root_can_open_a_lock_and_its_file_is_removed() {
        let directory = Directory::new("modes");
        assert!(matches!(NetnsLock::acquire(&directory.0, ID, false, LONG), Err(e) if e.kind() == ErrorKind::NotFound));
        let lock = directory.acquire(LONG).expect("usable").expect("acquired");
        let mode = |path: &Path| fs::metadata(path).expect("it exists").permissions().mode() & 0o7777;
        assert_eq!(directory.files(), [directory.0.join("4-4026531840")]);
        assert_eq!((mode(&directory.0), mode(&lock.path)), (0o700, 0o600));
        assert!(matches!(directory.acquire(Duration::ZERO), Ok(None)));
        drop(lock);
        assert!(directory.files().is_empty());
        NetnsLock::acquire(&directory.0, ID, false, LONG).expect("the directory exists now").expect("acquired");
    }

    #[test]
    fn a_file_in_place_of_the_directory_is_an_error() {
        let directory = Directory::new("file");
        fs::create_dir_all(directory.0.parent().expect("a parent")).expect("created");
        fs::write(&directory.0, "").expect("written");
        assert!(directory.acquire(LONG).is_err());
    }

    #[test]
    fn one_thread_at_a_time_holds_the_lock() {
        let directory = Directory::new("many");
        let (inside, rounds) = (std::sync::atomic::AtomicU32::new(0), 50);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        let _lock = directory.acquire(LONG).expect("usable").expect("acquired");
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        remove_stale_locks_in(&directory.0);
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(directory.files().is_empty());
    }

    #[test]
    fn stale_locks_are_removed_and_held_locks_stay() {
        let directory = Directory::new("stale");
        let lock = directory.acquire(LONG).expect("usable").expect("acquired");
        for inode in 0..1000 {
            fs::write(directory.0.join(format!("4-{inode}")), "").expect("written");
        }
        remove_stale_locks_in(&directory.0);
        assert_eq!(directory.files(), std::slice::from_ref(&lock.path));
    }
}
