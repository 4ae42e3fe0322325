//! The primary plugin as a runtime calls it, with reference plugins, recorders and real packets. Needs
//! root, `iptables-save`, `ip`, and Debian's `containernetworking-plugins`.

use support::{delegate_pod as pod, recorders, server};

mod after;
mod api;
mod chain;
mod delegates;
mod networks;
mod node;
mod sidecar;
#[path = "../support/mod.rs"]
mod support;
