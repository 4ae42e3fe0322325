//! Live policy: running pods follow their annotations, those of their namespace and the node's configuration. A real
//! agent watches a simulated API server, pods have real network namespaces, and their rules are those of the plugin's
//! ADD. Each test has its own simulated node. Needs root, `ip`, `iptables` and `nsenter`.

mod ambient;
mod followed;
mod guard;
mod requests;
mod scene;
