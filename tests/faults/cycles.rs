//! Many cycles of calls leave no file, rule, network namespace, descriptor, connection tracking entry, mount or
//! process. `CYCLES` sets their number.

use crate::node::{STATE, on_a_node_with};
use crate::subject::{Mode, Subject, Verb};
use crate::table::{Table, is_done, number};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const CYCLES: usize = 10;

/// Counts what a call could leave on the node and in the pod.
fn counts(subject: &Subject) -> BTreeMap<&'static str, usize> {
    let entries = |path: &Path| fs::read_dir(path).map_or(0, Iterator::count);
    let lines = |path: &str| fs::read_to_string(path).map_or(0, |text| text.lines().count());
    let tool = |arguments: &[&str]| subject.pod.tool("sh", &["-c", &arguments.join("; ")], "").lines().count();
    let processes = fs::read_dir("/proc").expect("readable").flatten();
    let is_ours = |entry: &fs::DirEntry| {
        let parent = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let mut words = parent.rsplit(") ").next().unwrap_or_default().split(' ');
        words.nth(1).is_some_and(|parent| parent == std::process::id().to_string())
    };
    let own_thread = Path::new("/proc/thread-self");
    [
        ("files of state", walk(Path::new(STATE))),
        ("mounts", lines("/proc/thread-self/mountinfo")),
        ("descriptors of the caller", entries(&own_thread.join("fd"))),
        ("child processes", processes.filter(is_ours).count()),
        ("tables, chains and rules", tool(&["nft list ruleset"])),
        (
            "policy rules and routes",
            tool(&["ip rule", "ip -6 rule", "ip route show table all", "ip -6 route show table all"]),
        ),
        ("interfaces and addresses", tool(&["ip -oneline addr"])),
        // Entries with their zones; the file exists only if connection tracking is loaded.
        ("connection tracking entries", tool(&["cat /proc/self/net/nf_conntrack 2>/dev/null || true"])),
        ("sockets", tool(&["cat /proc/self/net/netlink /proc/self/net/unix /proc/self/net/tcp"])),
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
            let mut cycle = |table: &mut Table| {
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
