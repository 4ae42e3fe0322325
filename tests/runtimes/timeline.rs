//! The bypass that ends when the proxy accepts connections.

use crate::cluster::{Agent, Cluster};
use crate::node::{Node, Runtime, until};
use crate::pod::{CAPTURED, Class, DIRECT, PROXY, Pod, REFUSED, printed};
use crate::result;
use serde_json::json;
use std::path::Path;

/// One round of `traffic loop`: when, and who answered.
struct Round {
    time: f64,
    /// On the connection that was opened first.
    held: char,
    /// On a new connection.
    tcp: char,
    /// To a DNS query on a new socket, and on the socket that was opened first.
    udp: [char; 2],
}

fn rounds(log: &Path) -> Vec<Round> {
    let parse = |line: &String| {
        let mut words = line.split(' ');
        let time = words.next()?.parse().ok()?;
        let mut letter = || words.next()?.chars().next();
        Some(Round { time, held: letter()?, tcp: letter()?, udp: [letter()?, letter()?] })
    };
    printed(log).iter().filter_map(parse).collect()
}

fn timeline(runtime: Runtime) {
    let node = Node::start(runtime, |_| ());
    let cluster = Cluster::new(&node);
    let pod = Pod::new("web", Class::Burstable, "migrate").native_sidecar("migrate").container("app");
    cluster.has(&pod);
    let agent = Agent::start_ready(&node, &cluster);
    let sandbox = pod.start(&node).expect("it starts");
    let (_, log) = sandbox.run("migrate", &["/traffic", "loop", "10"]).expect("it starts");
    until("it has sent", || rounds(&log).len() > 20);

    let (_, proxy) = sandbox.run("istio-proxy", &[PROXY, &["1500"]].concat()).expect("it starts");
    let ready =
        || printed(&proxy).iter().find_map(|line| line.strip_suffix(" ready").and_then(|time| time.parse().ok()));
    until("the proxy listens", || ready().is_some());
    let ready: f64 = ready().expect("it was there");
    until("new connections are captured", || rounds(&log).iter().filter(|round| round.tcp == 'P').count() > 50);

    let rounds = rounds(&log);
    let captured = rounds.iter().position(|round| round.tcp == 'P').expect("one is");
    let delay = rounds[captured].time - ready;
    let detail = format!(
        "ready at {ready:.3}, first captured connection at {:.3}: {:#?}",
        rounds[captured].time,
        agent.logged()
    );
    assert!(rounds[..captured].iter().all(|round| round.tcp == 'D' && round.udp == ['D', 'D']), "{detail}");
    assert!(rounds[captured + 1..].iter().all(|round| round.tcp == 'P' && round.udp == ['P', 'P']), "{detail}");
    assert!(rounds.iter().all(|round| round.held == 'D'), "the connection that was opened before survives");
    assert!((0.0..1.0).contains(&delay), "{detail}");
    let before = rounds.iter().filter(|round| round.time < ready).count();
    result(
        runtime,
        "until proxy-ready",
        &format!(
            "{before} connections and queries bypass before the proxy listens; captured {:.0} ms after; the connection opened before survives {} rounds more",
            delay * 1000.0,
            rounds.len() - captured
        ),
    );
    until("the Event says so", || !cluster.events("DetourBypassEnded").is_empty());
    let events = cluster.events("DetourBypassEnded");
    assert!(events.iter().all(|event| event.contains("migrate")), "{events:?}");
    assert_eq!(events.len(), 1, "{events:?}");
    until("the metric counts it", || agent.metrics("detour_bypasses_ended_total") == [(String::new(), 1.0)]);

    // Started again, it is captured at once: the proxy was ready before.
    assert_eq!(sandbox.once("migrate").expect("it starts").0, CAPTURED);
    sandbox.remove();
}

#[test]
fn a_bypass_ends_when_the_proxy_listens_under_containerd() {
    timeline(Runtime::Containerd);
}

#[test]
fn a_bypass_ends_when_the_proxy_listens_under_cri_o() {
    timeline(Runtime::CriO);
}

/// An OpenShift-like namespace: all containers of the pod run as one UID. Vault's init container and its native sidecar
/// need the network before the proxy runs.
fn vault(runtime: Runtime) {
    let node = Node::start(runtime, |_| ());
    let cluster = Cluster::new(&node);
    let pod = Pod::new("web", Class::Guaranteed, "vault-agent-init,vault-agent")
        .init_container("vault-agent-init")
        .init_container("prepare")
        .native_sidecar("vault-agent")
        .container("app");
    cluster.has(&pod);
    let _agent = Agent::start_ready(&node, &cluster);
    let sandbox = pod.start(&node).expect("it starts");

    assert_eq!(sandbox.once("vault-agent-init").expect("it starts").0, DIRECT, "TCP and DNS bypass");
    assert_eq!(
        sandbox.once("prepare").expect("it starts").0,
        REFUSED,
        "same UID, not named: captured, and no proxy yet"
    );
    let (agent, log) = sandbox.run("vault-agent", &["/traffic", "loop", "20"]).expect("it starts");
    until("it has sent", || rounds(&log).len() > 10);
    assert!(rounds(&log).iter().all(|round| round.tcp == 'D' && round.udp == ['D', 'D']));
    sandbox.run_proxy();
    until("new connections are captured", || rounds(&log).last().is_some_and(|round| round.tcp == 'P'));
    assert_eq!(sandbox.once("app").expect("it starts").0, CAPTURED);
    until("and all DNS", || rounds(&log).last().is_some_and(|round| round.udp == ['P', 'P']));
    node.asked(json!({"op": "stop", "container": agent, "seconds": 1}));
    assert_eq!(sandbox.once("vault-agent").expect("it starts").0, CAPTURED, "after its restart, it is captured");

    result(
        runtime,
        "Vault, all containers with one UID",
        "init container and native sidecar bypass (TCP, DNS); an unnamed init container and the application are captured; after the proxy is ready, everything is captured",
    );
    sandbox.remove();
}

#[test]
fn vault_bypasses_until_the_proxy_listens_though_all_containers_have_one_uid_under_containerd() {
    vault(Runtime::Containerd);
}

#[test]
fn vault_bypasses_until_the_proxy_listens_though_all_containers_have_one_uid_under_cri_o() {
    vault(Runtime::CriO);
}
