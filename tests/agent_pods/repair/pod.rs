//! A running pod: its sandbox's process in a network namespace with addresses, and the runtime's cached result of the
//! cluster network's ADD.

use crate::repair::agent_node;
use crate::repair::kernel::Tools;
use crate::repair::node::{Process, Where, id, uid};
use crate::repair::scene::Scene;
use crate::support::new_netns::tool_in;
use detour_cni::agent::ObservedPod;
use detour_cni::cluster::objects;
use nix::mount::umount;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const LINKS: &str = "link set lo up
link add eth0 type veth peer name peer0
link set eth0 up
link set peer0 up
addr add 10.88.0.2/24 dev eth0
addr add fd88::2/64 dev eth0 nodad
";

pub(crate) struct Pod {
    pub(crate) uid: String,
    pub(crate) sandbox: String,
    pause: Process,
    address: &'static str,
    annotations: Vec<(String, String)>,
    pub(crate) dialect: &'static str,
}

fn group(uid: &str, container: &str) -> String {
    let uid = uid.replace('-', "_");
    format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice/crio-{container}.scope")
}

impl Tools for Pod {
    fn tool(&self, name: &str, args: &[&str], input: &str) -> String {
        Self::tool(self, name, args, input)
    }
}

impl Pod {
    pub(crate) fn new(scene: &Scene<'_>) -> Self {
        let (uid, sandbox) = (uid(), id("b"));
        let pause = scene.node.process("pause", &group(&uid, &sandbox), Where::New);
        scene.node.pin(&sandbox, &pause);
        let pod = Self { uid, sandbox, pause, address: "10.88.0.2", annotations: Vec::new(), dialect: "auto" };
        let named = (&*pod.name(), &*pod.uid);
        scene.node.keep("results", ("cluster", "eth0"), &pod.sandbox, named, &pod.sandbox);
        pod.tool("ip", &["-batch", "-"], LINKS);
        pod
    }

    /// Returns another pod, of which only a process in this pod's network namespace is left.
    pub(crate) fn stray(&self, scene: &Scene<'_>) -> Self {
        let (uid, sandbox) = (uid(), id("b"));
        let pause = scene.node.process("pause", &group(&uid, &sandbox), Where::With(&self.pause));
        Self { uid, sandbox, pause, address: "10.88.0.3", annotations: Vec::new(), dialect: "auto" }
    }

    /// Ends the pod without a DEL.
    pub(crate) fn go(&self, scene: &Scene<'_>) {
        let path = scene.node.root.join("run/netns").join(&self.sandbox);
        umount(&path).expect("unmounted");
        fs::remove_file(path).expect("removed");
        self.pause.end();
    }

    pub(crate) fn netns(&self) -> PathBuf {
        self.pause.netns()
    }

    /// Runs a tool in the network namespace, which must succeed. Returns its stdout.
    #[track_caller]
    pub(crate) fn tool(&self, program: &str, arguments: &[&str], stdin: &str) -> String {
        tool_in(&self.netns(), program, arguments, stdin)
    }

    /// Calls the plugin as the runtime does, which must succeed.
    #[track_caller]
    pub(crate) fn call(&self, scene: &Scene<'_>, verb: &str) {
        let mut conf = scene.call_configuration();
        conf["dialect"] = self.dialect.into();
        if verb == "CHECK" {
            conf["prevResult"] = json!({});
        }
        let called = agent_node::call(verb, (&self.sandbox, &self.netns()), (&self.name(), ""), &conf);
        called.unwrap_or_else(|printed| panic!("{verb}: {printed}"));
    }

    /// Returns its name in the namespace shop.
    pub(crate) fn name(&self) -> String {
        format!("web-{}", self.uid)
    }

    /// Adds an annotation, and publishes the pod.
    pub(crate) fn annotate(&mut self, scene: &Scene<'_>, key: &str, value: &str) {
        self.annotations.push((key.to_owned(), value.to_owned()));
        scene.publish(self);
    }

    /// Its manifest, with a sidecar.
    pub(crate) fn manifest(&self) -> Value {
        let mut manifest = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": self.name(), "namespace": "shop", "uid": self.uid, "labels": {"app": "web"},
                "annotations": {"sidecar.istio.io/status": "{}"},
            },
            "spec": {
                "initContainers": [{"name": "istio-validation"}],
                "containers": [
                    {"name": "web"},
                    {"name": "istio-proxy", "args": ["proxy", "sidecar"], "securityContext": {"runAsUser": 1337}},
                ],
            },
        });
        for (key, value) in &self.annotations {
            manifest["metadata"]["annotations"][key] = value.as_str().into();
        }
        manifest
    }

    /// Returns the pod as the agent observes it with its addresses.
    pub(crate) fn observed(&self) -> ObservedPod {
        self.observed_as(&self.manifest())
    }

    pub(crate) fn observed_as(&self, manifest: &Value) -> ObservedPod {
        let pod = objects(Path::new("pod"), &manifest.to_string(), "default").expect("a manifest").pods.remove(0).pod;
        ObservedPod {
            pod,
            resource_version: "7".into(),
            owned: true,
            addresses: vec![self.address.parse().expect("an address")],
            ..ObservedPod::default()
        }
    }

    /// Returns the pod after a failed validation.
    pub(crate) fn unvalidated(&self) -> Arc<ObservedPod> {
        Arc::new(ObservedPod { validation_failed: true, ..self.observed() })
    }
}
