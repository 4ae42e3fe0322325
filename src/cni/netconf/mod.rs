//! The network configuration of this plugin.

mod chain;
mod file;
mod keys;
mod kubernetes;
mod net_conf;
mod primary;
mod unknown;

pub use chain::{ALLOW, BlockBounds, Bounds, OUTSIDE_BOUNDS, OWN_TYPES, OutsideBounds, PROGRAM, REQUEST, SUB_PLUGINS};
pub(super) use chain::{NODE_BOUNDS, blocks, kind};
pub use file::{ONLY_INLINED, OWN_LIST, configuration, has_only_inlined, is_configuration_file};
pub use keys::{CNI_CONF_DIR, LogLevel, POD_ANNOTATIONS};
pub use kubernetes::{DEFAULT_AGENT_PREFIXES, Kubernetes};
pub use net_conf::{AUTO_DIALECT, GROUP_FILE, NetConf, RuleFormat, ValidAttachment};
pub(super) use primary::is_primary;
pub use primary::{DefaultNetwork, GLOBAL_NAMESPACE, NetworkName, NetworkStatus, Primary, SYSTEM_NAMESPACE};
pub(super) use unknown::is_of_this_plugin;
pub use unknown::unknown_key;
