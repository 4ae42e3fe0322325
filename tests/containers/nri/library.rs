//! The library that containerd and CRI-O use as the runtime (`tests/containers/nri/runtime`).

use super::plugin::{Call, DEADLINE, Plugin, Report, socket_path};
use crate::support::background::Running;
use detour_cni::agent::nri::NriStatus;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;

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

#[test]
fn two_plugins_receive_each_start() {
    let (_directory, path) = socket_path();
    let mut runtime = Library::start(&path, 0, 0);
    let plugins = [Plugin::start(&path), Plugin::start(&path)];
    runtime.registered();
    runtime.registered();
    let (median, highest) = runtime.call("start a 500");
    println!("500 starts with two plugins: median {median} µs, 99th percentile {highest} µs");
    for plugin in &plugins {
        let starts =
            plugin.reports().into_iter().filter(|report| matches!(report, Report::Call(Call::Start(..)))).count();
        assert_eq!(starts, 500);
    }
}
