//! The agent and excluded containers: a simulated runtime reports containers over NRI, an API server records Events, and
//! the containers are processes in real control groups and network namespaces. Each test has its own simulated node.
//! Needs root, cgroup v2, `ip`, `nft`, `bash`, `nsenter` and `unshare`.

mod bypass;
mod captured;
mod container;
mod ended;
#[allow(dead_code, reason = "a part of it is used here")]
#[path = "../nri/peer.rs"]
mod peer;
mod reports;
mod restored;
mod runtime;
mod scene;
#[path = "../support/mod.rs"]
mod support;

use support::{agent_node, agent_process, api, cgroup, program, simulated_node as node};

/// For the simulated runtime.
mod plugin {
    pub(crate) const DEADLINE: std::time::Duration = std::time::Duration::from_secs(20);
}
