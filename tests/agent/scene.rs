//! A node with an agent, a simulated API server, a pod, and calls of the plugin.

use crate::support::agent_process::{Agent, SETTLED};
use crate::support::api::{Api, DEFINITIONS, NAMESPACES, PODS, kubeconfig_of};
use crate::support::called::{self, Called, plugin};
use crate::support::directory::Directory;
use crate::support::netns_pod::Pod;
use crate::support::private_node::on_a_node_with;
use crate::support::wait::DEADLINE;
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;

pub(crate) const UID: &str = "uid-1";

pub(crate) struct Scene {
    pub(crate) api: Api,
    pub(crate) root: Directory,
    pub(crate) pod: Pod,
}

impl Scene {
    /// Runs a test on a node whose API knows namespace and pod `shop/web-0`, with a sidecar.
    pub(crate) fn run(test: impl FnOnce(&Self) + Send) {
        on_a_node_with("size=16m", || {
            let scene = Self { api: Api::start(), root: Directory::new("agent"), pod: Pod::new() };
            let namespace = json!({"metadata": {"name": "shop", "annotations": {"a": "1"}}});
            scene.api.put(NAMESPACES, &namespace);
            scene.api.put(PODS, &pod(UID));
            test(&scene);
        });
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.root.join("run/detour/agent.sock")
    }

    /// Starts an agent, and waits until it has installed the plugin, synced its caches and bound its socket.
    pub(crate) fn agent(&self) -> Agent {
        let agent = self.agent_that_starts("first");
        let kinds = ["watching pods", "watching namespaces", "watching network attachment"];
        agent.wait_for_logs(&[&kinds[..], &["serving the plugin's", SETTLED]].concat());
        agent
    }

    pub(crate) fn agent_that_starts(&self, name: &str) -> Agent {
        self.agent_with(name, &[])
    }

    /// The same with more arguments.
    pub(crate) fn agent_with(&self, name: &str, more: &[&str]) -> Agent {
        Agent::on_node(name, &self.root, &self.api.url(), &[&["--platform=openshift"], more].concat())
    }

    /// An attachment's configuration with the agent's socket and the API.
    pub(crate) fn conf(&self) -> Value {
        let kubeconfig = self.root.join("kubeconfig");
        fs::write(&kubeconfig, kubeconfig_of(&json!({"server": self.api.url()}), &json!({}))).expect("written");
        json!({
            "cniVersion": "1.0.0", "name": "istio-cni", "type": "detour", "log_level": "debug",
            "kubernetes": {"agent_socket": self.socket(), "kubeconfig": kubeconfig, "timeout_seconds": 6},
            "chain": [{"type": "istio-redirect"}, {"type": "uid-exclude", "uids": ["1337"]}],
        })
    }

    /// The same without an API to fall back to.
    pub(crate) fn conf_of_agent_alone(&self) -> Value {
        without("kubeconfig", self.conf())
    }

    /// A call for the pod `shop/web-0` with this UID.
    pub(crate) fn call(&self, verb: &str, conf: &Value, uid: Option<&str>) -> Called {
        Called::ended(self.start(verb, conf, uid))
    }

    pub(crate) fn start(&self, verb: &str, conf: &Value, uid: Option<&str>) -> Child {
        let uid = uid.map(|uid| format!(";K8S_POD_UID={uid}")).unwrap_or_default();
        let arguments = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0{uid}");
        let mut conf = conf.clone();
        if verb == "CHECK" {
            conf["prevResult"] = json!({});
        }
        let ifname = if conf["delegates"].is_array() { "eth0" } else { "net1" };
        start(&self.pod, verb, ifname, &arguments, &conf)
    }

    /// Calls the plugin, which must succeed.
    #[track_caller]
    pub(crate) fn done(&self, verb: &str, conf: &Value, uid: Option<&str>) -> Called {
        self.call(verb, conf, uid).done()
    }

    /// Whether the pod's traffic is redirected.
    pub(crate) fn is_redirected(&self) -> bool {
        is_redirected(&self.pod)
    }

    /// Sends a raw request to the agent. Returns the second line of the answer, or an empty line.
    pub(crate) fn ask(&self, question: &[u8]) -> String {
        let mut stream = UnixStream::connect(self.socket()).expect("it listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("set");
        // The agent closes the connection after too much input.
        let _ = stream.write_all(question);
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text.lines().nth(1).unwrap_or_default().to_owned()
    }
}

/// Starts a call of the plugin for a pod.
pub(crate) fn start(pod: &Pod, verb: &str, ifname: &str, arguments: &str, conf: &Value) -> Child {
    let mut plugin = plugin([
        ("CNI_COMMAND", verb),
        ("CNI_CONTAINERID", &pod.container_id),
        ("CNI_NETNS", &pod.netns().display().to_string()),
        ("CNI_IFNAME", ifname),
        ("CNI_PATH", "/usr/lib/cni"),
        ("CNI_ARGS", arguments),
    ]);
    called::start(&mut plugin, &conf.to_string())
}

/// Returns a configuration without this key of `kubernetes`.
pub(crate) fn without(key: &str, mut conf: Value) -> Value {
    conf["kubernetes"].as_object_mut().expect("an object").remove(key);
    conf
}

/// Whether the pod's traffic is redirected.
pub(crate) fn is_redirected(pod: &Pod) -> bool {
    pod.tool("iptables-save", &["-t", "nat"], "").contains("--to-ports 15001")
}

/// The pod `shop/web-0`.
pub(crate) fn pod(uid: &str) -> Value {
    json!({
        "metadata": {
            "name": "web-0", "namespace": "shop", "uid": uid,
            "annotations": {"sidecar.istio.io/status": "{}", "k8s.v1.cni.cncf.io/networks": "default/istio-cni"},
        },
        "spec": {"nodeName": "node-1", "containers": [
            {"name": "app"},
            {"name": "istio-proxy", "args": ["proxy", "sidecar"], "securityContext": {"runAsUser": 1337}},
        ]},
        "status": {"phase": "Pending"},
    })
}

/// The definition `default/istio-cni`.
pub(crate) fn definition() -> Value {
    let config = json!({"cniVersion": "0.3.1", "name": "istio-cni", "type": "istio-cni"});
    json!({"metadata": {"name": "istio-cni", "namespace": "default"}, "spec": {"config": config.to_string()}})
}

/// Adds the definition to the API server.
pub(crate) fn define(api: &Api) {
    api.put(DEFINITIONS, &definition());
}

/// Whether only root may use a file.
pub(crate) fn is_private(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(path).expect("there").permissions().mode() & 0o777 == 0o600
}
