//! The files that a kubeconfig consists of: who may own them, and how errors name them.

use crate::cni::{Code, Error};
use crate::host_path::{HostPath, HostRoot};
use crate::trusted_file::{self, FileError, is_trusted};
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The maximum size of a kubeconfig; client-go's are a few KiB.
const MAX_KUBECONFIG: u64 = 1 << 20;

/// Who supplies a kubeconfig.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cluster) enum KubeconfigOwner {
    /// The node's configuration. Only trusted users may be able to change the file: it decides which files root
    /// reads, and which server receives the token in them.
    Node,
    /// The user of the command line. The file may belong to any user.
    User,
}

/// Which files a kubeconfig may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AllowedFiles {
    /// Files that only trusted users can change.
    Trusted,
    /// All files.
    Any,
    /// Files of the kubeconfig's owner, who could otherwise have root send a token that only root can read.
    OwnedBy(u32),
}

impl KubeconfigOwner {
    /// Reads the kubeconfig at `path`; returns its contents and which files it may name.
    pub(super) fn read(self, path: &Path) -> Result<(Vec<u8>, AllowedFiles), FileError> {
        if self == Self::Node {
            return Ok((trusted_file::read_trusted(path, MAX_KUBECONFIG)?, AllowedFiles::Trusted));
        }
        let (contents, owner) = trusted_file::read_with_owner(path, MAX_KUBECONFIG)?;
        Ok((contents, if is_trusted(owner) { AllowedFiles::Any } else { AllowedFiles::OwnedBy(owner) }))
    }
}

impl AllowedFiles {
    /// Reads a file of at most `limit` bytes.
    fn read(self, path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
        if self == Self::Trusted {
            return trusted_file::read_trusted(path, limit);
        }
        match (trusted_file::read_with_owner(path, limit)?, self) {
            ((_, owner), Self::OwnedBy(uid)) if owner != uid => {
                let why = format!("owned by UID {owner}; expected UID {uid}, the owner of the kubeconfig");
                Err(io::Error::new(ErrorKind::PermissionDenied, why).into())
            }
            ((contents, _), _) => Ok(contents),
        }
    }
}

/// The location of an entry in a kubeconfig, for errors about its keys and for the files that they name.
#[derive(Debug, Clone)]
pub(super) struct EntryLocation<'a> {
    /// The kubeconfig.
    pub(super) kubeconfig: &'a Path,
    /// The mount point of the file system that absolute paths in the kubeconfig refer to.
    pub(super) root: &'a Path,
    /// Which files the entry may name.
    pub(super) files: AllowedFiles,
    /// The entry, such as `clusters[local].cluster`; empty for the top level.
    pub(super) entry: String,
}

impl EntryLocation<'_> {
    /// Returns the error for a key of this entry.
    pub(super) fn error(&self, key: &str, what: impl Display) -> Error {
        let (kubeconfig, entry) = (self.kubeconfig.display(), &self.entry);
        let dot = if entry.is_empty() { "" } else { "." };
        Error::new(Code::InvalidConfig, format!("kubeconfig {kubeconfig}: {entry}{dot}{key}: {what}"))
    }

    /// Reads the text file that `key` names, of at most `limit` bytes.
    pub(super) fn read(&self, key: &str, file: &str, limit: u64) -> Result<String, Error> {
        let failed =
            |path: &Path, why: String| self.error(key, format!("{} can't be read", path.display())).with_details(why);
        let path = self.resolve(file).map_err(|error| failed(Path::new(file), error.to_string()))?;
        let contents = self.files.read(&path, limit).map_err(|error| match error {
            FileError::Io(error) => failed(&path, error.to_string()),
            refused => self.error(key, format!("{} is not used: {refused}", path.display())),
        })?;
        String::from_utf8(contents).map_err(|_| failed(&path, "expected UTF-8".to_owned()))
    }

    /// Resolves a path in this entry; relative paths are relative to the kubeconfig. Below another root, symbolic
    /// links lead to where that file system's own processes find them.
    fn resolve(&self, file: &str) -> io::Result<PathBuf> {
        if self.root == Path::new("/") || !file.starts_with('/') {
            return Ok(self.kubeconfig.parent().unwrap_or(Path::new("")).join(file));
        }
        let refused = || io::Error::new(ErrorKind::InvalidInput, "expected a path without \"..\"");
        HostRoot::new(self.root).reach(&HostPath::new(file).ok_or_else(refused)?)
    }
}

/// Returns `None` for an empty value: kubeconfigs may omit a key or leave it empty.
pub(super) fn non_empty(text: &Option<String>) -> Option<&str> {
    text.as_deref().filter(|text| !text.is_empty())
}
