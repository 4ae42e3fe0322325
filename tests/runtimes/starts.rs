//! Many starts of containers that send with their first instruction.

use crate::cluster::{Agent, Cluster};
use crate::node::{Node, Runtime, until};
use crate::pod::{CAPTURED, Class, DIRECT, Pod, Sandbox};
use crate::{repetitions, result};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{fs, thread};

/// How many containers start at the same time, besides one after the other.
const PARALLEL: usize = 20;

/// One start: the container's name, its exit status, and how long the runtime took to answer StartContainer.
struct Start {
    name: &'static str,
    status: u64,
    time: Duration,
}

/// Starts `count` containers, `parallel` at a time, alternately excluded and ordinary ones, in all sandboxes.
fn start(sandboxes: &[Sandbox<'_>], count: usize, parallel: usize) -> Vec<Start> {
    let (next, starts) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..parallel {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let name = ["excluded", "ordinary"][number % 2];
                    let sandbox = &sandboxes[number / 2 % sandboxes.len()];
                    let (status, time) = sandbox.once(name).expect("it starts");
                    let time = Duration::from_micros(time);
                    starts.lock().expect("no panic while locked").push(Start { name, status, time });
                }
            });
        }
    });
    starts.into_inner().expect("no panic while locked")
}

/// Median and 99th percentile.
fn quantiles(times: impl Iterator<Item = Duration>) -> String {
    let mut times: Vec<_> = times.map(|time| time.as_secs_f64() * 1000.0).collect();
    times.sort_by(f64::total_cmp);
    let at = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)];
    format!("median {:.1} ms, p99 {:.1} ms of {}", at(50), at(99), times.len())
}

/// Bounds of median and 99th percentile in the buckets of a histogram, by their labels.
fn bounds(buckets: &BTreeMap<String, f64>) -> String {
    let bound = |label: &str| label.split('"').nth(1).and_then(|bound| bound.parse().ok()).unwrap_or(f64::INFINITY);
    let mut buckets: Vec<(f64, f64)> = buckets.iter().map(|(label, number)| (bound(label) * 1000.0, *number)).collect();
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    let total = buckets.last().map_or(0.0, |last| last.1);
    let at =
        |part: f64| buckets.iter().find(|(_, number)| *number >= total * part).map_or(f64::INFINITY, |bucket| bucket.0);
    format!("median at most {} ms, p99 at most {} ms of {total}", at(0.5), at(0.99))
}

/// Starts with and without the agent alternate, so that other load on the machine affects both.
const ROUNDS: usize = 5;

/// The number of containers that start at the same time, and its name.
const MODES: [(usize, &str); 2] = [(1, "alone"), (PARALLEL, "20 in parallel")];

fn first_instruction(runtime: Runtime) {
    let count = repetitions("STARTS", 40);
    let node = Node::start(runtime, |_| ());
    let cluster = Cluster::new(&node);
    let pods = [
        Pod::new("guaranteed", Class::Guaranteed, "excluded"),
        Pod::new("burstable", Class::Burstable, "excluded"),
        Pod::new("nested", Class::Nested, "excluded"),
    ]
    .map(|pod| pod.container("excluded").container("ordinary"));
    pods.iter().for_each(|pod| cluster.has(pod));
    let mut agent = Agent::start_ready(&node, &cluster);
    let sandboxes = pods.each_ref().map(|pod| pod.start(&node).expect("it starts"));
    sandboxes.iter().for_each(Sandbox::run_proxy);

    // Fails early, with the rules of the pod, if no exclusion works.
    let (status, _) = sandboxes[0].once("excluded").expect("it starts");
    assert_eq!(status, DIRECT, "{}\n{:#?}", sandboxes[0].ok_inside(&["nft", "list", "ruleset"]), agent.logged());

    let (mut with, mut without) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
    let mut answers = BTreeMap::new();
    for round in 0..ROUNDS {
        if round > 0 {
            agent = Agent::start_ready(&node, &cluster);
        }
        for (starts, (parallel, _)) in with.iter_mut().zip(MODES) {
            starts.extend(start(&sandboxes, count / 2 / ROUNDS, parallel));
        }
        for (bound, number) in agent.metrics("detour_nri_seconds_bucket") {
            *answers.entry(bound).or_insert(0.0) += number;
        }
        if round + 1 == ROUNDS {
            break;
        }
        agent.kill();
        for (starts, (parallel, _)) in without.iter_mut().zip(MODES) {
            starts.extend(start(&sandboxes, count / 2 / ROUNDS, parallel));
        }
    }
    result(runtime, "time of the agent's answer to the runtime", &bounds(&answers));
    for ((with, without), (_, how)) in with.iter().zip(&without).zip(MODES) {
        for name in ["excluded", "ordinary"] {
            let times =
                |starts: &[Start]| quantiles(starts.iter().filter(|start| start.name == name).map(|start| start.time));
            result(runtime, &format!("StartContainer, {name}, {how}"), &times(with));
        }
        let times = quantiles(without.iter().map(|start| start.time));
        result(runtime, &format!("StartContainer without the agent, {how}"), &times);
    }
    let expected = |start: &&Start| start.status != if start.name == "excluded" { DIRECT } else { CAPTURED };
    let wrong: Vec<_> = with.iter().flatten().filter(expected).map(|start| (start.name, start.status)).collect();
    result(runtime, "wrong deliveries", &format!("{} of {} starts", wrong.len(), with.iter().flatten().count()));
    assert_eq!(wrong, []);
    let bypassed: Vec<_> =
        without.iter().flatten().map(|start| start.status).filter(|status| *status != CAPTURED).collect();
    assert_eq!(bypassed, [0; 0], "without the agent, every container is captured");

    for sandbox in &sandboxes {
        let set = || sandbox.ok_inside(&["nft", "list", "set", "inet", "detour-exclusions", "excluded-all"]);
        until("the elements of ended containers are removed", || !set().contains("elements"));
    }
    sandboxes.iter().for_each(Sandbox::remove);
}

#[test]
fn a_container_is_excluded_from_its_first_instruction_under_containerd() {
    first_instruction(Runtime::Containerd);
}

#[test]
fn a_container_is_excluded_from_its_first_instruction_under_cri_o() {
    first_instruction(Runtime::CriO);
}

/// With containerd's validator, a container that needs the agent does not start without it.
#[test]
fn the_validator_of_containerd_refuses_containers_without_the_agent() {
    let node = Node::start(Runtime::Containerd, |directory| {
        fs::create_dir_all(directory.join("containerd.d")).expect("made");
        let toml = "version = 3\n[plugins.'io.containerd.nri.v1.nri'.default_validator]\nenable = true\n";
        fs::write(directory.join("containerd.d/validator.toml"), toml).expect("written");
    });
    let cluster = Cluster::new(&node);
    let mut pod = Pod::new("web", Class::Burstable, "excluded").container("excluded").container("ordinary");
    pod.annotate("required-plugins.noderesource.dev/container.excluded", "[detour]");
    cluster.has(&pod);
    let agent = Agent::start_ready(&node, &cluster);
    let sandbox = pod.start(&node).expect("it starts");
    sandbox.run_proxy();
    assert_eq!(sandbox.once("excluded").expect("it starts").0, DIRECT);
    drop(agent);
    let mut refused = None;
    until("containerd notices the end of the agent", || {
        refused = sandbox.once("excluded").err();
        refused.is_some()
    });
    println!("The runtime's error: {}", refused.unwrap_or_default());
    assert_eq!(sandbox.once("ordinary").expect("it starts").0, CAPTURED);
    result(Runtime::Containerd, "validator, container without the agent", "does not start");
    sandbox.remove();
}
