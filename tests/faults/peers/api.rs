//! Faults of the API server, in HTTP.

use super::case::{Case, case, run};
use super::healthy;
use super::scene::{Expected, Mode, Scene, fails, works};
use super::server::{Connection, Request, Script, Server, healthy as good, response, status};
use crate::support::server::takes;
use crate::table::is_complete;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

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
    let mut pod = healthy::pod();
    change(&mut pod);
    pod
}

fn ok(body: &[u8]) -> Vec<u8> {
    response(200, "content-type: application/json\r\n", body)
}

fn gzip(mut input: impl Read + Send) -> Vec<u8> {
    let mut gzip = Command::new("gzip").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gzip is needed");
    let (mut stdin, mut stdout) = (gzip.stdin.take().expect("a pipe"), gzip.stdout.take().expect("a pipe"));
    let mut bytes = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::io::copy(&mut input, &mut stdin).expect("it reads");
            drop(stdin.flush());
            drop(stdin);
        });
        stdout.read_to_end(&mut bytes).expect("it writes");
    });
    gzip.wait().expect("it ends");
    bytes
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
const CHUNKED: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
const HTML: &[u8] = b"<html><body>Sign in to the proxy</body></html>";
const UNUSABLE: &[&str] = &["no usable answer in", "check that this node can reach the API server"];

/// A server with a fault, and what a call must answer.
struct Fault {
    name: String,
    server: Box<dyn Fn() -> Server + Send + Sync>,
    expected: Expected,
    /// The only mode in which it has an effect.
    only: Option<Mode>,
}

fn fault(name: &str, script: Script, expected: Expected) -> Fault {
    let server = move || Server::start(Arc::clone(&script));
    Fault { name: name.to_owned(), server: Box::new(server), expected, only: None }
}

fn late(part: &str) -> Expected {
    fails(11, UNUSABLE).with(&[part])
}

fn connections() -> Vec<Fault> {
    let healthy_pod = good("GET /api/v1/namespaces/shop/pods/web-0 HTTP/1.1");
    let half = healthy_pod[..healthy_pod.len() / 2].to_vec();
    let hangs: Script = Arc::new(Connection::hang);
    let resets: Script = Arc::new(Connection::reset);
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
    let special = |name: &str, server: fn() -> Server, expected| Fault {
        name: name.to_owned(),
        server: Box::new(server),
        expected,
        only: None,
    };
    vec![
        special("API: the connection is refused", Server::closed, late("refused")),
        special("API: hangs at connect", Server::full, late("no answer within 1.0 s")),
        fault("API: hangs after accept", hangs, late("no answer within 1.0 s")),
        fault("API: hangs in the header", stops_after(&HEAD.as_bytes()[..30]), late("no answer within 1.0 s")),
        fault("API: hangs in the body", stops_after(half.clone()), late("no answer within 1.0 s")),
        fault("API: resets after accept", resets, late("reset")),
        fault("API: resets after the request", resets_after(""), late("")),
        fault("API: resets in the header", resets_after(&HEAD.as_bytes()[..30]), late("")),
        fault("API: resets in the body", resets_after(half.clone()), late("")),
        fault("API: closes after the request", closes_after(""), late("")),
        fault("API: closes in the header", closes_after(&HEAD.as_bytes()[..30]), late("")),
        fault("API: closes in the body", closes_after(half), late("")),
        fault("API: sends one byte each 100 ms", slow, late("no answer within 1.0 s")),
        fault("API: closes each connection after one answer", closes_idle, works()),
        fault("API: endless headers", endless(HEAD, "x-a: b\r\n"), late("")),
        fault("API: an endless header", endless("HTTP/1.1 200 OK\r\nx: ", "x"), late("")),
        fault("API: an endless status line", endless("HTTP/1.1 ", "2"), late("")),
    ]
}

