//! The node's agent answers the plugin: real processes on a socket, an API of the tests' own. Needs
//! root, `ip` and `iptables-save`.

mod answers;
mod fallback;
mod listener;
mod primary;
mod scene;
#[path = "../support/mod.rs"]
mod support;
mod told;
mod upgrade;

use support::{agent_process, api, netns_pod as pod, private_node as node};
