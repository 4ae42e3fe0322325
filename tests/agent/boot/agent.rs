//! The agent while it starts, hangs or is replaced, with real agents and a simulated API server.

use crate::boot::scene::{Kind, Scene, api, call, has_rules, is_redirected, starts, waits};
use crate::support::agent_process::Agent;
use crate::support::api::Api;
use crate::support::netns_pod::Pod;
use crate::support::wait::until_within;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// The limit for what an agent does beside the other agents and calls of this program.
const LIMIT: Duration = Duration::from_secs(120);

/// An API server that accepts connections and never answers.
fn silent() -> Api {
    let api = api(true);
    api.go_silent();
    api
}

/// Waits until the agent has accepted this many connections (proc(5): an accepted socket has the listener's path).
fn wait_for_connections(socket: &Path, wanted: usize) {
    // The agent binds the socket elsewhere in the directory, and moves it.
    let directory = socket.parent().expect("a directory");
    let is_connected = |line: &&str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        columns.get(5) == Some(&"03") && columns.last().is_some_and(|path| Path::new(path).starts_with(directory))
    };
    let sockets = || fs::read_to_string("/proc/net/unix").expect("readable");
    let are_accepted = || sockets().lines().filter(is_connected).count() >= wanted;
    until_within(LIMIT, "the agent accepts the connections", are_accepted);
}

/// Adds a meshed pod, which must be redirected.
#[track_caller]
fn redirects(conf: &Value) {
    let pod = Pod::new();
    call(&pod, "ADD", conf, &Kind::meshed()).done();
    assert!(is_redirected(&pod));
    call(&pod, "DEL", conf, &Kind::meshed()).done();
}

/// Adds a meshed pod, which must fail with these parts in the message.
fn fails(conf: &Value, parts: &[&str]) -> Duration {
    waits(&Kind::meshed(), conf, 11, parts)
}

/// The socket is served before the caches are synced, and so before the agent is ready.
#[test]
fn an_agent_that_has_just_started_answers_from_the_api_server() {
    Scene::run(|node| {
        node.api.refuse_watches(500);
        let agent = node.agent_that_starts("first");
        agent.wait_for_log("serving the plugin's");
        redirects(&node.conf_of_agent_alone());
        node.api.grant_watches();
        agent.wait_for_logs(&["watching pods", "watching namespaces"]);
        redirects(&node.conf_of_agent_alone());
    });
}

#[test]
fn an_agent_without_an_api_server_fails_only_pods_with_a_sidecar() {
    Scene::run(|node| {
        node.api.go_silent();
        let agent = node.agent_that_starts("first");
        agent.wait_for_log("serving the plugin's");
        let conf = node.conf_of_agent_alone();
        fails(&conf, &["no usable answer", "no answer within", "/sa)"]);
        for kind in Kind::starting() {
            starts(&kind, &conf);
        }
        // The agent has accepted, so the configured timeout applies.
        let took = fails(&node.conf_with(&silent()), &["no answer within ", "the agent failed"]);
        assert!(took > Duration::from_secs(4), "{took:?}");
        let log = starts(&Kind::plain(), &node.conf_with(&silent()));
        assert!(log.contains("the agent does not have the pod in memory yet"), "{log}");
        redirects(&node.conf_with(&api(true)));
    });
}

/// The API server answers the agent, but not the plugin, whose whole timeout applies.
#[test]
fn a_pod_with_a_sidecar_waits_while_the_agent_answers_that_it_has_no_facts_yet() {
    Scene::run(|node| {
        node.api.refuse_watches(503);
        node.api.refuse_reads(503);
        let agent = node.agent_that_starts("first");
        agent.wait_for_log("serving the plugin's");
        let took = fails(&node.conf_with(&silent()), &["503", "no answer within "]);
        assert!(took > Duration::from_secs(4), "{took:?}");
    });
}

/// A first installation on a node whose API server does not answer: the runtime uses the own list before the plugin has
/// credentials.
#[test]
fn with_the_own_list_only_pods_with_a_sidecar_wait_for_the_first_credentials() {
    Scene::run(|node| {
        node.api.go_silent();
        let list = r#"{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "bridge"}]}"#;
        let networks = node.root.join("etc/cni/net.d");
        fs::create_dir_all(&networks).expect("made");
        fs::write(networks.join("10-n.conflist"), list).expect("written");
        let more = ["--platform=kubernetes", "--own-list=true", "--plugin-service-account=detour-plugin"];
        let _agent = Agent::on_node("first", &node.root, &node.api.url(), &more);
        let own = networks.join("00-detour.conflist");
        until_within(LIMIT, "the own list exists", || own.exists());
        assert!(!node.root.join("var/lib/cni/detour/kubeconfig").exists());
        let own: Value = serde_json::from_slice(&fs::read(&own).expect("readable")).expect("JSON");
        let mut conf = own["plugins"][1].clone();
        (conf["name"], conf["cniVersion"]) = (own["name"].clone(), own["cniVersion"].clone());
        for key in ["kubeconfig", "agent_socket"] {
            let path = conf["kubernetes"][key].as_str().expect("a path").trim_start_matches('/').to_owned();
            conf["kubernetes"][key] = node.root.join(path).to_str().expect("text").into();
        }
        fails(&conf, &["kubeconfig", "check that the pod of the agent"]);
        for kind in Kind::starting() {
            starts(&kind, &conf);
        }
    });
}

#[test]
fn a_call_whose_agent_ends_asks_the_api_server_at_once() {
    Scene::run(|node| {
        node.api.go_silent();
        let agent = node.agent_that_starts("first");
        agent.wait_for_log("serving the plugin's");
        let (mut with_api, mut alone) = (node.conf_with(&api(true)), node.conf_of_agent_alone());
        // So that neither call stops waiting before the other one waits.
        for conf in [&mut with_api, &mut alone] {
            conf["kubernetes"]["timeout_seconds"] = 60.into();
        }
        thread::scope(|scope| {
            let other = Pod::new();
            scope.spawn(move || redirects(&with_api));
            scope.spawn(move || {
                let called = call(&other, "ADD", &alone, &Kind::meshed());
                let (code, text) = called.refused();
                assert!(code == 11 && text.contains("the agent closed the connection"), "{code}: {text}");
                assert!(text.contains("pod shop/web-0") && text.contains("check that the agent's pod"), "{text}");
                assert!(!has_rules(&other));
                call(&other, "DEL", &alone, &Kind::meshed()).done();
            });
            // Both calls wait for the agent.
            wait_for_connections(&node.socket(), 2);
            agent.end(Signal::SIGKILL);
        });
    });
}
