//! The agent's watches: what they list, what of it is in memory, and when they are trusted.

use crate::agent_process::{Agent, SETTLED};
use crate::answers::{annotated, answer, question};
use crate::api::{DEFINITIONS, NAMESPACES, PODS};
use crate::scene::{Scene, UID, pod};
use crate::support::wait::until;
use serde_json::json;
use std::fs;
use std::thread;
use std::time::Duration;

/// The most memory that the agent has used so far, in MiB (proc(5), `VmHWM`).
fn most_memory(agent: &Agent) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", agent.id())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") / 1024
}

/// The memory limit of the chart is 128 MiB.
#[test]
fn large_objects_neither_stop_a_watch_nor_exhaust_memory() {
    Scene::run(|scene| {
        for number in 0..12 {
            let mut fat = pod(&format!("uid-fat-{number}"));
            fat["metadata"]["name"] = format!("fat-{number}").into();
            fat["metadata"]["managedFields"] = json!([{"fieldsV1": {"f:a": "x".repeat(2 << 20)}}]);
            fat["metadata"]["annotations"]["example.com/large"] = "x".repeat(1 << 20).into();
            scene.api.put(PODS, &fat);
        }
        for number in 0..80 {
            let (metadata, config) = (json!({"name": format!("d-{number}"), "namespace": "x"}), "x".repeat(1_500_000));
            scene.api.put(DEFINITIONS, &json!({"metadata": metadata, "spec": {"config": config}}));
        }
        let agent = scene.agent();
        let memory = most_memory(&agent);
        println!("at most {memory} MiB of memory");
        assert!(memory < 128, "{memory} MiB");
        scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
        let question = question("uid-fat-7").replace("web-0", "fat-7");
        assert_eq!(answer(&scene.ask(question.as_bytes()))["pod"]["uid"], "uid-fat-7");
        assert_eq!(scene.api.requests(), [""; 0]);
        // A definition for which the cache has no room is requested.
        let wanted = json!([{"object": {"namespace": "x", "name": "d-9"}, "awaited": false}]);
        let question = json!({"wait_ms": 20_000, "ask": {"about": "definitions", "wanted": wanted}}).to_string();
        let found = answer(&scene.ask((question + "\n").as_bytes()));
        assert!(found["found"][0]["found"]["config"].is_string(), "{}", found["answer"]);
        assert_eq!(scene.api.requests().len(), 1);
    });
}

#[test]
fn many_namespaces_take_few_requests() {
    Scene::run(|scene| {
        for number in 0..5000 {
            scene.api.put(NAMESPACES, &json!({"metadata": {"name": format!("n-{number}")}}));
        }
        let _agent = scene.agent();
        let requests = scene.api.asked_for(NAMESPACES);
        assert!((21..25).contains(&requests), "{requests} requests");
    });
}

#[test]
fn definitions_are_not_watched_without_a_primary_plugin() {
    Scene::run(|scene| {
        let agent = scene.agent_with("first", &["--primary=false"]);
        agent.wait_for_logs(&["watching pods", "watching namespaces", "serving the plugin's", SETTLED]);
        assert_eq!(scene.api.asked_for(DEFINITIONS), 0);
    });
}

/// The API server is busy: there is an event within the first seconds of each new watch.
#[test]
fn a_watch_is_trusted_again_although_events_arrive_at_once() {
    Scene::run(|scene| {
        let agent = scene.agent();
        scene.api.refuse_watches(500);
        agent.wait_for_logs(&["can't watch pods", "can't watch namespaces"]);
        scene.api.grant_watches();
        let mut number = 0;
        let is_answered_from_the_cache = || {
            number += 1;
            scene.api.put(PODS, &annotated(&number.to_string()));
            scene.api.put(NAMESPACES, &json!({"metadata": {"name": "shop", "annotations": {"n": number.to_string()}}}));
            thread::park_timeout(Duration::from_millis(20));
            let before = scene.api.requests().len();
            scene.ask(question(UID).as_bytes());
            scene.api.requests().len() == before
        };
        until("an answer from the cache", is_answered_from_the_cache);
    });
}

#[test]
fn a_watch_is_not_trusted_while_the_api_server_does_not_answer() {
    Scene::run(|scene| {
        let agent = scene.agent();
        scene.api.refuse_watches(500);
        agent.wait_for_logs(&["can't watch pods", "can't watch namespaces", "can't watch network"]);
        scene.api.go_silent();
        // Each attempt to start a watch takes some seconds.
        let before = scene.api.asked_for(PODS);
        until("the answer", || scene.api.asked_for(PODS) > before + 1);
        assert!(!agent.logged().iter().any(|line| line.contains("again")));
    });
}
