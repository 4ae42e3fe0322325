//! A node with one pod: plugins, manifests, and the configuration of the primary plugin.

use crate::pod::{Pod, call, with};
use crate::recorders::{Recorders, add_prints};
use crate::support::called::Called;
use crate::support::directory::Directory;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) const REFERENCE: &str = "/usr/lib/cni";
const ARGS: &str = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=uid-1";

pub(crate) struct Node {
    pub(crate) pod: Pod,
    pub(crate) recorders: Recorders,
    /// Manifests, saved state, and files of plugins.
    pub(crate) dir: Directory,
    number: u32,
}

impl Node {
    /// Returns a node whose plugins `default`, `a` and `b` are recorders that report an interface without creating it.
    pub(crate) fn new() -> Self {
        let recorders = Recorders::new()
            .with("default", &add_prints(&made("eth0", "10.0.0.2/24")))
            .with("a", &add_prints(&made("net1", "10.1.0.2/24")))
            .with("b", &add_prints(&made("net2", "10.2.0.2/24")));
        Self::with(recorders)
    }

    pub(crate) fn with(recorders: Recorders) -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let pod = Pod::new();
        pod.run(&["ip", "link", "set", "lo", "up"]);
        let dir = Directory::new("primary");
        fs::create_dir_all(dir.join("manifests")).expect("a directory");
        let node = Self { pod, recorders, dir, number };
        node.manifest("shop", &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}));
        node
    }

    /// Adds a pod with a sidecar that selects `networks`, and another one without.
    pub(crate) fn pod_selects(&self, networks: &str) {
        self.manifest("pod", &pod_object(networks));
    }

    pub(crate) fn definition(&self, namespace: &str, name: &str, config: &Value) {
        let config = if config.is_null() { String::new() } else { config.to_string() };
        let file = format!("{namespace}-{name}");
        self.manifest(&file, &definition_object(namespace, name, &config));
    }

    pub(crate) fn manifest(&self, name: &str, object: &Value) {
        fs::write(self.dir.join("manifests").join(format!("{name}.json")), object.to_string()).expect("writable");
    }

    /// Returns the configuration with this default network.
    pub(crate) fn conf(&self, default: &Value, more: &Value) -> Value {
        let conf = json!({
            "cniVersion": "1.1.0", "name": "primary", "type": "detour", "delegates": [default],
            "cniDir": self.dir.join("state"), "binDir": self.recorders.bin(),
            "kubernetes": {"manifests_dir": self.dir.join("manifests")},
        });
        with(conf, more)
    }

    /// Returns the configuration with the recorder `default` as default network.
    pub(crate) fn recording(&self, more: &Value) -> Value {
        self.conf(&json!({"cniVersion": "1.1.0", "name": "cluster", "type": "default"}), more)
    }

    /// Returns the configuration of a reference bridge with its own subnet.
    pub(crate) fn bridge(&self) -> Value {
        json!({
            "cniVersion": "1.0.0", "name": "cluster", "type": "bridge", "bridge": self.bridge_name(),
            "isGateway": true, "isDefaultGateway": true,
            "ipam": {"type": "host-local", "subnet": self.subnet("0/24"), "dataDir": self.dir.join("ipam")},
        })
    }

    pub(crate) fn bridge_name(&self) -> String {
        format!("dp{}n{}", std::process::id() % 1_000_000, self.number)
    }

    /// Returns an address of the bridge's subnet, or the subnet.
    pub(crate) fn subnet(&self, last: &str) -> String {
        // Other runs of these tests have other subnets.
        let index = (std::process::id() % 16_384 * 97 + self.number) % 16_384;
        format!("10.{}.{}.{last}", 128 + index / 256, index % 256)
    }

    pub(crate) fn environment(&self, command: &str) -> BTreeMap<String, String> {
        let path = format!("{}:{REFERENCE}", self.recorders.bin().display());
        let mut environment = self.pod.environment(command, &path);
        environment.insert("CNI_ARGS".into(), ARGS.into());
        environment.insert("PATH".into(), "/usr/sbin:/usr/bin:/sbin:/bin".into());
        environment
    }

    pub(crate) fn call(&self, command: &str, conf: &Value) -> Called {
        call(&self.environment(command), conf)
    }

    #[track_caller]
    pub(crate) fn done(&self, command: &str, conf: &Value) -> Value {
        self.call(command, conf).done().stdout
    }

    /// Returns the error's code and text, with details.
    #[track_caller]
    pub(crate) fn refused(&self, command: &str, conf: &Value) -> (u64, String) {
        self.call(command, conf).refused()
    }

    /// Returns whether the pod has saved state.
    pub(crate) fn has_saved_state(&self) -> bool {
        self.state_file().exists() || Path::new("/run/detour/attachments").join(&self.pod.name).exists()
    }

    pub(crate) fn state_file(&self) -> PathBuf {
        self.dir.join("state").join(&self.pod.name).join("primary@eth0.json")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = Command::new("ip")
            .args(["link", "delete", &self.bridge_name()])
            .stderr(std::process::Stdio::null())
            .status();
    }
}

/// Returns a result with one interface and one address.
pub(crate) fn made(interface: &str, address: &str) -> Value {
    json!({
        "cniVersion": "1.1.0", "interfaces": [{"name": interface, "sandbox": "/run/netns/x"}],
        "ips": [{"interface": 0, "address": address}],
    })
}

pub(crate) fn pod_object(networks: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web-0", "namespace": "shop", "uid": "uid-1", "annotations": annotations(networks)},
        "spec": {"containers": [{"name": "app"}, {"name": "istio-proxy"}]},
    })
}

pub(crate) fn annotations(networks: &str) -> Value {
    json!({"k8s.v1.cni.cncf.io/networks": networks, "sidecar.istio.io/status": "{}"})
}

pub(crate) fn definition_object(namespace: &str, name: &str, config: &str) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": name, "namespace": namespace}, "spec": {"config": config},
    })
}

/// Returns the definition of Istio's attachment.
pub(crate) fn istio_cni() -> Value {
    json!({"cniVersion": "0.3.1", "name": "istio-cni", "type": "istio-cni"})
}
