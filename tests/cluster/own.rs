//! The agent's requests as its pod's service account: its own DaemonSet.

use crate::scene::directory;
use crate::server::{Answer, Server};
use crate::support::agent_process::write_account;
use detour_cni::cluster::{Api, ObjectRef};
use detour_cni::cni::{Code, Error};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::time::Duration;

/// A service account with `server` as the API.
fn account(test: &str, server: &Server) -> Api {
    let directory = directory(&format!("own-{test}")).join("account");
    write_account(&directory);
    Api::of_account(server.http(), directory)
}

/// Sends requests of the account on an event loop of this thread.
fn on_event_loop<T>(account: Api, requests: impl AsyncFnOnce(Api) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
    runtime.block_on(requests(account.for_tasks()))
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
    let server = Server::plain(|_| list(&[metadata("1")]));
    let directory = directory("own-mounted").join("account");
    write_account(&directory);
    let exists = || has(Api::of_account(server.http(), directory.clone()), Duration::from_secs(60));
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

/// The answer to a list of the DaemonSets with these metadata.
fn list(found: &[Value]) -> Answer {
    let items: Vec<_> = found.iter().map(|metadata| json!({"metadata": metadata})).collect();
    Answer::json(200, &json!({"metadata": {"resourceVersion": "20"}, "items": items}))
}

fn metadata(version: &str) -> Value {
    json!({"name": "detour-agent", "resourceVersion": version})
}

fn deleting() -> Value {
    json!({"name": "detour-agent", "resourceVersion": "9", "deletionTimestamp": "2026-01-01T00:00:00Z"})
}

const LIST: &str = "GET /apis/apps/v1/namespaces/kube-system/daemonsets?&fieldSelector=metadata.name%3Ddetour-agent";

#[test]
fn a_daemon_set_exists_if_the_list_has_it_and_it_is_not_being_deleted() {
    for (name, found, expected) in
        [("exists", vec![metadata("7")], true), ("ends", vec![deleting()], false), ("gone", vec![], false)]
    {
        let server = Server::plain(move |_| list(&found));
        assert_eq!(has(account(name, &server), Duration::from_secs(60)), Ok(expected), "{name}");
        assert_eq!(server.lines(), [format!("{LIST} HTTP/1.1")]);
    }
}

/// Returns what a watch of the DaemonSet reports after this list and for these events, how it ends, and the requests.
fn watched(test: &str, found: Vec<Value>, events: &[Value]) -> (Vec<bool>, Result<(), Error>, Vec<String>) {
    let lines: String = events.iter().map(|event| format!("{event}\n")).collect();
    let server = Server::plain(move |request| match request.line.contains("watch=true") {
        true => Answer::text(200, &lines),
        false => list(&found),
    });
    let mut reports = Vec::new();
    let ended = watch(account(test, &server), |exists| reports.push(exists));
    (reports, ended, server.lines())
}

fn event(kind: &str, metadata: &Value) -> Value {
    json!({"type": kind, "object": {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}})
}

#[test]
fn a_watch_continues_a_list() {
    let events = [event("MODIFIED", &metadata("8")), event("MODIFIED", &deleting()), event("DELETED", &deleting())];
    let (reports, ended, requests) = watched("begins", vec![metadata("7")], &events);
    assert_eq!((reports, ended), (vec![true, true, false, false], Ok(())));
    let [first, second] = requests.as_slice() else { panic!("a list and a watch: {requests:?}") };
    assert!(first.starts_with(LIST) && second.contains("resourceVersion=20"), "{requests:?}");
    let (reports, ..) = watched("missing", vec![], &[]);
    assert_eq!(reports, [false]);
}

#[test]
fn an_error_event_ends_a_watch_with_an_error() {
    let status =
        json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 1 (30)"});
    let (reports, ended, _) = watched("expired", vec![metadata("7")], &[json!({"type": "ERROR", "object": status})]);
    let error = ended.expect_err("an error");
    assert_eq!(reports, [true]);
    let text = error.to_string();
    assert!(text.contains("410") && text.contains("too old") && text.contains("detour-agent"), "{text}");
}

/// A server that does not serve all resources yet, or a proxy in front of it.
#[test]
fn not_found_is_no_answer_about_a_daemon_set() {
    let server = Server::plain(|_| Answer::text(404, "404 page not found\n"));
    let error = has(account("unserved", &server), Duration::from_secs(3)).expect_err("no answer");
    assert!(error.to_string().contains("DaemonSet kube-system/detour-agent"), "{error}");
}
