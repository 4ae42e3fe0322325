//! A network namespace as an open file: opened by path, identified by device and inode, locked and entered. This is
//! the only place that calls `setns` (clippy.toml), also for cgroup namespaces.
//!
//! The lock is a file that only root can open. The namespace file itself can't be the lock: every user can open it where
//! it is mounted, and every process inside has it in `/proc/self/ns`.

use crate::cni::{Code, Error};
/// The identity of a network namespace, which does not depend on the path that opens it.
pub use crate::trusted_file::FileId as NetnsId;
use crate::trusted_file::{self, open_of_any_kind};
use crate::wait;
use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{FsType, fstatfs};
use rustix::fs::OFlags;
use std::fmt::Display;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// `NSFS_MAGIC` (linux/magic.h): the file system of namespace files.
const NSFS_MAGIC: FsType = FsType(0x6e73_6673);

/// The network namespace of the calling thread.
const OWN_NETNS: &str = "/proc/thread-self/ns/net";

/// A network namespace, kept alive by its open file.
#[derive(Debug)]
pub struct NetNs {
    path: PathBuf,
    file: File,
    id: NetnsId,
}

/// What a call does in a namespace, which decides whether it can do without the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockMode {
    /// Adds or changes: fails if the lock can't be used.
    Change,
    /// Removes: continues without the lock if it can't be used, so that a pod can always be deleted.
    CleanUp,
    /// Reads: continues without the lock if it can't be used, and does not create the lock directory.
    Read,
}

impl NetNs {
    /// Opens the namespace at `path`; `None` if the path does not exist or its namespace is gone.
    ///
    /// # Errors
    /// The file can't be opened or examined.
    pub fn open(path: &Path) -> Result<Option<Self>, Error> {
        let failed =
            |why: String| Error::new(Code::InvalidNetns, format!("network namespace {}: {why}", path.display()));
        // A namespace is not a regular file everywhere.
        let file = match open_of_any_kind(path) {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
            Err(error) => return Err(failed(format!("can't be opened: {error}"))),
        };
        let examined = fstatfs(&file).map_err(io::Error::from).and_then(|system| Ok((system, file.metadata()?)));
        let (system, metadata) = examined.map_err(|error| failed(format!("can't be examined: {error}")))?;
        // When the bind mount of a namespace is gone, its mount point remains as an empty file.
        let is_netns = system.filesystem_type() == NSFS_MAGIC;
        Ok(is_netns.then(|| Self { path: path.to_owned(), file, id: NetnsId::of(&metadata) }))
    }

    /// Returns the identity of the namespace.
    #[must_use]
    pub const fn id(&self) -> NetnsId {
        self.id
    }

    /// Returns the path that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether containerd made this namespace: the name is `cni-` and a UUID (containerd, pkg/netns, `newNS`).
    #[must_use]
    pub fn is_of_containerd(&self) -> bool {
        self.path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"cni-"))
    }

    /// Runs `work`, which only reads, in the namespace: [`Self::enter_to`] with [`LockMode::Read`].
    ///
    /// # Errors
    /// As [`Self::enter_to`].
    pub fn enter<T>(&self, timeout: Duration, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        self.enter_to(LockMode::Read, timeout, work)
    }

    /// Runs `work` on this thread in the namespace, under the lock that excludes other plugin calls and the agent.
    /// `work` must not start threads.
    ///
    /// # Errors
    /// [`Code::TryAgain`]: another call holds the lock for longer than `timeout`. [`Code::Io`]: the lock can't be
    /// used, and `mode` requires it. [`Code::InvalidNetns`]: the namespace can't be entered. Otherwise the error of
    /// `work`.
    ///
    /// # Panics
    /// The thread can't return to its own namespace: it must not continue in this one.
    pub fn enter_to<T>(
        &self,
        mode: LockMode,
        timeout: Duration,
        work: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let _lock = self.lock(mode, timeout)?;
        let _inside = EnteredNetns::enter(self)?;
        work()
    }

    /// Runs `work` on this thread in the namespace without the lock. `work` must not start threads, and must not depend
    /// on what other calls do in the namespace meanwhile.
    ///
    /// # Errors
    /// [`Code::InvalidNetns`]: the namespace can't be entered. Otherwise the error of `work`.
    ///
    /// # Panics
    /// As [`Self::enter_to`].
    pub fn enter_without_lock<T>(&self, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let _inside = EnteredNetns::enter(self)?;
        work()
    }

    fn lock(&self, mode: LockMode, timeout: Duration) -> Result<Option<NetnsLock>, Error> {
        let shown = self.path.display();
        match NetnsLock::acquire(Path::new(LOCKS), self.id, mode != LockMode::Read, timeout) {
            Ok(Some(lock)) => Ok(Some(lock)),
            Ok(None) => {
                let msg = format!(
                    "network namespace {shown}: locked by another detour call; waited {} s; retry",
                    timeout.as_secs()
                );
                Err(Error::new(Code::TryAgain, msg))
            }
            // No ADD has created the directory, so no other call can hold the lock.
            Err(error) if mode == LockMode::Read && error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => {
                let directory = LOCKS;
                let msg = format!(
                    "network namespace {shown}: can't lock it: {directory}: {error}; check that root can create files there"
                );
                if mode == LockMode::Change {
                    return Err(Error::new(Code::Io, msg));
                }
                tracing::warn!("{msg}; continuing without the lock");
                Ok(None)
            }
        }
    }
}

