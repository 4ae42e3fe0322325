//! A pod: its object in the API server, and the kubelet's requests to the runtime for it.

use crate::node::Node;
use crate::support::new_netns::tool;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// The UID of all containers, except for the proxy.
pub(crate) const USER: u32 = 1_000_650_000;
const PROXY_USER: u32 = 1_000_650_001;
const IMAGE: &str = "detour.invalid/test:1";
/// One DNS query or connection after the other with the first instruction.
pub(crate) const FIRST: &[&str] = &["/first"];
/// The proxy's listeners.
pub(crate) const PROXY: &[&str] = &["/traffic", "answer", "P", "15001", "15053"];

/// Exit status of [`FIRST`] if everything arrived at the destination.
pub(crate) const DIRECT: u64 = 0;
/// … if everything arrived at the proxy.
pub(crate) const CAPTURED: u64 = 1 + 3 + 9 + 27 + 81;

/// Where the kubelet creates the pod's control group.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Class {
    Guaranteed,
    Burstable,
    /// Below a control group that a tool created for the whole node, as in kind.
    Nested,
}

pub(crate) struct Pod {
    namespace: &'static str,
    pub(crate) name: String,
    pub(crate) uid: String,
    class: Class,
    pub(crate) annotations: Value,
    /// The spec as in the pod's manifest.
    pub(crate) spec: Value,
}

/// A running sandbox of a pod.
pub(crate) struct Sandbox<'a> {
    node: &'a Node,
    pub(crate) id: String,
    config: Value,
    attempts: AtomicU32,
}

impl Pod {
    /// A pod with a sidecar. `exclude` is the value of the annotation detour.io/exclude-containers.
    pub(crate) fn new(name: &str, class: Class, exclude: &str) -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(1);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let uid = format!("{:08x}-0000-4000-9000-{number:012x}", std::process::id());
        let mut annotations = json!({"sidecar.istio.io/status": "{}"});
        if !exclude.is_empty() {
            annotations["detour.io/exclude-containers"] = exclude.into();
        }
        let proxy = json!({"name": "istio-proxy", "image": IMAGE, "args": ["proxy", "sidecar"],
            "securityContext": {"runAsUser": PROXY_USER, "runAsGroup": PROXY_USER}});
        Self { namespace: "shop", name: name.to_owned(), uid, class, annotations, spec: json!({"containers": [proxy]}) }
    }

    /// A pod of this namespace without a sidecar.
    pub(crate) fn plain(namespace: &'static str, name: &str) -> Self {
        let mut pod = Self::new(name, Class::Burstable, "");
        pod.namespace = namespace;
        pod.annotations = json!({});
        pod.spec = json!({});
        pod.container("web")
    }

    pub(crate) fn annotate(&mut self, key: &str, value: &str) {
        self.annotations[key] = value.into();
    }

    /// Adds a container.
    pub(crate) fn container(mut self, name: &str) -> Self {
        let container = json!({"name": name, "image": IMAGE, "securityContext": {"runAsUser": USER}});
        let containers = &mut self.spec["containers"];
        containers
            .as_array_mut()
            .map(|all| all.push(container.clone()))
            .unwrap_or_else(|| *containers = json!([container]));
        self
    }

    pub(crate) fn manifest(&self) -> Value {
        let mut spec = self.spec.clone();
        spec["nodeName"] = "node-1".into();
        let metadata =
            json!({"name": self.name, "namespace": self.namespace, "uid": self.uid, "annotations": self.annotations});
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    }

    /// Starts the sandbox.
    ///
    /// # Errors
    /// The runtime's error.
    pub(crate) fn start<'a>(&self, node: &'a Node) -> Result<Sandbox<'a>, String> {
        self.start_again(node, 0)
    }

    /// Starts the sandbox after this number of failed attempts.
    ///
    /// # Errors
    /// The runtime's error.
    pub(crate) fn start_again<'a>(&self, node: &'a Node, attempt: u32) -> Result<Sandbox<'a>, String> {
        let group = &node.group;
        let parent = match self.class {
            Class::Guaranteed => format!("{group}/kubepods/pod{}", self.uid),
            Class::Burstable => format!("{group}/kubepods/burstable/pod{}", self.uid),
            Class::Nested => format!("{group}/docker/0123/kubelet/kubepods/besteffort/pod{}", self.uid),
        };
        let logs = node.path("logs").join(&self.uid);
        fs::create_dir_all(&logs).expect("made");
        // The kubelet adds these to each pod that it gets from the API server (pkg/kubelet/config).
        let mut annotations = self.annotations.clone();
        annotations["kubernetes.io/config.source"] = "api".into();
        annotations["kubernetes.io/config.seen"] = "2026-01-31T12:00:00.000000000Z".into();
        let config = json!({
            "metadata": {"name": self.name, "namespace": self.namespace, "uid": self.uid, "attempt": attempt},
            "hostname": self.name,
            "annotations": annotations,
            "log_directory": logs,
            "labels": {"io.kubernetes.pod.name": self.name, "io.kubernetes.pod.namespace": self.namespace, "io.kubernetes.pod.uid": self.uid},
            "linux": {"cgroup_parent": parent, "security_context": {"namespace_options": {"pid": "CONTAINER"}}},
        });
        let answer = node.ask(json!({"op": "sandbox", "sandbox_config": config}))?;
        let id = answer["sandbox"].as_str().expect("an ID").to_owned();
        Ok(Sandbox { node, id, config, attempts: AtomicU32::new(0) })
    }
}

