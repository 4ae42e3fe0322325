//! Failures of the connection: the plugin reports the cause of each one, and reconnects.

use super::peer::{
    DEADLINE, EMPTY, PLUGIN, Peer, Plugin, Report, Runtime, bytes, call, configuration, container, error, event, frame,
    integer, pod, socket_path, started,
};
use crate::support::listener::foreign_listener;
use std::fs::{self, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::sync::mpsc::channel;
use std::time::Instant;

const NOT_FOUND: &str =
    "socket not found; check that the container runtime runs and that its configuration enables NRI";
/// A user who is not root.
const UNPRIVILEGED: u32 = 65534;

#[test]
fn a_missing_socket_is_reported_once_and_used_as_soon_as_it_appears() {
    let (_directory, path) = socket_path();
    let plugin = Plugin::start(&path);
    let cause = plugin.next_failure();
    assert_eq!(cause, format!("{}: {NOT_FOUND}", path.display()));
    let runtime = Runtime::listen(&path);
    runtime.register(&[]);
    plugin.registered();
}

#[test]
fn a_file_that_is_no_socket_is_reported() {
    let (_directory, path) = socket_path();
    fs::write(&path, "").expect("written");
    let plugin = Plugin::start(&path);
    assert!(plugin.next_failure().ends_with("; check that it runs, and the path in --nri-socket"));
}

#[test]
fn a_runtime_that_has_ended_is_reported_and_a_new_one_is_used() {
    let (_directory, path) = socket_path();
    let runtime = Runtime::listen(&path);
    let plugin = Plugin::start(&path);
    let mut peer = runtime.register(&[]);
    plugin.registered();
    // The plugin connects again as soon as the runtime shuts down.
    drop(runtime);
    assert_eq!(peer.call("Shutdown", &[]), EMPTY);
    drop(peer);
    assert!(plugin.next_failure().ends_with("the runtime closed the connection; if it does not restart, see its log"));
    let refused = plugin.next_failure();
    assert!(refused.contains("the runtime does not accept connections: Connection refused"), "{refused}");
    assert!(refused.ends_with("check that it runs, and the path in --nri-socket"), "{refused}");
    let runtime = Runtime::listen(&path);
    let running = [container("c", "p"), integer(4, 3)].concat();
    let mut peer = runtime.register(&[bytes(1, pod("p")), bytes(2, running)].concat());
    assert_eq!(plugin.registered().len(), 1);
    assert_eq!(peer.call("StartContainer", &event("a")), EMPTY);
    assert!(matches!(plugin.next(), Report::Start(_)));
}

#[test]
fn a_connection_that_ends_before_the_registration_is_replaced() {
    let (_directory, runtime, plugin) = started();
    let mut peer = runtime.accept();
    peer.expect_registration();
    // A part of a list never reaches the handler.
    let running = [container("c", "p"), integer(4, 3)].concat();
    peer.call("Synchronize", &[bytes(2, running), integer(3, 1)].concat());
    drop(peer);
    assert!(plugin.next_failure().ends_with("the runtime closed the connection; if it does not restart, see its log"));
    runtime.register(&[]);
    assert_eq!(plugin.registered(), []);
}

#[test]
fn a_refused_registration_is_reported_with_the_cause() {
    let (_directory, path) = socket_path();
    let runtime = Runtime::listen(&path);
    let plugin = Plugin::start(&path);
    let mut peer = runtime.accept();
    peer.expect_registration();
    peer.write(&frame(2, 1, 2, &error(3, "plugin name in use")));
    let expected =
        "the runtime refused to register plugin \"detour\" with index 10: plugin name in use (code 3)".to_owned();
    assert_eq!(plugin.next_failure(), format!("{}: {expected}", path.display()));
    peer.closed();
    runtime.register(&[]);
    plugin.registered();
}

#[test]
fn larger_frames_and_messages_than_the_protocol_allows_end_the_connection() {
    let (_directory, path) = socket_path();
    let runtime = Runtime::listen(&path);
    for (header, cause) in [
        ([0, 0, 0, 1, 0, 0x40, 0, 0x0b].as_slice(), "expected a frame of at most 4194314 bytes, got 4194315"),
        (&[0, 0, 0, 7, 0xff, 0xff, 0xff, 0xff], "expected a frame of at most 4194314 bytes, got 4294967295"),
        (
            &[0, 0, 0, 1, 0, 0, 0, 0x0a, 0, 0x40, 0, 1, 0, 0, 0, 1, 1, 0],
            "expected a message of at most 4194304 bytes, got 4194305",
        ),
        (
            &[0, 0, 0, 2, 0, 0, 0, 0x0a, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 1, 0],
            "expected a message of at most 4194304 bytes, got 4294967295",
        ),
        (&frame(1, 1, 1, &[0xff; 5]), "the runtime sent a malformed message"),
        (&frame(2, 1, 2, &[0xff; 5]), "the runtime sent a malformed message"),
    ] {
        let plugin = Plugin::start(&path);
        let mut peer = runtime.accept();
        peer.expect_registration();
        peer.write(header);
        assert_eq!(plugin.next_failure(), format!("{}: {cause}", path.display()));
        peer.closed();
        runtime.register(&[]);
        plugin.registered();
    }
}

#[test]
fn a_start_is_answered_before_the_runtime_stops_waiting() {
    let (_directory, path) = socket_path();
    let runtime = Runtime::listen(&path);
    let (release, released) = channel::<()>();
    let plugin = Plugin::start_with(&path, move |report| {
        if matches!(report, Report::Start(_)) {
            released.recv_timeout(DEADLINE).expect("released");
        }
    });
    let mut peer = runtime.accept();
    peer.expect_registration();
    // The runtime waits for 1 ms.
    peer.call("Configure", &configuration(1));
    peer.call("Synchronize", &[]);
    plugin.registered();
    assert_eq!(peer.call("StartContainer", &event("a")), EMPTY);
    plugin.next();
    release.send(()).expect("received");
    assert_eq!(plugin.reports(), []);
}

#[test]
fn a_receiver_of_reports_that_has_ended_never_fails_a_start() {
    let (_directory, path) = socket_path();
    let runtime = Runtime::listen(&path);
    let plugin = Plugin::start_with(&path, |report| assert!(!matches!(report, Report::Start(_)), "an intended panic"));
    let mut peer = runtime.register(&[]);
    plugin.registered();
    for id in ["a", "b"] {
        assert_eq!(peer.call("StartContainer", &event(id)), EMPTY);
    }
}

/// Sends calls until `done`, and reads no answer.
fn send_without_reading(peer: &mut Peer, mut done: impl FnMut(Instant) -> bool) {
    let calls = call(1, PLUGIN, &"x".repeat(500), &[]).repeat(100);
    peer.stream.set_nonblocking(true).expect("set");
    let (mut rest, mut sent) = (calls.as_slice(), Instant::now());
    while !done(sent) {
        match peer.stream.write(rest) {
            Ok(length) => {
                rest = if length < rest.len() { &rest[length..] } else { &calls };
                sent = Instant::now();
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // The plugin has closed the connection.
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}")
            }
        }
    }
}