fn statuses() -> Vec<Fault> {
    let refused = |code| move |headers: &str| always(status(code, headers, "refused for the test"));
    let mut faults = Vec::new();
    for (name, header) in [
        ("API: 429 without Retry-After", ""),
        ("API: 429, Retry-After: 0", "Retry-After: 0\r\n"),
        ("API: 429, Retry-After: 1", "Retry-After: 1\r\n"),
        ("API: 429, Retry-After: 3600", "Retry-After: 3600\r\n"),
        ("API: 429, Retry-After: 18446744073709551615", "Retry-After: 18446744073709551615\r\n"),
        ("API: 429, Retry-After: 1e400", "Retry-After: 99999999999999999999999999999999\r\n"),
        ("API: 429, Retry-After: -1", "Retry-After: -1\r\n"),
        ("API: 429, Retry-After: soon", "Retry-After: soon\r\n"),
        ("API: 429, Retry-After is a date", "Retry-After: Wed, 21 Oct 2099 07:28:00 GMT\r\n"),
        ("API: 429, Retry-After is binary", "Retry-After: \u{fc}\r\n"),
    ] {
        faults.push(fault(name, refused(429)(header), late("429, refused for the test")));
    }
    for (name, code, header) in [
        ("API: 500", 500, ""),
        ("API: 503", 503, ""),
        ("API: 503, Retry-After: 1", 503, "Retry-After: 1\r\n"),
        ("API: 504", 504, ""),
    ] {
        let part = if code == 500 { "500, refused" } else { "refused for the test" };
        faults.push(fault(name, refused(code)(header), late(part)));
    }
    faults.push(fault("API: 502 with HTML", always(response(502, "", HTML)), late("502, <html>")));
    faults.push(fault("API: 429 once, then 200", first(status(429, "Retry-After: 0\r\n", "busy")), works()));
    faults.push(fault("API: 500 once, then 200", first(status(500, "", "busy")), works()));
    let script: Script = Arc::new(|connection: &mut Connection| {
        while let Some(request) = connection.request() {
            if request.nth % 2 == 1 {
                return connection.hang();
            }
            connection.send(&status(500, "", "busy"));
        }
    });
    let expected = late("no answer within 1.0 s; an earlier attempt failed: 500, busy");
    faults.push(fault("API: 500 once, then hangs", script, expected));
    faults.push(fault("API: 404 once, then 200", first(status(404, "", "no such pod")), works()));
    let missing = fails(100, &["not found in", "it was deleted, or the kubeconfig is for another cluster"]);
    faults.push(fault("API: 404", refused(404)(""), missing));
    faults.push(fault("API: 401", refused(401)(""), fails(101, &["401, the credentials in", "check the process"])));
    faults.push(fault(
        "API: 403",
        refused(403)(""),
        fails(101, &["403, the credentials in", "grant it in a ClusterRole"]),
    ));
    faults.push(fault(
        "API: 410",
        refused(410)(""),
        fails(7, &["410, not the response of a Kubernetes API", "correct server"]),
    ));
    let namespace =
        answers(|request| if is_pod(request) { good(&request.line) } else { status(404, "", "no namespace") });
    faults.push(fault(
        "API: the namespace is missing",
        namespace,
        fails(100, &["/api/v1/namespaces/shop", "not found in"]),
    ));
    faults
}

