//! The primary plugin, as a runtime calls it: real reference plugins, recorders, real packets. Needs
//! root, `iptables-save`, `ip`, Debian's `containernetworking-plugins` and `cnitool`.

mod after;
mod agent;
mod api;
mod chain;
mod cnitool;
mod default_route;
mod definitions;
mod networks;
mod node;
#[path = "../delegates/pod.rs"]
#[expect(dead_code, reason = "attachments under another primary plugin are for tests/delegates")]
mod pod;
mod readiness;
#[path = "../delegates/recorders.rs"]
mod recorders;
mod rollback;
#[path = "../cluster/server.rs"]
#[expect(dead_code, reason = "TLS and connections are for tests/cluster")]
mod server;
mod sidecar;
