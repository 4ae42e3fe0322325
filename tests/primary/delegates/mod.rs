//! Delegates: reference plugins, and recorders that record their input. Needs root, `iptables-save` and Debian's `containernetworking-plugins`.

mod chain;
mod cnitool;
mod node_configuration;

use crate::support::{delegate_pod as pod, recorders};
