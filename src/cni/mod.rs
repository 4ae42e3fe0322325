//! The CNI protocol as values: request, configuration, result, versions, errors and their codes.

mod block;
mod document;
mod error;
mod names;
mod netconf;
mod node_conf;
mod request;
pub mod result;
pub mod version;

pub use block::{Block, BlockReader, ItemList, LIST_ITEMS, at_most, excerpt, json_error, wrong_type};
pub use document::{Document, MAX_CONFIGURATION, excess, null_is_empty};
pub use error::{Code, Error};
pub use names::{
    DEFAULT_INTERFACE, check_interface_name, closest, did_you_mean, is_dns_label, is_dns_subdomain, is_identifier,
    is_matchable_interface, parse_ip_net,
};
pub use netconf::{
    ALLOW, AUTO_DIALECT, BlockBounds, Bounds, CNI_CONF_DIR, DEFAULT_AGENT_PREFIXES, DefaultNetwork, GLOBAL_NAMESPACE,
    GROUP_FILE, Kubernetes, NetConf, NetworkName, NetworkStatus, ONLY_INLINED, OUTSIDE_BOUNDS, OWN_LIST, OWN_TYPES,
    OutsideBounds, POD_ANNOTATIONS, PROGRAM, Primary, REQUEST, RuleFormat, SUB_PLUGINS, SYSTEM_NAMESPACE,
    ValidAttachment, configuration, has_only_inlined, is_configuration_file, unknown_key,
};
pub use node_conf::{NODE_CONFIGURATION, NODE_CONFIGURATION_LIMIT, NodeConf, primary_in_attachment};
pub use request::{Args, CniCommand, Request, variables};
