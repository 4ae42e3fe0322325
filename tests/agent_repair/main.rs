//! Pods that bypass the mesh are repaired, or not, as configured; and a node that isn't ready is tainted.
//! Every test has a node of its own: a file system, a `/run/detour`, pods' network namespaces with
//! processes in control groups, and an API server that remembers what it is told. Needs root, `ip`,
//! `nft`, `iptables`, `unshare` and control groups that can be made.

mod agent;
#[path = "../agent/api.rs"]
#[expect(dead_code, reason = "an API that fails is for tests/agent")]
mod api;
mod in_place;
#[path = "../convergence/kernel.rs"]
#[expect(dead_code, reason = "settings are for tests/convergence")]
mod kernel;
mod left_alone;
mod modes;
#[path = "../find/node.rs"]
#[expect(dead_code, reason = "nodes of other kinds are for tests/find")]
mod node;
mod older;
mod pod;
#[path = "../install/program.rs"]
mod program;
mod scene;
#[path = "../cluster/server.rs"]
#[expect(dead_code, reason = "TLS and connections are for tests/cluster")]
mod server;
mod taint;
