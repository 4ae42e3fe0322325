//! A running agent, from the watch of a pod to its rules.

use crate::api::{Api, NAMESPACES, PODS};
use crate::kernel::Kernel;
use crate::program::program;
use crate::scene::{Scene, scene};
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(60);

struct Agent {
    process: Child,
    lines: Receiver<String>,
}

impl Agent {
    fn start(scene: &Scene<'_>, api: &Api) -> Self {
        let (root, account) = (scene.node.root.display(), scene.account());
        // As the pod that it is compared with.
        let config = scene.node.root.join("agent-config.json");
        std::fs::write(&config, r#"{"chain": [{"type": "istio-redirect"}]}"#).expect("written");
        let mut process = Command::new(program())
            .args(["agent", "--platform=kubernetes", "--node-name=node-1", "--taint=cni.istio.io/not-ready"])
            .args([format!("--root={root}"), format!("--api-server={}", api.url())])
            .arg(format!("--service-account={}", account.directory.display()))
            .arg(format!("--config={}", config.display()))
            .env_clear()
            .env("HOSTNAME", "a")
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let stderr = BufReader::new(process.stderr.take().expect("a pipe"));
        let (sender, lines) = channel();
        thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { process, lines }
    }

    /// Waits for a log line that contains `part`.
    #[track_caller]
    fn wait_for_log(&self, part: &str) {
        let mut before = Vec::new();
        loop {
            match self.lines.recv_timeout(DEADLINE) {
                Ok(line) if line.contains(part) => return,
                Ok(line) => before.push(line),
                Err(why) => panic!("{part:?} was not logged ({why}), but {before:#?}"),
            }
        }
    }
}

/// Waits for a condition.
#[track_caller]
fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::park_timeout(Duration::from_millis(20));
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.process.kill().and_then(|()| self.process.wait()).expect("it ends");
    }
}

#[test]
fn the_agent_repairs_watched_pods_and_checks_the_nodes_taint() {
    scene(|scene| {
        let (api, pod, plain) = (Api::start(), scene.pod(), scene.pod());
        plain.call(scene, "ADD");
        let mut object = pod.manifest();
        object["spec"]["nodeName"] = json!("node-1");
        object["status"] = json!({"phase": "Running", "podIPs": [{"ip": "10.88.0.2"}]});
        api.put(NAMESPACES, &json!({"metadata": {"name": "shop"}}));
        api.put(PODS, &object);
        let agent = Agent::start(scene, &api);
        agent.wait_for_log("traffic is redirected to the sidecar again: it had a sidecar and no rules");
        Kernel::of(&pod).assert_is(&Kernel::of(&plain), "after the race");
        pod.tool("nft", &["flush", "ruleset"], "");
        object["metadata"]["labels"]["changed"] = json!("yes");
        api.put(PODS, &object);
        agent.wait_for_log("traffic is redirected to the sidecar again: its rules had drifted");
        Kernel::of(&pod).assert_is(&Kernel::of(&plain), "after the loss");
        // Other threads write the Event and the taint.
        until("an Event", || api.bodies().iter().any(|body| body["reason"] == "DetourRepaired"));
        until("the taint", || api.requests().contains(&"GET /api/v1/nodes/node-1".to_owned()));
    });
}
