//! The primary plugin as a runtime calls it, with reference plugins, recorders and real packets. Needs
//! root, `iptables-save`, `ip`, Debian's `containernetworking-plugins` and `cnitool`.

mod after;
mod agent;
mod api;
mod auxiliary_chain;
mod chain;
mod cnitool;
mod default_route;
mod definitions;
mod delegates;
mod live_policy;
mod networks;
mod node;
mod readiness;
mod rollback;
mod sidecar;
#[path = "../support/mod.rs"]
mod support;

use support::{delegate_pod as pod, recorders, server};
