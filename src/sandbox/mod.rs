//! The pod's network namespace: opened by path and known by device and inode, entered on a thread
//! of its own that ends there, locked so that two calls for one pod wait for each other.

mod addresses;
mod default_route;
pub mod find;
mod fixtures;
mod routing;
mod rtnl;

pub use addresses::{OwnFamilies, PROXY_LOOPBACK, own_addresses, own_families, secondary_interfaces};
pub use default_route::replace_default_routes;
pub use fixtures::Fixtures;
pub use routing::Routing;

use crate::cni::{Code, Error};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{FsType, fstatfs};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// `NSFS_MAGIC` (linux/magic.h): the file system of namespace files.
const NSFS_MAGIC: FsType = FsType(0x6e73_6673);

/// A network namespace that is held open.
#[derive(Debug)]
pub struct Sandbox {
    path: PathBuf,
    file: File,
    id: Id,
}

/// Which namespace it is, whatever path it was opened by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Id {
    /// The device of the namespace file system.
    pub device: u64,
    /// The namespace's inode.
    pub inode: u64,
}

impl Sandbox {
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
        let id = Id::of(&file).map_err(|e| wrong(format!("can't be examined: {e}")))?;
        Ok(Some(Self { path: path.to_owned(), file, id }))
    }

    /// Which namespace this is.
    #[must_use]
    pub const fn id(&self) -> Id {
        self.id
    }

    /// The path by which it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `work` in the namespace, alone: no other call of this plugin is in it meanwhile. It
    /// runs on a thread of its own, for a thread that has entered a namespace can't be trusted to
    /// get back.
    ///
    /// # Errors
    /// The namespace can't be entered, or another call stays in it for longer than `patience`;
    /// else what `work` returns.
    pub fn enter<T: Send>(
        &self,
        patience: Duration,
        work: impl FnOnce() -> Result<T, Error> + Send,
    ) -> Result<T, Error> {
        let entered = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let _lock = self.lock(patience)?;
                setns(&self.file, CloneFlags::CLONE_NEWNET)
                    .map_err(|e| self.error(&format!("can't be entered: {e}")))?;
                work()
            });
            thread.join()
        });
        entered.unwrap_or_else(|_| Err(Error::new(Code::Internal, "the thread in the pod's network namespace ended")))
    }

    fn error(&self, why: &str) -> Error {
        Error::new(Code::InvalidNetns, format!("network namespace {}: {why}", self.path.display()))
    }

    /// The namespace's own file is the lock: it needs no path and leaves nothing behind.
    fn lock(&self, patience: Duration) -> Result<Flock<File>, Error> {
        let deadline = Instant::now() + patience;
        let mut file = self.file.try_clone().map_err(|e| self.error(&format!("can't be held open: {e}")))?;
        let mut pause = Duration::from_millis(1);
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((same, Errno::EWOULDBLOCK)) if Instant::now() < deadline => {
                    file = same;
                    // flock has no deadline of its own; a signal to end it would need one thread more.
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(Duration::from_millis(20));
                }
                Err((_, Errno::EWOULDBLOCK)) => {
                    let msg = format!(
                        "network namespace {}: another call has been at work in this namespace for {} s; try again",
                        self.path.display(),
                        patience.as_secs()
                    );
                    return Err(Error::new(Code::TryAgain, msg));
                }
                Err((_, errno)) => return Err(self.error(&format!("can't be locked: {errno}"))),
            }
        }
    }
}

impl Id {
    fn of(file: &File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}
