//! Which files a kubeconfig may consist of: it depends on who names it.

use crate::trusted_file::{self, FileError, is_trusted};
use std::io::{self, ErrorKind};
use std::path::Path;

/// A kubeconfig is larger only by mistake; client-go's own are a few KiB.
const LARGEST: u64 = 1 << 20;

/// Who names a kubeconfig.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cluster) enum KubeconfigOwner {
    /// The node's configuration: only trusted users may be able to change it, since it decides which files
    /// root reads and which server gets the token in them.
    Node,
    /// The user of the command line: it may belong to any user.
    User,
}

/// The files that a kubeconfig may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Files {
    /// Those that only trusted users can change.
    Trusted,
    /// All.
    Any,
    /// Those of the kubeconfig's own owner, who could otherwise have root send a token of root's.
    Of(u32),
}

impl KubeconfigOwner {
    /// Reads the kubeconfig at `path`: its contents, and which files it may name.
    ///
    /// # Errors
    /// It can't be read, or may not be used.
    pub(super) fn read(self, path: &Path) -> Result<(Vec<u8>, Files), FileError> {
        if self == Self::Node {
            return Ok((trusted_file::read_trusted(path, LARGEST)?, Files::Trusted));
        }
        let (contents, owner) = trusted_file::read_with_owner(path, LARGEST)?;
        Ok((contents, if is_trusted(owner) { Files::Any } else { Files::Of(owner) }))
    }
}

impl Files {
    /// Reads one of them, of at most `limit` bytes.
    ///
    /// # Errors
    /// It can't be read, or is none of them.
    pub(super) fn read(self, path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
        if self == Self::Trusted {
            return trusted_file::read_trusted(path, limit);
        }
        match (trusted_file::read_with_owner(path, limit)?, self) {
            ((_, owner), Self::Of(uid)) if owner != uid => {
                let why = format!("owned by UID {owner}; expected UID {uid}, the owner of the kubeconfig");
                Err(io::Error::new(ErrorKind::PermissionDenied, why).into())
            }
            ((contents, _), _) => Ok(contents),
        }
    }
}
