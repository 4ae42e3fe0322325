//! Why a node can't be changed.

use crate::host_path::HostPath;
use std::io::{self, ErrorKind};

/// The reason for which an installation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstallError {
    /// A file operation failed.
    #[error("{0}")]
    File(String),
    /// The installation record can't be parsed.
    #[error("{path}: invalid installation record: {cause}; the next installation replaces it")]
    Record {
        /// The record.
        path: HostPath,
        /// The parser's error.
        cause: String,
    },
    /// The node has the installation of another DaemonSet.
    #[error(
        "can't install: DaemonSet {0} has installed detour on this node, and a node has one installation; add the \
         exclusions to that installation as attachments (attachments in the chart), or uninstall it first: delete that \
         DaemonSet, and run `detour uninstall` on the node if the plugin stays there"
    )]
    Owned(String),
    /// The plugin would reject the configuration.
    #[error("invalid plugin configuration: {0}")]
    Configuration(String),
}

impl InstallError {
    pub(super) fn file(operation: &'static str, path: &HostPath, error: &io::Error) -> Self {
        let hint = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; free some space on the node",
            ErrorKind::ReadOnlyFilesystem => "; mount it writable, or select another directory",
            ErrorKind::PermissionDenied => "; run as root, with the type spc_t if SELinux is enforcing",
            _ => "",
        };
        Self::File(format!("can't {operation} {path}: {error}{hint}"))
    }
}
