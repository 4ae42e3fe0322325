//! The agent's answers to the plugin: real processes on a socket, with a simulated API server. Needs root, `ip` and
//! `iptables-save`.

use support::{agent_process, api, netns_pod as pod, private_node as node};

mod answers;
mod boot;
mod call_reports;
mod lifecycle;
mod scene;
#[path = "../support/mod.rs"]
mod support;
