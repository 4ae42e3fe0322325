//! A node with an agent, running pods with a sidecar, and an API server that records what is written.

use crate::live_policy::agent_node::{self, ROOT, mount_node, reach, write};
use crate::live_policy::agent_process::{Agent, SETTLED};
use crate::live_policy::api::{Api, NAMESPACES, PODS};
use crate::live_policy::node::{self, Node, id};
use crate::support::health::fetch;
use crate::support::node_pod::NodePod;
pub(crate) use crate::support::wait::{DEADLINE, pause, until};
use detour_cni::cluster::agent::{PoliciesReport, PolicyCounts, pod_policies};
use serde_json::{Value, json};
use std::fs;
use std::ops::Deref;
use std::path::Path;
use std::time::Instant;

pub(crate) const AGENT_SOCKET: &str = "/run/detour/agent.sock";
/// The sub-plugins of the node's configuration.
pub(crate) const CHAIN: &str = r#"[{"type": "istio-redirect"}, {"type": "uid-exclude"}, {"type": "dns-exclude"},
    {"type": "container-exclude"}]"#;
const LIST: &str = "/etc/cni/net.d/10-cluster.conflist";

pub(crate) struct Scene<'a> {
    pub(crate) node: &'a Node,
    url: String,
}

/// Runs `work` with a temporary node and a simulated API server.
pub(crate) fn scene(work: impl FnOnce(&Scene<'_>, &Api) + Send) {
    let authority = rcgen::generate_simple_self_signed(["client.invalid".to_owned()]).expect("a certificate");
    let api = Api::start();
    api.put(NAMESPACES, &json!({"metadata": {"name": "shop"}}));
    scene_of(&api.url(), &authority.cert.pem(), "token", |scene| work(scene, &api));
}

/// Runs `work` with a temporary node whose agent uses the API server at `url` with this token.
pub(crate) fn scene_of(url: &str, authority: &str, token: &str, work: impl FnOnce(&Scene<'_>) + Send) {
    node::scene(|node| {
        mount_node(node);
        let scene = Scene { node, url: url.to_owned() };
        let list = json!({"cniVersion": "1.0.0", "name": "cluster", "plugins": [{"type": "ovn"}]});
        write(LIST, &list.to_string());
        write("/account/ca.crt", authority);
        write("/account/token", token);
        scene.configure(CHAIN);
        work(&scene);
    });
}

impl Scene<'_> {
    /// Sets the `chain` of the node's configuration.
    pub(crate) fn configure(&self, chain: &str) {
        write("/config/agent.json", &format!("{{\"chain\": {chain}}}"));
    }

    /// Starts an agent, and waits until it has installed the plugin and serves its requests.
    pub(crate) fn agent(&self, more: &[&str]) -> Agent {
        self.agent_with_metrics(more).0
    }

    /// The same; returns the address of its metrics too.
    pub(crate) fn agent_with_metrics(&self, more: &[&str]) -> (Agent, String) {
        let agent = self.starting_agent("a", &[more, &["--health-address=127.0.0.1:0"]].concat());
        let parts = [
            "serving /healthz",
            SETTLED,
            "serving the plugin's requests",
            "watching pods of this node",
            "watching namespaces",
        ];
        let lines = agent.wait_for_logs(&parts);
        let line = lines.iter().find(|line| line.contains(parts[0])).expect("one");
        let address = line.split("address=").nth(1).expect("the address").trim().to_owned();
        (agent, address)
    }

    /// Starts an agent, and adds the pod `web-0`. Waits until the agent has it.
    pub(crate) fn agent_and_pod(&self, api: &Api) -> (Agent, Pod) {
        let (agent, pod) = (self.agent(&[]), Pod::added(self, api, "web-0", &[]));
        self.wait_for_counts([1, 0, 0, 0]);
        (agent, pod)
    }

    /// Starts an agent with this host name.
    pub(crate) fn starting_agent(&self, name: &str, more: &[&str]) -> Agent {
        Agent::spawn(name, &agent_node::agent_arguments(Path::new(ROOT), &self.url, more))
    }

    /// Returns the installed entry of the cluster network's list as the runtime passes it.
    pub(crate) fn entry(&self) -> Value {
        let list: Value = serde_json::from_slice(&fs::read(reach(LIST)).expect("installed")).expect("JSON");
        let entries = list["plugins"].as_array().expect("a list");
        let mut entry = entries.iter().find(|entry| entry["type"] == "detour").expect("installed").clone();
        entry["name"] = list["name"].clone();
        entry["cniVersion"] = list["cniVersion"].clone();
        entry["prevResult"] = json!({"cniVersion": "1.0.0"});
        entry
    }

    /// Returns the report of the agent.
    pub(crate) fn report(&self) -> PoliciesReport {
        pod_policies(Path::new(AGENT_SOCKET), DEADLINE).expect("the agent answers")
    }

    /// Waits until the agent reports these numbers of pods: current, rejected, failed, none.
    #[track_caller]
    pub(crate) fn wait_for_counts(&self, expected: [u32; 4]) -> PoliciesReport {
        let mut last = PoliciesReport::default();
        let deadline = Instant::now() + DEADLINE;
        while Instant::now() < deadline {
            last = self.report();
            let PolicyCounts { current, rejected, failed, none, .. } = last.counts;
            if [current, rejected, failed, none] == expected {
                return last;
            }
            pause();
        }
        panic!("expected {expected:?}, got {last:#?}");
    }
}

/// Publishes a pod to the watches.
pub(crate) fn publish(api: &Api, pod: &Pod) {
    api.put(PODS, &pod.object());
}

/// Changes the annotations of the namespace.
pub(crate) fn annotate_namespace(api: &Api, annotations: &Value) {
    api.put(NAMESPACES, &json!({"metadata": {"name": "shop", "annotations": annotations}}));
}

/// Returns the messages of the Events about a pod with this reason.
pub(crate) fn events(api: &Api, pod: &Pod, reason: &str) -> Vec<String> {
    agent_node::events(api, &pod.uid, reason)
}

/// Waits for an Event about a pod with this reason whose message contains `part`. Returns the message.
#[track_caller]
pub(crate) fn wait_for_event(api: &Api, pod: &Pod, reason: &str, part: &str) -> String {
    agent_node::wait_for_event(api, &pod.uid, reason, part)
}

/// Returns a sample of the metrics of the agent with this health address.
pub(crate) fn sample(address: &str, series: &str) -> Option<u32> {
    let (_, text) = fetch(address, "/metrics");
    text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?.trim().parse().ok()
}

pub(crate) const EXCLUDE_UIDS: &str = "detour.io/exclude-uids";
pub(crate) const EXCLUDE_PORTS: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";

/// A running pod, whose network namespace the runtime has mounted.
pub(crate) struct Pod {
    pod: NodePod,
}

impl Deref for Pod {
    type Target = NodePod;

    fn deref(&self) -> &NodePod {
        &self.pod
    }
}

impl Pod {
    /// Creates the pod's network namespace. The plugin was not called yet.
    pub(crate) fn new(scene: &Scene<'_>, name: &str) -> Self {
        Self::with_sandbox(scene, name, id("b"))
    }

    /// The same with this ID of the sandbox.
    pub(crate) fn with_sandbox(scene: &Scene<'_>, name: &str, sandbox: String) -> Self {
        let pod = NodePod::with_sandbox(scene.node, Some(name), sandbox).with_init_containers(&[]);
        agent_node::pin(&pod.sandbox, &pod.pause);
        Self { pod }
    }

    /// Creates a pod, publishes it, and calls ADD for it.
    pub(crate) fn added(scene: &Scene<'_>, api: &Api, name: &str, annotations: &[(&str, &str)]) -> Self {
        let pod = Self::new(scene, name);
        annotations.iter().for_each(|(key, value)| pod.set(key, value));
        publish(api, &pod);
        pod.call(scene, "ADD").expect("added");
        pod
    }

    /// Sets an annotation, and publishes the pod.
    pub(crate) fn annotate(&self, api: &Api, key: &str, value: &str) {
        self.set(key, value);
        publish(api, self);
    }

    /// Sets the UID, for another sandbox of a pod.
    pub(crate) fn set_uid(&mut self, uid: &str) {
        uid.clone_into(&mut self.pod.uid);
    }

    /// Removes the sidecar from the manifest.
    pub(crate) fn without_sidecar(self) -> Self {
        Self { pod: self.pod.without_sidecar() }
    }

    /// Adds Istio's init container to the manifest.
    pub(crate) fn with_istio_init(self) -> Self {
        Self { pod: self.pod.with_init_containers(&["istio-init"]) }
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
        let netns = agent_node::netns_of(&self.sandbox);
        self.pod.call(verb, &netns, conf, &format!(";K8S_POD_UID={}", self.uid))
    }

    /// Returns the rules of the table nat, without the time that iptables-save adds, and detour's native rules.
    pub(crate) fn rules(&self) -> String {
        let text = self.tool("iptables-save", &["-t", "nat"], "");
        let native = self.tool("nft", &["--stateless", "list", "ruleset", "inet"], "");
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
