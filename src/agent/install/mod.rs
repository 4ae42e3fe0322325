//! The plugin on a node: program, kubeconfig and configuration are put there, and taken away.
//!
//! [`Node::look`] gives what is [`Found`]; [`reconcile()`] compares it with what is [`Desired`], and
//! its [`Plan`] is shown or applied ([`Node::apply`]). [`plan::undo`] makes the plan that takes all
//! back. Only [`Node`] touches the file system.

mod atomic;
pub mod conflist;
mod diff;
mod digest;
mod entry;
pub mod kubeconfig;
mod node;
pub mod plan;
mod platform;
mod reconcile;
mod record;
mod target;

pub use crate::cni::PROGRAM;
pub use crate::host_path::{HostPath, HostRoot};
pub use diff::unified;
pub use digest::Digest;
pub use digest::changed;
pub use entry::{EntrySettings, default_chain};
pub use node::{InstallLock, NodeFiles};
pub use plan::{FileAction, InstallPlan};
pub use platform::{PLATFORMS, Platform};
pub use reconcile::{ConfigurationTarget, DesiredState, FoundFile, FoundState, reconcile};
pub use record::Installed;
pub use record::{EditedList, InstallLog, Owned, PreviousContent, Role};
pub use target::ConfFile;

use std::io::{self, ErrorKind};

/// Why a node can't be changed as it should.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstallError {
    /// The file system refused.
    #[error("{path}: can't {doing} it: {why}{hint}")]
    File {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: HostPath,
        /// What the file system says.
        why: String,
        /// What could be done about it; starts with `; `, or is empty.
        hint: &'static str,
    },
    /// The log of the installation is broken.
    #[error("{path}: the log of the installation can't be understood ({why}); installing makes a new one")]
    Log {
        /// The log.
        path: HostPath,
        /// Where it is broken.
        why: String,
    },
    /// The plugin would refuse the configuration.
    #[error("the plugin's configuration is wrong: {0}")]
    Configuration(String),
}

impl InstallError {
    pub(crate) fn file(doing: &'static str, path: &HostPath, why: &io::Error) -> Self {
        let hint = match why.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; free some space on the node",
            ErrorKind::ReadOnlyFilesystem => "; mount it writable, or name another directory",
            ErrorKind::PermissionDenied => "; this needs root, and with SELinux the type spc_t",
            _ => "",
        };
        Self::File { doing, path: path.clone(), why: why.to_string(), hint }
    }
}
