//! The reports of a simulated runtime and of the library that containerd and CRI-O use (`nri/runtime`) reach the handler, and
//! each call gets its answer.

use super::peer::{
    Call, DEADLINE, EMPTY, NriStatus, PLUGIN, Plugin, Report, Runtime, bytes, configuration, container, entry, error,
    event, integer, pod, registered, socket_path, started, state_change,
};
use crate::support::background::Running;
use detour_cni::agent::nri::{NriContainer, NriPod};
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

fn expected_pod(id: &str) -> NriPod {
    NriPod { id: format!("pod-{id}"), name: "web-0".into(), namespace: "shop".into(), uid: "8d1f".into() }
}

fn expected_container(id: &str) -> NriContainer {
    NriContainer {
        id: id.into(),
        pod_id: format!("pod-{id}"),
        name: "app".into(),
        running: false,
        cgroups_path: "/kubepods/a/b".into(),
        pid: 4002,
    }
}

#[test]
fn events_reach_the_handler_by_their_own_method_and_by_state_change() {
    let (_runtime, mut peer, plugin) = registered();
    let (pod, container) = (expected_pod("a"), expected_container("a"));
    let start = Call::Start(pod.clone(), container.clone());
    let started = Call::Started(pod.clone(), container.clone());
    let stopped = Call::Stopped(pod.clone(), container.clone());
    let removed = Call::Removed(pod, container);
    for (method, argument, expected) in [
        ("StartContainer", event("a"), &start),
        ("PostStartContainer", event("a"), &started),
        ("StopContainer", event("a"), &stopped),
        ("RemoveContainer", event("a"), &removed),
        ("StateChange", state_change(6, "a"), &start),
        ("StateChange", state_change(7, "a"), &started),
        ("StateChange", state_change(10, "a"), &stopped),
        ("StateChange", state_change(11, "a"), &removed),
    ] {
        assert_eq!(peer.call(method, &argument), EMPTY, "{method}");
        assert_eq!(plugin.next_call(), *expected, "{method}");
    }
    // An event without a subscription, such as one of a pod, is answered and ignored.
    assert_eq!(peer.call("StateChange", &[integer(1, 3), bytes(2, super::peer::pod("pod-a"))].concat()), EMPTY);
    assert_eq!(peer.call("StateChange", &state_change(99, "a")), EMPTY);
    assert_eq!(plugin.reports(), []);
}

#[test]
fn the_runtime_waits_for_the_receiver_at_the_start_of_a_container_only() {
    let (_directory, path) = socket_path();
    let runtime = Runtime::listen(&path);
    let (release, released) = channel::<()>();
    let plugin = Plugin::start_with(&path, move |call| {
        if !matches!(call, Call::Synchronize(..)) {
            released.recv_timeout(DEADLINE).expect("released");
        }
    });
    let mut peer = runtime.register(&[]);
    plugin.registered();
    for (method, waits) in
        [("StartContainer", true), ("PostStartContainer", false), ("StopContainer", false), ("RemoveContainer", false)]
    {
        let begin = Instant::now();
        let stream = peer.send(PLUGIN, method, &event("a"));
        if !waits {
            assert_eq!(peer.answer(stream), EMPTY, "{method}");
        }
        plugin.next_call();
        peer.stream.set_nonblocking(true).expect("set");
        let early = std::io::Read::read(&mut peer.stream, &mut [0]);
        // The plugin answers after 1 s in any case.
        if begin.elapsed() < Duration::from_secs(1) {
            assert_eq!(early.expect_err("no answer yet").kind(), std::io::ErrorKind::WouldBlock);
        }
        peer.stream.set_nonblocking(false).expect("set");
        release.send(()).expect("received");
        if waits && begin.elapsed() < Duration::from_secs(1) {
            assert_eq!(peer.answer(stream), EMPTY);
        }
    }
}

#[test]
fn a_list_of_containers_in_several_parts_is_one_synchronization() {
    let (_directory, runtime, plugin) = started();
    let mut peer = runtime.accept();
    peer.expect_registration();
    peer.call("Configure", &configuration(2000));
    let running = [container("b", "pod-a"), integer(4, 3)].concat();
    let parts = [
        [bytes(1, pod("pod-a")), integer(3, 1)].concat(),
        [bytes(2, container("a", "pod-a")), integer(3, 1)].concat(),
        bytes(2, running),
    ];
    assert_eq!(peer.call("Synchronize", &parts[0]), bytes(2, integer(2, 1)));
    assert_eq!(peer.call("Synchronize", &parts[1]), bytes(2, integer(2, 1)));
    assert_eq!(plugin.reports(), []);
    assert_eq!(peer.call("Synchronize", &parts[2]), EMPTY);
    let created = expected_container("a");
    let running = NriContainer { id: "b".into(), pod_id: "pod-a".into(), running: true, ..created.clone() };
    assert_eq!(plugin.registered(), (vec![expected_pod("a")], vec![created, running]));
}