/// The calling thread inside a network namespace; it returns to its own when this is dropped.
struct EnteredNetns {
    own: File,
}

impl EnteredNetns {
    #[expect(clippy::disallowed_methods, reason = "the one place that enters a namespace")]
    fn enter(netns: &NetNs) -> Result<Self, Error> {
        let failed = |why: &dyn Display| {
            let msg = format!("network namespace {}: can't be entered: {why}", netns.path.display());
            Error::new(Code::InvalidNetns, msg)
        };
        let own = open_of_any_kind(Path::new(OWN_NETNS)).map_err(|e| failed(&format!("{OWN_NETNS}: {e}")))?;
        // Entering its own namespace first proves that the thread may return to it.
        for namespace in [&own, &netns.file] {
            setns(namespace, CloneFlags::CLONE_NEWNET).map_err(|errno| failed(&errno))?;
        }
        Ok(Self { own })
    }
}

impl Drop for EnteredNetns {
    #[expect(clippy::disallowed_methods, reason = "the one place that enters and leaves a namespace")]
    fn drop(&mut self) {
        let back = setns(&self.own, CloneFlags::CLONE_NEWNET);
        assert!(back.is_ok(), "the thread can't return from a pod's network namespace to its own: {back:?}");
    }
}

/// Moves the calling thread into the cgroup namespace at `path`, for the rest of its life.
///
/// # Errors
/// The file can't be opened or is not a cgroup namespace, or the thread may not enter it.
#[expect(clippy::disallowed_methods, reason = "the one place that enters a namespace")]
pub fn enter_cgroup_namespace(path: &Path) -> io::Result<()> {
    Ok(setns(open_of_any_kind(path)?, CloneFlags::CLONE_NEWCGROUP)?)
}

/// The directory of the lock files: one file `DEVICE-INODE` for each namespace in use.
const LOCKS: &str = "/run/detour/locks";
/// The intervals between two attempts to take the lock: flock(2) has no timeout.
const POLL_INTERVALS: wait::Intervals = [Duration::from_millis(1), Duration::from_millis(20)];

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
    remove_stale_locks_in(Path::new(LOCKS));
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
    use nix::sched::unshare;
    use std::os::unix::fs::PermissionsExt;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn new_netns() -> NetNs {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("needs root");
            NetNs::open(Path::new(OWN_NETNS)).expect("readable").expect("a namespace")
        };
        std::thread::spawn(make).join().expect("no panic")
    }

    fn current() -> NetnsId {
        NetnsId::of(&fs::metadata(OWN_NETNS).expect("readable"))
    }

    #[test]
    fn the_thread_returns_to_its_own_namespace_after_success_error_and_panic() {
        let (netns, own) = (new_netns(), current());
        assert_eq!(netns.enter(TIMEOUT, || Ok(current())).expect("entered"), netns.id());
        assert_eq!(current(), own);
        let failed = netns.enter(TIMEOUT, || Err::<(), _>(Error::new(Code::Internal, "why")));
        assert_eq!((failed.expect_err("it failed").msg.as_str(), current()), ("why", own));
        let panicked = catch_unwind(AssertUnwindSafe(|| netns.enter::<()>(TIMEOUT, || panic!("a fault"))));
        assert!(panicked.is_err());
        assert_eq!(current(), own);
    }

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
