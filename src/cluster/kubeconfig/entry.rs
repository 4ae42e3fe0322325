//! One entry of a kubeconfig, for what is wrong in it and for the files that it names.

use crate::cni::{Code, Error};
use std::fmt::Display;
use std::fs;
use std::path::Path;

/// Where keys stand.
#[derive(Debug, Clone)]
pub(super) struct Entry<'a> {
    /// The kubeconfig.
    pub(super) kubeconfig: &'a Path,
    /// Where the file system is mounted to which absolute paths in it belong.
    pub(super) root: &'a Path,
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

    /// The text of the file that `key` names.
    ///
    /// # Errors
    /// It can't be read.
    pub(super) fn read(&self, key: &str, file: &str) -> Result<String, Error> {
        let path = self.near(file);
        fs::read_to_string(&path)
            .map_err(|error| self.wrong(key, format!("{path} can't be read")).with_details(error.to_string()))
    }
}

/// Kubeconfigs leave a key out or leave it empty to the same effect.
pub(super) fn present(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}
