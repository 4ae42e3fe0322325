//! Installation of the plugin on a node: program, kubeconfig and configuration.
//!
//! [`NodeFiles::look`] reads the [`FoundState`] of the node; [`reconcile()`] compares it with the [`DesiredState`]
//! and returns an [`InstallPlan`], which is shown or applied ([`NodeFiles::apply`]). [`plan::undo`] returns the plan
//! that reverts an installation. A node has one installation. Only [`NodeFiles`] accesses the file system.

mod atomic;
pub mod conflist;
mod digest;
mod drift;
mod entry;
mod error;
pub mod kubeconfig;
mod node;
pub mod plan;
mod platform;
mod reconcile;
mod state;
mod target;

pub use crate::cni::PROGRAM;
pub use crate::host_path::{HostPath, HostRoot};
pub use digest::Digest;
pub use drift::changed;
pub use entry::{EntrySettings, default_chain};
pub use error::InstallError;
pub use node::{InstallLock, Installed, InstalledText, InstalledTexts, Leadership, NodeFiles, state_path};
pub use plan::{FileAction, InstallPlan};
pub use platform::{PLATFORMS, Platform};
pub use reconcile::{SourceTimer, reconcile};
pub use state::{
    ConfFile, ConfigurationTarget, CopiedList, DesiredState, EditedList, FoundFile, FoundState, InstallRecord,
    OWN_LIST, OriginalList, Owned, PreviousContent, Role,
};
