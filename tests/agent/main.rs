//! The agent's answers to the plugin: real processes on a socket, with a simulated API server. Needs root, `ip` and
//! `iptables-save`.

mod answers;
mod boot;
mod bounds;
mod call_reports;
mod fallback;
mod primary;
mod scene;
#[path = "../support/mod.rs"]
mod support;
mod upgrade;
mod watches;

use support::{agent_process, api, netns_pod as pod, private_node as node};
