//! The reports of a simulated runtime and of the library that containerd and CRI-O use (`nri/runtime`) reach the handler, and
//! each call gets its answer.

use super::peer::{
    DEADLINE, EMPTY, Plugin, Report, Runtime, bytes, configuration, container, entry, error, event, integer, pod,
    registered, socket_path, started, state_change,
};
use crate::support::background::Running;
use detour_cni::agent::nri::NriContainer;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// The fields of a container that the agent uses: ID, pod sandbox, name, control group, first process.
type Fields<'a> = (&'a str, &'a str, &'a str, &'a str, u32);

fn fields(container: &NriContainer) -> Fields<'_> {
    (&container.id, &container.pod_id, &container.name, container.cgroups_path(), container.pid)
}

const EXPECTED: Fields<'_> = ("a", "pod-a", "app", "/kubepods/a/b", 4002);

/// Returns the kind of a report about one container, and the container.
#[track_caller]
fn of_container(report: Report) -> (&'static str, NriContainer) {
    match report {
        Report::Start(container) => ("start", container),
        Report::Started(container) => ("post-start", container),
        Report::Stopped(container) => ("stop", container),
        Report::Removed(container) => ("remove", container),
        report => panic!("{report:?}"),
    }
}

#[test]
fn events_reach_the_handler_by_their_own_method_and_by_state_change() {
    let (_runtime, mut peer, plugin) = registered();
    for (method, number, expected) in [
        ("StartContainer", 6, "start"),
        ("PostStartContainer", 7, "post-start"),
        ("StopContainer", 10, "stop"),
        ("RemoveContainer", 11, "remove"),
    ] {
        for (method, argument) in [(method, event("a")), ("StateChange", state_change(number, "a"))] {
            assert_eq!(peer.call(method, &argument), EMPTY, "{method}");
            let (kind, container) = of_container(plugin.next());
            assert_eq!((kind, fields(&container)), (expected, EXPECTED), "{method}");
        }
    }
    // An event without a subscription, such as one of a pod, is answered and ignored.
    assert_eq!(peer.call("StateChange", &[integer(1, 3), bytes(2, pod("pod-a"))].concat()), EMPTY);
    assert_eq!(peer.call("StateChange", &state_change(99, "a")), EMPTY);
    assert_eq!(plugin.reports(), []);
}

/// The runtime waits only at a start: `a_start_is_answered_after_one_second_if_the_receiver_of_the_reports_does_not_answer`.
#[test]
fn the_runtime_never_waits_for_the_receiver_of_other_reports() {
    let (_directory, path) = socket_path();
    let runtime = Runtime::listen(&path);
    let (release, released) = channel::<()>();
    let plugin = Plugin::start_with(&path, move |report| {
        if matches!(report, Report::Started(_)) {
            let _ = released.recv_timeout(DEADLINE);
        }
    });
    let mut peer = runtime.register(&[]);
    plugin.registered();
    let begin = Instant::now();
    for method in ["PostStartContainer", "StopContainer", "RemoveContainer"].repeat(20) {
        assert_eq!(peer.call(method, &event("a")), EMPTY, "{method}");
    }
    // If it waited, each of the 60 calls would take 1 s.
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    assert_eq!(of_container(plugin.next()).0, "post-start");
    assert_eq!(plugin.reports(), [], "the receiver works on the first report");
    drop(release);
    assert_eq!(of_container(plugin.next()).0, "stop");
}

#[test]
fn a_list_of_containers_in_several_parts_is_one_synchronization() {
    let (_directory, runtime, plugin) = started();
    let mut peer = runtime.accept();
    peer.expect_registration();
    peer.call("Configure", &configuration(2000));
    let running = |id| bytes(2, [container(id, "pod-a"), integer(4, 3)].concat());
    let parts =
        [[bytes(1, pod("pod-a")), integer(3, 1)].concat(), [running("a"), integer(3, 1)].concat(), running("b")];
    assert_eq!(peer.call("Synchronize", &parts[0]), bytes(2, integer(2, 1)));
    assert_eq!(peer.call("Synchronize", &parts[1]), bytes(2, integer(2, 1)));
    assert_eq!(plugin.reports(), []);
    assert_eq!(peer.call("Synchronize", &parts[2]), EMPTY);
    let listed = plugin.registered();
    let [a, b] = listed.as_slice() else { panic!("{listed:?}") };
    assert_eq!((fields(a), fields(b)), (EXPECTED, ("b", "pod-a", "app", "/kubepods/a/b", 4002)));
}

