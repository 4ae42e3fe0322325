//! Live policy: running pods follow their annotations, those of their namespace and the node's configuration. A real
//! agent watches a simulated or a real API server, pods have real network namespaces, and their rules are those of the
//! plugin's ADD. Each test has its own simulated node. Needs root, `ip`, `iptables` and `nsenter`; the tests in
//! `many_pods` need etcd and kube-apiserver too.

mod agents;
mod ambient;
#[allow(dead_code, reason = "a part of it is used here")]
#[path = "../apiserver/certificates.rs"]
mod certificates;
#[allow(dead_code, reason = "a part of it is used here")]
#[path = "../apiserver/client.rs"]
mod client;
mod cluster;
mod configuration;
#[allow(dead_code, reason = "a part of it is used here")]
#[path = "../apiserver/control_plane.rs"]
mod control_plane;
#[path = "../apiserver/etcd.rs"]
mod etcd;
mod followed;
mod guard;
mod limits;
mod many_pods;
mod pinned;
mod pod;
mod refused;
mod scene;
#[path = "../support/mod.rs"]
mod support;
mod traffic;

use support::{agent_node, agent_process, api, simulated_node as node};
