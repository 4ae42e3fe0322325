//! Faults of the agent as the plugin sees it through the socket: the plugin asks the API server instead. Without
//! one, it fails in time.

use super::case::{Case, Row, case, run};
use super::listener::{foreign_listener, listener, that_accepts_nothing};
use super::scene::{Mode, POD, Scene, TIMEOUT, fails, works};
use super::server::Server;
use crate::support::server::takes;
use crate::table::is_complete;
use detour_cni::cluster;
use detour_cni::cni::Kubernetes;
use detour_cni::pod::PodRef;
use serde_json::{Value, json};
use std::any::Any;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

const HELLO: &str = "{\"version\":\"0.2.0\",\"facts\":1}\n";
const NO_AGENT: &str = "no agent listens on the socket";
/// What the error of a call without an API server contains.
const ALONE: [&str; 2] = ["no facts from the agent", "check that the agent's pod (detour-agent-…) runs on this node"];

/// Returns the agent's correct answer about the pod.
fn facts() -> Value {
    let containers = json!([{"name": "app"}, {"name": "istio-proxy", "args": ["proxy", "sidecar"]}]);
    let pod = json!({
        "namespace": "shop", "name": "web-0", "uid": "uid-1", "containers": containers,
        "annotations": {"sidecar.istio.io/status": "{}"},
    });
    json!({"answer": "facts", "pod": pod, "namespace": {"name": "shop"}})
}

fn changed(change: impl FnOnce(&mut Value)) -> String {
    let mut answer = facts();
    change(&mut answer);
    format!("{HELLO}{answer}\n")
}

/// Reads the plugin's request.
fn request(stream: &UnixStream) {
    let _ = BufReader::new(stream).read_line(&mut String::new());
}

/// Waits until the plugin closes the connection.
fn hang(mut stream: &UnixStream) {
    while stream.read(&mut [0; 4096]).is_ok_and(|length| length > 0) {}
}

/// What happens at the socket's path while the value lives.
type Peer = Box<dyn Any>;
/// Puts something at the socket's path.
type Place = Box<dyn Fn(&Path) -> Peer + Send + Sync>;

fn serves(work: impl Fn(&UnixStream) + Send + Sync + Clone + 'static) -> Place {
    Box::new(move |path| {
        let work = work.clone();
        Box::new(listener(path, move |stream| work(&stream)))
    })
}

/// Answers each request with this text and closes the connection.
fn says(text: impl Into<Vec<u8>>) -> Place {
    let text = text.into();
    serves(move |mut stream| {
        request(stream);
        let _ = stream.write_all(&text);
    })
}

/// Sends this text and waits.
fn stops_after(text: impl Into<Vec<u8>>) -> Place {
    let text = text.into();
    serves(move |mut stream| {
        request(stream);
        let _ = stream.write_all(&text);
        hang(stream);
    })
}

/// Sends a start and then a part without end.
fn endless(start: &'static str, part: &'static str) -> Place {
    serves(move |mut stream| {
        request(stream);
        let mut sent = stream.write_all(start.as_bytes());
        let part = part.repeat(65536 / part.len());
        while sent.is_ok() {
            sent = stream.write_all(part.as_bytes());
        }
    })
}

/// A fault, and the reason that the log or the error contains.
struct Fault {
    name: &'static str,
    place: Place,
    why: &'static str,
    answer: AgentAnswer,
}

/// What the plugin makes of the agent's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AgentAnswer {
    Facts,
    None,
    /// The agent's error.
    Failed(u64),
}

fn fault(name: &'static str, why: &'static str, place: Place) -> Fault {
    Fault { name, place, why, answer: AgentAnswer::None }
}

fn usable(name: &'static str, place: Place) -> Fault {
    Fault { name, place, why: "", answer: AgentAnswer::Facts }
}

/// The agent answers with an error; the plugin's has another code if that is none of its own.
fn failed(name: &'static str, (code, expected): (u64, u64), msg: &str, why: &'static str) -> Fault {
    let answer = json!({"answer": "failed", "code": code, "msg": msg});
    let place = says(format!("{HELLO}{answer}\n"));
    Fault { name, place, why, answer: AgentAnswer::Failed(expected) }
}

