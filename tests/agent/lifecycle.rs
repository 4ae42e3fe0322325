//! The socket passes from one agent to the next; the agent's watches: what they list, and when they are trusted.

use crate::answers::{annotated, answer, question};
use crate::scene::{Scene, UID, is_private, pod};
use crate::support::agent_process::{Agent, SETTLED};
use crate::support::api::{DEFINITIONS, NAMESPACES, PODS};
use crate::support::called::Called;
use crate::support::wait::until;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;
use std::{fs, thread};

/// Two agents in pods with hostNetwork have the same HOSTNAME.
#[test]
fn a_second_agent_of_the_same_name_does_not_take_the_socket_and_ends_at_a_signal() {
    Scene::run(|scene| {
        let first = scene.agent();
        let second = scene.agent_that_starts("first");
        second.wait_for_log("this agent is on standby");
        scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
        first.wait_for_log("command=ADD");
        assert!(second.end(Signal::SIGTERM).success());
        scene.done("DEL", &scene.conf_of_agent_alone(), Some(UID));
        first.wait_for_log("command=DEL");
    });
}

#[test]
fn a_pending_request_is_answered_when_the_agent_ends() {
    Scene::run(|scene| {
        let agent = scene.agent();
        scene.api.put_quietly(PODS, &pod("uid-2"));
        let mut stream = UnixStream::connect(scene.socket()).expect("it listens");
        stream.write_all(question("uid-2").as_bytes()).expect("sent");
        let mut lines = BufReader::new(stream).lines();
        lines.next().expect("it says hello").expect("text");
        // The agent waits for the watch, and then asks the API server.
        agent.end(Signal::SIGTERM);
        let answer: Value = serde_json::from_str(&lines.next().expect("it answers").expect("text")).expect("JSON");
        assert_eq!(answer["pod"]["uid"], "uid-2", "{answer}");
    });
}

#[test]
fn a_stale_socket_is_replaced_and_a_removed_one_is_bound_again() {
    Scene::run(|scene| {
        fs::create_dir_all(scene.socket().parent().expect("one")).expect("made");
        drop(UnixListener::bind(scene.socket()).expect("bound"));
        let agent = scene.agent();
        scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
        fs::remove_file(scene.socket()).expect("removed");
        agent.wait_for_log("serving the plugin's");
        assert!(is_private(&scene.socket()));
        assert!(!agent.logged().iter().any(|line| line.contains("level=warn")));
    });
}

#[test]
fn the_later_agent_takes_over_the_socket_and_requests_are_answered_meanwhile() {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        Scene::run(|scene| {
            let first = scene.agent();
            assert!(is_private(&scene.socket()));
            let second = scene.agent_that_starts("second");
            second.wait_for_logs(&["watching pods", "watching namespaces", "this agent is on standby"]);
            let (conf, alone) = (scene.conf(), scene.conf_of_agent_alone());
            scene.done("ADD", &alone, Some(UID));
            first.wait_for_log("command=ADD");
            // The plugin asks the API server if neither agent answers.
            scene.done("ADD", &conf, Some(UID));
            let call = scene.start("ADD", &conf, Some(UID));
            first.end(signal);
            Called::ended(call).done();
            scene.done("ADD", &conf, Some(UID));
            second.wait_for_log("serving the plugin's");
            let before = scene.api.requests();
            scene.done("DEL", &alone, Some(UID));
            second.wait_for_log("command=DEL");
            scene.done("ADD", &alone, Some(UID));
            assert_eq!(scene.api.requests(), before, "the second agent answers from its cache");
            scene.done("DEL", &alone, Some(UID));
            // Its periodic check did not have to repair the socket.
            let log = second.log();
            let count = |part: &str| log.iter().filter(|line| line.contains(part)).count();
            assert_eq!((count("serving the plugin's"), count("can't listen")), (1, 0), "{log:#?}");
            second.end(Signal::SIGTERM);
            assert!(!scene.socket().exists());
            assert_eq!(fs::read_dir(scene.socket().parent().expect("one")).expect("readable").count(), 0);
        });
    }
}

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
        let mut requests = scene.api.requests();
        // A slow request is sent twice.
        requests.dedup();
        assert_eq!(requests.len(), 1);
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
        assert!((21..100).contains(&requests), "{requests} requests");
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
