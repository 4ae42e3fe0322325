//! The agent and excluded containers: a simulated runtime reports containers over NRI, an API server records Events, and
//! the containers are processes in real control groups and network namespaces. Each test has its own simulated node.
//! Needs root, cgroup v2, Go, `ip`, `nft`, `bash`, `nsenter` and `unshare`.

mod bypass;
mod nri;
mod reports;
mod scene;
#[path = "../support/mod.rs"]
mod support;
