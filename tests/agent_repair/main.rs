//! Pods that bypass the mesh are repaired, or not, as configured; and a node that isn't ready is tainted.
//! Every test has a node of its own: a file system, a `/run/detour`, pods' network namespaces with
//! processes in control groups, and an API server that remembers what it is told. Needs root, `ip`,
//! `nft`, `iptables`, `unshare` and control groups that can be made.

mod agent;
mod in_place;
mod left_alone;
mod modes;
mod older;
mod pod;
mod scene;
#[path = "../support/mod.rs"]
mod support;
mod taint;

use support::{api, kernel, program, server, simulated_node as node};
