//! Failures of the API server: which errors are retried, for how long, and which message they produce.

use crate::scene::{GET_POD, api, facts, facts_by, has_both, kubeconfig, pod, status};
use crate::server::{Answer, Request, Server};
use crate::support::called::{Called, plugin};
use detour_cni::cni::{Code, Error};
use serde_json::json;
use std::thread;
use std::time::{Duration, Instant};

/// A server with these answers about the pod, by the number of the request; else it has pod and namespace.
fn server(answers: impl Fn(usize) -> Option<Answer> + Send + Sync + 'static) -> Server {
    Server::plain(move |request: &Request| match request.line.as_str() {
        GET_POD => answers(request.nth).unwrap_or_else(|| has_both(request)),
        _ => has_both(request),
    })
}

fn fails(test: &str, server: &str, timeout: Duration) -> Error {
    let path = kubeconfig(test, &json!({"server": server}), &json!({"token": "t"}));
    let error = facts(&api(&path, timeout)).expect_err("an error");
    for part in ["shop/web-0", server, path.to_str().expect("a path")] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    error
}

/// The number of requests for the pod.
fn attempts(server: &Server) -> usize {
    server.lines().iter().filter(|line| *line == GET_POD).count()
}

/// A timeout that no call reaches.
const LONG: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_secs(1);
/// A timeout that is longer than that without a connection.
const PATIENT: Duration = Duration::from_secs(3);
/// A timeout that is reached, after the first answer on a loaded machine too.
const BRIEF: Duration = Duration::from_secs(10);

