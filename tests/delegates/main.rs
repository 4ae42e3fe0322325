//! Other plugins run by this one: real ones of the reference's, and recorders that write down what
//! they were given. Needs root, `iptables-save` and Debian's `containernetworking-plugins`.

mod chain;
mod cnitool;
mod failures;
mod node_configuration;
mod reference_plugins;
#[path = "../support/mod.rs"]
mod support;
mod trust;

use support::{delegate_pod as pod, recorders};
