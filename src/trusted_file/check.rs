//! Checks that only trusted users can change a file or the path that leads to it.

use crate::links;
use nix::unistd::geteuid;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The sticky bit: only the owners of an entry and of its directory can replace the entry (inode(7)).
const STICKY: u32 = 0o1000;
const GROUP_WRITABLE: u32 = 0o020;
const OTHER_WRITABLE: u32 = 0o002;

/// The reason why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// An untrusted user owns a part of the path, and can therefore replace the file.
    #[error("{0} is owned by UID {uid}; expected root; run chown root:root {0}", path.display())]
    Owner {
        /// The file or directory.
        path: PathBuf,
        /// The UID of its owner.
        uid: u32,
    },
    /// Untrusted users can write to a part of the path.
    #[error("{0} has mode {mode:04o}; expected one that only root can write to; run chmod go-w {0}", path.display())]
    Writable {
        /// The file or directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

impl FileError {
    /// Returns the error with the path on the node whose file system is mounted at `mount`.
    #[must_use]
    pub fn below(self, mount: &Path) -> Self {
        let on_node = |path: PathBuf| match path.strip_prefix(mount) {
            Ok(below) => Path::new("/").join(below),
            Err(_) => path,
        };
        match self {
            Self::Owner { path, uid } => Self::Owner { path: on_node(path), uid },
            Self::Writable { path, mode } => Self::Writable { path: on_node(path), mode },
            Self::Io(error) => Self::Io(error),
        }
    }

    /// Returns whether the path does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
    }
}

/// Resolves the symbolic links of `path` and checks that only trusted users can change the result.
///
/// Trusted users must own each directory, each link and the file itself, and no other user may write to
/// them. A directory on the path may be writable for others if it is sticky, such as `/tmp`.
///
/// # Errors
/// A part of the path is not trusted, or its metadata can't be read.
pub fn check(path: &Path) -> Result<PathBuf, FileError> {
    let root = Path::new("/");
    verify(root, &fs::symlink_metadata(root)?, false)?;
    links::resolve(root, &std::path::absolute(path)?, |part, is_last| {
        let metadata = fs::symlink_metadata(part)?;
        verify(part, &metadata, is_last)?;
        Ok(if metadata.is_symlink() { Some(fs::read_link(part)?) } else { None })
    })
}

/// Returns whether the user is root or the user of this process.
#[must_use]
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

/// Checks that only trusted users can write to the file or directory. In a sticky directory on the way to it, others can
/// replace only their own entries; a symbolic link has no mode.
pub(super) fn verify(path: &Path, metadata: &Metadata, is_last: bool) -> Result<(), FileError> {
    let (uid, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    if !is_trusted(uid) {
        return Err(FileError::Owner { path: path.to_owned(), uid });
    }
    if metadata.is_symlink() || (!is_last && mode & STICKY != 0) {
        return Ok(());
    }
    let group_writable = mode & GROUP_WRITABLE != 0 && (metadata.gid() != 0 || has_acl(path));
    let writable = mode & OTHER_WRITABLE != 0 || group_writable;
    if writable { Err(FileError::Writable { path: path.to_owned(), mode }) } else { Ok(()) }
}

/// Returns whether the file has an access control list. The group permission bits are then the maximum that
/// the list grants to any other user (acl(5), "Correspondence between ACL entries and file permission bits").
fn has_acl(path: &Path) -> bool {
    let mut buffer: [u8; 0] = [];
    let found = rustix::fs::getxattr(path, "system.posix_acl_access", &mut buffer);
    !matches!(found, Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP))
}
