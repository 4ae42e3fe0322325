//! The agent's reports about plugin calls, a stuck agent, malformed requests, and the requests of the primary plugin.
//! `tests/cluster` has the other faults of agents.

use crate::scene::{Scene, UID, define, pod};
use crate::support::api::PODS;
use serde_json::{Value, json};

fn field<'a>(line: &'a str, key: &str) -> &'a str {
    let start = line.find(&format!(" {key}=")).unwrap_or_else(|| panic!("no {key} in {line}")) + key.len() + 2;
    line[start..].split(' ').next().expect("a value")
}

#[test]
fn each_call_is_logged_in_one_line_with_its_outcome() {
    Scene::run(|scene| {
        let agent = scene.agent();
        for verb in ["ADD", "CHECK", "DEL"] {
            scene.done(verb, &scene.conf(), Some(UID));
            let line = agent.wait_for_log(&format!("command={verb}"));
            assert_eq!(field(&line, "pod"), "shop/web-0");
            assert_eq!((field(&line, "network"), field(&line, "ifname")), ("istio-cni", "net1"));
            assert_eq!(field(&line, "container"), scene.pod.container_id);
            let (wall, cpu) = (field(&line, "wall_ms"), field(&line, "cpu_ms"));
            assert!(wall.parse::<f64>().expect("a number") > 0.0 && cpu.parse::<f64>().expect("a number") > 0.0);
            assert_eq!(line.contains("facts=agent"), verb == "ADD", "{line}");
            assert!(line.contains("level=info"), "{line}");
        }

        let (code, _) = scene.call("ADD", &scene.conf(), Some("uid-9")).refused();
        let line = agent.wait_for_log("command=ADD");
        assert_eq!(field(&line, "code"), code.to_string());
        assert!(line.contains("level=error") && line.contains("expected uid-9"), "{line}");

        // Warnings and the source of facts are reported at every log level.
        let mut conf = scene.conf();
        conf["log_level"] = json!("none");
        conf["kubernetes"]["nonsense"] = json!(1);
        assert_eq!(scene.done("ADD", &conf, None).stderr, "");
        let line = agent.wait_for_log("command=ADD");
        assert!(line.contains("kubernetes.nonsense: unknown key"), "{line}");
        assert_eq!(field(&line, "facts"), "agent");

        let mut conf = scene.conf();
        conf["kubernetes"]["exclude_namespaces"] = json!(["shop"]);
        scene.done("ADD", &conf, Some(UID));
        assert!(!agent.wait_for_log("command=ADD").contains("facts="));

        // STATUS is not reported.
        let mut conf = scene.conf();
        conf["cniVersion"] = json!("1.1.0");
        conf["cni.dev/valid-attachments"] = json!([]);
        for verb in ["STATUS", "GC", "DEL"] {
            scene.done(verb, &conf, Some(UID));
        }
        let line = agent.wait_for_log("command=");
        assert!(line.contains("command=GC") && !line.contains("container=") && !line.contains("ifname="), "{line}");
        assert!(agent.wait_for_log("command=").contains("command=DEL"));
    });
}

#[test]
fn a_request_outside_the_bounds_is_an_event_of_the_pod() {
    Scene::run(|scene| {
        let mut excluding = pod(UID);
        excluding["metadata"]["annotations"]["detour.io/exclude-uids"] = json!("7,*");
        scene.api.put(PODS, &excluding);
        let _agent = scene.agent();
        let mut conf = scene.conf_of_agent_alone();
        let (code, text) = scene.call("ADD", &conf, Some(UID)).refused();
        let bound = "annotation \"detour.io/exclude-uids\" of pod shop/web-0: \"*\" is outside the bounds: \
                     not permitted by the default bounds";
        assert!(code == 7 && text.contains(bound), "{text}");
        assert!(!scene.is_redirected());
        conf["outside_bounds"] = json!("ignore");
        let called = scene.done("ADD", &conf, Some(UID));
        assert!(called.stderr.contains("is outside the bounds"), "{}", called.stderr);
        assert!(scene.is_redirected());
        let (mut requests, bodies) = (scene.api.requests(), scene.api.events());
        requests.dedup();
        assert_eq!(requests, ["POST /api/v1/namespaces/shop/events"]);
        for (body, reason) in bodies.iter().zip(["DetourExclusionRejected", "DetourExclusionIgnored"]) {
            assert_eq!((&body["reason"], &body["type"]), (&json!(reason), &json!("Warning")));
            assert_eq!(body["involvedObject"]["uid"], UID);
            assert!(body["message"].as_str().is_some_and(|message| message.contains(bound)), "{body}");
        }
        assert_eq!(bodies.len(), 2);
    });
}

#[test]
fn with_a_stuck_agent_the_api_server_answers() {
    Scene::run(|scene| {
        let agent = scene.agent();
        agent.freeze();
        let called = scene.done("ADD", &scene.conf(), Some(UID));
        assert!(called.stderr.contains("stuck"), "{}", called.stderr);
        assert!(scene.is_redirected());
        let requests = scene.api.requests();
        assert!(requests.iter().any(|line| line == "GET /api/v1/namespaces/shop/pods/web-0"), "{requests:?}");
    });
}

#[test]
fn the_agent_survives_malformed_requests() {
    Scene::run(|scene| {
        let _agent = scene.agent();
        let unknown: Value =
            serde_json::from_str(&scene.ask(b"{\"ask\":{\"about\":\"weather\"},\"wait_ms\":1000}\n")).expect("JSON");
        assert_eq!(unknown["answer"], "unknown");
        let nonsense = [b"GET / HTTP/1.1\r\n".to_vec(), b"\n".to_vec(), vec![b'x'; 1 << 20], vec![0xff; 64]];
        for nonsense in nonsense {
            scene.ask(&nonsense);
        }
        scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
        assert_eq!(scene.api.requests(), [""; 0]);
    });
}

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
        requests.dedup();
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
