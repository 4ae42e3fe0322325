//! Why a node can't be changed.

use super::release::Release;
use crate::host_path::HostPath;
use std::io::{self, ErrorKind};

/// The reason for which an installation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstallError {
    /// A file operation failed.
    #[error("can't {operation} {path}: {cause}{hint}")]
    File {
        /// The operation, as a verb.
        operation: &'static str,
        /// The file.
        path: HostPath,
        /// The error of the file system.
        cause: String,
        /// The next step, with a leading `; `; empty if unknown.
        hint: &'static str,
    },
    /// The installation record can't be parsed.
    #[error("{path}: invalid installation record: {cause}; the next installation replaces it")]
    Record {
        /// The record.
        path: HostPath,
        /// The parser's error.
        cause: String,
    },
    /// A part of the configuration belongs to another release.
    #[error(
        "can't install: {what} belongs to release {owner:?} on this node; {hint}, or uninstall that release with: \
         detour uninstall --release {owner}"
    )]
    Owned {
        /// The file, or the entry in a list.
        what: String,
        /// How the two releases can coexist.
        hint: &'static str,
        /// The other release.
        owner: String,
    },
    /// The plugin would refuse the configuration.
    #[error("invalid plugin configuration: {0}")]
    Configuration(String),
}

impl InstallError {
    pub(super) fn owned_file(path: &HostPath, owner: &Release) -> Self {
        let hint = "give the attachment another name (attachments in the chart, --conf-name and --network)";
        Self::Owned { what: format!("file {path}"), hint, owner: owner.to_string() }
    }

    /// `recorded` is the path of the same file in the record of `owner`.
    pub(super) fn owned_alias(path: &HostPath, recorded: &HostPath, owner: &Release) -> Self {
        let hint = "give the attachment another name, or select another directory with --conf-dir";
        let what = format!("file {path}, which is the same file as {recorded},");
        Self::Owned { what, hint, owner: owner.to_string() }
    }

    pub(super) fn owned_network(network: &str, owner: &Release) -> Self {
        let hint = "give the attachment another name (attachments in the chart, or --network)";
        Self::Owned { what: format!("network {network:?}"), hint, owner: owner.to_string() }
    }

    pub(super) fn owned_list(path: &HostPath, owner: &Release) -> Self {
        let hint = "install this release without --own-list (cni.ownList=false in the chart)";
        Self::Owned { what: format!("the plugin list {path}"), hint, owner: owner.to_string() }
    }

    pub(super) fn owned_entry(kind: &str, path: &HostPath, owner: &Release) -> Self {
        let hint = "add the entries of chain to the configuration of that release";
        Self::Owned { what: format!("the entry of the plugin {kind:?} in {path}"), hint, owner: owner.to_string() }
    }

    pub(super) fn file(operation: &'static str, path: &HostPath, error: &io::Error) -> Self {
        let hint = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; free some space on the node",
            ErrorKind::ReadOnlyFilesystem => "; mount it writable, or select another directory",
            ErrorKind::PermissionDenied => "; run as root, with the type spc_t if SELinux is enforcing",
            _ => "",
        };
        Self::File { operation, path: path.clone(), cause: error.to_string(), hint }
    }
}