fn sockets() -> Vec<Fault> {
    let nothing = |place: fn(&Path)| -> Place {
        Box::new(move |path| {
            place(path);
            Box::new(())
        })
    };
    vec![
        fault("agent: the socket is missing", NO_AGENT, nothing(|_| {})),
        fault("agent: the socket's process has ended", NO_AGENT, nothing(|path| drop(UnixListener::bind(path)))),
        fault(
            "agent: the queue of connections is full",
            "queue is full",
            Box::new(|path| Box::new(that_accepts_nothing(path))),
        ),
        fault(
            "agent: accepts no connection",
            "no greeting: timeout",
            Box::new(|path| Box::new(UnixListener::bind(path))),
        ),
        fault(
            "agent: a socket of another user",
            "expected root as listener",
            Box::new(|path| Box::new(foreign_listener(path))),
        ),
        fault(
            "agent: a file instead of the socket",
            "connection refused",
            nothing(|path| fs::write(path, "x").expect("written")),
        ),
        fault(
            "agent: a directory instead of the socket",
            "connection refused",
            nothing(|path| fs::create_dir(path).expect("made")),
        ),
        fault(
            "agent: a FIFO instead of the socket",
            "connection refused",
            nothing(|path| {
                nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRUSR).expect("made");
            }),
        ),
        fault("agent: a dangling symbolic link", NO_AGENT, nothing(|path| symlink("/nowhere", path))),
        fault("agent: a loop of symbolic links", "too many symbolic links", nothing(|path| symlink(path, path))),
        usable(
            "agent: a symbolic link to the socket",
            Box::new(|path| {
                let own = path.with_file_name("own.sock");
                symlink(&own, path);
                says(changed(|_| {}))(&own)
            }),
        ),
    ]
}

fn symlink(to: impl AsRef<Path>, path: &Path) {
    std::os::unix::fs::symlink(to, path).expect("made");
}

