//! The lock of a network namespace: a file that root alone can open. The namespace's own file is no lock:
//! every user can open it where it is mounted, and every process in it has it in `/proc/self/ns`.

use super::NetnsId;
use crate::trusted_file;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where the locks are, one file for each namespace that is in use now: `DEVICE-INODE`.
pub(super) const DIRECTORY: &str = "/run/detour/locks";
/// How often the directory is created again because another process removes it.
const TRIES: u32 = 10;

/// A lock that this process holds. Its file is removed with it.
#[derive(Debug)]
pub(super) struct NetnsLock {
    path: PathBuf,
    /// The lock ends when this is closed, after the file was removed.
    _file: File,
}

/// Why there is no lock.
#[derive(Debug)]
pub(super) enum LockError {
    /// Another process holds it.
    Busy,
    /// The file can't be used.
    Io(PathBuf, io::Error),
}

impl NetnsLock {
    /// Waits for the lock of a namespace, up to `patience`. Creates the directory if `create` is set.
    pub(super) fn acquire(directory: &Path, id: NetnsId, create: bool, patience: Duration) -> Result<Self, LockError> {
        let path = directory.join(format!("{}-{}", id.device, id.inode));
        let mut left = TRIES;
        let mut open = || loop {
            let opened = trusted_file::open(&path, OpenOptions::new().write(true).create(true).mode(0o600));
            match opened {
                Err(error) if error.kind() == ErrorKind::NotFound && create && left > 0 => {
                    left -= 1;
                    // The parent as the state's, whatever the umask is: a runtime's may be 0.
                    create_directory(directory).map_err(|e| LockError::Io(directory.to_owned(), e))?;
                }
                other => return other.map_err(|e| LockError::Io(path.clone(), e)),
            }
        };
        let deadline = Instant::now() + patience;
        let mut pause = Duration::from_millis(1);
        loop {
            if let Some(lock) = Self::try_acquire(&path, open()?).map_err(|e| LockError::Io(path.clone(), e))? {
                return Ok(lock);
            }
            if Instant::now() >= deadline {
                return Err(LockError::Busy);
            }
            // flock has no deadline of its own; a signal to end it would need one thread more.
            std::thread::park_timeout(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// The lock, unless another process holds it or has removed its file meanwhile.
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
        // One that stays is used by the next call in this namespace, or removed as stale.
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes the files that killed calls left behind. It waits for none that is in use.
pub fn remove_stale_locks() {
    remove_stale_locks_in(Path::new(DIRECTORY));
}

fn remove_stale_locks_in(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        if let Ok(file) = trusted_file::open(&path, OpenOptions::new().write(true)) {
            // To hold it for a moment removes it.
            let _ = NetnsLock::try_acquire(&path, file);
        }
    }
}

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

    /// A directory of locks that does not exist yet, below one that does not either.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("detour-lock-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            Self(root.join("detour/locks"))
        }

        fn acquire(&self, patience: Duration) -> Result<NetnsLock, LockError> {
            NetnsLock::acquire(&self.0, ID, true, patience)
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
    fn a_lock_is_for_root_alone_and_leaves_no_file() {
        let directory = Directory::new("modes");
        assert!(
            matches!(NetnsLock::acquire(&directory.0, ID, false, LONG), Err(LockError::Io(_, e)) if e.kind() == ErrorKind::NotFound)
        );
        let lock = directory.acquire(LONG).expect("acquired");
        let mode = |path: &Path| fs::metadata(path).expect("it exists").permissions().mode() & 0o7777;
        assert_eq!(directory.files(), [directory.0.join("4-4026531840")]);
        assert_eq!((mode(&directory.0), mode(&lock.path)), (0o700, 0o600));
        assert!(matches!(directory.acquire(Duration::ZERO), Err(LockError::Busy)));
        drop(lock);
        assert!(directory.files().is_empty());
        NetnsLock::acquire(&directory.0, ID, false, LONG).expect("the directory exists now");
    }

    #[test]
    fn a_file_in_the_way_is_an_error_that_names_it() {
        let directory = Directory::new("file");
        fs::create_dir_all(directory.0.parent().expect("a parent")).expect("created");
        fs::write(&directory.0, "").expect("written");
        assert!(matches!(directory.acquire(LONG), Err(LockError::Io(..))));
    }

    #[test]
    fn one_holds_it_at_a_time_however_many_come() {
        let directory = Directory::new("many");
        let (inside, rounds) = (std::sync::atomic::AtomicU32::new(0), 50);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        let _lock = directory.acquire(LONG).expect("acquired");
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
    fn only_files_that_no_call_uses_are_stale() {
        let directory = Directory::new("stale");
        let lock = directory.acquire(LONG).expect("acquired");
        for inode in 0..1000 {
            fs::write(directory.0.join(format!("4-{inode}")), "").expect("written");
        }
        remove_stale_locks_in(&directory.0);
        assert_eq!(directory.files(), std::slice::from_ref(&lock.path));
    }
}
