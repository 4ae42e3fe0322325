//! One entry of a kubeconfig, for what is wrong in it and for the files that it names.

use super::access::Files;
use crate::cni::{Code, Error};
use crate::host_path::{HostPath, HostRoot};
use crate::trusted_file;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Where keys stand.
#[derive(Debug, Clone)]
pub(super) struct KeyPath<'a> {
    /// The kubeconfig.
    pub(super) kubeconfig: &'a Path,
    /// Where the file system is mounted to which absolute paths in it belong.
    pub(super) root: &'a Path,
    /// The files that it may name.
    pub(super) files: Files,
    /// For example `clusters[local].cluster`; empty for the top level.
    pub(super) place: String,
}

impl KeyPath<'_> {
    /// The error for a key of this entry.
    pub(super) fn wrong(&self, key: &str, what: impl Display) -> Error {
        let (kubeconfig, place) = (self.kubeconfig.display(), &self.place);
        let dot = if place.is_empty() { "" } else { "." };
        Error::new(Code::InvalidConfig, format!("kubeconfig {kubeconfig}: {place}{dot}{key}: {what}"))
    }

    /// The path of a file that this entry names; a relative one is relative to the kubeconfig. Links below
    /// another root lead to where that file system's own processes find them; on the node itself, who owns
    /// them counts as well.
    fn near(&self, file: &str) -> io::Result<PathBuf> {
        if self.root == Path::new("/") || !file.starts_with('/') {
            return Ok(self.kubeconfig.parent().unwrap_or(Path::new("")).join(file));
        }
        let refused = || io::Error::new(ErrorKind::InvalidInput, "expected a path without \"..\"");
        HostRoot::new(self.root).reach(&HostPath::new(file).ok_or_else(refused)?)
    }

    /// The text of the file that `key` names, of at most `limit` bytes.
    ///
    /// # Errors
    /// It can't be read, or may not be used.
    pub(super) fn read(&self, key: &str, file: &str, limit: u64) -> Result<String, Error> {
        let unread =
            |path: &Path, why: String| self.wrong(key, format!("{} can't be read", path.display())).with_details(why);
        let path = self.near(file).map_err(|error| unread(Path::new(file), error.to_string()))?;
        let contents = self.files.read(&path, limit).map_err(|error| match error {
            trusted_file::FileError::Io(error) => unread(&path, error.to_string()),
            refused => self.wrong(key, format!("{} is not used: {refused}", path.display())),
        })?;
        String::from_utf8(contents).map_err(|_| unread(&path, "not UTF-8".to_owned()))
    }
}

/// Kubeconfigs leave a key out or leave it empty to the same effect.
pub(super) fn present(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}
