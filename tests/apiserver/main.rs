//! The shipped manifests with a real API server: they are accepted, and the agent and the plugin work with exactly the
//! rights that they grant.

mod accepted;
mod admission;
mod agent_policy;
mod boot;
mod certificates;
mod client;
mod control_plane;
mod etcd;
mod facts;
mod kubectl;
mod multus_chain;
mod node;
mod permissions;
mod releases;
mod removal;
mod repairs;
mod sandbox;
mod service_mesh;
mod shipped;
#[path = "../support/mod.rs"]
mod support;
mod tokens;