#[test]
fn the_name_of_a_container_comes_from_the_label_if_the_field_is_empty() {
    let (_directory, runtime, plugin) = started();
    let label = entry(5, "io.kubernetes.container.name", "by-label");
    let cases = [([bytes(3, "by-field"), label.clone()].concat(), "by-field"), (label, "by-label"), (vec![], "")];
    let identified = |fields: &Vec<u8>| bytes(2, [bytes(1, "c"), bytes(2, "p"), fields.clone()].concat());
    let containers: Vec<u8> = cases.iter().flat_map(|(fields, _)| identified(fields)).collect();
    runtime.register(&containers);
    let names: Vec<String> = plugin.registered().1.into_iter().map(|container| container.name).collect();
    assert_eq!(names, cases.map(|(_, name)| name));
}

#[test]
fn only_running_and_paused_containers_run() {
    let (_directory, runtime, plugin) = started();
    let states: Vec<u8> =
        (0..6).flat_map(|state| bytes(2, [container("c", "p"), integer(4, state)].concat())).collect();
    runtime.register(&states);
    let running: Vec<bool> = plugin.registered().1.into_iter().map(|container| container.running).collect();
    assert_eq!(running, [false, false, true, true, false, false]);
}

#[test]
fn ids_that_could_lead_out_of_a_directory_never_reach_the_handler() {
    let (_directory, runtime, plugin) = started();
    let odd = ["", "..", "../../etc", "a/b", "a\u{1b}[2J"];
    let listed = odd.map(|id| [bytes(1, pod(id)), bytes(2, container(id, "p")), bytes(2, container("c", id))].concat());
    let mut peer = runtime.register(&listed.concat());
    assert_eq!(plugin.registered(), (vec![], vec![]));
    for id in odd {
        for (pod_id, container_id) in [(id, "c"), ("p", id)] {
            let argument = [bytes(1, pod(pod_id)), bytes(2, container(container_id, pod_id))].concat();
            assert_eq!(peer.call("StartContainer", &argument), EMPTY, "{id:?}");
        }
    }
    assert_eq!(plugin.reports(), []);
}

#[test]
fn unknown_methods_and_services_are_unimplemented() {
    let (_directory, runtime, plugin) = started();
    let mut peer = runtime.register(&[]);
    // Runtimes call CreateContainer only for plugins that subscribe to it.
    for method in ["CreateContainer", "RunPodSandbox", "FutureEvent"] {
        assert_eq!(peer.call(method, &event("a")), error(12, &format!("unknown method {method}")));
    }
    let answer = peer.call_service("nri.pkg.api.v9.Plugin", "StartContainer", &event("a"));
    assert_eq!(answer, error(12, "unknown method StartContainer"));
    let long = peer.call(&"x".repeat(100_000), &[]);
    assert!(long.len() < 2048, "the answer fits into the buffer of a runtime, got {}", long.len());
    plugin.registered();
    assert_eq!(plugin.reports(), []);
}

#[test]
fn an_event_that_cannot_be_read_never_fails_the_start_of_a_container() {
    let (_runtime, mut peer, plugin) = registered();
    let argument = event("a");
    for argument in [&argument[..argument.len() - 3], &[0xff; 40], &[]] {
        assert_eq!(peer.call("StartContainer", argument), EMPTY);
        assert_eq!(peer.call("StateChange", argument), EMPTY);
    }
    assert_eq!(plugin.reports(), []);
    assert_eq!(peer.call("StartContainer", &event("b")), EMPTY);
    assert_eq!(plugin.next_call(), Call::Start(expected_pod("b"), expected_container("b")));
}

