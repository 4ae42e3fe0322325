//! Answers from the agent's cache, and requests to the API server for the rest.

use crate::scene::{Scene, UID, define, pod};
use crate::support::api::{DEFINITIONS, NAMESPACES, PODS};
use crate::support::wait::until;
use serde_json::{Value, json};
use std::io::Write;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;

const GET_POD: &str = "GET /api/v1/namespaces/shop/pods/web-0";
const GET_NAMESPACE: &str = "GET /api/v1/namespaces/shop";

pub(crate) fn question(uid: &str) -> String {
    let pod = json!({"namespace": "shop", "name": "web-0", "uid": uid});
    json!({"wait_ms": 20_000, "ask": {"about": "facts", "pod": pod, "with_namespace": true}}).to_string() + "\n"
}

pub(crate) fn answer(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
}

#[test]
fn calls_send_no_request_to_the_api_server() {
    Scene::run(|scene| {
        let _agent = scene.agent();
        scene.done("ADD", &scene.conf(), Some(UID));
        assert!(scene.is_redirected());
        scene.done("CHECK", &scene.conf(), Some(UID));
        scene.done("DEL", &scene.conf(), Some(UID));
        let mut conf = scene.conf_of_agent_alone();
        conf["cniVersion"] = json!("1.1.0");
        scene.done("STATUS", &conf, None);
        assert_eq!(scene.api.requests(), [""; 0]);
    });
}

#[test]
fn a_pod_that_the_watch_reports_a_moment_later_causes_no_request() {
    Scene::run(|scene| {
        let _agent = scene.agent();
        // If this machine is so slow that the agent gets a report only after the 300 ms for which it waits, another try
        // shows whether the report is enough.
        let mut number = 1;
        until("an answer from the cache", || {
            number += 1;
            let (uid, before) = (format!("uid-{number}"), scene.api.requests().len());
            let mut stream = UnixStream::connect(scene.socket()).expect("it listens");
            stream.write_all(question(&uid).as_bytes()).expect("sent");
            let mut lines = BufReader::new(stream).lines();
            lines.next().expect("it says hello").expect("text");
            // The agent is looking it up now.
            scene.api.put(PODS, &pod(&uid));
            let answer = answer(&lines.next().expect("it answers").expect("text"));
            assert_eq!(answer["pod"]["uid"], uid, "{answer}");
            scene.api.requests().len() == before
        });
    });
}

#[test]
fn a_pod_that_the_watch_does_not_report_or_without_a_uid_is_requested() {
    Scene::run(|scene| {
        let _agent = scene.agent();
        scene.done("ADD", &scene.conf_of_agent_alone(), None);
        let mut first = scene.api.requests();
        let sent = first.len();
        // A slow request is sent twice.
        first.dedup();
        assert_eq!(first, [GET_POD]);
        scene.api.put_quietly(PODS, &pod("uid-2"));
        scene.done("ADD", &scene.conf_of_agent_alone(), Some("uid-2"));
        assert!(scene.is_redirected());
        let mut second = scene.api.requests().split_off(sent);
        second.dedup();
        assert_eq!(second, [GET_POD]);
    });
}

#[test]
fn an_unknown_pod_is_a_final_answer_of_the_agent() {
    Scene::run(|scene| {
        let _agent = scene.agent();
        let (code, text) = scene.call("ADD", &scene.conf(), Some("uid-9")).refused();
        assert_eq!(code, 100, "{text}");
        assert!(text.contains("shop/web-0") && text.contains("uid-1") && text.contains("uid-9"), "{text}");
        assert!(scene.api.requests().iter().all(|request| request == GET_POD), "{:?}", scene.api.requests());
    });
}