#[test]
fn temporary_failures_are_retried() {
    type Row = (&'static str, fn() -> Answer);
    let rows: [Row; 8] = [
        ("404", || status(404, "pods \"web-0\" not found")),
        ("500", || status(500, "etcd leader changed")),
        ("429", || Answer::Reply(429, "Retry-After: 0\r\n".into(), b"Too many requests".to_vec())),
        ("broken-body", || Answer::text(200, "{\"metadata\":")),
        ("not-a-pod", || Answer::text(200, "<html>")),
        ("closed", || Answer::Close),
        ("stale", || Answer::json(200, &pod("uid-0"))),
        ("cut-off", || Answer::Reply(200, "content-length: 9999\r\nconnection: close\r\n".into(), b"{".to_vec())),
    ];
    for (name, answer) in rows {
        let server = server(move |nth| (nth == 0).then(answer));
        let path = kubeconfig(&format!("heals-{name}"), &json!({"server": server.http()}), &json!({}));
        let facts = facts_by(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(facts.pod.uid.as_deref(), Some("uid-1"), "{name}");
        assert_eq!(attempts(&server), 2, "{name}");
    }
}

#[test]
fn an_unknown_pod_is_retried_for_two_seconds() {
    let server = server(|_| Some(status(404, "pods \"web-0\" not found")));
    let started = Instant::now();
    let error = fails("404", &server.http(), LONG);
    assert_eq!(error.code, Code::PodUnknown);
    assert!(error.details.contains("pods \"web-0\" not found"), "{error}");
    assert!(started.elapsed() > Duration::from_millis(1800));
    // Fewer if the machine is slow.
    assert!((2..=6).contains(&attempts(&server)), "{}", attempts(&server));
}

#[test]
fn retry_after_is_honored() {
    let server = server(|nth| (nth == 0).then(|| Answer::Reply(429, "Retry-After: 1\r\n".into(), Vec::new())));
    let path = kubeconfig("retry-after", &json!({"server": server.http()}), &json!({}));
    let started = Instant::now();
    facts_by(&path).expect("facts");
    assert!(started.elapsed() >= SHORT);
    assert_eq!(attempts(&server), 2);
}

#[test]
fn a_server_that_accepts_no_connection_ends_the_call_early_and_one_that_hangs_does_not() {
    let refused = format!("http://{}", crate::server::closed_port());
    let error = fails("refused", &refused, LONG);
    assert!(error.code == Code::TryAgain && error.details.contains("no connection within"), "{error}");
    let hangs = server(|_| Some(Answer::Hang));
    let started = Instant::now();
    let error = fails("hangs", &hangs.http(), PATIENT);
    assert!(error.code == Code::TryAgain && error.details.contains("no answer within"), "{error}");
    assert!(started.elapsed() >= PATIENT);
}

#[test]
fn rejected_credentials_are_not_retried() {
    let message = "pods \"web-0\" is forbidden: User \"u\" cannot get resource \"pods\"";
    for (code, expected) in [(401, "not accepted"), (403, "get pods in namespace shop")] {
        let server = server(move |_| Some(status(code, message)));
        let error = fails(&format!("credentials-{code}"), &server.http(), LONG);
        assert_eq!(error.code, Code::Forbidden);
        assert!(error.msg.contains(expected) && error.details.contains(message), "{error}");
        assert_eq!(attempts(&server), 1);
    }
    let server = Server::plain(|request| match request.line.as_str() {
        GET_POD => Answer::Hang,
        _ => status(403, "no"),
    });
    // It does not wait for the response about the pod.
    let error = fails("credentials-namespace", &server.http(), LONG);
    assert_eq!(error.code, Code::Forbidden);
    assert!(error.msg.contains("get namespaces"), "{error}");
}

/// Responses that are never usable.
#[test]
fn each_unusable_response_is_an_error_with_its_reason() {
    const LIMIT: &str = "expected a response of at most 16777216 bytes, got more";
    const BODY: &str = "200, but the body";
    let nested = [b"{\"metadata\":".to_vec(), b"[".repeat(1 << 20)].concat();
    let list = json!({"kind": "PodList", "items": []}).to_string();
    let rows: [(u16, &str, &[u8], u32, &str); 12] = [
        (200, "", b"", 11, BODY),
        (200, "", b"[1, 2]", 11, BODY),
        (200, "", b"null", 11, BODY),
        (200, "", &[0xff, 0xfe, 0, 1], 11, BODY),
        (200, "", &nested, 11, BODY),
        (200, "", list.as_bytes(), 11, "no usable answer"),
        (200, "content-encoding: gzip\r\n", b"\x1f\x8b\x08\0\0\0\0\0", 11, BODY),
        (200, "", &[b' '; 17 << 20], 7, LIMIT),
        (500, "", &[b' '; 17 << 20], 7, LIMIT),
        (429, "Retry-After: 99999999999\r\n", b"busy", 11, "429, busy"),
        (502, "", b"<html>", 11, "502, <html>"),
        (410, "", b"gone", 7, "410, not the response of a Kubernetes API"),
    ];
    let check = |(code, headers, body, expected, part): (u16, &str, &[u8], u32, &str), test: String| {
        let answer = (headers.to_owned(), body.to_vec());
        let server = server(move |_| Some(Answer::Reply(code, answer.0.clone(), answer.1.clone())));
        let path = kubeconfig(&test, &json!({"server": server.http()}), &json!({}));
        let error = facts(&api(&path, if expected == 11 { BRIEF } else { LONG })).expect_err("an error");
        let (text, shown) = (error.to_string(), String::from_utf8_lossy(&body[..body.len().min(20)]).into_owned());
        assert!(error.number() == expected && text.contains(part), "{code} with {shown}: {text}");
    };
    // At the same time, because most of them are retried until the timeout.
    thread::scope(|scope| {
        rows.into_iter()
            .enumerate()
            .for_each(|(at, row)| drop(scope.spawn(move || check(row, format!("unusable-{at}")))));
    });
}

/// A text of the server can contain the token, which no output may show.
#[test]
fn a_token_in_a_response_is_redacted() {
    let padding = "x".repeat(280);
    for (code, before) in [(400, ""), (401, ""), (500, ""), (502, padding.as_str())] {
        let text = format!("{before}Bearer secret-token");
        let server = server(move |_| Some(status(code, &text)));
        let path = kubeconfig(
            &format!("redacted-{code}"),
            &json!({"server": server.http()}),
            &json!({"token": "secret-token"}),
        );
        let mut plugin = plugin([
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "redacted"),
            ("CNI_NETNS", "/run/netns/none"),
            ("CNI_IFNAME", "net1"),
            ("CNI_PATH", "/nowhere"),
            ("CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=uid-1"),
        ]);
        let kubernetes = json!({"kubeconfig": path, "timeout_seconds": 10});
        let conf = json!({"cniVersion": "1.0.0", "name": "n", "type": "istio-cni", "log_level": "debug", "kubernetes": kubernetes});
        let called = Called::run(&mut plugin, &conf);
        let all = format!("{:?}", called);
        assert!(!all.contains("secret-token") && (code == 502 || all.contains("(redacted)")), "{code}: {all}");
        assert!(attempts(&server) > 0, "{code}: {all}");
    }
}

/// The header `Authorization` must not reach another host.
#[test]
fn a_redirect_is_not_followed() {
    let other = Server::plain(has_both);
    for code in [301, 302, 303, 307, 308] {
        let location = format!("Location: {}/api/v1/namespaces/shop/pods/web-0\r\n", other.http());
        let server = server(move |_| Some(Answer::Reply(code, location.clone(), b"moved".to_vec())));
        let error = fails(&format!("redirect-{code}"), &server.http(), LONG);
        assert!(error.number() == 7 && error.to_string().contains("correct server"), "{error}");
    }
    assert_eq!(other.connections(), 0);
}
