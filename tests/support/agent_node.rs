//! A simulated node with an agent: the node's files at [`ROOT`], and an API server that records what is written.

use super::agent_process::{Agent, arguments_on_node};
use super::api::{Api, NAMESPACES, PODS};
use super::node_pod::NodePod;
pub(crate) use super::simulated_node::bind;
use super::simulated_node::{self, Node, Process};
use super::wait::{DEADLINE, pause};
use nix::mount::{MsFlags, mount};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Where the node's files are. The path of a socket has at most 107 bytes (unix(7)).
pub(crate) const ROOT: &str = "/mnt";
pub(crate) const AGENT_SOCKET: &str = "/run/detour/agent.sock";
/// The configuration list of the cluster network.
pub(crate) const LIST: &str = "/etc/cni/net.d/10-cluster.conflist";
const NETNS: &str = "/run/netns";

pub(crate) struct AgentNode<'a> {
    pub(crate) node: &'a Node,
    pub(crate) api: Api,
}

/// Runs `work` with a temporary node of a cluster that has the namespace `shop`.
pub(crate) fn scene(work: impl FnOnce(&AgentNode<'_>) + Send) {
    simulated_node::scene(|node| {
        bind(&node.root, Path::new(ROOT));
        // The plugin's state is as this process sees it.
        for (directory, also) in [("run/detour", true), ("run/netns", false)] {
            let (own, of_node) = (Path::new("/").join(directory), Path::new(ROOT).join(directory));
            fs::create_dir_all(&own).expect("needs root");
            fs::create_dir_all(&of_node).expect("made");
            mount(Some("tmpfs"), &own, Some("tmpfs"), MsFlags::empty(), Some("size=64m")).expect("a tmpfs");
            if also {
                bind(&own, &of_node);
            }
        }
        let api = Api::start();
        api.put(NAMESPACES, &json!({"metadata": {"name": "shop"}}));
        let list = json!({"cniVersion": "1.0.0", "name": "cluster", "plugins": [{"type": "ovn"}]});
        write(LIST, &list.to_string());
        work(&AgentNode { node, api });
    });
}

impl AgentNode<'_> {
    /// Sets the `chain` of the agent's configuration.
    pub(crate) fn configure(&self, chain: &str) {
        write("/config/agent.json", &format!("{{\"chain\": {chain}}}"));
    }

    /// Returns the arguments of an agent of this node.
    pub(crate) fn arguments(&self, more: &[&str]) -> Vec<String> {
        let own = ["--platform=kubernetes", "--config=/mnt/config/agent.json"];
        arguments_on_node(Path::new(ROOT), &self.api.url(), &[&own, more].concat())
    }

    /// Starts an agent with this host name.
    pub(crate) fn start_agent(&self, name: &str, more: &[&str]) -> Agent {
        Agent::spawn(name, &self.arguments(more))
    }

    /// Publishes a pod to the agent's watch.
    pub(crate) fn publish(&self, pod: &NodePod) {
        self.api.put(PODS, &pod.object());
    }

    /// Returns the messages of the Events about a pod with this reason.
    pub(crate) fn events(&self, pod: &NodePod, reason: &str) -> Vec<String> {
        let mut events = self.api.events();
        events.retain(|event| event["reason"] == reason && event["involvedObject"]["uid"] == pod.uid);
        events.iter().map(|event| event["message"].as_str().expect("text").to_owned()).collect()
    }

    /// Waits for an Event about a pod with this reason whose message contains `part`. Returns the message.
    #[track_caller]
    pub(crate) fn wait_for_event(&self, pod: &NodePod, reason: &str, part: &str) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(message) = self.events(pod, reason).into_iter().find(|message| message.contains(part)) {
                return message;
            }
            assert!(Instant::now() < deadline, "{reason}, {part}: got {:#?}", self.api.bodies());
            pause();
        }
    }
}

/// Returns a path of the node as this process reaches it.
pub(crate) fn reach(path: &str) -> PathBuf {
    Path::new(ROOT).join(path.trim_start_matches('/'))
}

/// Writes a file of the node. As in a volume of a ConfigMap, no process sees a part of the text.
pub(crate) fn write(path: &str, text: &str) -> PathBuf {
    let path = reach(path);
    fs::create_dir_all(path.parent().expect("a directory")).expect("made");
    let temporary = path.with_extension("new");
    fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, &path)).expect("written");
    path
}

/// Mounts the network namespace of a sandbox as runtimes do.
pub(crate) fn pin(sandbox: &str, process: &Process) {
    for path in [reach(NETNS), PathBuf::from(NETNS)] {
        let path = path.join(sandbox);
        fs::write(&path, "").expect("written");
        bind(&process.netns(), &path);
    }
}
