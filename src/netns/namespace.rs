//! A network namespace as an open file: opened by path, identified by device and inode, locked and entered. This is
//! the only place that calls `setns` (clippy.toml), also for cgroup namespaces.

use super::lock::{self, NetnsId, NetnsLock};
use crate::cni::{Code, Error};
use crate::trusted_file::open_of_any_kind;
use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{FsType, fstatfs};
use std::fmt::Display;
use std::fs::File;
use std::io::{self, ErrorKind};
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
        match NetnsLock::acquire(Path::new(lock::DIRECTORY), self.id, mode != LockMode::Read, timeout) {
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
                let directory = lock::DIRECTORY;
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

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sched::unshare;
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
        NetnsId::of(&std::fs::metadata(OWN_NETNS).expect("readable"))
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
}
