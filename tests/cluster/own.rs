//! The agent's requests as its pod's service account: its own DaemonSet.

use crate::scene::directory;
use crate::server::{Answer, Server};
use crate::support::agent_process::write_account;
use detour_cni::cluster::{Api, ObjectRef};
use detour_cni::cni::{Code, Error};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

/// A service account with `server` as the API.
fn account(test: &str, server: &Server) -> Api {
    let directory = directory(&format!("own-{test}")).join("account");
    write_account(&directory);
    Api::of_account(server.http(), directory)
}

/// Sends requests of the account on an event loop of this thread.
fn on_event_loop<T>(account: Api, requests: impl AsyncFnOnce(Api) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
    runtime.block_on(requests(account.on(runtime.handle().clone())))
}

fn has(account: Api, time: Duration) -> Result<bool, Error> {
    on_event_loop(account, async |account| account.has(&daemon_set(), time).await)
}

fn watch(account: Api, report: impl FnMut(bool)) -> Result<(), Error> {
    on_event_loop(account, async |account| account.watch(&daemon_set(), report).await)
}

fn daemon_set() -> ObjectRef {
    ObjectRef { namespace: "kube-system".into(), name: "detour-agent".into() }
}

/// The kubelet mounts a directory that all users can write to, with symbolic links that it replaces (`AtomicWriter`).
#[test]
fn a_service_account_as_the_kubelet_mounts_it_is_accepted_unless_another_user_owns_a_file() {
    let object = json!({"metadata": {"name": "detour-agent", "resourceVersion": "1"}});
    let server = Server::plain(move |_| Answer::json(200, &object));
    let directory = directory("own-mounted").join("account");
    write_account(&directory);
    let exists = || has(Api::of_account(server.http(), directory.clone()), Duration::from_secs(10));
    let data = directory.join("..2026_11_22");
    fs::create_dir(&data).expect("made");
    fs::set_permissions(&directory, Permissions::from_mode(0o1777)).expect("set");
    symlink("..2026_11_22", directory.join("..data")).expect("linked");
    for name in ["token", "ca.crt"] {
        fs::rename(directory.join(name), data.join(name)).expect("moved");
        symlink(format!("..data/{name}"), directory.join(name)).expect("linked");
    }
    assert!(exists().expect("an answer"));
    let requests = server.lines().len();
    for name in ["token", "ca.crt"] {
        chown(data.join(name), Some(12345), None).expect("needs root");
        let error = exists().expect_err("refused");
        assert_eq!(error.code, Code::InvalidConfig, "{error}");
        assert!(error.msg.contains(&format!("{name} is owned by UID 12345; expected root")), "{error}");
        chown(data.join(name), Some(0), None).expect("needs root");
    }
    assert_eq!(server.lines().len(), requests, "nothing was sent");
}

#[test]
fn a_daemon_set_is_missing_if_the_response_names_it() {
    let missing = json!({
        "kind": "Status", "status": "Failure", "message": "daemonsets.apps \"detour-agent\" not found",
        "reason": "NotFound", "details": {"name": "detour-agent", "group": "apps", "kind": "daemonsets"}, "code": 404
    });
    let server = Server::plain(move |_| Answer::json(404, &missing));
    assert!(!has(account("missing", &server), Duration::from_secs(10)).expect("an answer"));
    assert_eq!(server.lines(), ["GET /apis/apps/v1/namespaces/kube-system/daemonsets/detour-agent HTTP/1.1"]);
}

const WATCH: &str = "GET /apis/apps/v1/namespaces/kube-system/daemonsets?";

/// Returns what a watch of the DaemonSet reports for these events, how it ends, and the requests.
fn watched(test: &str, events: &[Value]) -> (Vec<bool>, Result<(), Error>, Vec<String>) {
    let lines: String = events.iter().map(|event| format!("{event}\n")).collect();
    let server = Server::plain(move |request| match request.line.starts_with(WATCH) {
        true => Answer::text(200, &lines),
        false => Answer::json(404, &json!({"kind": "Status", "message": "no such thing"})),
    });
    let mut reports = Vec::new();
    let ended = watch(account(test, &server), |exists| reports.push(exists));
    (reports, ended, server.lines())
}

fn event(kind: &str, metadata: &Value) -> Value {
    json!({"type": kind, "object": {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}})
}

#[test]
fn a_watch_starts_with_the_object_of_any_version() {
    let metadata = json!({"name": "detour-agent", "resourceVersion": "7"});
    let deleted = json!({"name": "detour-agent", "resourceVersion": "9", "deletionTimestamp": "2026-01-01T00:00:00Z"});
    let events = [event("ADDED", &metadata), event("MODIFIED", &deleted), event("DELETED", &deleted)];
    let (reports, ended, requests) = watched("begins", &events);
    assert_eq!((reports, ended), (vec![true, false, false], Ok(())));
    let [request] = requests.as_slice() else { panic!("one request: {requests:?}") };
    let version = request.split(['?', '&', ' ']).find_map(|part| part.strip_prefix("resourceVersion="));
    assert_eq!(version, Some("0"), "the object's own may be too old for the server: {request}");
}

#[test]
fn an_error_event_ends_a_watch_with_an_error() {
    let status =
        json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 1 (30)"});
    let (reports, ended, _) = watched("expired", &[json!({"type": "ERROR", "object": status})]);
    let error = ended.expect_err("an error");
    assert!(reports.is_empty(), "{reports:?}");
    let text = error.to_string();
    assert!(text.contains("410") && text.contains("too old") && text.contains("detour-agent"), "{text}");
}

#[test]
fn a_watch_without_a_first_event_gets_the_object() {
    let missing = json!({
        "kind": "Status", "message": "not found", "reason": "NotFound", "details": {"name": "detour-agent"}, "code": 404
    });
    let server = Server::plain(move |request| match request.line.starts_with(WATCH) {
        true => Answer::Reply(200, "transfer-encoding: chunked\r\n".into(), Vec::new()),
        false => Answer::json(404, &missing),
    });
    let account = account("nothing", &server);
    let (sender, receiver) = channel();
    thread::spawn(move || watch(account, |exists| sender.send(exists).expect("the receiver exists")));
    assert_eq!(receiver.recv_timeout(Duration::from_secs(60)), Ok(false));
}

#[test]
fn a_404_that_does_not_name_the_daemon_set_is_a_temporary_error() {
    let server = Server::plain(|_| Answer::text(404, "404 page not found\n"));
    let (started, time) = (Instant::now(), Duration::from_secs(3));
    let error = has(account("unserved", &server), time).expect_err("no answer");
    assert_eq!(error.code, Code::TryAgain, "{error}");
    assert!(error.to_string().contains("DaemonSet kube-system/detour-agent"), "{error}");
    assert!(server.lines().len() > 1 && started.elapsed() < 20 * time, "{:?}", server.lines());
}
