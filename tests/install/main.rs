//! The plugin is put on a node, stays whole whatever happens, and is taken away again.

mod agent;
#[expect(dead_code, reason = "other tests use the rest of it")]
mod agent_process;
mod command;
mod crash;
mod disk;
mod exposition;
mod golden;
mod manifests;
mod program;
mod scene;
#[path = "../cluster/server.rs"]
#[expect(dead_code, reason = "TLS and connections are for tests/cluster")]
mod server;
