//! Faults of the API server, in HTTP.

use super::expected::{Expected, fails, works};
use super::server::{Connection, Request, Script, Server, healthy as good, kubeconfig, pod, response, status};
use super::{try_all, with_sources};
use crate::call::Call;
use crate::subject::{Mode, Subject, Verb};
use crate::support::server::takes;
use crate::table::{Table, is_complete};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

const MODES: [(Mode, &str); 2] = [(Mode::Redirect, "nftables"), (Mode::Primary, "iptables")];

/// Waits for the client's end, after these bytes.
fn stops_after(bytes: impl Into<Vec<u8>>) -> Script {
    let bytes = bytes.into();
    Arc::new(move |connection: &mut Connection| {
        connection.request();
        connection.send(&bytes);
        connection.hang();
    })
}

/// Resets the connection after these bytes.
fn resets_after(bytes: impl Into<Vec<u8>>) -> Script {
    let bytes = bytes.into();
    Arc::new(move |connection: &mut Connection| {
        connection.request();
        connection.send(&bytes);
        connection.reset();
    })
}

/// Closes the connection after these bytes.
fn closes_after(bytes: impl Into<Vec<u8>>) -> Script {
    let bytes = bytes.into();
    Arc::new(move |connection: &mut Connection| {
        connection.request();
        connection.send(&bytes);
    })
}

/// Sends a start and then a part without end.
fn endless(start: &'static str, part: &str) -> Script {
    let part = part.repeat((65536 / part.len()).max(1));
    Arc::new(move |connection: &mut Connection| {
        connection.request();
        let mut open = connection.send(start.as_bytes());
        while open {
            open = connection.send(part.as_bytes());
        }
    })
}

/// Answers each request.
fn answers(answer: impl Fn(&Request) -> Vec<u8> + Send + Sync + 'static) -> Script {
    Arc::new(move |connection: &mut Connection| connection.serve(|request| Some(answer(request))))
}

/// Answers each request with these bytes.
fn always(answer: Vec<u8>) -> Script {
    answers(move |_| answer.clone())
}

/// Answers the first request for each object with these bytes, and then as a healthy server.
fn first(answer: Vec<u8>) -> Script {
    answers(move |request| if request.nth == 0 { answer.clone() } else { good(&request.line) })
}

fn is_pod(request: &Request) -> bool {
    request.line.contains("/pods/")
}

/// Answers the requests for the pod with this body.
fn pod_is(body: &Value) -> Script {
    let body = body.to_string();
    answers(move |request| if is_pod(request) { ok(body.as_bytes()) } else { good(&request.line) })
}

fn changed(change: impl FnOnce(&mut Value)) -> Value {
    let mut pod = pod();
    change(&mut pod);
    pod
}