#[test]
fn changes_of_objects_reach_the_answers() {
    Scene::run(|scene| {
        let _agent = scene.agent();
        let answered = || answer(&scene.ask(question(UID).as_bytes()));
        scene.api.put(NAMESPACES, &json!({"metadata": {"name": "shop", "annotations": {"a": "2"}}}));
        until("the answer", || answered()["namespace"]["annotations"]["a"] == "2");
        assert_eq!(scene.api.requests(), [""; 0]);
        scene.api.delete(NAMESPACES, "", "shop");
        until("the answer", || answered()["answer"] == "failed");
        assert!(scene.api.requests().iter().all(|request| request == GET_NAMESPACE));
        scene.api.delete(PODS, "shop", "web-0");
        until("the answer", || answered()["answer"] == "failed" && scene.api.requests().contains(&GET_POD.to_owned()));
    });
}

#[test]
fn with_the_api_down_an_add_is_answered_from_the_cache() {
    Scene::run(|scene| {
        let agent = scene.agent();
        scene.api.go_down();
        agent.wait_for_logs(&["can't watch pods", "can't watch namespaces"]);
        let called = scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
        assert!(scene.is_redirected(), "{called:?}");
        agent.wait_for_log("answering from the cache");
        for object in [GET_POD, GET_NAMESPACE] {
            let tries = scene.api.requests().iter().filter(|request| *request == object).count();
            // hyper repeats a request whose connection ends before an answer begins.
            assert!(tries <= 2, "{:?}", scene.api.requests());
        }
        scene.done("DEL", &scene.conf_of_agent_alone(), Some(UID));
        let (code, text) = scene.call("ADD", &scene.conf(), Some("uid-2")).refused();
        assert_eq!(code, 11, "{text}");
        assert!(text.contains("shop/web-0"), "{text}");
    });
}

/// The pod with the annotation `a`.
pub(crate) fn annotated(value: &str) -> Value {
    let mut pod = pod(UID);
    pod["metadata"]["annotations"]["a"] = json!(value);
    pod
}

#[test]
fn while_the_watch_is_broken_objects_are_requested() {
    Scene::run(|scene| {
        scene.api.put(PODS, &annotated("before"));
        let agent = scene.agent();
        scene.api.refuse_watches(403);
        agent.wait_for_log("can't watch pods");
        scene.api.put_quietly(PODS, &annotated("after"));
        // The cache, which answers if the API server takes a second, has "before".
        until("the answer", || answer(&scene.ask(question(UID).as_bytes()))["pod"]["annotations"]["a"] == "after");
        assert!(scene.api.requests().contains(&GET_POD.to_owned()));
    });
}

/// A pod without a sidecar is answered from memory, also while the watch is broken, and never by the API server.
#[test]
fn a_request_for_what_is_in_memory_causes_no_request_to_the_api_server() {
    Scene::run(|scene| {
        let agent = scene.agent();
        let from_memory = |uid: &str| {
            let mut question: Value = serde_json::from_str(&question(uid)).expect("JSON");
            question["from_memory"] = json!(true);
            answer(&scene.ask((question.to_string() + "\n").as_bytes()))
        };
        assert_eq!(from_memory(UID)["pod"]["uid"], UID);
        assert_eq!(from_memory("uid-2")["answer"], "failed");
        scene.api.refuse_watches(500);
        agent.wait_for_logs(&["can't watch pods", "can't watch namespaces"]);
        scene.api.go_silent();
        let known = from_memory(UID);
        assert!(known["pod"]["uid"] == UID && known["namespace"]["name"] == "shop", "{known}");
        assert_eq!(from_memory("uid-2")["answer"], "failed");
        assert_eq!(scene.api.requests(), [""; 0]);
    });
}

#[test]
fn a_watch_with_an_expired_version_starts_with_a_list() {
    Scene::run(|scene| {
        let agent = scene.agent();
        scene.api.forget_versions();
        scene.api.put_quietly(PODS, &annotated("after"));
        agent.wait_for_logs(&["can't watch pods", "watching pods"]);
        until("the answer", || answer(&scene.ask(question(UID).as_bytes()))["pod"]["annotations"]["a"] == "after");
    });
}

