//! Delegates: reference plugins, and recorders that record their input. Needs root, `iptables-save` and Debian's `containernetworking-plugins`.

mod chain;
mod cnitool;
mod failures;
mod node_configuration;
mod reference_plugins;
#[path = "../support/mod.rs"]
mod support;
mod trust;

use support::{delegate_pod as pod, recorders};
