//! One entry of a kubeconfig, for what is wrong in it and for the files that it names.

use super::access::Files;
use crate::cni::{Code, Error};
use crate::trusted_file;
use std::fmt::Display;
use std::path::Path;

/// Where keys stand.
#[derive(Debug, Clone)]
pub(super) struct Entry<'a> {
    /// The kubeconfig.
    pub(super) kubeconfig: &'a Path,
    /// Where the file system is mounted to which absolute paths in it belong.
    pub(super) root: &'a Path,
    /// The files that it may name.
    pub(super) files: Files,
    /// For example `clusters[local].cluster`; empty for the top level.
    pub(super) place: String,
}

impl Entry<'_> {
    /// The error for a key of this entry.
    pub(super) fn wrong(&self, key: &str, what: impl Display) -> Error {
        let (kubeconfig, place) = (self.kubeconfig.display(), &self.place);
        let dot = if place.is_empty() { "" } else { "." };
        Error::new(Code::InvalidConfig, format!("kubeconfig {kubeconfig}: {place}{dot}{key}: {what}"))
    }

    /// The path of a file that this entry names; a relative one is relative to the kubeconfig.
    pub(super) fn near(&self, file: &str) -> String {
        let path = match file.strip_prefix('/') {
            Some(within) => self.root.join(within),
            None => self.kubeconfig.parent().unwrap_or(Path::new("")).join(file),
        };
        path.display().to_string()
    }

    /// The text of the file that `key` names, of at most `limit` bytes.
    ///
    /// # Errors
    /// It can't be read, or may not be used.
    pub(super) fn read(&self, key: &str, file: &str, limit: u64) -> Result<String, Error> {
        let path = self.near(file);
        let unread = |why: String| self.wrong(key, format!("{path} can't be read")).with_details(why);
        let contents = self.files.read(Path::new(&path), limit).map_err(|error| match error {
            trusted_file::Error::Io(error) => unread(error.to_string()),
            refused => self.wrong(key, format!("{path} is not used: {refused}")),
        })?;
        String::from_utf8(contents).map_err(|_| unread("not UTF-8".to_owned()))
    }
}

/// Kubeconfigs leave a key out or leave it empty to the same effect.
pub(super) fn present(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}
