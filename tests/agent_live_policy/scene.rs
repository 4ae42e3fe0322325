//! A node with an agent, pods and an API server that records what is written.

use crate::agent_process::{Agent, SETTLED};
use crate::api::{Api, NAMESPACES, PODS};
use crate::node::{self, Node};
use crate::pod::Pod;
use detour_cni::cluster::agent::{PoliciesReport, pod_policies};
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) const AGENT_SOCKET: &str = "/run/detour/agent.sock";
/// The sub-plugins of the node's configuration.
pub(crate) const CHAIN: &str = r#"[{"type": "istio-redirect"}, {"type": "uid-exclude"}, {"type": "dns-exclude"},
    {"type": "container-exclude"}]"#;
const LIST: &str = "/etc/cni/net.d/10-cluster.conflist";
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
/// Where the node's files are. The path of a socket has at most 107 bytes (unix(7)).
const ROOT: &str = "/mnt";

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
        bind(&node.root, Path::new(ROOT));
        for (directory, also) in [("run/detour", true), ("run/netns", false)] {
            let (own, of_node) = (Path::new("/").join(directory), Path::new(ROOT).join(directory));
            fs::create_dir_all(&own).expect("needs root");
            fs::create_dir_all(&of_node).expect("made");
            mount(Some("tmpfs"), &own, Some("tmpfs"), MsFlags::empty(), Some("size=64m")).expect("a tmpfs");
            if also {
                bind(&own, &of_node);
            }
        }
        let scene = Scene { node, url: url.to_owned() };
        let list = json!({"cniVersion": "1.0.0", "name": "cluster", "plugins": [{"type": "ovn"}]});
        scene.write(LIST, &list.to_string());
        scene.write("/account/ca.crt", authority);
        scene.write("/account/token", token);
        scene.configure(CHAIN);
        work(&scene);
    });
}

pub(crate) fn bind(from: &Path, to: &Path) {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("mounted");
}

impl Scene<'_> {
    /// Returns a path of the node as this process reaches it.
    pub(crate) fn reach(&self, path: &str) -> PathBuf {
        Path::new(ROOT).join(path.trim_start_matches('/'))
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.reach(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        // As a volume of a ConfigMap: never a part of the text.
        let temporary = path.with_extension("new");
        fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, &path)).expect("written");
    }

    /// Sets the `chain` of the node's configuration.
    pub(crate) fn configure(&self, chain: &str) {
        self.write("/config/agent.json", &format!("{{\"chain\": {chain}}}"));
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
            format!("--service-account={}", self.reach("/account").display()),
            format!("--config={}", self.reach("/config/agent.json").display()),
        ];
        arguments.extend(more.iter().map(ToString::to_string));
        Agent::spawn(name, &arguments)
    }

    /// Returns the installed entry of the cluster network's list as the runtime passes it.
    pub(crate) fn entry(&self) -> Value {
        let list: Value = serde_json::from_slice(&fs::read(self.reach(LIST)).expect("installed")).expect("JSON");
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

    /// Waits until the agent reports these numbers of pods: current, older, refused, none.
    #[track_caller]
    pub(crate) fn wait_for_counts(&self, expected: [u32; 4]) -> PoliciesReport {
        let mut last = PoliciesReport::default();
        let deadline = Instant::now() + DEADLINE;
        while Instant::now() < deadline {
            last = self.report();
            if [last.current, last.older, last.refused, last.none] == expected {
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
    let bodies = api.bodies();
    let of_pod =
        bodies.iter().filter(|body| body["reason"] == reason && body["involvedObject"]["uid"] == pod.uid.as_str());
    of_pod.map(|body| body["message"].as_str().expect("text").to_owned()).collect()
}

/// Waits for an Event about a pod with this reason whose message contains `part`. Returns the message.
#[track_caller]
pub(crate) fn wait_for_event(api: &Api, pod: &Pod, reason: &str, part: &str) -> String {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(message) = events(api, pod, reason).into_iter().find(|message| message.contains(part)) {
            return message;
        }
        assert!(Instant::now() < deadline, "{reason}, {part}: got {:#?}", api.bodies());
        pause();
    }
}

/// Returns the conditions that were set, in order.
pub(crate) fn conditions(api: &Api) -> Vec<Value> {
    let bodies = api.bodies();
    bodies.iter().filter_map(|body| body["status"]["conditions"].get(0).cloned()).collect()
}

/// Returns a sample of the metrics of the agent with this health address.
pub(crate) fn sample(address: &str, series: &str) -> Option<u32> {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("it reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("it answers");
    text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?.trim().parse().ok()
}

/// Waits for a condition.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        pause();
    }
}

/// The interval in which conditions are checked.
pub(crate) fn pause() {
    thread::park_timeout(Duration::from_millis(20));
}