#[test]
fn an_empty_directory_at_the_sockets_path_is_replaced() {
    Scene::run(|scene| {
        std::fs::create_dir_all(scene.socket()).expect("made");
        let agent = scene.agent();
        scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
        drop(agent);
        std::fs::remove_file(scene.socket()).expect("removed");
        std::fs::create_dir_all(scene.socket().join("mine")).expect("made");
        let line = scene.agent_that_starts("second").wait_for_log("can't listen on the agent socket");
        assert!(line.contains("a directory exists at the socket's path") && line.contains("remove it"), "{line}");
        assert!(scene.socket().join("mine").exists());
    });
}

#[test]
fn with_a_refused_watch_each_add_sends_requests_until_it_is_granted() {
    Scene::run(|scene| {
        scene.api.refuse_watches(403);
        let agent = scene.agent_that_starts("first");
        let refused = ["can't watch pods", "can't watch namespaces", "can't watch network", "serving the plugin's"];
        let lines = agent.wait_for_logs(&refused);
        assert!(lines.iter().any(|line| line.contains("grant the permission to list and watch pods")), "{lines:?}");
        scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
        let mut requests = scene.api.requests();
        requests.sort();
        // A slow request is sent twice.
        requests.dedup();
        assert_eq!(requests, [GET_NAMESPACE, GET_POD]);
        scene.api.grant_watches();
        agent.wait_for_logs(&["watching pods", "watching namespaces", "watching network"]);
    });
}

#[test]
fn a_cluster_without_attachment_definitions_causes_no_warning_and_its_first_ones_are_watched() {
    Scene::run(|scene| {
        scene.api.refuse_watches(404);
        let agent = scene.agent_that_starts("first");
        agent.wait_for_log("this cluster has no network attachment definitions");
        define(&scene.api);
        scene.api.grant_watches();
        agent.wait_for_log("watching network attachment definitions");
        let found = answer(&scene.ask(question_about_definitions(&["istio-cni"]).as_bytes()));
        assert!(found["found"][0]["found"].is_object(), "{found}");
    });
}

fn question_about_definitions(names: &[&str]) -> String {
    let wanted = |name: &&str| json!({"object": {"namespace": "default", "name": name}, "awaited": false});
    let wanted: Vec<Value> = names.iter().map(wanted).collect();
    json!({"wait_ms": 5000, "ask": {"about": "definitions", "wanted": wanted}}).to_string() + "\n"
}

#[test]
fn definitions_and_their_absence_are_answered_from_the_cache() {
    Scene::run(|scene| {
        define(&scene.api);
        scene.api.put(DEFINITIONS, &json!({"metadata": {"name": "istio-cni", "namespace": "shop"}}));
        let _agent = scene.agent();
        let found = answer(&scene.ask(question_about_definitions(&["istio-cni", "absent"]).as_bytes()));
        assert!(found["found"][0]["found"]["config"].as_str().is_some_and(|config| config.contains("istio-cni")));
        assert!(found["found"][1]["missing"].is_string(), "{found}");
        assert_eq!(scene.api.requests(), [""; 0]);
    });
}

/// Only root can open them. Each ends after its timeout.
#[test]
fn idle_connections_do_not_stop_the_agent() {
    Scene::run(|scene| {
        let _agent = scene.agent();
        let idle: Vec<_> = (0..200).map(|_| UnixStream::connect(scene.socket()).expect("it listens")).collect();
        let half: Vec<_> = (0..100)
            .map(|_| {
                let mut stream = UnixStream::connect(scene.socket()).expect("it listens");
                stream.write_all(b"{\"wait_ms\":").expect("sent");
                stream
            })
            .collect();
        assert_eq!(answer(&scene.ask(question(UID).as_bytes()))["pod"]["uid"], UID);
        drop((idle, half));
        scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
    });
}
