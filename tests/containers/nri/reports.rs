//! The runtime's reports reach the handler, and each call gets its answer.

use super::peer::{
    EMPTY, PLUGIN, Runtime, bytes, configuration, container, entry, error, event, frame, integer, pod, state_change,
};
use super::plugin::{Call, DEADLINE, Plugin, Report, registered, socket_path, started};
use detour_cni::agent::nri::{NriContainer, NriPod, NriStatus};
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
fn the_plugin_answers_configure_before_its_registration_is_answered() {
    let (_directory, runtime, plugin) = started();
    let mut peer = runtime.accept();
    peer.expect_registration();
    // Start, post-start, stop and remove.
    assert_eq!(peer.call("Configure", &configuration(2000)), bytes(2, integer(2, 1632)));
    peer.write(&frame(2, 1, 2, &[]));
    assert_eq!(peer.call("Synchronize", &[]), EMPTY);
    assert_eq!(plugin.next_call(), Call::Synchronize(vec![], vec![]));
    let registered = NriStatus::Registered { runtime: "simulated".into(), version: "v1.2".into() };
    assert_eq!(plugin.next(), Report::Status(registered));
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