fn bodies() -> Vec<Fault> {
    let text = |name: &str, body: &[u8], part: &str| fault(name, always(ok(body)), late(part));
    let pod = healthy::pod().to_string();
    let lies = |length: usize, body: &str| format!("{HEAD}content-length: {length}\r\n\r\n{body}");
    let nested = [b"{\"metadata\":".to_vec(), b"[".repeat(1 << 20)].concat();
    let bomb = gzip(std::io::repeat(b' ').take(if is_complete() { 1 << 30 } else { 1 << 24 }));
    let bomb = always(response(200, "content-encoding: gzip\r\ncontent-type: application/json\r\n", &bomb));
    let small = gzip(pod.as_bytes());
    let other = |change: fn(&mut Value)| pod_is(&changed(change));
    let secret = json!({"kind": "Secret", "metadata": {"name": "web-0", "namespace": "shop", "uid": "uid-2"}});
    let mut faults = vec![
        text("API: 200 with HTML", HTML, "200, but the body"),
        text("API: 200 with an empty body", b"", "200, but the body"),
        text("API: 200 with truncated JSON", &pod.as_bytes()[..pod.len() / 2], "200, but the body"),
        text("API: 200 with a JSON array", b"[1, 2]", "200, but the body"),
        text("API: 200 with null", b"null", "200, but the body"),
        text("API: 200 with binary data", &[0xff, 0xfe, 0, 1], "200, but the body"),
        text("API: 200 with 1 MiB of nested JSON", &nested, "200, but the body"),
        fault(
            "API: a pod list instead of the pod",
            pod_is(&json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": []})),
            late(""),
        ),
        fault("API: a Status with code 200", pod_is(&json!({"kind": "Status", "metadata": {}, "code": 404})), late("")),
        fault(
            "API: another pod",
            other(|pod| pod["metadata"]["name"] = "web-1".into()),
            late("expected the object shop/web-0, got shop/web-1"),
        ),
        fault(
            "API: a pod of another namespace",
            other(|pod| pod["metadata"]["namespace"] = "prod".into()),
            late("got prod/web-0"),
        ),
        fault("API: an object of another kind and of the pod's name", pod_is(&secret), fails(100, &["UID mismatch"])),
        fault(
            "API: a stale pod (another UID)",
            other(|pod| pod["metadata"]["uid"] = "uid-0".into()),
            fails(100, &["expected uid-1, got uid-0", "it was deleted"]),
        ),
        fault(
            "API: an older version of the pod",
            other(|pod| pod["metadata"]["resourceVersion"] = "1".into()),
            works(),
        ),
        fault(
            "API: 50 MB",
            always(ok(&[b' '; 50_000_000])),
            fails(7, &["expected a response of at most 16777216 bytes, got more", "correct server"]),
        ),
        // A busy machine needs time for 16 MiB.
        fault(
            "API: an endless body",
            endless(CHUNKED, &format!("10000\r\n{}\r\n", " ".repeat(0x10000))),
            fails(7, &["expected a response of at most 16777216 bytes, got more"]).within(Duration::from_secs(10)),
        ),
        fault(
            "API: an endless error",
            endless("HTTP/1.1 500 x\r\n\r\n", "no "),
            fails(7, &["expected a response of at most 16777216 bytes, got more"]).within(Duration::from_secs(10)),
        ),
        fault(
            "API: gzip although not requested",
            always(response(200, "content-encoding: gzip\r\n", &small)),
            late("200, but the body"),
        ),
        fault("API: 1 GiB as gzip", bomb, late("200, but the body")),
        fault("API: Content-Length is too large, then closes", closes_after(lies(9999, &pod)), late("")),
        fault(
            "API: Content-Length is too large, then hangs",
            stops_after(lies(9999, &pod)),
            late("no answer within 1.0 s"),
        ),
        fault("API: Content-Length is too small", closes_after(lies(10, &pod)), late("200, but the body")),
        fault(
            "API: Content-Length is not a number",
            closes_after(format!("{HEAD}content-length: many\r\n\r\n{pod}")),
            late(""),
        ),
        fault(
            "API: two values of Content-Length",
            closes_after(format!("{HEAD}content-length: 3\r\ncontent-length: 4\r\n\r\n{pod}")),
            late(""),
        ),
        fault("API: invalid size of a chunk", closes_after(format!("{CHUNKED}xyz\r\n{pod}")), late("")),
        fault(
            "API: the last chunk is missing",
            closes_after(format!("{CHUNKED}{:x}\r\n{pod}\r\n", pod.len())),
            late(""),
        ),
        fault(
            "API: HTTP/2",
            closes_after(b"\0\0\x0c\x04\0\0\0\0\0\0\x03\0\0\0\x64\0\x04\0\x10\0\0".to_vec()),
            late(""),
        ),
        fault("API: not HTTP (SSH)", closes_after("SSH-2.0-OpenSSH_9.2\r\n"), late("")),
        fault("API: TLS on a plain port", closes_after(b"\x15\x03\x01\0\x02\x02\x16".to_vec()), late("")),
    ];
    let prod = ok(br#"{"kind": "Namespace", "metadata": {"name": "prod"}}"#);
    let is_namespace = |request: &Request| request.line.starts_with("GET /api/v1/namespaces/shop HTTP");
    let script = answers(move |request| if is_namespace(request) { prod.clone() } else { good(&request.line) });
    faults.push(fault("API: another namespace", script, late("expected the object shop, got prod")));
    let second = healthy::definition().to_string().replace("\"second\",\"namespace", "\"third\",\"namespace");
    let is_definition = |request: &Request| request.line.contains("network-attachment-definitions");
    let script =
        answers(move |request| if is_definition(request) { ok(second.as_bytes()) } else { good(&request.line) });
    let expected = late("expected the object shop/second, got shop/third");
    faults.push(Fault { only: Some(Mode::Primary), ..fault("API: another definition", script, expected) });
    let is_write = |request: &Request| !request.line.starts_with("GET ");
    let script: Script = Arc::new(move |connection: &mut Connection| {
        while let Some(request) = connection.request() {
            if is_write(&request) {
                return connection.hang();
            }
            connection.send(&good(&request.line));
        }
    });
    let expected = works().with(&["no answer within 2.0 s"]).within(Duration::from_secs(2));
    faults.push(Fault { only: Some(Mode::Primary), ..fault("API: hangs when it is written to", script, expected) });
    let refuses =
        move |request: &Request| if is_write(request) { status(403, "", "no right") } else { good(&request.line) };
    let expected = works().with(&["no right"]);
    faults.push(Fault { only: Some(Mode::Primary), ..fault("API: 403 for writes", answers(refuses), expected) });
    faults
}

/// Servers that return the header `Authorization` in an answer.
fn echoes() -> Vec<Fault> {
    let echo = |form: fn(&str) -> Vec<u8>| answers(move |request| form(&request.authorization));
    vec![
        fault(
            "API: 400 with the token",
            echo(|token| response(400, "", format!("bad header Authorization: {token}").as_bytes())),
            fails(7, &["(redacted)"]),
        ),
        fault(
            "API: 401 with the token",
            echo(|token| status(401, "", &format!("invalid token {token:?}"))),
            fails(101, &["(redacted)"]),
        ),
        fault("API: 500 with the token", echo(|token| status(500, "", token)), late("(redacted)")),
        fault("API: 200 with the token", echo(|token| ok(json!(token).to_string().as_bytes())), late("(redacted)")),
        fault("API: 404 with the token", echo(|token| status(404, "", token)), fails(100, &["(redacted)"])),
        fault(
            "API: 502 with the token over the limit of a text",
            echo(|token| response(502, "", format!("{}{token}", "x".repeat(280)).as_bytes())),
            late(""),
        ),
    ]
}

/// Tries a fault in all calls.
fn attempt(scene: &mut Scene, fault: &Fault, usable: &Server) {
    let server = (fault.server)();
    let shows = |expected: &Expected| {
        if expected.codes.is_empty() { expected.clone() } else { expected.clone().with(&[&server.url()]) }
    };
    let timeout = fault.expected.within.as_secs();
    let kubernetes = json!({"kubeconfig": scene.root.join("kubeconfig"), "timeout_seconds": timeout});
    let modes = Mode::BOTH.into_iter().filter(|mode| fault.only.is_none_or(|only| only == *mode));
    for mode in modes {
        let conf = scene.conf(mode, &kubernetes);
        scene.kubeconfig(&server.url());
        scene.expect("ADD", mode, &conf, &shows(&fault.expected));
        scene.expect("DEL", mode, &conf, &works());
        if !is_complete() {
            break;
        }
        scene.kubeconfig(&usable.url());
        scene.done("ADD", mode, &conf);
        scene.kubeconfig(&server.url());
        scene.expect("CHECK", mode, &conf, &works());
        scene.expect("DEL", mode, &conf, &works());
    }
}

fn try_all(group: &'static str, faults: Vec<Fault>) {
    let usable = Server::healthy();
    let of = |fault: Fault| {
        let usable = &usable;
        let name = fault.name.clone();
        case(&name, move |name| Scene::run(name, |scene| attempt(scene, &fault, usable)))
    };
    let cases: Vec<Case<'_>> = faults.into_iter().map(of).collect();
    run(group, &cases);
}

#[test]
fn each_fault_of_the_api_server_is_answered_in_time() {
    try_all("API", [connections(), statuses(), bodies(), echoes()].into_iter().flatten().collect());
}

/// The header `Authorization` must not reach another host.
#[test]
fn a_redirect_is_not_followed() {
    let other = Server::healthy();
    let url = other.url();
    let faults = [301, 302, 303, 307, 308].map(|code| {
        let location = format!("Location: {url}/api/v1/namespaces/shop/pods/web-0\r\n");
        let expected = fails(7, &[&code.to_string(), "correct server"]);
        fault(&format!("API: {code} to another host"), always(response(code, &location, b"moved")), expected)
    });
    try_all("API", faults.into());
    assert_eq!(other.connections(), 0, "{:?}", other.requests());
}

/// The first request hangs; a later one is answered on another connection.
#[test]
fn one_connection_that_hangs_does_not_fail_the_call() {
    let script: Script = Arc::new(|connection: &mut Connection| {
        while let Some(request) = connection.request() {
            if request.nth == 0 && is_pod(&request) {
                return connection.hang();
            }
            connection.send(&good(&request.line));
        }
    });
    let server = Server::start(script);
    let cases = [case("API: one connection hangs (timeout 10 s)", |name| {
        Scene::run(name, |scene| {
            scene.kubeconfig(&server.url());
            let kubernetes = json!({"kubeconfig": scene.root.join("kubeconfig"), "timeout_seconds": 10});
            let conf = scene.conf(Mode::Attachment, &kubernetes);
            scene.expect("ADD", Mode::Attachment, &conf, &works().within(Duration::from_secs(4)));
            scene.expect("DEL", Mode::Attachment, &conf, &works());
        })
    })];
    run("API", &cases);
}
