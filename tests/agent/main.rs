//! The agent's answers to the plugin: real processes on a socket, with a simulated API server. Needs root, `ip` and
//! `iptables-save`.

mod answers;
mod boot;
mod call_reports;
mod lifecycle;
mod scene;
#[path = "../support/mod.rs"]
mod support;
