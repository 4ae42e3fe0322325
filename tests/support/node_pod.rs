//! A running pod of a simulated node: its sandbox's process in a network namespace with an address.

use super::agent_node::pin;
use super::called::{Called, plugin};
use super::new_netns::tool_in;
use super::simulated_node::{Node, Process, Where, id, uid};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;

const LINKS: &str = "link set lo up
link add eth0 type veth peer name peer0
link set eth0 up
link set peer0 up
addr add 10.88.0.2/24 dev eth0
addr add fd88::2/64 dev eth0 nodad
";

/// A pod of the namespace `shop` with a sidecar.
pub(crate) struct NodePod {
    pub(crate) name: String,
    /// Its UID, which a real API server replaces.
    pub(crate) uid: String,
    pub(crate) sandbox: String,
    pub(crate) pause: Process,
    annotations: RefCell<BTreeMap<String, String>>,
    labels: RefCell<BTreeMap<String, String>>,
    init_containers: Vec<&'static str>,
    has_sidecar: bool,
}

/// Returns the control group of a container, as systemd names it.
fn group(uid: &str, container: &str) -> String {
    let uid = uid.replace('-', "_");
    format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice/crio-{container}.scope")
}

impl NodePod {
    /// Creates a pod whose network namespace the runtime has mounted, and for which the plugin was not called yet; `None`
    /// is a name that no other pod has.
    pub(crate) fn new(node: &Node, name: Option<&str>) -> Self {
        Self::with_sandbox(node, name, id("b"))
    }

    /// The same with this ID of the sandbox.
    pub(crate) fn with_sandbox(node: &Node, name: Option<&str>, sandbox: String) -> Self {
        let pod = Self::started(node, name, sandbox, Where::New);
        pod.tool("ip", &["-batch", "-"], LINKS);
        pin(&pod.sandbox, &pod.pause);
        pod
    }

    /// Creates a pod of which only a process in this pod's network namespace is left.
    pub(crate) fn stray(&self, node: &Node) -> Self {
        Self::started(node, None, id("b"), Where::With(&self.pause))
    }

    fn started(node: &Node, name: Option<&str>, sandbox: String, place: Where<'_>) -> Self {
        let uid = uid();
        let pause = node.process("pause", &group(&uid, &sandbox), place);
        Self {
            name: name.map_or_else(|| format!("web-{uid}"), str::to_owned),
            uid,
            sandbox,
            pause,
            annotations: RefCell::new([("sidecar.istio.io/status".to_owned(), "{}".to_owned())].into()),
            labels: RefCell::new([("app".to_owned(), "web".to_owned())].into()),
            init_containers: vec!["istio-validation"],
            has_sidecar: true,
        }
    }

    /// Removes the sidecar from the manifest.
    pub(crate) fn without_sidecar(self) -> Self {
        Self { has_sidecar: false, ..self }
    }

    /// Sets the init containers of the manifest.
    pub(crate) fn with_init_containers(self, names: &[&'static str]) -> Self {
        Self { init_containers: names.to_vec(), ..self }
    }

    pub(crate) fn netns(&self) -> PathBuf {
        self.pause.netns()
    }

    /// Runs a tool in the network namespace, which must succeed. Returns its stdout.
    #[track_caller]
    pub(crate) fn tool(&self, program: &str, arguments: &[&str], stdin: &str) -> String {
        tool_in(&self.netns(), program, arguments, stdin)
    }

    /// Sets an annotation of the manifest.
    pub(crate) fn set(&self, key: &str, value: &str) {
        self.annotations.borrow_mut().insert(key.to_owned(), value.to_owned());
    }

    /// Removes an annotation of the manifest.
    pub(crate) fn unset(&self, key: &str) {
        self.annotations.borrow_mut().remove(key);
    }

    /// Sets a label of the manifest.
    pub(crate) fn label(&self, key: &str, value: &str) {
        self.labels.borrow_mut().insert(key.to_owned(), value.to_owned());
    }

    /// Returns the pod as it is in the cluster.
    pub(crate) fn object(&self) -> Value {
        let named = |name: &&str| json!({"name": name, "image": name});
        let mut containers = vec![named(&"web")];
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
                "initContainers": self.init_containers.iter().map(named).collect::<Vec<_>>()},
            "status": {"phase": "Running", "podIPs": [{"ip": "10.88.0.2"}]},
        })
    }

    /// Calls the plugin as the runtime does.
    ///
    /// # Errors
    /// The call fails; the text is what it prints.
    pub(crate) fn call(&self, verb: &str, conf: &Value) -> Result<(), String> {
        let Self { sandbox, name, uid, .. } = self;
        let mut plugin = plugin([
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", sandbox),
            ("CNI_NETNS", &format!("/run/netns/{sandbox}")),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/opt/cni/bin"),
            ("CNI_ARGS", &format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name};K8S_POD_UID={uid}")),
        ]);
        let mut conf = conf.clone();
        conf["prevResult"] = json!({"cniVersion": conf["cniVersion"]});
        let called = Called::run(&mut plugin, &conf);
        if called.success { Ok(()) } else { Err(format!("{}{}", called.stdout, called.stderr)) }
    }
}
