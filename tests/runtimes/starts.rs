//! Many starts of containers that send with their first instruction.

use crate::cluster::{Agent, Cluster, Mode};
use crate::node::{Node, Runtime};
use crate::pod::{CAPTURED, Class, DIRECT, Pod, Sandbox};
use crate::{repetitions, result};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

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
    let agent = Agent::start_ready(&node, &cluster, Mode::Nri);
    let sandboxes = pods.each_ref().map(|pod| pod.start(&node).expect("it starts"));
    sandboxes.iter().for_each(Sandbox::run_proxy);

    // Fail early, with the rules of the pod, if nothing works.
    let (status, _) = sandboxes[0].once("excluded").expect("it starts");
    assert_eq!(status, DIRECT, "{}\n{:#?}", sandboxes[0].ok_inside(&["nft", "list", "ruleset"]), agent.logged());

    let mut wrong = Vec::new();
    for (how, parallel) in [("alone", 1), ("20 in parallel", PARALLEL)] {
        let starts = start(&sandboxes, count / 2, parallel);
        for name in ["excluded", "ordinary"] {
            let times = starts.iter().filter(|start| start.name == name).map(|start| start.time);
            result(runtime, &format!("StartContainer, {name}, {how}"), &quantiles(times));
        }
        let expected = |start: &Start| if start.name == "excluded" { DIRECT } else { CAPTURED };
        wrong.extend(
            starts.into_iter().filter(|start| start.status != expected(start)).map(|start| (start.name, start.status)),
        );
    }
    result(runtime, "wrong deliveries", &format!("{} of {count} starts", wrong.len()));

    drop(agent);
    for (how, parallel) in [("alone", 1), ("20 in parallel", PARALLEL)] {
        let starts = start(&sandboxes, count / 4, parallel);
        result(
            runtime,
            &format!("StartContainer without the agent, {how}"),
            &quantiles(starts.iter().map(|start| start.time)),
        );
        let bypassed: Vec<_> =
            starts.iter().filter(|start| start.status != CAPTURED).map(|start| start.status).collect();
        assert_eq!(bypassed, [0; 0], "without the agent, every container is captured");
    }
    sandboxes.iter().for_each(Sandbox::remove);
    assert_eq!(wrong, []);
}

#[test]
fn a_container_is_excluded_from_its_first_instruction_under_containerd() {
    first_instruction(Runtime::Containerd);
}

#[test]
fn a_container_is_excluded_from_its_first_instruction_under_cri_o() {
    first_instruction(Runtime::CriO);
}
