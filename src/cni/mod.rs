//! The CNI protocol as values: request, configuration, result, versions, errors and their codes.

mod args;
mod block;
mod document;
mod error;
mod file;
mod json;
mod limit;
mod list;
mod names;
mod nameservers;
mod netconf;
mod node_conf;
mod request;
pub mod result;
pub mod version;

pub use args::Args;
pub use block::{Block, Reader};
pub use document::Document;
pub use error::{Code, Error};
pub use file::{OWN_TYPES, PROGRAM, configuration};
pub use json::{MAX_CONFIGURATION, excess};
pub use limit::{LIST_ITEMS, at_most, excerpt};
pub use list::{List, wrong_type};
pub use names::{
    DEFAULT_INTERFACE, check_interface_name, is_dns_label, is_dns_subdomain, is_identifier, is_interface_of_rules,
};
pub use netconf::{
    DefaultNetwork, Dialect, Kubernetes, LogLevel, NetConf, NetworkName, NetworkStatus, Primary, SUB_PLUGINS,
    ValidAttachment,
};
pub use node_conf::{NODE_CONFIGURATION, NODE_CONFIGURATION_LIMIT, NodeConf, primary_in_attachment};
pub use request::{Command, Request, variables};
