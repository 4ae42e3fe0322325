//! Under containerd, asked by crictl as the kubelet would ask it: real sandboxes of real pods.

mod chained;
#[path = "../support/control_groups.rs"]
mod control_groups;
mod image;
mod node;
mod pod;

use serde_json::{Value, json};

/// The cluster's network: a bridge, and `more` plugins.
fn network(more: &[Value]) -> Value {
    let plugins = [&[bridge("cni0", &["10.85.0.0/16", "fd00:85::/64"])], more].concat();
    json!({"cniVersion": "1.0.0", "name": "net", "plugins": plugins})
}

fn bridge(name: &str, subnets: &[&str]) -> Value {
    let ranges: Vec<_> = subnets.iter().map(|subnet| json!([{"subnet": subnet}])).collect();
    // The addresses' leases are in /var/lib/cni/networks.
    json!({"type": "bridge", "bridge": name, "ipam": {"type": "host-local", "ranges": ranges}})
}

/// The plugin as the last in a list, with facts from the node's manifests.
fn chained() -> Value {
    json!({
        "type": "detour",
        "kubernetes": {"manifests_dir": "NODE/manifests"},
        "chain": [{"type": "istio-redirect"}, {"type": "uid-exclude", "uids": [1200]}],
    })
}
