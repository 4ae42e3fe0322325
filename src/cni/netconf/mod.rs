//! The network configuration of this plugin.

mod bounds;
mod file;
mod keys;
mod kubernetes;
mod net_conf;
mod pod_annotations;
mod primary;
mod sub_plugins;
mod unknown;

pub(super) use bounds::NODE_BOUNDS;
pub use bounds::{ALLOW, BlockBounds, Bounds, OUTSIDE_BOUNDS, OutsideBounds, REQUEST};
pub use file::{ONLY_INLINED, OWN_LIST, configuration, has_only_inlined, is_configuration_file};
pub use keys::{CNI_CONF_DIR, LogLevel};
pub use kubernetes::{DEFAULT_AGENT_PREFIXES, Kubernetes};
pub use net_conf::{AUTO_DIALECT, GROUP_FILE, NetConf, RuleFormat, ValidAttachment, unknown_key};
pub use pod_annotations::POD_ANNOTATIONS;
pub(super) use primary::is_primary;
pub use primary::{DefaultNetwork, GLOBAL_NAMESPACE, NetworkName, NetworkStatus, Primary, SYSTEM_NAMESPACE};
pub(super) use sub_plugins::{MAX_BLOCKS, default_chain, kind};
pub use sub_plugins::{OWN_TYPES, PROGRAM, SUB_PLUGINS};
pub(super) use unknown::is_of_this_plugin;