fn ok(body: &[u8]) -> Vec<u8> {
    response(200, "content-type: application/json\r\n", body)
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
const CHUNKED: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
const HTML: &[u8] = b"<html><body>Sign in to the proxy</body></html>";
const LATE: &str = "no answer within 1.0 s";
const BODY: &str = "200, but the body";
const LIMIT: &str = "expected a response of at most 16777216 bytes, got more";

/// A server with a fault, and what an ADD must answer.
struct Fault {
    server: Box<dyn Fn() -> Server + Send + Sync>,
    expected: Expected,
    /// The only mode in which it has an effect.
    only: Option<Mode>,
}

type Faults = Vec<(String, Fault)>;

fn fault(name: &str, script: Script, expected: Expected) -> (String, Fault) {
    let server = Box::new(move || Server::start(Arc::clone(&script)));
    (format!("API: {name}"), Fault { server, expected, only: None })
}

/// A fault that only a call of the primary plugin meets.
fn primary(name: &str, script: Script, expected: Expected) -> (String, Fault) {
    let (name, fault) = fault(name, script, expected);
    (name, Fault { only: Some(Mode::Primary), ..fault })
}

fn late(part: &str) -> Expected {
    fails(11, &["no usable answer in", "check that this node can reach the API server", part])
}

fn connections() -> Faults {
    let healthy_pod = good("GET /api/v1/namespaces/shop/pods/web-0 HTTP/1.1");
    let half = healthy_pod[..healthy_pod.len() / 2].to_vec();
    let head = &HEAD.as_bytes()[..30];
    let slow: Script = Arc::new(|connection: &mut Connection| {
        while let Some(request) = connection.request() {
            for byte in good(&request.line) {
                takes(Duration::from_millis(100));
                if !connection.send(&[byte]) {
                    return;
                }
            }
        }
    });
    let closes_idle: Script = Arc::new(|connection: &mut Connection| {
        if let Some(request) = connection.request() {
            connection.send(&good(&request.line));
        }
    });
    let special = |name: &str, server: fn() -> Server, expected| {
        (format!("API: {name}"), Fault { server: Box::new(server), expected, only: None })
    };
    vec![
        special("the connection is refused", Server::closed, late("refused")),
        special("hangs at connect", Server::full, late(LATE)),
        fault("hangs after accept", Arc::new(Connection::hang), late(LATE)),
        fault("hangs in the header", stops_after(head), late(LATE)),
        fault("hangs in the body", stops_after(half.clone()), late(LATE)),
        fault("resets after accept", Arc::new(Connection::reset), late("reset")),
        fault("resets in the header", resets_after(head), late("")),
        fault("resets in the body", resets_after(half.clone()), late("")),
        fault("closes after the request", closes_after(""), late("")),
        fault("closes in the header", closes_after(head), late("")),
        fault("closes in the body", closes_after(half), late("")),
        fault("sends one byte each 100 ms", slow, late(LATE)),
        fault("closes each connection after one answer", closes_idle, works()),
        fault("endless headers", endless(HEAD, "x-a: b\r\n"), late("")),
        fault("an endless header", endless("HTTP/1.1 200 OK\r\nx: ", "x"), late("")),
        fault("an endless status line", endless("HTTP/1.1 ", "2"), late("")),
    ]
}

fn statuses() -> Faults {
    let refused = |code, headers: &str| always(status(code, headers, "refused for the test"));
    let retry_after = [
        "0",
        "1",
        "3600",
        "18446744073709551615",
        "99999999999999999999999",
        "-1",
        "soon",
        "Wed, 21 Oct 2099 07:28:00 GMT",
        "\u{fc}",
    ];
    let busy = retry_after.map(|value| {
        let script = refused(429, &format!("Retry-After: {value}\r\n"));
        fault(&format!("429, Retry-After: {value}"), script, late("429, refused for the test"))
    });
    let hangs: Script = Arc::new(|connection: &mut Connection| {
        while let Some(request) = connection.request() {
            if request.nth % 2 == 1 {
                return connection.hang();
            }
            connection.send(&status(500, "", "busy"));
        }
    });
    let namespace =
        answers(|request| if is_pod(request) { good(&request.line) } else { status(404, "", "no namespace") });
    let no_pod = fails(100, &["not found in", "it was deleted, or the kubeconfig is for another cluster"]);
    let mut faults = vec![
        fault("429 without Retry-After", refused(429, ""), late("429, refused for the test")),
        fault("500", refused(500, ""), late("500, refused")),
        fault("503, Retry-After: 1", refused(503, "Retry-After: 1\r\n"), late("refused for the test")),
        fault("504", refused(504, ""), late("refused for the test")),
        fault("502 with HTML", always(response(502, "", HTML)), late("502, <html>")),
        fault("429 once, then 200", first(status(429, "Retry-After: 0\r\n", "busy")), works()),
        fault("500 once, then 200", first(status(500, "", "busy")), works()),
        fault("500 once, then hangs", hangs, late(LATE).with(&["an earlier attempt failed: 500, busy"])),
        fault("404 once, then 200", first(status(404, "", "no such pod")), works()),
        fault("404", refused(404, ""), no_pod),
        fault("401", refused(401, ""), fails(101, &["401, the credentials in", "check the process"])),
        fault("403", refused(403, ""), fails(101, &["403, the credentials in", "grant it in a ClusterRole"])),
        fault("410", refused(410, ""), fails(7, &["410, not the response of a Kubernetes API", "correct server"])),
        fault("the namespace is missing", namespace, fails(100, &["/api/v1/namespaces/shop", "not found in"])),
    ];
    faults.extend(busy);
    faults
}

fn bodies() -> Faults {
    let text = |name: &str, body: &[u8]| fault(name, always(ok(body)), late(BODY));
    let closes = |name: &str, bytes: Vec<u8>, part: &str| fault(name, closes_after(bytes), late(part));
    let pod = pod().to_string();
    let lies = |length: usize| format!("{HEAD}content-length: {length}\r\n\r\n{pod}").into_bytes();
    let nested = [b"{\"metadata\":".to_vec(), b"[".repeat(1 << 20)].concat();
    let gzip = response(200, "content-encoding: gzip\r\n", b"\x1f\x8b\x08\0\0\0\0\0");
    let other = |change: fn(&mut Value)| pod_is(&changed(change));
    let part = || endless(CHUNKED, &format!("10000\r\n{}\r\n", " ".repeat(0x10000)));
    let is_write = |request: &Request| !request.line.starts_with("GET ");
    let hangs: Script = Arc::new(move |connection: &mut Connection| {
        while let Some(request) = connection.request() {
            if is_write(&request) {
                return connection.hang();
            }
            connection.send(&good(&request.line));
        }
    });
    let refuses =
        move |request: &Request| if is_write(request) { status(403, "", "no right") } else { good(&request.line) };
    vec![
        text("200 with HTML", HTML),
        text("200 with an empty body", b""),
        text("200 with truncated JSON", &pod.as_bytes()[..pod.len() / 2]),
        text("200 with a JSON array", b"[1, 2]"),
        text("200 with null", b"null"),
        text("200 with binary data", &[0xff, 0xfe, 0, 1]),
        text("200 with 1 MiB of nested JSON", &nested),
        fault("a pod list instead of the pod", pod_is(&json!({"kind": "PodList", "items": []})), late("")),
        fault("a Status with code 200", pod_is(&json!({"kind": "Status", "metadata": {}, "code": 404})), late("")),
        fault("another pod", other(|pod| pod["metadata"]["name"] = "web-1".into()), late("got shop/web-1")),
        fault("another namespace", other(|pod| pod["metadata"]["namespace"] = "prod".into()), late("got prod/web-0")),
        fault("a stale pod", other(|pod| pod["metadata"]["uid"] = "uid-0".into()), fails(100, &["got uid-0"])),
        fault("50 MB", always(ok(&[b' '; 50_000_000])), fails(7, &[LIMIT, "correct server"])),
        // A busy machine needs time for 16 MiB.
        fault("an endless body", part(), fails(7, &[LIMIT]).within(10)),
        fault("an endless error", endless("HTTP/1.1 500 x\r\n\r\n", "no "), fails(7, &[LIMIT]).within(10)),
        fault("gzip although not requested", always(gzip), late(BODY)),
        closes("Content-Length is too large", lies(9999), ""),
        fault("Content-Length is too large, then hangs", stops_after(lies(9999)), late(LATE)),
        closes("Content-Length is too small", lies(10), BODY),
        closes("invalid size of a chunk", format!("{CHUNKED}xyz\r\n{pod}").into_bytes(), ""),
        closes("the last chunk is missing", format!("{CHUNKED}{:x}\r\n{pod}\r\n", pod.len()).into_bytes(), ""),
        closes("not HTTP (SSH)", b"SSH-2.0-OpenSSH_9.2\r\n".to_vec(), ""),
        closes("TLS on a plain port", b"\x15\x03\x01\0\x02\x02\x16".to_vec(), ""),
        primary("hangs when it is written to", hangs, works().with(&["no answer within 2.0 s"]).within(2)),
        primary("403 for writes", answers(refuses), works().with(&["no right"])),
    ]
}

/// Servers that return the header `Authorization` in an answer.
fn echoes() -> Faults {
    let echo = |form: fn(&str) -> Vec<u8>| answers(move |request| form(&request.authorization));
    let long = echo(|token| response(502, "", format!("{}{token}", "x".repeat(280)).as_bytes()));
    vec![
        fault("400 with the token", echo(|token| response(400, "", token.as_bytes())), fails(7, &["(redacted)"])),
        fault("401 with the token", echo(|token| status(401, "", token)), fails(101, &["(redacted)"])),
        fault("500 with the token", echo(|token| status(500, "", token)), late("(redacted)")),
        fault("200 with the token", echo(|token| ok(json!(token).to_string().as_bytes())), late("(redacted)")),
        fault("502 with the token over the limit of a text", long, late("")),
    ]
}

/// Tries a fault in all calls. A response can't use memory without limit.
fn attempt(name: &str, fault: &Fault, subject: &Subject, table: &mut Table) {
    if fault.only.is_some_and(|only| only != subject.mode) {
        return;
    }
    let server = (fault.server)();
    let path = kubeconfig(subject.directory(), &json!({"server": server.url()}));
    let shown = fault.expected.clone().with_if_it_fails(&[&server.url()]);
    for (verb, expected) in [(Verb::Add, &shown), (Verb::Check, &works()), (Verb::Del, &works())] {
        if verb == Verb::Check && !is_complete() {
            continue;
        }
        let make = |call: Call| {
            let call = with_sources(call, json!({"kubeconfig": path}), expected);
            call.under(&["prlimit", "--as=1073741824"]).run()
        };
        subject.attempt(table, verb, (name, ""), make, |ended| expected.check(ended));
    }
}

#[test]
fn each_fault_of_the_api_server_is_answered_in_time() {
    let faults: Faults = [connections(), statuses(), bodies(), echoes()].into_iter().flatten().collect();
    try_all("API", &MODES, &faults, attempt);
}

/// The header `Authorization` must not reach another host.
#[test]
fn a_redirect_is_not_followed() {
    let other = Server::healthy();
    let faults = [301, 302, 303, 307, 308].map(|code| {
        let location = format!("Location: {}/api/v1/namespaces/shop/pods/web-0\r\n", other.url());
        let expected = fails(7, &[&code.to_string(), "correct server"]);
        fault(&format!("{code} to another host"), always(response(code, &location, b"moved")), expected)
    });
    try_all("API", &MODES, &faults, attempt);
    assert_eq!(other.connections(), 0, "{:?}", other.requests());
}
