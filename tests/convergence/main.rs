//! Calls in any order, repeated, killed, concurrent, or after damage reconcile a pod's kernel state with the policies
//! of all its attachments. Every test has its own node (a private `/run/detour`) and its own pods (unnamed network
//! namespaces), so that nothing remains. Needs root, `ip`, `nft`, `iptables`, `iptables-legacy` and `strace`.

use support::{attachment, kernel, netns_pod as pod, plugin_call as call, private_node as node};

mod damage;
mod faults;
mod limits;
mod loopback_plugin;
mod lost_state;
mod records;
mod sequences;
#[path = "../support/mod.rs"]
mod support;
