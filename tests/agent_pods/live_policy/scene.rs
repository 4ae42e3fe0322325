//! A node with an agent, pods and an API server that records what is written.

use crate::live_policy::agent_node::{self, ROOT, mount_node, reach, write};
use crate::live_policy::agent_process::{Agent, SETTLED};
use crate::live_policy::api::{Api, NAMESPACES, PODS};
use crate::live_policy::node::{self, Node};
use crate::live_policy::pod::Pod;
use crate::support::health::fetch;
pub(crate) use crate::support::wait::{DEADLINE, pause, until};
use detour_cni::cluster::agent::{PoliciesReport, pod_policies};
use serde_json::{Value, json};
use std::fs;
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

    /// Starts an agent with this host name.
    pub(crate) fn starting_agent(&self, name: &str, more: &[&str]) -> Agent {
        let mut arguments = vec![
            "agent".to_owned(),
            "--platform=kubernetes".to_owned(),
            "--node-name=node-1".to_owned(),
            format!("--root={ROOT}"),
            format!("--api-server={}", self.url),
            format!("--service-account={}", reach("/account").display()),
            format!("--config={}", reach("/config/agent.json").display()),
        ];
        arguments.extend(more.iter().map(ToString::to_string));
        Agent::spawn(name, &arguments)
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
            if [last.current, last.rejected, last.failed, last.none] == expected {
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
