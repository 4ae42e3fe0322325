//! The agent and running pods: repairs, and live policy. Each test has its own simulated node and API server. Needs root,
//! `ip`, `iptables`, `nft` and `nsenter`.

mod live_policy;
mod repair;
#[path = "../support/mod.rs"]
mod support;
