//! The pod's network namespace: opened by path and known by device and inode, entered and left again
//! here only, locked so that two calls for one pod wait for each other.
//!
//! The kernel's routing side (rtnetlink(7)), asked from the thread that is in the namespace.

use crate::cni::{Code, Error};
use crate::netlink::{Allowance, NetlinkSocket, TOO_MANY};
pub use addresses::{
    OwnFamilies, PROXY_LOOPBACK, own_addresses, own_families, own_ip6_addresses, secondary_interfaces,
};
pub use connections::{OpenConnection, open_connections};
pub use default_route::replace_default_routes;
pub use fixtures::{Fixture, Fixtures, Routing, add_fixtures, remove_fixtures};
use lock::NetnsLock;
pub use lock::remove_stale_locks;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::SockProtocol;
use nix::sys::statfs::{FsType, fstatfs};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

mod addresses;
mod connections;
mod default_route;
pub mod find;
mod fixtures;
mod lock;

/// `NSFS_MAGIC` (linux/magic.h): the file system of namespace files.
const NSFS_MAGIC: FsType = FsType(0x6e73_6673);

/// The network namespace of the calling thread.
const OWN: &str = "/proc/thread-self/ns/net";

/// A network namespace that is held open.
#[derive(Debug)]
pub struct NetNs {
    path: PathBuf,
    file: File,
    id: NetnsId,
}

/// Identifies a network namespace independently of the path by which it was opened (namespaces(7)).
pub use crate::trusted_file::FileId as NetnsId;

impl NetNs {
    /// Opens the namespace at `path`; `None` where there is nothing at that path.
    ///
    /// # Errors
    /// What is there can't be opened or is no network namespace.
    pub fn open(path: &Path) -> Result<Option<Self>, Error> {
        let wrong =
            |why: String| Error::new(Code::InvalidNetns, format!("network namespace {}: {why}", path.display()));
        // To open a pipe would wait for whoever writes to it.
        #[expect(clippy::disallowed_methods, reason = "a namespace, checked below, is no regular file everywhere")]
        let file = match File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path) {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
            Err(error) => return Err(wrong(format!("can't be opened: {error}"))),
        };
        let kind = fstatfs(&file).map_err(|e| wrong(format!("can't be examined: {e}")))?.filesystem_type();
        // A path of a namespace that has gone is an empty file left behind by its bind mount.
        if kind != NSFS_MAGIC {
            return Ok(None);
        }
        let id = file
            .metadata()
            .map(|metadata| NetnsId::of(&metadata))
            .map_err(|e| wrong(format!("can't be examined: {e}")))?;
        Ok(Some(Self { path: path.to_owned(), file, id }))
    }

    /// Which namespace this is.
    #[must_use]
    pub const fn id(&self) -> NetnsId {
        self.id
    }

    /// The path by which it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `work`, which only reads, in the namespace and alone: see [`Self::enter_to`].
    ///
    /// # Errors
    /// As [`Self::enter_to`].
    pub fn enter<T>(&self, patience: Duration, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        self.enter_to(LockMode::Read, patience, work)
    }

    /// Runs `work` on this thread in the namespace, while no other call of this plugin and no agent works
    /// there. `work` must not start threads.
    ///
    /// # Errors
    /// [`Code::TryAgain`]: another call works there for longer than `patience`. [`Code::Io`]: the lock
    /// can't be used, and `access` needs it. The namespace can't be entered; else what `work` returns.
    ///
    /// # Panics
    /// The thread can't return to its own namespace: then it must not go on in this one.
    pub fn enter_to<T>(
        &self,
        access: LockMode,
        patience: Duration,
        work: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let _lock = self.lock(access, patience)?;
        let _inside = EnteredNetns::of(self)?;
        work()
    }

    fn error(&self, why: &str) -> Error {
        Error::new(Code::InvalidNetns, format!("network namespace {}: {why}", self.path.display()))
    }

    fn lock(&self, access: LockMode, patience: Duration) -> Result<Option<NetnsLock>, Error> {
        let shown = self.path.display();
        match NetnsLock::acquire(Path::new(lock::DIRECTORY), self.id, access != LockMode::Read, patience) {
            Ok(lock) => Ok(Some(lock)),
            Err(lock::LockError::Busy) => {
                let msg = format!(
                    "network namespace {shown}: another call has been at work in this namespace for {} s; try again",
                    patience.as_secs()
                );
                Err(Error::new(Code::TryAgain, msg))
            }
            // No ADD has created the directory: there is no call to wait for.
            Err(lock::LockError::Io(_, error)) if access == LockMode::Read && error.kind() == ErrorKind::NotFound => {
                Ok(None)
            }
            Err(lock::LockError::Io(path, error)) => {
                let msg = format!(
                    "network namespace {shown}: can't lock it: {}: {error}; check that root can create files there",
                    path.display()
                );
                if access == LockMode::Change {
                    return Err(Error::new(Code::Io, msg));
                }
                tracing::warn!("{msg}; continuing without the lock");
                Ok(None)
            }
        }
    }
}

