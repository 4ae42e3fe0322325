//! Installation, repair and removal of the plugin on a node, by the command line and by the agent.

mod agent;
mod attachments;
mod cluster_cnis;
mod command;
mod crash;
mod credentials;
mod exposition;
mod golden;
mod multus_chain;
mod own_list;
mod owner;
mod saved_results;
#[path = "../support/mod.rs"]
mod support;
mod validate;

use support::{agent_process, install_scene as scene, server};
