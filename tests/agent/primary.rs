//! The primary plugin's requests and reports through the agent.

use crate::scene::{Scene, UID, define};
use serde_json::{Value, json};

const STATUS: &str = "PATCH /api/v1/namespaces/shop/pods/web-0/status";
const EVENTS: &str = "POST /api/v1/namespaces/shop/events";

/// A primary plugin whose default network is the loopback device.
fn conf(scene: &Scene, mut conf: Value) -> Value {
    let more = json!({
        "name": "primary", "cniDir": scene.root.join("state"), "binDir": "/usr/lib/cni",
        "delegates": [{"cniVersion": "1.0.0", "name": "cluster", "type": "loopback"}],
    });
    conf.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    conf
}

#[test]
fn an_add_with_references_sends_two_writes() {
    Scene::run(|scene| {
        define(&scene.api);
        let agent = scene.agent();
        let conf = conf(scene, scene.conf_of_agent_alone());
        scene.done("ADD", &conf, Some(UID));
        assert!(scene.is_redirected());
        let mut requests = scene.api.requests();
        requests.sort();
        assert_eq!(requests, [STATUS, EVENTS]);
        let bodies = scene.api.bodies();
        let status = bodies.iter().find_map(|body| body["metadata"].get("annotations")).expect("a patch");
        assert!(status["k8s.v1.cni.cncf.io/network-status"].as_str().is_some_and(|text| text.contains("cluster")));
        let patched = bodies.iter().find(|body| body["metadata"]["annotations"].is_object()).expect("a patch");
        assert_eq!(patched["metadata"]["uid"], UID);
        assert!(bodies.iter().any(|body| body["reason"] == "AddedInterface" && body["involvedObject"]["uid"] == UID));
        assert!(agent.wait_for_log("command=ADD").contains("facts=agent"));
        scene.done("DEL", &conf, Some(UID));
    });
}

#[test]
fn the_error_names_a_missing_definition() {
    Scene::run(|scene| {
        let _agent = scene.agent();
        let (code, text) = scene.call("ADD", &conf(scene, scene.conf()), Some(UID)).refused();
        assert_eq!(code, 7, "{text}");
        assert!(text.contains("default/istio-cni"), "{text}");
    });
}

#[test]
fn without_an_agent_status_and_events_go_to_the_api_server() {
    Scene::run(|scene| {
        define(&scene.api);
        scene.done("ADD", &conf(scene, scene.conf()), Some(UID));
        let requests = scene.api.requests();
        assert!(requests.contains(&STATUS.to_owned()) && requests.contains(&EVENTS.to_owned()), "{requests:?}");
    });
}
