//! Installation of the plugin on a node: program, kubeconfig and configuration.
//!
//! [`NodeFiles::look`] reads the [`FoundState`] of the node; [`reconcile()`] compares it with the [`DesiredState`]
//! and returns an [`InstallPlan`], which is shown or applied ([`NodeFiles::apply`]). [`undo`] returns the plan that
//! removes an installation. A node has one installation. Only [`NodeFiles`] accesses the file system.

mod atomic;
mod cluster_list;
pub mod conflist;
mod drift;
mod error;
mod node;
pub mod plan;
mod reconcile;
mod record;
mod settings;

pub use crate::cni::PROGRAM;
pub use crate::host_path::{HostPath, HostRoot};
pub use drift::changed;
pub use error::InstallError;
pub use node::{InstallLock, Installed, InstalledText, InstalledTexts, Leadership, NodeFiles, state_path};
pub use plan::{ConfFile, ConfigurationTarget, DesiredState, FileAction, FoundFile, FoundState, InstallPlan, OWN_LIST};
pub use reconcile::{reconcile, undo};
pub use record::{Digest, FileRecord, InstallRecord, Role};
pub use settings::{EntrySettings, PLATFORMS, Platform, default_chain, kubeconfig, server_url, token_in};
