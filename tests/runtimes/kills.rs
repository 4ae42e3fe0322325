//! An agent that is killed while containers start.

use crate::cluster::{Agent, Cluster, REGISTERED};
use crate::node::{Node, Runtime, until};
use crate::pod::{CAPTURED, Class, DIRECT, Pod, Sandbox, printed};
use crate::{Random, repetitions, result};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Containers that start at the same time.
const PARALLEL: usize = 4;

/// Kills the agent and starts it again until `ended`. Returns the times from the kill to the first start of an excluded
/// container that bypasses the sidecar.
fn kill(node: &Node, cluster: &Cluster, sandbox: &Sandbox<'_>, mut agent: Agent, ended: &AtomicBool) -> Vec<Duration> {
    let (mut random, mut times) = (Random(1), Vec::new());
    while !ended.load(Ordering::Relaxed) {
        thread::park_timeout(random.time(1500));
        let begin = Instant::now();
        agent.kill();
        agent = Agent::start(node, cluster);
        until("an excluded container bypasses the sidecar again", || {
            sandbox.once("excluded").is_ok_and(|(status, _)| status == DIRECT)
        });
        times.push(begin.elapsed());
    }
    times
}

fn killed_agent(runtime: Runtime) {
    let count = repetitions("KILL_STARTS", 30);
    let node = Node::start(runtime, |_| ());
    let cluster = Cluster::new(&node);
    let pods =
        [Pod::new("guaranteed", Class::Guaranteed, "excluded"), Pod::new("burstable", Class::Burstable, "excluded")]
            .map(|pod| pod.container("excluded").container("ordinary"));
    pods.iter().for_each(|pod| cluster.has(pod));
    let agent = Agent::start_ready(&node, &cluster);
    let sandboxes = pods.each_ref().map(|pod| pod.start(&node).expect("it starts"));
    sandboxes.iter().for_each(Sandbox::run_proxy);

    let (ended, next, statuses) = (AtomicBool::new(false), AtomicUsize::new(0), Mutex::new(Vec::new()));
    let mut recoveries = thread::scope(|scope| {
        let killer = scope.spawn(|| kill(&node, &cluster, &sandboxes[0], agent, &ended));
        let starters: Vec<_> = (0..PARALLEL)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= count {
                            return;
                        }
                        let name = ["excluded", "ordinary"][number % 2];
                        let (status, _) = sandboxes[number / 2 % 2].once(name).expect("it starts");
                        statuses.lock().expect("no panic while locked").push((name, status));
                    }
                })
            })
            .collect();
        starters.into_iter().for_each(|starter| starter.join().expect("they all start"));
        ended.store(true, Ordering::Relaxed);
        killer.join().expect("the agent recovers each time")
    });

    let statuses = statuses.into_inner().expect("no panic while locked");
    let number = |name: &str, status: u64| statuses.iter().filter(|start| **start == (name, status)).count();
    recoveries.sort();
    result(
        runtime,
        "agent killed during starts",
        &format!(
            "{count} starts, {} kills: {} excluded containers bypassed from their first instruction, {} started captured; {} ordinary ones captured, {} not",
            recoveries.len(),
            number("excluded", DIRECT),
            count.div_ceil(2) - number("excluded", DIRECT),
            number("ordinary", CAPTURED),
            count / 2 - number("ordinary", CAPTURED),
        ),
    );
    let seconds = |time: Option<&Duration>| time.map_or(0.0, Duration::as_secs_f64);
    result(
        runtime,
        "recovery, from SIGKILL to the next container that bypasses",
        &format!(
            "median {:.2} s, longest {:.2} s",
            seconds(recoveries.get(recoveries.len() / 2)),
            seconds(recoveries.last())
        ),
    );
    let bypassed: Vec<_> =
        statuses.iter().filter(|(name, status)| *name == "ordinary" && *status != CAPTURED).collect();
    assert!(bypassed.is_empty(), "an ordinary container bypassed the sidecar: {bypassed:?}");
    sandboxes.iter().for_each(Sandbox::remove);
}

#[test]
fn an_ordinary_container_never_bypasses_while_the_agent_is_killed_under_containerd() {
    killed_agent(Runtime::Containerd);
}

#[test]
fn an_ordinary_container_never_bypasses_while_the_agent_is_killed_under_cri_o() {
    killed_agent(Runtime::CriO);
}

fn restarted_runtime(runtime: Runtime) {
    let node = Node::start(runtime, |_| ());
    let cluster = Cluster::new(&node);
    let pod =
        Pod::new("web", Class::Burstable, "excluded,job").container("excluded").container("job").container("ordinary");
    cluster.has(&pod);
    let agent = Agent::start_ready(&node, &cluster);
    let sandbox = pod.start(&node).expect("it starts");
    sandbox.run_proxy();
    let (_, log) = sandbox.run("job", &["/traffic", "loop", "20"]).expect("it starts");
    until("it has sent", || printed(&log).len() > 10);

    node.restart_runtime();
    let registrations = || agent.logged().iter().filter(|line| line.contains(REGISTERED)).count();
    until("the agent registers again", || registrations() == 2);
    assert_eq!(sandbox.once("excluded").expect("it starts").0, DIRECT);
    assert_eq!(sandbox.once("ordinary").expect("it starts").0, CAPTURED);
    let lines = printed(&log);
    assert!(
        lines.iter().all(|line| line.ends_with("D D D D")),
        "the running container bypasses all the time: {lines:?}"
    );
    result(
        runtime,
        "runtime restarted",
        "the agent registers again; a running excluded container bypasses all the time",
    );
    sandbox.remove();
}

#[test]
fn the_agent_registers_again_when_containerd_restarts() {
    restarted_runtime(Runtime::Containerd);
}

#[test]
fn the_agent_registers_again_when_cri_o_restarts() {
    restarted_runtime(Runtime::CriO);
}
