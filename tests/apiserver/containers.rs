//! The value `containerExclusion.enabled` with a real API server: the shipped agent has the rights and mounts that it
//! needs, without those of repairs.

use crate::control_plane::ControlPlane;
use crate::node::{SETTLED, meshed_pod, on_a_node};
use crate::shipped::{NAMESPACE, apply, chart, prepare};
use crate::support::netns_pod::Pod;
use serde_json::json;

#[test]
fn the_shipped_agent_creates_an_event_if_an_excluded_container_starts_captured() {
    let values = [
        "containerExclusion.enabled=true",
        "repair.enabled=false",
        "config.chain[0].type=istio-redirect",
        "config.chain[1].type=container-exclude",
        "config.chain[1].containers={app}",
    ];
    let (plane, objects) = (ControlPlane::start(), chart(&values));
    let admin = plane.admin();
    prepare(&admin);
    apply(&admin, &objects);
    let pod = meshed_pod(&admin, "web-0");
    on_a_node(&plane, &objects, |node| {
        let agent = node.start_agent("detour-agent-x");
        agent.wait_for_logs(&[SETTLED, "not registered at the container runtime"]);
        let sandbox = Pod::new();
        sandbox.pin(&pod);
        node.call("ADD", &sandbox, &pod).expect("added");
        let kind = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"namespace": "shop"}});
        let is_capture = |event: &serde_json::Value| {
            let message = event["message"].as_str().expect("text");
            event["reason"] == "DetourContainerCaptured"
                && event["involvedObject"]["uid"] == pod["metadata"]["uid"]
                && message.contains("container app started captured")
                && message.contains("nri.sock: socket not found")
        };
        plane.until(|| admin.list(&kind).expect("allowed").iter().any(is_capture));
        assert!(agent.ended().0.success());
    });
    let user = format!("system:serviceaccount:{NAMESPACE}:detour-agent");
    let refused = plane.audit().into_iter().filter(|event| event["user"]["username"] == user.as_str());
    let refused: Vec<_> = refused.filter(|event| event["responseStatus"]["code"] == 403).collect();
    assert!(refused.is_empty(), "{refused:?}");
}