/// The simulated runtime as a process. It ends with this value.
struct Library {
    _process: Running,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Library {
    /// Starts a runtime with pods of one container each, whose environment has `padding` bytes.
    fn start(socket: &Path, pods: usize, padding: usize) -> Self {
        let program =
            Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target directory").join("tools/nri-runtime");
        let mut process = Command::new(&program)
            .arg(socket)
            .args([pods.to_string(), padding.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}; run hack/test.sh --test containers", program.display()));
        let (stdin, stdout) = (process.stdin.take().expect("a pipe"), process.stdout.take().expect("a pipe"));
        Self { _process: Running(process), stdin, stdout: BufReader::new(stdout).lines() }
    }

    fn next(&mut self) -> String {
        self.stdout.next().expect("a line").expect("text")
    }

    /// Waits for the end of a registration.
    fn registered(&mut self) {
        assert_eq!(self.next(), "synchronized");
    }

    /// Calls the plugins, and returns the median and the 99th percentile in microseconds.
    fn call(&mut self, call: &str) -> (u64, u64) {
        writeln!(self.stdin, "{call}").expect("sent");
        let answer = self.next();
        let mut times = answer.strip_prefix("ok ").unwrap_or_else(|| panic!("{answer}")).split(' ');
        let mut next = || times.next().expect("a number").parse().expect("a number");
        (next(), next())
    }
}

#[test]
fn the_library_reports_each_event_to_the_plugin() {
    let (_directory, path) = socket_path();
    let mut runtime = Library::start(&path, 2, 0);
    let plugin = Plugin::start(&path);
    runtime.registered();
    let report = loop {
        // The process may not listen yet.
        match plugin.next() {
            Report::Status(NriStatus::Disconnected(_)) => {}
            report => break report,
        }
    };
    let Report::Call(Call::Synchronize(pods, containers)) = report else { panic!("{report:?}") };
    assert_eq!((pods.len(), containers.len()), (2, 2));
    assert_eq!((pods[1].id.as_str(), containers[1].pod_id.as_str()), ("pod-existing1", "pod-existing1"));
    assert!(containers.iter().all(|container| container.running));
    let Report::Status(NriStatus::Registered { runtime: name, version }) = plugin.next() else { panic!("a status") };
    assert_eq!((name.as_str(), version.starts_with("0.")), ("nri-runtime", true));
    for (call, expected) in [("start", 0), ("post-start", 1), ("stop", 2), ("remove", 3)] {
        runtime.call(&format!("{call} a"));
        let (kind, pod, container) = match plugin.next_call() {
            Call::Start(pod, container) => (0, pod, container),
            Call::Started(pod, container) => (1, pod, container),
            Call::Stopped(pod, container) => (2, pod, container),
            Call::Removed(pod, container) => (3, pod, container),
            Call::Synchronize(..) => panic!("another synchronization"),
        };
        assert_eq!(kind, expected, "{call}");
        assert_eq!((pod.name.as_str(), pod.namespace.as_str(), pod.uid.as_str()), ("web-a", "shop", "uid-a"));
        assert_eq!((container.id.as_str(), container.name.as_str()), ("container-a", "app"));
        assert_eq!((container.cgroups_path.as_str(), container.pid), ("/kubepods/pod-a/container-a", 4002));
    }
    // The plugin did not subscribe to these.
    for call in ["create a", "stop-pod a"] {
        runtime.call(call);
    }
    assert_eq!(plugin.reports(), []);
}

#[test]
fn the_library_splits_a_list_that_exceeds_the_limit_of_a_message() {
    let (_directory, path) = socket_path();
    let mut runtime = Library::start(&path, 2000, 8 << 10);
    let plugin = Plugin::start(&path);
    runtime.registered();
    let (pods, containers) = loop {
        if let Report::Call(Call::Synchronize(pods, containers)) = plugin.next() {
            break (pods, containers);
        }
    };
    assert_eq!((pods.len(), containers.len()), (2000, 2000));
    assert_eq!(containers[1999].id, "container-existing1999");
    runtime.call("start a");
}

#[test]
fn a_start_is_answered_after_one_second_if_the_receiver_of_the_reports_does_not_answer() {
    let (_directory, path) = socket_path();
    let mut runtime = Library::start(&path, 0, 0);
    let (release, released) = channel::<()>();
    let mut first = true;
    let plugin = Plugin::start_with(&path, move |call| {
        if matches!(call, Call::Start(..)) && std::mem::take(&mut first) {
            released.recv_timeout(DEADLINE).expect("released");
        }
    });
    runtime.registered();
    // The library closes the connection after 2 s.
    let (waited, _) = runtime.call("start a");
    assert!((1_000_000..1_990_000).contains(&waited), "{waited} µs");
    release.send(()).expect("received");
    let (waited, _) = runtime.call("start b");
    assert!(waited < 1_000_000, "{waited} µs");
    let closed = |report: &Report| matches!(report, Report::Status(NriStatus::Disconnected(cause)) if cause.contains("closed the connection"));
    assert!(!plugin.reports().iter().any(closed));
}
