//! A node after a reboot: the runtime calls the plugin before the agent runs, maybe without an API server. Pods with a
//! sidecar wait, and all others start. Needs root, `ip`, `nft` and `iptables-save`.

mod agent;
mod node_states;
mod scene;
mod started;
