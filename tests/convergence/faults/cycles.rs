//! Many cycles of calls leave no file, rule, descriptor, connection tracking entry, mount or process.

use super::subject::{Mode, Subject, Verb};
use crate::node::{STATE, on_a_node_with};
use crate::support::agent_process::{Agent, SETTLED};
use crate::support::api::{Api, NAMESPACES, PODS};
use crate::support::directory::Directory;
use crate::support::wait::until;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const CYCLES: usize = 10;

/// Counts what a call could leave on the node and in the pod. Other tests run at the same time, so only what belongs
/// to this node or pod counts.
fn counts(subject: &Subject) -> BTreeMap<&'static str, usize> {
    // Routes of other tables and IPv6 routes are in the ruleset: the kernel adds its own after it has verified addresses.
    let script = "echo '#rules'; nft list ruleset; echo '#routes'; ip rule; ip -6 rule; ip -4 route show table all; \
        echo '#addresses'; ip -oneline addr; echo '#connections'; \
        cat /proc/sys/net/netfilter/nf_conntrack_count; echo '#sockets'; cat /proc/self/net/unix /proc/self/net/tcp";
    let text = subject.pod.tool("sh", &["-c", script], "");
    let lines = |title: &str| {
        let part = text.split(&format!("#{title}\n")).nth(1).unwrap_or_default();
        part.lines().take_while(|line| !line.starts_with('#')).count()
    };
    let connections = text.split("#connections\n").nth(1).and_then(|rest| rest.lines().next()).unwrap_or_default();
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").expect("readable");
    let processes = fs::read_dir("/proc").expect("readable").flatten();
    let own = format!("CNI_CONTAINERID={}", subject.pod.container_id);
    let is_of_pod = |entry: &fs::DirEntry| {
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == own.as_bytes())
    };
    [
        ("files of state", walk(Path::new(STATE))),
        ("mounts", mounts.lines().filter(|line| line.contains(STATE)).count()),
        ("processes", processes.filter(is_of_pod).count()),
        ("tables, chains and rules", lines("rules")),
        ("policy rules and routes", lines("routes") + subject.read().fixtures.len()),
        ("interfaces and addresses", lines("addresses")),
        // In all zones.
        ("connection tracking entries", connections.parse().expect("a number")),
        ("sockets", lines("sockets")),
    ]
    .into()
}

fn walk(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| 1 + if entry.path().is_dir() { walk(&entry.path()) } else { 0 }).sum()
}

#[test]
fn cycles_leave_nothing() {
    on_a_node_with("size=64m", || {
        for (mode, dialect) in [(Mode::Containers, "iptables"), (Mode::Primary, "nftables")] {
            let subject = Subject::new(mode, dialect);
            let cycle = || {
                [Verb::Add, Verb::Check, Verb::AddChanged, Verb::Del].into_iter().for_each(|verb| subject.done(verb))
            };
            cycle();
            let before = counts(&subject);
            (0..CYCLES).for_each(|_| cycle());
            assert_eq!(counts(&subject), before, "after {CYCLES} cycles ({mode:?}, {dialect})");
            subject.assert_nothing_is_left("the last cycle");
        }
    });
}

/// Returns the numbers of descriptors and threads of a process.
fn resources(process: nix::unistd::Pid) -> (usize, usize) {
    let entries = |name: &str| fs::read_dir(format!("/proc/{process}/{name}")).map_or(0, Iterator::count);
    (entries("fd"), entries("task"))
}

#[test]
fn cycles_leave_nothing_in_the_agent() {
    on_a_node_with("size=64m", || {
        let root = Directory::new("cycles");
        let api = Api::start();
        api.put(NAMESPACES, &json!({ "metadata": { "name": "shop" } }));
        api.put(PODS, &json!({
            "metadata": { "name": "web-0", "namespace": "shop", "uid": "u", "annotations": { "sidecar.istio.io/status": "{}" } },
            "spec": { "containers": [{ "name": "istio-proxy", "image": "x" }] },
        }));
        let agent = Agent::on_openshift("cycles", &root, &api.url(), &[]);
        let kinds = ["watching pods", "watching namespaces", "watching network attachment"];
        agent.wait_for_logs(&[&kinds[..], &["serving the plugin's", SETTLED]].concat());
        let subject = Subject::new(Mode::Redirect, "nftables");
        let cycle = || {
            for verb in [Verb::Add, Verb::Check, Verb::Del] {
                let socket = root.join("run/detour/agent.sock");
                let call = subject.call(verb).configured(|conf| conf["kubernetes"] = json!({ "agent_socket": socket }));
                call.run().is_done().unwrap_or_else(|why| panic!("{}: {why}", verb.name()));
            }
        };
        cycle();
        let before = resources(agent.id());
        (0..CYCLES).for_each(|_| cycle());
        // The agent closes the last connection after the plugin has ended, and idle threads end after 10 s.
        until("the agent has no more descriptors and threads than before", || {
            let now = resources(agent.id());
            now.0 <= before.0 && now.1 <= before.1
        });
    });
}
