//! Installation of the plugin on a node: program, kubeconfig and configuration.
//!
//! [`NodeFiles`] is the only value that accesses the file system, with plain synchronous functions:
//! [`NodeFiles::install`] and [`NodeFiles::uninstall`] read the [`FoundState`] of the node, compare it with the
//! [`DesiredState`] ([`reconcile()`], [`undo`]), and apply the [`InstallPlan`]; `preview` and `preview_uninstall` return
//! the plan without a change. A node has one installation.

mod cluster_list;
pub mod conflist;
mod error;
mod node;
pub mod plan;
mod reconcile;
mod record;
mod settings;

pub use crate::cni::PROGRAM;
pub use crate::host_path::{HostPath, HostRoot};
pub use error::InstallError;
pub use node::{Installed, InstalledText, InstalledTexts, Leadership, NodeFiles, state_path};
pub use plan::{
    Change, ConfFile, Content, DesiredFile, DesiredState, FileAction, FoundFile, FoundState, InstallPlan, ListEntry,
    OWN_LIST,
};
pub use reconcile::{changed, reconcile, undo};
pub use record::{Digest, FileRecord, InstallRecord, Role};
pub use settings::{Entry, PLATFORMS, Platform, default_chain, kubeconfig, server_url, token_in};
