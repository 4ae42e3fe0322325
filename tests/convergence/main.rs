//! Calls in any order, repeated, killed, concurrent, or after damage reconcile a pod's kernel state with the policies
//! of all its attachments. Every test has its own node (a private `/run/detour`) and its own pods (unnamed network
//! namespaces), so that nothing remains. Needs root, `ip`, `nft`, `iptables` and `iptables-legacy`.

mod attachment;
mod call;
mod damage;
mod expect;
mod faults;
mod foreign;
mod gc;
mod inject;
mod kill;
mod legacy;
mod limits;
mod locks;
mod order;
mod parallel;
mod records;
mod sequences;
#[path = "../support/mod.rs"]
mod support;

use support::{kernel, netns_pod as pod, private_node as node};