#[test]
fn the_name_of_a_container_comes_from_the_label_if_the_field_is_empty() {
    let (_directory, runtime, plugin) = started();
    let label = entry(5, "io.kubernetes.container.name", "by-label");
    let cases = [([bytes(3, "by-field"), label.clone()].concat(), "by-field"), (label, "by-label"), (vec![], "")];
    let identified =
        |fields: &Vec<u8>| bytes(2, [bytes(1, "c"), bytes(2, "p"), integer(4, 3), fields.clone()].concat());
    let containers: Vec<u8> = cases.iter().flat_map(|(fields, _)| identified(fields)).collect();
    runtime.register(&containers);
    let names: Vec<String> = plugin.registered().into_iter().map(|container| container.name).collect();
    assert_eq!(names, cases.map(|(_, name)| name));
}

#[test]
fn only_running_and_paused_containers_run() {
    let (_directory, runtime, plugin) = started();
    let state = |state: u64| bytes(2, [container(&state.to_string(), "p"), integer(4, state)].concat());
    runtime.register(&(0..6).flat_map(state).collect::<Vec<u8>>());
    let running: Vec<String> = plugin.registered().into_iter().map(|container| container.id).collect();
    assert_eq!(running, ["2", "3"]);
}

#[test]
fn ids_that_could_lead_out_of_a_directory_never_reach_the_handler() {
    let (_directory, runtime, plugin) = started();
    let odd = ["", "..", "../../etc", "a/b", "a\u{1b}[2J"];
    let running = |id, pod| bytes(2, [container(id, pod), integer(4, 3)].concat());
    let listed = odd.map(|id| [bytes(1, pod(id)), running(id, "p"), running("c", id)].concat());
    let mut peer = runtime.register(&listed.concat());
    assert_eq!(plugin.registered(), []);
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
    assert!(matches!(plugin.next(), Report::Start(container) if container.id == "b"));
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
    let running = loop {
        match plugin.next() {
            // The process may not listen yet.
            Report::Disconnected(_) => {}
            Report::Registered(name, running) if name.starts_with("nri-runtime 0.") => break running,
            report => panic!("{report:?}"),
        }
    };
    let listed: Vec<_> = running.iter().map(|one| (one.id.as_str(), one.pod_id.as_str())).collect();
    assert_eq!(listed, [("container-existing0", "pod-existing0"), ("container-existing1", "pod-existing1")]);
    for call in ["start", "post-start", "stop", "remove"] {
        runtime.call(&format!("{call} a"));
        let (kind, container) = of_container(plugin.next());
        assert_eq!(kind, call);
        assert_eq!(fields(&container), ("container-a", "pod-a", "app", "/kubepods/pod-a/container-a", 4002));
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
    let running = loop {
        if let Report::Registered(_, running) = plugin.next() {
            break running;
        }
    };
    assert_eq!((running.len(), running[1999].id.as_str()), (2000, "container-existing1999"));
    runtime.call("start a");
}

#[test]
fn a_start_is_answered_after_one_second_if_the_receiver_of_the_reports_does_not_answer() {
    let (_directory, path) = socket_path();
    let mut runtime = Library::start(&path, 0, 0);
    let (release, released) = channel::<()>();
    let mut first = true;
    let plugin = Plugin::start_with(&path, move |report| {
        if matches!(report, Report::Start(_)) && std::mem::take(&mut first) {
            released.recv_timeout(DEADLINE).expect("released");
        }
    });
    runtime.registered();
    let (waited, _) = runtime.call("start a");
    assert!(waited >= 1_000_000, "{waited} µs");
    release.send(()).expect("received");
    // The best of several, because a busy machine may need a second for one.
    let waited = ["b", "c", "d", "e"].map(|id| runtime.call(&format!("start {id}")).0);
    assert!(waited.iter().any(|waited| *waited < 1_000_000), "{waited:?} µs");
    let closed =
        |report: &Report| matches!(report, Report::Disconnected(cause) if cause.contains("closed the connection"));
    assert!(!plugin.reports().iter().any(closed));
}
