//! A node with an agent, running pods with a sidecar, and an API server that records what is written.

use crate::support::agent_node::{self, AGENT_SOCKET, AgentNode, LIST, reach};
use crate::support::agent_process::{Agent, SETTLED};
use crate::support::api::NAMESPACES;
use crate::support::health::fetch;
use crate::support::node_pod::NodePod as Pod;
use crate::support::wait::{DEADLINE, pause, until};
use detour_cni::cluster::agent::{PoliciesReport, PolicyCounts, pod_policies};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Instant;

/// The sub-plugins of the node's configuration.
pub(crate) const CHAIN: &str = r#"[{"type": "istio-redirect"}, {"type": "uid-exclude"}, {"type": "dns-exclude"},
    {"type": "container-exclude"}]"#;

/// Runs `work` with a temporary node.
pub(crate) fn scene(work: impl FnOnce(&AgentNode<'_>) + Send) {
    agent_node::scene(|scene| {
        scene.configure(CHAIN);
        work(scene);
    });
}

impl AgentNode<'_> {
    /// Starts an agent, and waits until it has installed the plugin and serves its requests.
    pub(crate) fn agent(&self, more: &[&str]) -> Agent {
        self.agent_with_metrics(more).0
    }

    /// The same; returns the address of its metrics too.
    pub(crate) fn agent_with_metrics(&self, more: &[&str]) -> (Agent, String) {
        let agent = self.start_agent("a", &[more, &["--health-address=127.0.0.1:0"]].concat());
        let parts = ["serving the plugin's requests", "watching pods of this node", "watching namespaces"];
        agent.wait_for_logs(&[&parts[..], &[SETTLED]].concat());
        let address = agent.address();
        (agent, address)
    }

    /// Starts an agent, and adds the pod `web-0`. Waits until the agent has it.
    pub(crate) fn agent_and_pod(&self) -> (Agent, Pod) {
        let (agent, pod) = (self.agent(&[]), self.added("web-0", &[]));
        self.wait_for_counts([1, 0, 0, 0]);
        (agent, pod)
    }

    /// Creates a pod, for which the plugin was not called yet.
    pub(crate) fn pod(&self, name: &str) -> Pod {
        Pod::new(self.node, Some(name))
    }

    /// Creates a pod, publishes it, and calls ADD for it.
    pub(crate) fn added(&self, name: &str, annotations: &[(&str, &str)]) -> Pod {
        let pod = self.pod(name);
        annotations.iter().for_each(|(key, value)| pod.set(key, value));
        self.publish_and_add(&pod);
        pod
    }

    pub(crate) fn publish_and_add(&self, pod: &Pod) {
        self.publish(pod);
        self.call(pod, "ADD").expect("added");
    }

    /// Calls the installed plugin.
    ///
    /// # Errors
    /// The call fails; the text is what it prints.
    pub(crate) fn call(&self, pod: &Pod, verb: &str) -> Result<(), String> {
        pod.call(verb, &self.entry())
    }

    /// Sets an annotation, and publishes the pod.
    pub(crate) fn annotate(&self, pod: &Pod, key: &str, value: &str) {
        pod.set(key, value);
        self.publish(pod);
    }

    /// Changes the annotations of the namespace.
    pub(crate) fn annotate_namespace(&self, annotations: &Value) {
        self.api.put(NAMESPACES, &json!({"metadata": {"name": "shop", "annotations": annotations}}));
    }

    /// Changes the labels of the namespace.
    pub(crate) fn label_namespace(&self, labels: &Value) {
        self.api.put(NAMESPACES, &json!({"metadata": {"name": "shop", "labels": labels}}));
    }

    /// Returns the installed entry of the cluster network's list as the runtime passes it.
    pub(crate) fn entry(&self) -> Value {
        let list: Value = serde_json::from_slice(&fs::read(reach(LIST)).expect("installed")).expect("JSON");
        let entries = list["plugins"].as_array().expect("a list");
        let mut entry = entries.iter().find(|entry| entry["type"] == "detour").expect("installed").clone();
        (entry["name"], entry["cniVersion"]) = (list["name"].clone(), list["cniVersion"].clone());
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

/// Waits for a sample of the metrics of the agent with this health address, which may be too busy for an answer.
pub(crate) fn sample(address: &str, series: &str) -> Option<u32> {
    let mut value = None;
    until(series, || {
        let (_, text) = fetch(address, "/metrics");
        let found = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value = found.and_then(|found| found.trim().parse().ok());
        value.is_some()
    });
    value
}

pub(crate) const EXCLUDE_UIDS: &str = "detour.io/exclude-uids";
pub(crate) const EXCLUDE_PORTS: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";

impl Pod {
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
