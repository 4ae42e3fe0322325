//! A node has one installation: a DaemonSet owns it, and a second one changes nothing.

use crate::agent_process::{Agent, READY, SETTLED, arguments_on_node};
use crate::scene::{CALICO, RECORD, Scene};
use crate::server::{Answer, Request, Server};
use crate::support::wait::until;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

const REFUSED: &str = "DaemonSet mesh/first has installed detour on this node";

/// The API server with one node. Records the taints that it gets.
struct Cluster {
    api: Server,
    taints: Arc<Mutex<Vec<Value>>>,
}

impl Cluster {
    fn start() -> Self {
        let taints = Arc::new(Mutex::new(vec![json!([])]));
        let changed = Arc::clone(&taints);
        let api = Server::plain(move |request| {
            let mut changes = changed.lock().expect("unpoisoned");
            if request.line.starts_with("PATCH /api/v1/nodes/node-1") {
                let body: Value = serde_json::from_slice(&request.body).expect("JSON");
                changes.push(body["spec"]["taints"].clone());
            } else if !request.line.starts_with("GET /api/v1/nodes/node-1") {
                return Answer::json(404, &json!({"kind": "Status", "message": "no such thing"}));
            }
            let metadata = json!({"name": "node-1", "resourceVersion": changes.len().to_string()});
            Answer::json(200, &json!({"metadata": metadata, "spec": {"taints": changes.last()}}))
        });
        Self { api, taints }
    }

    /// Starts an agent of a DaemonSet in the namespace `mesh`.
    fn agent(&self, scene: &Scene, daemon_set: &str, more: &[&str]) -> Agent {
        let own = format!("--daemon-set={daemon_set}");
        let flags = [&["--taint=cni.istio.io/not-ready", "--repair=off", &own], more].concat();
        let pod = [("HOSTNAME", daemon_set), ("POD_NAMESPACE", "mesh"), ("POD_NAME", daemon_set), ("POD_UID", "uid")];
        Agent::spawn_with(&pod, &arguments_on_node(&scene.root, &self.api.http(), &flags))
    }
}

fn scene(name: &str) -> Scene {
    Scene::with(name, "10-calico.conflist", CALICO)
}

#[test]
fn the_agent_of_a_second_daemon_set_changes_nothing_until_the_first_installation_is_gone() {
    let (scene, cluster) = (scene("owner-agents"), Cluster::start());
    let first = cluster.agent(&scene, "first", &[]);
    first.wait_for_log(READY);
    assert_eq!(scene.json(RECORD)["owner"], "mesh/first");
    let socket = scene.path("run/detour/agent.sock");
    until("the first agent serves the plugin", || UnixStream::connect(&socket).is_ok());
    let files =
        || [RECORD, "etc/cni/net.d/10-calico.conflist", "var/lib/cni/detour/node.json"].map(|file| scene.read(file));
    let installed = files();
    let second = cluster.agent(&scene, "second", &["--chained=false"]);
    let line = second.wait_for_log(REFUSED);
    assert!(line.contains("add the exclusions to that installation as attachments"), "{line}");
    assert!(line.contains("or uninstall it first"), "{line}");
    let is_event = |request: &Request| {
        let text = String::from_utf8_lossy(&request.body);
        request.line.starts_with("POST /api/v1/namespaces/mesh/events")
            && text.contains("DetourNotInstalled")
            && text.contains(REFUSED)
    };
    until("an Event of the agent's pod", || cluster.api.requests().iter().any(is_event));
    assert_eq!(files(), installed);
    assert!(!second.log().iter().any(|line| line.contains("serving the plugin's requests")));
    assert_eq!(*cluster.taints.lock().expect("unpoisoned"), [json!([])], "the node is ready");
    assert!(first.end(Signal::SIGTERM).success());
    scene.ok("uninstall", &[]);
    second.wait_for_log(READY);
    assert_eq!(scene.json(RECORD)["owner"], "mesh/second");
}

#[test]
fn the_command_line_does_not_change_the_installation_of_a_daemon_set_and_can_revert_it() {
    let (scene, cluster) = (scene("owner-command"), Cluster::start());
    let before = scene.files();
    scene.ok("install", &[]);
    let agent = cluster.agent(&scene, "first", &[]);
    agent.wait_for_log(SETTLED);
    assert!(agent.end(Signal::SIGTERM).success());
    scene.reports(1, "install", &["--name=istio-cni"], &[REFUSED, "uninstall"]);
    scene.ok("uninstall", &[]);
    assert_eq!(scene.files(), before);
}
