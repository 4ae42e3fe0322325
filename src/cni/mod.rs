//! The CNI protocol as values: request, configuration, result, versions, errors and their codes.

mod block;
mod error;
mod json;
pub mod json_spans;
mod list;
mod names;
mod netconf;
mod node_conf;
mod request;
pub mod result;
pub mod version;

pub use block::{Block, BlockReader};
pub use error::{Code, Error};
pub use json::Document;
pub use json::{LIST_ITEMS, at_most, excerpt};
pub use json::{MAX_CONFIGURATION, excess};
pub use list::{ItemList, wrong_type};
pub use list::{OWN_TYPES, PROGRAM, configuration};
pub use names::{
    DEFAULT_INTERFACE, check_interface_name, is_dns_label, is_dns_subdomain, is_identifier, is_interface_of_rules,
};
pub use netconf::{
    DefaultNetwork, Kubernetes, LogLevel, NetConf, NetworkName, NetworkStatus, Primary, RuleFormatSetting, SUB_PLUGINS,
    ValidAttachment,
};
pub use node_conf::{NODE_CONFIGURATION, NODE_CONFIGURATION_LIMIT, NodeConf, primary_in_attachment};
pub use request::Args;
pub use request::{CniCommand, Request, variables};
