//! A running pod with a sidecar: its sandbox's process in a network namespace.

use crate::live_policy::agent_node;
use crate::live_policy::node::{Process, Where, id, uid};
use crate::live_policy::scene::{DEADLINE, Scene, pause};
use crate::support::new_netns::tool_in;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

pub(crate) const EXCLUDE_UIDS: &str = "detour.io/exclude-uids";
pub(crate) const EXCLUDE_PORTS: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";

pub(crate) struct Pod {
    pub(crate) name: String,
    /// Its UID, which a real API server replaces.
    pub(crate) uid: String,
    pub(crate) sandbox: String,
    pub(crate) pause: Process,
    pub(crate) annotations: RefCell<BTreeMap<String, String>>,
    labels: RefCell<BTreeMap<String, String>>,
    has_sidecar: bool,
    init_containers: Vec<Value>,
}

impl Pod {
    /// Creates the pod's network namespace. The plugin was not called yet.
    pub(crate) fn new(scene: &Scene<'_>, name: &str) -> Self {
        Self::with_sandbox(scene, name, id("b"))
    }

    /// The same with this ID of the sandbox.
    pub(crate) fn with_sandbox(scene: &Scene<'_>, name: &str, sandbox: String) -> Self {
        let uid = uid();
        let group = format!("kubepods.slice/kubepods-pod{uid}.slice/crio-{sandbox}.scope");
        let pause = scene.node.process("pause", &group, Where::New);
        agent_node::pin(&sandbox, &pause);
        let annotations = [("sidecar.istio.io/status".to_owned(), "{}".to_owned())].into();
        let pod = Self {
            name: name.to_owned(),
            uid,
            sandbox,
            pause,
            annotations: RefCell::new(annotations),
            labels: RefCell::default(),
            has_sidecar: true,
            init_containers: Vec::new(),
        };
        let links = "link set lo up\nlink add eth0 type veth peer name peer0\nlink set eth0 up\nlink set peer0 up\n\
                     addr add 10.88.0.2/24 dev eth0\n";
        tool_in(&pod.netns(), "ip", &["-batch", "-"], links);
        pod
    }

    /// Creates a pod, publishes it, and calls ADD for it.
    pub(crate) fn added(
        scene: &Scene<'_>,
        api: &crate::live_policy::api::Api,
        name: &str,
        annotations: &[(&str, &str)],
    ) -> Self {
        let pod = Self::new(scene, name);
        annotations.iter().for_each(|(key, value)| pod.set(key, value));
        crate::live_policy::scene::publish(api, &pod);
        pod.call(scene, "ADD").expect("added");
        pod
    }

    /// Removes the sidecar from the manifest.
    pub(crate) fn without_sidecar(self) -> Self {
        Self { has_sidecar: false, ..self }
    }

    /// Adds Istio's init container to the manifest.
    pub(crate) fn with_istio_init(self) -> Self {
        Self { init_containers: vec![json!({"name": "istio-init", "image": "proxy"})], ..self }
    }

    pub(crate) fn netns(&self) -> PathBuf {
        self.pause.netns()
    }

    /// Sets an annotation of the manifest.
    pub(crate) fn set(&self, key: &str, value: &str) {
        self.annotations.borrow_mut().insert(key.to_owned(), value.to_owned());
    }

    /// Sets a label of the manifest.
    pub(crate) fn label(&self, key: &str, value: &str) {
        self.labels.borrow_mut().insert(key.to_owned(), value.to_owned());
    }

    /// Removes an annotation of the manifest.
    pub(crate) fn unset(&self, key: &str) {
        self.annotations.borrow_mut().remove(key);
    }

    /// Returns the pod as it is in the cluster.
    pub(crate) fn object(&self) -> Value {
        let mut containers = vec![json!({"name": "web", "image": "web"})];
        if self.has_sidecar {
            containers.push(json!({
                "name": "istio-proxy", "image": "proxy", "args": ["proxy", "sidecar"],
                "securityContext": {"runAsUser": 1337},
            }));
        }
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": self.name, "namespace": "shop", "uid": self.uid, "annotations": *self.annotations.borrow(),
                "labels": *self.labels.borrow(),
            },
            "spec": {"nodeName": "node-1", "automountServiceAccountToken": false, "containers": containers,
                "initContainers": self.init_containers},
            "status": {"phase": "Running", "podIPs": [{"ip": "10.88.0.2"}]},
        })
    }

    /// Calls the plugin as the runtime does.
    ///
    /// # Errors
    /// The call fails; the text is what it prints.
    pub(crate) fn call(&self, scene: &Scene<'_>, verb: &str) -> Result<(), String> {
        self.call_with(&scene.entry(), verb)
    }

    /// The same with this configuration.
    pub(crate) fn call_with(&self, conf: &Value, verb: &str) -> Result<(), String> {
        let arguments = format!(";K8S_POD_UID={}", self.uid);
        let netns = agent_node::netns_of(&self.sandbox);
        agent_node::call(verb, (&self.sandbox, &netns), (&self.name, &arguments), conf)
    }

    /// Returns the rules of the table nat, without the time that iptables-save adds, and detour's native rules.
    pub(crate) fn rules(&self) -> String {
        let text = tool_in(&self.netns(), "iptables-save", &["-t", "nat"], "");
        let native = tool_in(&self.netns(), "nft", &["--stateless", "list", "ruleset", "inet"], "");
        text.lines().chain(native.lines()).filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n")
    }

    /// Whether traffic of this UID bypasses the sidecar.
    pub(crate) fn excludes_uid(&self, uid: u32) -> bool {
        let rules = self.rules();
        // Several UIDs are a set.
        let mut ids = rules.lines().filter(|line| line.ends_with("goto DETOUR_DIRECT")).filter_map(|line| {
            let (_, ids) = line.split_once("meta skuid ")?;
            Some(ids.split_once(" counter")?.0)
        });
        ids.any(|ids| ids.split(['{', '}', ',', ' ']).any(|id| id == uid.to_string()))
    }

    /// Whether traffic to this port bypasses the sidecar.
    pub(crate) fn excludes_port(&self, port: u16) -> bool {
        self.rules().contains(&format!("-p tcp -m tcp --dport {port} -j RETURN"))
    }

    /// Waits until the rules meet a condition.
    #[track_caller]
    pub(crate) fn until(&self, holds: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !holds(self) {
            assert!(Instant::now() < deadline, "not in time: pod {}:\n{}", self.name, self.rules());
            pause();
        }
    }
}