fn conversations() -> Vec<Fault> {
    let slow = |pause: Duration, from: usize| {
        serves(move |mut stream| {
            request(stream);
            let text = changed(|_| {});
            let mut sent = stream.write_all(&text.as_bytes()[..from]);
            for byte in &text.as_bytes()[from..] {
                takes(pause);
                sent = sent.and_then(|()| stream.write_all(&[*byte]));
                if sent.is_err() {
                    return;
                }
            }
        })
    };
    let before_the_end = changed(|_| {}).len() - 3;
    let nested = format!("{HELLO}{{\"answer\":{}\n", "[".repeat(1 << 20));
    let large = changed(|answer| answer["pod"]["labels"] = json!({"a": "x".repeat(50_000_000)}));
    vec![
        fault("agent: hangs after accept", "no greeting: timeout", serves(hang)),
        fault("agent: hangs in the greeting", "no greeting: timeout", stops_after(&HELLO[..9])),
        fault("agent: hangs after the greeting", "no answer: timeout", stops_after(HELLO)),
        fault("agent: hangs in the answer", "no answer: timeout", stops_after(&changed(|_| {})[..90])),
        fault(
            "agent: sends one byte each 100 ms",
            "timeout; the agent is stuck or too slow",
            slow(Duration::from_millis(100), 0),
        ),
        usable("agent: answers after 0.3 s", slow(Duration::from_millis(100), before_the_end)),
        fault("agent: closes after accept", "the agent closed the connection", serves(|_| {})),
        fault("agent: closes after the greeting", "the agent closed the connection", says(HELLO)),
        fault("agent: closes in the answer", "the agent closed the connection", says(&changed(|_| {})[..90])),
        fault("agent: an answer without line end", "the agent closed the connection", says(changed(|_| {}).trim_end())),
        fault(
            "agent: facts of another UID",
            "answered another request",
            says(changed(|a| a["pod"]["uid"] = "uid-7".into())),
        ),
        fault(
            "agent: facts of another pod",
            "answered another request",
            says(changed(|a| a["pod"]["name"] = "web-7".into())),
        ),
        fault(
            "agent: facts of another namespace",
            "answered another request",
            says(changed(|a| a["pod"]["namespace"] = "prod".into())),
        ),
        fault(
            "agent: another namespace object",
            "answered another request",
            says(changed(|a| a["namespace"]["name"] = "prod".into())),
        ),
        fault(
            "agent: facts without the namespace",
            "answered another request",
            says(changed(|a| a["namespace"] = Value::Null)),
        ),
        usable("agent: facts without the UID", says(changed(|a| a["pod"]["uid"] = Value::Null))),
        fault(
            "agent: facts without a pod",
            "answered another request",
            says(changed(|a| drop(a.as_object_mut().map(|a| a.remove("pod"))))),
        ),
        fault(
            "agent: the answer to another request",
            "answered another request",
            says(format!("{HELLO}{{\"answer\":\"done\"}}\n")),
        ),
        fault(
            "agent: an answer of a later version",
            "does not support the request",
            says(format!("{HELLO}{{\"answer\":\"later\"}}\n")),
        ),
        fault(
            "agent: an earlier version",
            "earlier version",
            says(format!("{{\"version\":\"0.0.9\"}}\n{}\n", facts())),
        ),
        usable(
            "agent: unknown fields of a later version",
            says(
                changed(|a| {
                    a["later"] = json!([1]);
                    a["pod"]["later"] = json!({});
                })
                .replace("\"facts\":1", "\"facts\":9,\"later\":{}"),
            ),
        ),
        usable("agent: data after the answer", says(changed(|_| {}) + "more\n{\"answer\":\"done\"}\n")),
        fault("agent: data in the line of the answer", "no answer", says(format!("{HELLO}{} x\n", facts()))),
        fault("agent: not the protocol (SSH)", "no greeting", says("SSH-2.0-OpenSSH_9.2\r\n")),
        fault("agent: binary data", "no greeting", says([0xff, 0, 0xfe, b'\n'])),
        fault("agent: an empty line", "no greeting", says("\n\n")),
        fault("agent: an answer of a wrong type", "no answer", says(format!("{HELLO}[1, 2]\n"))),
        fault("agent: a pod of a wrong type", "no answer", says(changed(|a| a["pod"]["containers"] = json!({"a": 1})))),
        fault("agent: 1 MiB of nested JSON", "no answer", says(nested)),
        fault("agent: 50 MB", "no answer", says(large)),
        fault("agent: an endless greeting", "no greeting", endless("", "x")),
        fault("agent: an endless answer", "no answer", endless(HELLO, "{}, ")),
        fault("agent: endless lines", "no greeting", endless("", "\n")),
        failed("agent: fails with code 101", (101, 101), "no right", "no right"),
        failed("agent: fails with code 0", (0, 11), "no code", "no code"),
        failed("agent: fails with code 999", (999, 11), "odd code", "odd code"),
        failed("agent: fails with control characters", (11, 11), "\u{1b}[2J", "\\u{1b}[2J"),
    ]
}

/// Tries a fault with and without an API server as fallback.
fn attempt(scene: &mut Scene, fault: &Fault, usable: &Server) {
    let peer = (fault.place)(&scene.socket());
    scene.kubeconfig(&usable.url());
    let alone = json!({"agent_socket": scene.socket()});
    let with_api = json!({"agent_socket": scene.socket(), "kubeconfig": scene.root.join("kubeconfig")});
    for mode in Mode::BOTH.into_iter().take(if is_complete() { 2 } else { 1 }) {
        let socket = scene.socket().display().to_string();
        // The facts are all that the primary plugin gets from this agent.
        if (mode, fault.answer) != (Mode::Primary, AgentAnswer::Facts) {
            let expected = match fault.answer {
                AgentAnswer::Facts => works(),
                AgentAnswer::Failed(code) => fails(code, &[fault.why]),
                AgentAnswer::None => fails(11, &ALONE).with(&[fault.why, &socket]),
            };
            let conf = scene.conf(mode, &alone);
            scene.expect("ADD", mode, &conf, &expected);
            scene.expect("DEL", mode, &conf, &works());
        }
        let conf = scene.conf(mode, &with_api);
        let fallback = "asking the API server instead of the agent";
        let parts: &[&str] = if fault.answer == AgentAnswer::Facts { &[] } else { &[fault.why, fallback] };
        let expected = works().with(parts);
        scene.expect_as("ADD with an API server", "ADD", mode, &conf, &expected);
        scene.expect("CHECK", mode, &conf, &works());
        scene.expect("DEL", mode, &conf, &works());
    }
    drop(peer);
}

