//! Installation of the plugin on a node: program, kubeconfig and configuration.
//!
//! [`NodeFiles`] is the only value that accesses the file system, with plain synchronous functions:
//! [`NodeFiles::change`] reads the [`FoundState`] of the node, compares it with the [`DesiredState`] ([`reconcile()`],
//! [`undo`]), and applies the [`InstallPlan`]; `preview` returns the plan without a change. A node has one installation.

mod cluster_list;
pub mod conflist;
mod node;
pub mod plan;
mod reconcile;
mod record;
mod settings;

pub use crate::cni::PROGRAM;
pub use crate::host_path::{HostPath, HostRoot};
pub use node::{CHAIN_FILE, Installed, Leadership, NodeFiles, state_path};
pub use plan::{
    Change, ConfFile, Content, DesiredFile, DesiredState, FileAction, FoundFile, FoundState, InstallPlan, ListEntry,
    OWN_LIST, Obstacle,
};
pub use reconcile::{changed, reconcile, undo};
pub use record::{Digest, FileRecord, InstallRecord, Role};
pub use settings::{
    Attachment, Entry, GivenKeys, PLATFORMS, Platform, default_chain, kubeconfig, server_url, token_in,
};

use std::io::{self, ErrorKind};

/// Why an installation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstallError {
    /// A file operation failed.
    #[error("{0}")]
    File(String),
    /// The installation record at this path can't be parsed; the second value is the parser's error.
    #[error("{0}: invalid installation record: {1}; the next installation replaces it")]
    Record(HostPath, String),
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
    /// The administrator's keys are invalid.
    #[error("{0}")]
    Given(String),
}

impl InstallError {
    fn file(operation: &'static str, path: &HostPath, error: &io::Error) -> Self {
        let hint = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; free some space on the node",
            ErrorKind::ReadOnlyFilesystem => "; mount it writable, or select another directory",
            ErrorKind::PermissionDenied => "; run as root, with the type spc_t if SELinux is enforcing",
            _ => "",
        };
        Self::File(format!("can't {operation} {path}: {error}{hint}"))
    }
}