impl Sandbox<'_> {
    /// A request about the container `name` that runs this command.
    fn request(&self, op: &str, name: &str, command: &[&str]) -> (Value, u32) {
        let user = if name == "istio-proxy" { PROXY_USER } else { USER };
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        let config = json!({
            "metadata": {"name": name, "attempt": attempt},
            "image": {"image": IMAGE, "user_specified_image": IMAGE},
            "command": command,
            "log_path": format!("{name}-{attempt}.log"),
            "labels": {"io.kubernetes.container.name": name},
            "linux": {"security_context": {
                "namespace_options": {"pid": "CONTAINER"},
                "run_as_user": {"value": user}, "run_as_group": {"value": user},
            }},
        });
        (json!({"op": op, "sandbox": self.id, "sandbox_config": self.config, "config": config}), attempt)
    }

    /// Runs [`FIRST`] as the container `name`, and removes it. Returns its exit status, and how long the runtime took to
    /// answer StartContainer, in microseconds.
    pub(crate) fn once(&self, name: &str) -> Result<(u64, u64), String> {
        let (request, _) = self.request("once", name, FIRST);
        let answer = self.node.ask(request)?;
        Ok((answer["exit"].as_u64().expect("a status"), answer["start_us"].as_u64().expect("a time")))
    }

    /// Starts a container. Returns its ID and the file that it prints into.
    pub(crate) fn run(&self, name: &str, command: &[&str]) -> Result<(String, PathBuf), String> {
        let (request, attempt) = self.request("create", name, command);
        let answer = self.node.ask(request)?;
        let id = answer["container"].as_str().expect("an ID").to_owned();
        self.node.ask(json!({"op": "start", "container": id}))?;
        let directory = self.config["log_directory"].as_str().expect("a path");
        Ok((id, PathBuf::from(directory).join(format!("{name}-{attempt}.log"))))
    }

    /// Starts the proxy and waits until it listens.
    pub(crate) fn run_proxy(&self) {
        let (_, log) = self.run("istio-proxy", PROXY).expect("it starts");
        crate::node::until("the proxy listens", || printed(&log).iter().any(|line| line.ends_with("ready")));
    }

    /// The output of a command in the pod's network namespace, which must succeed.
    pub(crate) fn ok_inside(&self, command: &[&str]) -> String {
        let netns = self.netns();
        self.node.ok(&[&["nsenter", &format!("--net={netns}"), "--"], command].concat())
    }

    /// The path of the network namespace on the node.
    pub(crate) fn netns(&self) -> String {
        let answer = self.node.asked(json!({"op": "netns", "sandbox": self.id}));
        answer["netns"].as_str().expect("a path").to_owned()
    }

    /// The rules in the pod, as iptables-save prints them, without times and counters.
    pub(crate) fn rules(&self) -> Vec<String> {
        let netns = format!("--net={}", self.node.inside(&self.netns()).display());
        let saved = tool("nsenter", &[&netns, "sh", "-c", "iptables-save && ip6tables-save"], "");
        let lines = saved.lines().filter(|line| !line.starts_with('#'));
        // The counters of a netfilter chain follow its policy.
        let counted = |line: &str| line.starts_with(':').then(|| line.find(" [")).flatten().unwrap_or(line.len());
        lines.map(|line| line[..counted(line)].to_owned()).collect()
    }

    pub(crate) fn remove(&self) {
        self.node.asked(json!({"op": "drop", "sandbox": self.id}));
    }
}

/// The lines that a container printed. In its log, a time and two words precede each (CRI logging).
pub(crate) fn printed(log: &std::path::Path) -> Vec<String> {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).map(str::to_owned).collect()
}
