//! Many cycles of calls leave no file, rule, network namespace, descriptor, connection tracking entry, mount or
//! process. `CYCLES` sets their number.

use crate::node::{STATE, on_a_node_with};
use crate::subject::{Mode, Subject, Verb};
use crate::support::agent_process::{Agent, SETTLED};
use crate::support::api::{Api, NAMESPACES, PODS};
use crate::support::directory::Directory;
use crate::table::{Table, is_done, number};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

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

/// Returns the network namespaces that the kernel has allocated: its cache of struct net counts them.
fn network_namespaces() -> Option<usize> {
    let text = fs::read_to_string("/proc/slabinfo").ok()?;
    text.lines().find(|line| line.starts_with("net_namespace "))?.split_whitespace().nth(1)?.parse().ok()
}

#[test]
fn cycles_leave_nothing() {
    let mut table = Table::new("cycles");
    let cycles = number("CYCLES", CYCLES);
    on_a_node_with("size=64m", || {
        let modes = [
            (Mode::Redirect, "iptables"),
            (Mode::Tproxy, "nftables"),
            (Mode::Containers, "iptables"),
            (Mode::Primary, "nftables"),
        ];
        for (mode, dialect) in modes {
            let subject = Subject::new(mode, dialect);
            let cycle = |table: &mut Table| {
                for verb in [Verb::Add, Verb::Check, Verb::AddChanged, Verb::Del] {
                    let ended = subject.call(verb).run();
                    let left = if verb == Verb::Del { "nothing" } else { "its rules" };
                    let fault = format!("{cycles} cycles of ADD, CHECK, changed ADD and DEL");
                    table.add(&fault, &format!("{} ({mode:?}, {dialect})", verb.name()), &ended, left, is_done(&ended));
                }
            };
            cycle(&mut table);
            let before = counts(&subject);
            (0..cycles / modes.len() + 1).for_each(|_| cycle(&mut table));
            assert_eq!(counts(&subject), before, "after {cycles} cycles ({mode:?}, {dialect})");
            subject.assert_nothing_is_left("the last cycle");
        }
    });
    table.end();
}

/// Each pod has its own network namespace, which the kernel can remove only if nothing refers to it.
#[test]
fn pods_leave_nothing() {
    let mut table = Table::new("cycles");
    let pods = number("CYCLES", CYCLES).div_ceil(10);
    on_a_node_with("size=64m", || {
        let first = Subject::new(Mode::Redirect, "iptables");
        let before = (counts(&first), network_namespaces());
        for _ in 0..pods {
            let subject = first.another();
            for verb in [Verb::Add, Verb::Del] {
                let ended = subject.call(verb).run();
                let left = if verb == Verb::Del { "nothing" } else { "its rules" };
                table.add(&format!("{pods} pods, one after another"), verb.name(), &ended, left, is_done(&ended));
            }
        }
        assert_eq!(counts(&first), before.0, "after {pods} pods");
        // Other processes of the machine have network namespaces, too; the kernel frees them after a delay.
        if let (Some(before), Some(now)) = (before.1, network_namespaces()) {
            println!("network namespaces before {pods} pods: {before}, after: {now}");
        }
    });
    table.end();
}

/// Returns the numbers of descriptors and threads of a process, and its resident memory in KiB.
fn resources(process: nix::unistd::Pid) -> (usize, usize, usize) {
    let entries = |name: &str| fs::read_dir(format!("/proc/{process}/{name}")).map_or(0, Iterator::count);
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    (entries("fd"), entries("task"), memory.expect("a number"))
}

#[test]
fn cycles_leave_nothing_in_the_agent() {
    let mut table = Table::new("cycles");
    let cycles = number("CYCLES", CYCLES) / 2;
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
        let cycle = |table: &mut Table| {
            for verb in [Verb::Add, Verb::Check, Verb::Del] {
                let mut configuration = subject.configuration(verb);
                configuration["kubernetes"] = json!({ "agent_socket": root.join("run/detour/agent.sock") });
                if verb == Verb::Check {
                    configuration["prevResult"] = json!({});
                }
                configuration["log_level"] = "none".into();
                let ended = subject.call(verb).with_stdin(configuration.to_string()).run();
                let left = if verb == Verb::Del { "nothing" } else { "its rules" };
                let fault = format!("{cycles} cycles with facts from the agent");
                table.add(&fault, verb.name(), &ended, left, is_done(&ended));
            }
        };
        (0..cycles.div_ceil(10)).for_each(|_| cycle(&mut table));
        let before = resources(agent.id());
        (0..cycles).for_each(|_| cycle(&mut table));
        // The agent closes the last connection after the plugin has ended, and idle threads end after 10 s.
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut after = resources(agent.id());
        while (after.0 > before.0 || after.1 > before.1) && Instant::now() < deadline {
            std::thread::park_timeout(Duration::from_millis(20));
            after = resources(agent.id());
        }
        println!("descriptors, threads and memory of the agent before {cycles} cycles: {before:?}, after: {after:?}");
        assert!(after.0 <= before.0 && after.1 <= before.1, "the agent has more descriptors or threads");
        assert!(after.2 < before.2 + 2048, "the agent's memory grows");
    });
    table.end();
}