#[test]
fn sending_to_a_runtime_that_does_not_read_answers_times_out() {
    let (_directory, path) = socket_path();
    let runtime = Runtime::listen(&path);
    let plugin = Plugin::start(&path);
    let mut peer = runtime.register(&[]);
    plugin.registered();
    let mut reports = Vec::new();
    send_without_reading(&mut peer, |sent| {
        assert!(sent.elapsed() < DEADLINE);
        reports = plugin.reports();
        !reports.is_empty()
    });
    let cause = format!("{}: the runtime does not read the plugin's answers", path.display());
    assert_eq!(reports, [Report::Disconnected(cause)]);
    runtime.register(&[]);
    plugin.registered();
}

#[test]
fn a_socket_that_another_user_could_have_created_is_not_used() {
    let (directory, path) = socket_path();
    let _runtime = Runtime::listen(&path);
    chown(&*directory, Some(UNPRIVILEGED), None).expect("given away");
    let plugin = Plugin::start(&path);
    let expected = format!("{} is owned by UID 65534; expected root; run chown root:root", directory.display());
    let cause = plugin.next_failure();
    assert!(cause.contains(&expected), "{cause}");
    drop(plugin);
    chown(&*directory, Some(0), None).expect("taken back");
    fs::set_permissions(&*directory, Permissions::from_mode(0o777)).expect("set");
    let plugin = Plugin::start(&path);
    let cause = plugin.next_failure();
    assert!(cause.contains("expected one that only root can write to"), "{cause}");
}

#[test]
fn a_listener_of_another_user_is_not_used() {
    let (directory, path) = socket_path();
    let _listener = foreign_listener(&path);
    chown(&*directory, Some(0), None).expect("taken back");
    let plugin = Plugin::start(&path);
    let cause = plugin.next_failure();
    let expected = "expected root as listener on the socket, got UID 65534; remove the socket";
    assert_eq!(cause, format!("{}: {expected}", path.display()));
}