#[test]
fn each_fault_of_the_agent_is_answered_in_time() {
    let server = Server::healthy();
    let of = |fault: Fault| {
        let server = &server;
        case(fault.name, move |name| Scene::run(name, |scene| attempt(scene, &fault, server)))
    };
    let cases: Vec<Case<'_>> = sockets().into_iter().chain(conversations()).map(of).collect();
    run("agent", &cases);
}

/// "Pod not found" from the agent is final.
#[test]
fn an_unknown_pod_is_not_looked_up_again() {
    let server = Server::healthy();
    let fault = "agent: fails with code 100 (pod unknown)";
    let cases = [case(fault, |name| {
        Scene::run(name, |scene| {
            let answer = json!({"answer": "failed", "code": 100, "msg": format!("{POD}: not found in 6 attempts")});
            let _peer = says(format!("{HELLO}{answer}\n"))(&scene.socket());
            scene.kubeconfig(&server.url());
            let kubernetes = json!({"agent_socket": scene.socket(), "kubeconfig": scene.root.join("kubeconfig")});
            let conf = scene.conf(Mode::Attachment, &kubernetes);
            scene.expect("ADD", Mode::Attachment, &conf, &fails(100, &["not found"]));
            scene.expect("DEL", Mode::Attachment, &conf, &works());
        })
    })];
    run("agent", &cases);
    assert_eq!(server.requests(), [""; 0]);
}

/// The agent ends after each number of bytes of its answer; this process asks, because it takes many requests.
#[test]
fn an_agent_that_ends_at_any_byte_of_its_answer_is_no_agent() {
    let text = changed(|_| {});
    let step = if is_complete() { 1 } else { 37 };
    let fault = format!("agent: ends after 0 to {} bytes of its answer", text.len() - 1);
    let cases = [case(&fault, |fault| {
        let root = crate::support::directory::Directory::new("faults");
        let socket = root.join("agent.sock");
        (0..text.len()).step_by(step).map(|length| ends_after(fault, &socket, &text[..length])).collect()
    })];
    run("agent", &cases);
}

fn ends_after(fault: &str, socket: &Path, text: &str) -> Row {
    let kubernetes = Kubernetes {
        kubeconfig: None,
        agent_socket: Some(socket.to_owned()),
        manifests_dir: None,
        exclude_namespaces: Vec::new(),
        cni_bin_dir: None,
        timeout: TIMEOUT,
        agent_namespace: None,
        agent_pod_prefixes: Vec::new(),
        cluster_dns: Vec::new(),
    };
    let wanted = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: Some("uid-1".into()) };
    let started = Instant::now();
    let peer = says(text)(socket);
    let result = cluster::source(&kubernetes).expect("a source").facts(&wanted, true);
    drop(peer);
    let mut problems = Vec::new();
    let text = match result {
        Ok(facts) => {
            problems.push(format!("facts of half an answer: {facts:?}"));
            String::new()
        }
        Err(error) => {
            let is_right = error.number() == 11 && error.to_string().contains("the agent closed the connection");
            problems.extend((!is_right).then(|| format!("unexpected error: {error}")));
            error.to_string()
        }
    };
    Row::other(fault, "facts", 11, &text, started.elapsed(), problems)
}
