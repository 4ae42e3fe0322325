//! A pod, as the cluster has it and as the kubelet asks the runtime for it.

use serde_json::{Value, json};
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) uid: String,
    annotations: Value,
}

impl Pod {
    /// One in the namespace `shop` that no other test has.
    pub(crate) fn new(name: &str, annotations: Value) -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(1);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let uid = format!("{:08x}-0000-4000-9000-{number:012x}", std::process::id());
        Self { name: name.to_owned(), uid, annotations }
    }

    /// One that the injector has been at.
    pub(crate) fn meshed(name: &str) -> Self {
        Self::new(name, json!({"sidecar.istio.io/status": "{}"}))
    }

    pub(crate) fn select(mut self, networks: &str) -> Self {
        self.annotations["k8s.v1.cni.cncf.io/networks"] = networks.into();
        self
    }

    /// With a sidecar.
    pub(crate) fn manifest(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.name, "namespace": "shop", "uid": self.uid, "annotations": self.annotations},
            "spec": {"containers": [
                {"name": "web", "image": "i"},
                {"name": "istio-proxy", "image": "i", "args": ["proxy", "sidecar"], "securityContext": {"runAsUser": 1337}},
            ]},
        })
    }

    /// The CRI's `PodSandboxConfig`, below a control group as the kubelet's driver `cgroupfs` makes one.
    pub(crate) fn sandbox(&self, group: &str) -> Value {
        json!({
            "metadata": {"name": self.name, "namespace": "shop", "uid": self.uid, "attempt": 0},
            "annotations": self.annotations,
            "linux": {"cgroup_parent": format!("{group}/kubepods/burstable/pod{}", self.uid)},
        })
    }
}
