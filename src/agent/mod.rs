//! The node's agent: what puts the plugin on a node and keeps it there.

pub mod install;
