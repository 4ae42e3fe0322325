//! The files that a kubeconfig consists of, and how errors name them.

use crate::cni::{Code, Error};
use crate::host_path::{HostPath, HostRoot};
use crate::trusted_file::{self, FileError};
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The maximum size of a kubeconfig; client-go's are a few KiB.
pub(super) const MAX_KUBECONFIG: u64 = 1 << 20;

/// The location of an entry in a kubeconfig, for errors about its keys and for the files that they name.
#[derive(Debug, Clone)]
pub(super) struct EntryLocation<'a> {
    /// The kubeconfig.
    pub(super) kubeconfig: &'a Path,
    /// The mount point of the file system that absolute paths in the kubeconfig refer to.
    pub(super) root: &'a Path,
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
        let contents = trusted_file::read_trusted(&path, limit).map_err(|error| match error {
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
