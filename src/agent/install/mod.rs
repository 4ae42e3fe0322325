//! Installation of the plugin on a node: program, kubeconfig and configuration.
//!
//! [`NodeFiles::look`] reads the [`FoundState`] of the node; [`reconcile()`] compares it with the [`DesiredState`]
//! and returns an [`InstallPlan`], which is shown or applied ([`NodeFiles::apply`]). [`plan::undo`] returns the plan
//! that reverts an installation. Several releases can be installed on one node; each has its own installation record.
//! Only [`NodeFiles`] accesses the file system.
//!
//! | file | content |
//! |---|---|
//! | `state` | desired state, found state, and the installation record of a release; files that releases share |
//! | `reconcile` | desired state − found state = plan; `reconcile/cluster_list`: the own list |
//! | `release` | the name of a release |
//! | `plan` | the file operations of a plan, their diffs, and the plan of an uninstallation |
//! | `drift` | the differences between a node and its installation record |
//! | `target`, `conflist` | which configuration file gets the plugin's entry; editing a plugin list as text |
//! | `entry`, `kubeconfig` | the texts that are written: the plugin's configuration and its kubeconfig |
//! | `hook` | the configuration of the OCI hook |
//! | `platform` | directories and file names of the supported platforms |
//! | `node` | reading and changing the node's files |
//! | `atomic`, `digest`, `error` | atomic file writes, content hashes, [`InstallError`] |

mod atomic;
pub mod conflist;
mod digest;
mod drift;
mod entry;
mod error;
pub mod hook;
pub mod kubeconfig;
mod node;
pub mod plan;
mod platform;
mod reconcile;
mod release;
mod state;
mod target;

pub use crate::cni::PROGRAM;
pub use crate::host_path::{HostPath, HostRoot};
pub use digest::Digest;
pub use drift::changed;
pub use entry::{EntrySettings, default_chain};
pub use error::InstallError;
pub use node::{InstallLock, Installed, InstalledTexts, NodeFiles, Presence};
pub use plan::{FileAction, InstallPlan};
pub use platform::{PLATFORMS, Platform};
pub use reconcile::{SourceTimer, reconcile};
pub use release::Release;
pub use state::{
    ConfFile, ConfigurationTarget, CopiedList, DesiredState, EditedList, FoundFile, FoundState, InstallRecord,
    NodePart, NodeParts, OWN_LIST, Owned, PreviousContent, Role,
};
