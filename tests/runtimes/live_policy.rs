//! A running pod follows a change of its annotations, and its connections continue.

use crate::cluster::{Agent, Cluster};
use crate::node::{Node, Runtime, until};
use crate::pod::{Class, Pod, Sandbox, printed};
use crate::result;
use std::path::Path;
use std::time::{Duration, Instant};

/// The annotation that excludes a port.
const EXCLUDED: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";

/// Its value if no source sets it.
const DEFAULT: &str = "15020";

/// Who answered: `P` is the proxy, `D` the destination. See `traffic loop` of the image.
#[derive(Debug, PartialEq, Eq)]
struct Answers {
    /// On the connection that the container opened first.
    held: char,
    /// On a new connection.
    new: char,
}

fn answers(log: &Path) -> Vec<Answers> {
    let answer = |line: &String| {
        let mut words = line.split(' ').skip(1).map(|word| word.chars().next());
        Some(Answers { held: words.next()??, new: words.next()?? })
    };
    printed(log).iter().filter_map(answer).collect()
}

/// Waits until new connections of the container arrive at `new`.
fn until_new(log: &Path, new: char) {
    until("new connections arrive there", || answers(log).last().is_some_and(|last| last.new == new));
}

/// Gives the pod another value of the annotation. Returns how long it takes until new connections follow.
fn change(cluster: &Cluster, pod: &mut Pod, sandbox: &Sandbox<'_>, log: &Path, (value, new): (&str, char)) -> Duration {
    pod.annotate(EXCLUDED, value);
    let begin = Instant::now();
    cluster.has_started(pod, sandbox);
    until_new(log, new);
    begin.elapsed()
}

fn follows(runtime: Runtime) {
    let node = Node::start(runtime, |_| ());
    let cluster = Cluster::new(&node);
    let entrance = cluster.open(&node);
    cluster.answer(&entrance);
    let agent = Agent::start_on_node(&node, &cluster, &["--own-list=true", "--live-policy=on"]);
    until("the agent is ready", || agent.is_ready(&node));
    node.wait_for_plugin();
    let mut pod = Pod::new("web", Class::Burstable, "").container("first").container("second");
    cluster.has(&pod);
    let sandbox = pod.start(&node).expect("it starts");
    cluster.has_started(&pod, &sandbox);
    sandbox.run_proxy();
    let before = sandbox.rules();
    let (_, first) = sandbox.run("first", &["/traffic", "loop", "20"]).expect("it starts");
    until_new(&first, 'P');

    let mut times = vec![change(&cluster, &mut pod, &sandbox, &first, ("8000", 'D'))];
    let (_, second) = sandbox.run("second", &["/traffic", "loop", "20"]).expect("it starts");
    until_new(&second, 'D');
    for round in 0..5 {
        times.push(change(&cluster, &mut pod, &sandbox, &first, ("9999", 'P')));
        let excluded = ["8000", "8000,9999"][round % 2];
        times.push(change(&cluster, &mut pod, &sandbox, &first, (excluded, 'D')));
    }
    // An invalid value counts as absent.
    pod.annotate(EXCLUDED, "80x0");
    cluster.has_started(&pod, &sandbox);
    until("an Event reports the value", || {
        cluster.events("DetourPolicyRejected").iter().any(|message| message.contains("80x0"))
    });
    until_new(&first, 'P');
    times.push(change(&cluster, &mut pod, &sandbox, &first, (DEFAULT, 'P')));
    assert_eq!(sandbox.rules(), before);

    let all = |log: &Path, held: char| {
        let answers = answers(log);
        assert!(answers.iter().all(|answer| answer.held == held), "the connection continues: {answers:?}");
        assert!(answers.iter().all(|answer| "PD".contains(answer.new)), "no new connection fails: {answers:?}");
        answers.len()
    };
    let count = all(&first, 'P') + all(&second, 'D');
    times.sort();
    let text = format!(
        "{} changes, median {:.2} s, longest {:.2} s; {count} answers on the two long connections, none lost",
        times.len(),
        times[times.len() / 2].as_secs_f64(),
        times[times.len() - 1].as_secs_f64()
    );
    result(runtime, "live policy: new connections follow an annotation", &text);
    sandbox.remove();
}

#[test]
fn a_running_pod_follows_its_annotations_under_containerd() {
    follows(Runtime::Containerd);
}

#[test]
fn a_running_pod_follows_its_annotations_under_cri_o() {
    follows(Runtime::CriO);
}