/// What a call does in a namespace: how much it depends on the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockMode {
    /// Adds or changes: it fails if the lock can't be used.
    Change,
    /// Removes: it continues without a lock, so that a pod can always be deleted.
    CleanUp,
    /// Reads: it continues without a lock, and does not create the lock's directory.
    Read,
}

/// A thread in another network namespace; it returns when this is dropped.
struct EnteredNetns {
    own: File,
}

impl EnteredNetns {
    fn of(sandbox: &NetNs) -> Result<Self, Error> {
        let refused = |why: &dyn std::fmt::Display| sandbox.error(&format!("can't be entered: {why}"));
        #[expect(clippy::disallowed_methods, reason = "a namespace is no regular file everywhere")]
        let own = File::open(OWN).map_err(|e| refused(&format!("{OWN}: {e}")))?;
        // That the way back is permitted is known before it is needed.
        for namespace in [&own, &sandbox.file] {
            setns(namespace, CloneFlags::CLONE_NEWNET).map_err(|errno| refused(&errno))?;
        }
        Ok(Self { own })
    }
}

impl Drop for EnteredNetns {
    fn drop(&mut self) {
        let back = setns(&self.own, CloneFlags::CLONE_NEWNET);
        assert!(back.is_ok(), "the thread can't return from a pod's network namespace to its own: {back:?}");
    }
}

/// The kernel gives lo this index in every namespace (net/core/dev.c: it is made first).
const LO: u32 = 1;

const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const RTM_GETRULE: u16 = 34;

/// The length of `struct rtmsg` and of `struct fib_rule_hdr` (linux/rtnetlink.h, fib_rules.h).
const HEADER: usize = 12;

/// A socket of the calling thread's namespace.
///
/// # Errors
/// No descriptor is left.
fn open() -> Result<NetlinkSocket, Errno> {
    NetlinkSocket::open(SockProtocol::NetlinkRoute)
}

/// Treats an object that already exists as added.
fn unless_there(result: Result<(), Errno>) -> Result<(), Errno> {
    unless(result, &[Errno::EEXIST])
}

/// Treats an object that does not exist as removed.
fn unless_gone(result: Result<(), Errno>) -> Result<(), Errno> {
    unless(result, &[Errno::ENOENT, Errno::ESRCH, Errno::EADDRNOTAVAIL])
}

fn unless(result: Result<(), Errno>, fine: &[Errno]) -> Result<(), Errno> {
    match result {
        Err(errno) if fine.contains(&errno) => Ok(()),
        other => other,
    }
}

/// The error of a request: [`Code::ForeignRules`] if the namespace holds more than is read.
fn failed(what: &str, why: &Errno) -> Error {
    if *why == TOO_MANY {
        let msg = format!("{what}: expected {}; got more; delete the pod", Allowance::USUAL);
        return Error::new(Code::ForeignRules, msg);
    }
    Error::new(Code::KernelRefused, format!("{what}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sched::unshare;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    const PATIENCE: Duration = Duration::from_secs(10);

    /// A new network namespace, which lives as long as this.
    fn new() -> NetNs {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("needs root");
            NetNs::open(Path::new(OWN)).expect("readable").expect("a namespace")
        };
        std::thread::spawn(make).join().expect("no panic")
    }

    fn here() -> NetnsId {
        NetnsId::of(&std::fs::metadata(OWN).expect("readable"))
    }

    #[test]
    fn the_thread_returns_whatever_happens_in_the_namespace() {
        let (sandbox, own) = (new(), here());
        assert_eq!(sandbox.enter(PATIENCE, || Ok(here())).expect("entered"), sandbox.id());
        assert_eq!(here(), own);
        let failed = sandbox.enter(PATIENCE, || Err::<(), _>(Error::new(Code::Internal, "why")));
        assert_eq!((failed.expect_err("it failed").msg.as_str(), here()), ("why", own));
        let panicked = catch_unwind(AssertUnwindSafe(|| sandbox.enter::<()>(PATIENCE, || panic!("a fault"))));
        assert!(panicked.is_err());
        assert_eq!(here(), own);
    }
}
