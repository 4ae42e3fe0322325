//! The shipped manifests with a real API server: they are accepted, and the agent and the plugin work with exactly the
//! rights that they grant.

mod accepted;
mod admission;
mod agent_policy;
mod client;
mod control_plane;
mod kubectl;
mod multus_chain;
mod node;
mod permissions;
mod releases;
mod repairs;
mod service_mesh;
mod shipped;
#[path = "../support/mod.rs"]
mod support;
mod tokens;
