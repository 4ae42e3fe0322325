//! Whatever happens to a pod's attachments, in any order, any number of times, killed, damaged or
//! in parallel: its kernel state is what they ask for together. Every test works on a node of its
//! own (a private `/run/detour`) and on pods of its own (network namespaces without a name), so
//! that nothing stays behind. Needs root, `ip`, `nft`, `iptables` and `iptables-legacy`.

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
