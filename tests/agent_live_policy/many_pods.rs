//! Many pods on a node whose namespace changes again and again.

use crate::agent_process::Agent;
use crate::cluster::{added, annotate_namespace, cluster};
use crate::pod::{EXCLUDE_PORTS, EXCLUDE_UIDS, Pod};
use crate::scene::{Scene, until};
use crate::traffic::{Traffic, retransmissions};
use serde_json::json;
use std::env;
use std::fs;
use std::time::{Duration, Instant};

const PODS: usize = 100;
const CHANGES: u32 = 20;

/// Whether the rules that exclude this UID are committed.
fn has_policy(pod: &Pod, uid: u32) -> bool {
    let excluded = format!("\"Uid\":{{\"first\":{uid},\"last\":{uid}}}");
    pod.records().iter().all(|record| record.contains(&excluded) && record.contains("\"before\":null"))
}

/// Returns the processor time of a process in clock ticks of 10 ms.
fn cpu_ticks(agent: &Agent) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", agent.id())).expect("it runs");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("fields").split_whitespace().collect();
    [fields[11], fields[12]].iter().map(|ticks| ticks.parse::<u64>().expect("a number")).sum()
}

fn resident_kib(agent: &Agent) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", agent.id())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a value");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number")
}

#[test]
fn all_pods_of_a_node_follow_their_namespace_and_no_long_connection_fails() {
    let is_measured = env::var_os("MEASURE").is_some();
    let limit = Duration::from_secs(if is_measured { 2 } else { 60 });
    cluster("live-policy-many", |plane, scene: &Scene<'_>| {
        let admin = plane.admin();
        let agent = scene.agent(&[]);
        let before = resident_kib(&agent);
        let pods: Vec<Pod> =
            (0..PODS).map(|number| added(&admin, scene, &format!("web-{number}"), &json!({}))).collect();
        let expected = u32::try_from(PODS).expect("a number");
        scene.wait_for_counts([expected, 0, 0, 0]);
        // One connection to the proxy and one past it, whose exclusion ends with the changes.
        annotate_namespace(&admin, &json!({EXCLUDE_UIDS: "6999"}));
        until("the first policy", || pods.iter().all(|pod| has_policy(pod, 6999)));
        for pod in &pods[..4] {
            let annotations = json!({"metadata": {"annotations": {EXCLUDE_PORTS: "81"}}});
            admin.merge(&crate::cluster::reference("Pod", &pod.name), &annotations).expect("accepted");
            pod.until(|pod| pod.excludes_port(81));
        }
        let traffic: Vec<Traffic> = pods[..4].iter().map(|pod| Traffic::start(scene, pod, &[80, 81])).collect();
        for pod in &pods[..4] {
            let annotations = json!({"metadata": {"annotations": {EXCLUDE_PORTS: null}}});
            admin.merge(&crate::cluster::reference("Pod", &pod.name), &annotations).expect("accepted");
            pod.until(|pod| !pod.excludes_port(81));
        }
        scene.wait_for_counts([expected, 0, 0, 0]);
        let (ticks, mut times) = (cpu_ticks(&agent), Vec::new());
        for change in 0..CHANGES {
            let uid = 7000 + change;
            let started = Instant::now();
            annotate_namespace(&admin, &json!({EXCLUDE_UIDS: uid.to_string()}));
            let last = started + limit;
            while !pods.iter().all(|pod| has_policy(pod, uid)) {
                let done = pods.iter().filter(|pod| has_policy(pod, uid)).count();
                assert!(Instant::now() < last, "change {change}: {done} of {PODS} pods within {limit:?}");
                std::thread::park_timeout(Duration::from_millis(5));
            }
            times.push(started.elapsed());
            // The saved state is not evidence of the rules.
            for pod in pods.iter().step_by(if change + 1 == CHANGES { 1 } else { 20 }) {
                assert!(pod.excludes_uid(uid) && !pod.excludes_uid(uid - 1), "{}", pod.rules());
            }
        }
        scene.wait_for_counts([expected, 0, 0, 0]);
        let busy = cpu_ticks(&agent) - ticks;
        let exchanges: Vec<Vec<u64>> = traffic.into_iter().map(Traffic::end).collect();
        assert!(exchanges.iter().flatten().all(|count| *count > 10), "{exchanges:?}");
        let resent: u64 = pods[..4].iter().map(retransmissions).sum();
        let (idle, idle_since) = (cpu_ticks(&agent), Instant::now());
        if is_measured {
            std::thread::park_timeout(Duration::from_secs(20));
        }
        times.sort();
        println!(
            "{PODS} pods, {CHANGES} changes: median {:?}, maximum {:?}; processor time of the agent per change {} ms, idle \
             {} ms in {:?}; resident memory {before} KiB before, {} KiB after; exchanges {exchanges:?}, \
             retransmissions {resent}",
            times[times.len() / 2],
            times[times.len() - 1],
            busy * 10 / u64::from(CHANGES),
            (cpu_ticks(&agent) - idle) * 10,
            idle_since.elapsed(),
            resident_kib(&agent),
        );
        for pod in &pods {
            pod.call(scene, "CHECK").expect("no drift");
        }
    });
}
