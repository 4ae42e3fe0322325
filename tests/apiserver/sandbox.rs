//! A pod's network namespace. It has no name, and ends when its file is closed.

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// The address of every sandbox.
pub(crate) const ADDRESS: &str = "10.88.0.2";

pub(crate) struct Sandbox {
    pub(crate) container_id: String,
    netns: File,
}

impl Sandbox {
    /// Creates a network namespace with an address on eth0.
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
            File::open("/proc/thread-self/ns/net").expect("the namespace of this thread")
        };
        let netns = std::thread::spawn(make).join().expect("a namespace");
        let sandbox = Self { container_id: format!("apiserver-{}-{number}", std::process::id()), netns };
        sandbox.tool("ip", &["link", "set", "lo", "up"]);
        sandbox.tool("ip", &["link", "add", "eth0", "type", "veth", "peer", "name", "peer0"]);
        sandbox.tool("ip", &["addr", "add", &format!("{ADDRESS}/24"), "dev", "eth0"]);
        sandbox
    }

    /// Returns the path of the network namespace.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.netns.as_raw_fd()).into()
    }

    /// Pins the network namespace and caches the cluster network's result, as a runtime does.
    pub(crate) fn pin(&self, pod: &Value) {
        let pinned = Path::new("/run/netns").join(&self.container_id);
        File::create(&pinned).expect("writable");
        mount(Some(&self.path()), &pinned, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a bind mount");
        let cached = json!({
            "kind": "cniCacheV1", "containerId": self.container_id, "config": "e30=", "ifName": "eth0",
            "networkName": "k8s-pod-network", "netns": format!("/var{}", pinned.display()),
            "cniArgs": [
                ["IgnoreUnknown", "1"], ["K8S_POD_NAMESPACE", pod["metadata"]["namespace"]],
                ["K8S_POD_NAME", pod["metadata"]["name"]], ["K8S_POD_UID", pod["metadata"]["uid"]],
            ],
            "result": {"cniVersion": "0.3.1", "interfaces": [{"name": "eth0", "sandbox": format!("/var{}", pinned.display())}],
                       "ips": [{"interface": 0, "version": "4", "address": format!("{ADDRESS}/24")}]},
        });
        fs::create_dir_all("/var/lib/cni/results").expect("a tmpfs");
        fs::write(format!("/var/lib/cni/results/k8s-pod-network-{}-eth0", self.container_id), cached.to_string())
            .expect("a tmpfs");
    }

    /// Whether it has the plugin's redirection.
    pub(crate) fn redirects(&self) -> bool {
        self.tool("iptables-save", &["-t", "nat"]).contains("-A ISTIO_REDIRECT ")
    }

    /// Returns its rules.
    pub(crate) fn rules(&self) -> String {
        let rules = ["iptables-save", "ip6tables-save"].map(|program| self.tool(program, &[]));
        let native = self.tool("nft", &["list", "table", "inet", "detour-exclusions"]);
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
        self.tool("iptables", &["-t", "nat", "-F"]);
    }

    fn tool(&self, program: &str, arguments: &[&str]) -> String {
        let run = || {
            setns(&self.netns, CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
            Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"))
        };
        let output = std::thread::scope(|scope| scope.spawn(run).join()).expect("it is started");
        assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }
}
