//! A pod's network namespace as the runtime pins it, and the plugin's redirection in it.

use crate::support::netns_pod::Pod;
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::Path;

/// The address of every pod.
pub(crate) const ADDRESS: &str = "10.88.0.2";

impl Pod {
    /// Pins the network namespace and caches the cluster network's result, as a runtime does.
    pub(crate) fn pin(&self, pod: &Value) {
        let pinned = Path::new("/run/netns").join(&self.container_id);
        File::create(&pinned).expect("writable");
        mount(Some(&self.netns()), &pinned, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a bind mount");
        let netns = format!("/var{}", pinned.display());
        let cached = json!({
            "kind": "cniCacheV1", "containerId": self.container_id, "config": "e30=", "ifName": "eth0",
            "networkName": "k8s-pod-network", "netns": netns,
            "cniArgs": [
                ["IgnoreUnknown", "1"], ["K8S_POD_NAMESPACE", pod["metadata"]["namespace"]],
                ["K8S_POD_NAME", pod["metadata"]["name"]], ["K8S_POD_UID", pod["metadata"]["uid"]],
            ],
            "result": {"cniVersion": "0.3.1", "interfaces": [{"name": "eth0", "sandbox": netns}],
                       "ips": [{"interface": 0, "version": "4", "address": format!("{ADDRESS}/24")}]},
        });
        fs::create_dir_all("/var/lib/cni/results").expect("a tmpfs");
        fs::write(format!("/var/lib/cni/results/k8s-pod-network-{}-eth0", self.container_id), cached.to_string())
            .expect("a tmpfs");
    }

    /// Whether it has the plugin's redirection.
    pub(crate) fn redirects(&self) -> bool {
        self.tool("iptables-save", &["-t", "nat"], "").contains("-A ISTIO_REDIRECT ")
    }

    /// Returns its rules.
    pub(crate) fn rules(&self) -> String {
        let rules = ["iptables-save", "ip6tables-save"].map(|program| self.tool(program, &[], ""));
        let native = self.tool("nft", &["list", "table", "inet", "detour-exclusions"], "");
        let is_rule = |line: &&str| !line.starts_with(['#', ':']);
        rules
            .iter()
            .chain([&native])
            .flat_map(|text| text.lines().filter(is_rule))
            .map(|line| format!("{line}\n"))
            .collect()
    }

    /// Removes the redirection.
    pub(crate) fn flush(&self) {
        for iptables in ["iptables", "ip6tables"] {
            self.tool(iptables, &["-t", "nat", "-F"], "");
        }
    }
}
