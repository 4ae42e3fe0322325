//! Delegates: reference plugins, and recorders that record their input. Needs root, `iptables-save` and Debian's `containernetworking-plugins`.

mod chain;
mod cnitool;
mod failures;
mod node_configuration;
mod reference_plugins;
mod trust;

use crate::support::{delegate_pod as pod, recorders};
