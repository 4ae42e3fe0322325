//! A running agent, from the watch of a pod to its rules.

use crate::repair::agent_process::Agent;
use crate::repair::api::{Api, NAMESPACES, PODS};
use crate::repair::kernel::Kernel;
use crate::repair::scene::{Scene, scene};
use crate::support::wait::until;
use serde_json::json;

fn start(scene: &Scene<'_>, api: &Api) -> Agent {
    let root = scene.node.root.display();
    scene.account();
    // As the pod that it is compared with.
    let config = scene.node.root.join("agent-config.json");
    std::fs::write(&config, r#"{"chain": [{"type": "istio-redirect"}]}"#).expect("written");
    let arguments = [
        "agent".to_owned(),
        "--platform=kubernetes".to_owned(),
        "--node-name=node-1".to_owned(),
        "--taint=cni.istio.io/not-ready".to_owned(),
        format!("--root={root}"),
        format!("--api-server={}", api.url()),
        format!("--service-account={root}/account"),
        format!("--config={}", config.display()),
    ];
    Agent::spawn("a", &arguments)
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
        let agent = start(scene, &api);
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
