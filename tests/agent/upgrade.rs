//! The socket passes from one agent to the next.

use crate::answers::question;
use crate::api::PODS;
use crate::scene::{Scene, UID, is_private, pod};
use crate::support::called::Called;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn the_later_agent_takes_over_the_socket_when_the_earlier_has_ended() {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        Scene::run(|scene| {
            let first = scene.agent();
            assert!(is_private(&scene.socket()));
            let second = scene.agent_that_starts("second");
            second.wait_for_logs(&["watching pods", "watching namespaces", "this agent is on standby"]);
            scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
            first.wait_for_log("command=ADD");
            first.end(signal);
            second.wait_for_log("serving the plugin's");
            scene.done("DEL", &scene.conf_of_agent_alone(), Some(UID));
            second.wait_for_log("command=DEL");
            assert_eq!(scene.api.requests(), [""; 0]);
            second.end(Signal::SIGTERM);
            assert!(!scene.socket().exists());
            assert_eq!(fs::read_dir(scene.socket().parent().expect("one")).expect("readable").count(), 0);
        });
    }
}

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
        let started = Instant::now();
        agent.end(Signal::SIGTERM);
        assert!(started.elapsed() < Duration::from_secs(40), "{:?}", started.elapsed());
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

/// Asks the agent repeatedly. Returns the longest time without an answer, and the number of requests.
fn longest_gap(scene: &Scene, ended: &AtomicBool) -> (Duration, u32) {
    let (mut gap, mut requests, mut answered) = (Duration::ZERO, 0, Instant::now());
    while !ended.load(Ordering::Relaxed) {
        requests += 1;
        let asked = Instant::now();
        let answer = UnixStream::connect(scene.socket()).and_then(|mut stream| {
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            stream.write_all(question(UID).as_bytes())?;
            BufReader::new(stream).lines().nth(1).transpose()
        });
        if let Ok(Some(_)) = answer {
            gap = gap.max(asked.saturating_duration_since(answered));
            answered = Instant::now();
        }
    }
    (gap, requests)
}

#[test]
fn requests_are_answered_while_the_first_of_two_agents_ends() {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        Scene::run(|scene| {
            let first = scene.agent();
            let second = scene.agent_that_starts("second");
            second.wait_for_logs(&["watching pods", "watching namespaces", "this agent is on standby"]);
            let conf = scene.conf();
            let is_ended = AtomicBool::new(false);
            thread::scope(|scope| {
                let gap = scope.spawn(|| longest_gap(scene, &is_ended));
                // The plugin asks the API server if neither agent answers.
                scene.done("ADD", &conf, Some(UID));
                let call = scene.start("ADD", &conf, Some(UID));
                first.end(signal);
                Called::ended(call).done();
                scene.done("ADD", &conf, Some(UID));
                second.wait_for_log("serving the plugin's");
                scene.done("DEL", &scene.conf_of_agent_alone(), Some(UID));
                is_ended.store(true, Ordering::Relaxed);
                let (gap, requests) = gap.join().expect("it ends");
                println!("{signal}: {requests} requests, longest time without an answer {gap:?}");
                assert!(gap < Duration::from_secs(4), "not only the periodic check: {gap:?}");
            });
        });
    }
}
