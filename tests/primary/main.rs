//! The primary plugin as a runtime calls it, with reference plugins, recorders and real packets. Needs
//! root, `iptables-save`, `ip`, and Debian's `containernetworking-plugins`.

mod after;
mod agent;
mod api;
mod auxiliary_chain;
mod chain;
mod default_route;
mod definitions;
mod delegates;
mod live_policy;
mod networks;
mod node;
mod rollback;
mod sidecar;
#[path = "../support/mod.rs"]
mod support;

use support::{delegate_pod as pod, recorders, server};
