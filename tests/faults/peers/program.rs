//! Faults of the peers of the agent as a program: its API server and its clients. The plugin has another way to the API
//! server, so that its calls succeed; the agent recovers when its peer does.

use super::case::{Case, Row, case, run};
use super::healthy;
use super::scene::{Mode, Scene, TOKEN, works};
use super::server::{Connection, Request, Server, response, status};
use crate::support::agent_process::{Agent, SETTLED};
use crate::support::server::takes;
use crate::table::is_complete;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a test waits for a condition.
const DEADLINE: Duration = Duration::from_secs(60);
/// The memory that the agent may use, in KiB: a page of a list is at most 64 MiB.
const MEMORY: u64 = 160 << 10;
/// The descriptors that the agent may have in addition to those after its start: connections of the moment.
const DESCRIPTORS: usize = 8;
/// The lines that the agent may log about a fault.
const MAX_LINES: usize = 200;
/// The clients that connect to the socket at the same time.
const CLIENTS: usize = 500;
const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";

/// What the agent's API server does with a request for a list or a watch; returns whether the connection continues.
type Reaction = Arc<dyn Fn(&mut Connection, &Request, &AtomicBool) -> bool + Send + Sync>;

/// Waits until the fault ends.
fn hangs(connection: &mut Connection, healed: &AtomicBool) -> bool {
    while !healed.load(Ordering::SeqCst) && !connection.is_closed() {
        takes(Duration::from_millis(20));
    }
    false
}

fn is_watch(request: &Request) -> bool {
    request.line.contains("watch=")
}

fn chunk(line: &str) -> String {
    format!("{:x}\r\n{line}\r\n", line.len())
}

/// Returns the healthy list of a collection.
fn list(line: &str) -> Option<Vec<u8>> {
    let path = line.split([' ', '?']).nth(1)?;
    let (items, version) = match path {
        "/api/v1/pods" => (json!([healthy::pod()]), "v1"),
        "/api/v1/namespaces" => (json!([healthy::namespace()]), "v1"),
        "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions" => {
            (json!([healthy::definition()]), "k8s.cni.cncf.io/v1")
        }
        _ => return None,
    };
    let metadata = json!({"resourceVersion": "7"});
    let body = json!({"kind": "List", "apiVersion": version, "metadata": metadata, "items": items});
    Some(response(200, "content-type: application/json\r\n", body.to_string().as_bytes()))
}

/// Serves the agent: with the fault until it is healed.
fn serve(connection: &mut Connection, reaction: &Reaction, healed: &AtomicBool) {
    while let Some(request) = connection.request() {
        let answer = list(&request.line);
        let continues = match answer {
            Some(_) if !healed.load(Ordering::SeqCst) => reaction(connection, &request, healed),
            Some(_) if is_watch(&request) => {
                connection.send(STREAM.as_bytes());
                connection.hang();
                false
            }
            Some(list) => connection.send(&list),
            None => connection.send(&super::server::healthy(&request.line)),
        };
        if !continues {
            return;
        }
    }
}

/// Answers lists and watches with these bytes.
fn all(answer: Vec<u8>) -> Reaction {
    Arc::new(move |connection, _, _| connection.send(&answer))
}

/// Answers watches like this, and lists as a healthy server.
fn watches(react: impl Fn(&mut Connection, &AtomicBool) -> bool + Send + Sync + 'static) -> Reaction {
    Arc::new(move |connection, request, healed| {
        if is_watch(request) {
            return react(connection, healed);
        }
        list(&request.line).is_some_and(|list| connection.send(&list))
    })
}

/// Sends these lines on each watch and ends it.
fn watch_sends(lines: &'static [&'static str]) -> Reaction {
    watches(move |connection, _| {
        let text: String = lines.iter().map(|line| chunk(&format!("{line}\n"))).collect();
        connection.send(format!("{STREAM}{text}0\r\n\r\n").as_bytes())
    })
}

/// Faults, with what the agent logs.
fn faults() -> Vec<(&'static str, &'static str, Reaction)> {
    let sized = |size: usize| format!("{{\"items\":[{}", " ".repeat(size)).into_bytes();
    let large_event: Reaction = watches(|connection, _| {
        let part = chunk(&"x".repeat(1 << 20));
        connection.send(STREAM.as_bytes()) && (0..50).all(|_| connection.send(part.as_bytes()))
    });
    vec![
        ("hangs", "", Arc::new(|connection, _, healed| hangs(connection, healed))),
        ("closes each connection", "can't watch pods", Arc::new(|_, _, _| false)),
        (
            "resets each connection",
            "can't watch pods",
            Arc::new(|connection, _, _| {
                connection.reset();
                false
            }),
        ),
        ("answers 500", "can't watch pods", all(status(500, "", "broken"))),
        ("answers 429 with Retry-After: 3600", "can't watch pods", all(status(429, "Retry-After: 3600\r\n", "later"))),
        ("answers 401", "can't watch pods", all(status(401, "", "Unauthorized"))),
        ("answers 403", "can't watch pods", all(status(403, "", "forbidden"))),
        ("answers 404", "has no pods", all(status(404, "", "not found"))),
        ("answers 410", "can't watch pods", all(status(410, "", "too old"))),
        ("redirects to another host", "can't watch pods", all(response(302, "Location: http://127.0.0.1:1/\r\n", b""))),
        ("answers with HTML", "can't watch pods", all(response(200, "", b"<html>"))),
        (
            "answers with a list of 70 MB",
            "expected a page of at most 67108864 bytes",
            all(response(200, "", &sized(70_000_000))),
        ),
        (
            "answers with the token",
            "(redacted)",
            Arc::new(|connection, request, _| connection.send(&status(500, "", &request.authorization))),
        ),
        (
            "hangs in watches",
            "watching pods",
            watches(|connection, healed| {
                connection.send(STREAM.as_bytes());
                hangs(connection, healed)
            }),
        ),
        (
            "resets watches",
            "can't watch pods",
            watches(|connection, _| {
                connection.send(STREAM.as_bytes());
                connection.reset();
                false
            }),
        ),
        ("ends watches at once", "watching pods", watch_sends(&[])),
        ("sends garbage on watches", "watching pods", watch_sends(&["garbage", "[]", "{\"type\":\"ADDED\"}"])),
        (
            "sends 410 on watches",
            "watching pods",
            watch_sends(&[
                "{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"code\":410,\"reason\":\"Expired\",\"message\":\"too old\"}}",
            ]),
        ),
        (
            "sends only bookmarks",
            "watching pods",
            watch_sends(&[
                "{\"type\":\"BOOKMARK\",\"object\":{\"kind\":\"Pod\",\"apiVersion\":\"v1\",\"metadata\":{\"resourceVersion\":\"9\"}}}",
            ]),
        ),
        ("sends an event of 50 MB", "watching pods", large_event),
    ]
}

/// A running agent with its API server.
struct Running {
    agent: Agent,
    server: Server,
    healed: Arc<AtomicBool>,
    descriptors: usize,
}

impl Running {
    fn start(scene: &Scene, reaction: Reaction, healed: bool, logged: &str) -> Self {
        let healed = Arc::new(AtomicBool::new(healed));
        let flag = Arc::clone(&healed);
        let script = move |connection: &mut Connection| serve(connection, &reaction, &flag);
        let server = Server::start(Arc::new(script));
        let node = scene.root.join("node");
        for directory in ["sa", "etc/cni/net.d"] {
            fs::create_dir_all(node.join(directory)).expect("made");
        }
        let authority = rcgen::generate_simple_self_signed(["api".to_owned()]).expect("a certificate");
        fs::write(node.join("sa/ca.crt"), authority.cert.pem()).expect("written");
        fs::write(node.join("sa/token"), TOKEN).expect("written");
        let running = Self { agent: agent(scene, &server), server, healed, descriptors: 0 };
        running.agent.wait_for_logs(&["serving the plugin's", SETTLED, logged]);
        Self { descriptors: running.descriptors(), ..running }
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.agent.id())).expect("it runs").count()
    }

    /// Waits until the agent has no more descriptors than after its start, and returns what it violates.
    fn problems(&self, max_lines: usize) -> Vec<String> {
        let started = Instant::now();
        while self.descriptors() > self.descriptors + DESCRIPTORS && started.elapsed() < DEADLINE {
            takes(Duration::from_millis(20));
        }
        let status = fs::read_to_string(format!("/proc/{}/status", self.agent.id())).expect("it runs");
        let peak =
            status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        let (peak, now): (u64, usize) = (peak.expect("a value"), self.descriptors());
        let mut problems = Vec::new();
        if now > self.descriptors + DESCRIPTORS {
            problems.push(format!("{now} descriptors, {} after the start", self.descriptors));
        }
        if peak > MEMORY {
            problems.push(format!("the agent used {peak} KiB"));
        }
        let log = self.agent.log();
        if log.iter().any(|line| line.contains(TOKEN)) {
            problems.push("the token is in the log".into());
        }
        if log.len() > max_lines {
            problems.push(format!("{} lines in the log", log.len()));
        }
        problems
    }
}

/// Starts an agent for the node of the scene.
fn agent(scene: &Scene, server: &Server) -> Agent {
    let node = scene.root.join("node").display().to_string();
    let arguments = [
        "agent".to_owned(),
        "--platform=openshift".to_owned(),
        "--node-name=node-1".to_owned(),
        "--repair=off".to_owned(),
        "--live-policy=off".to_owned(),
        format!("--root={node}"),
        format!("--service-account={node}/sa"),
        format!("--api-server={}", server.url()),
    ];
    Agent::spawn("agent", &arguments)
}

fn socket(scene: &Scene) -> PathBuf {
    scene.root.join("node/run/detour/agent.sock")
}

/// Returns a configuration with the agent and perhaps another way to the API server.
fn conf(scene: &Scene, with_api: bool, timeout: u64) -> Value {
    let mut kubernetes = json!({"agent_socket": socket(scene), "timeout_seconds": timeout});
    if with_api {
        kubernetes["kubeconfig"] = json!(scene.root.join("kubeconfig"));
    }
    scene.conf(Mode::Attachment, &kubernetes)
}

/// Calls the plugin until the agent alone answers; returns the time.
fn recovers(scene: &Scene) -> Option<Duration> {
    let started = Instant::now();
    while started.elapsed() < DEADLINE {
        let conf = conf(scene, false, 1);
        let is_done = scene.call("ADD", Mode::Attachment, &conf).is_done();
        scene.done("DEL", Mode::Attachment, &conf);
        if is_done {
            return Some(started.elapsed());
        }
    }
    None
}

fn attempt(scene: &mut Scene, logged: &str, reaction: &Reaction, usable: &Server) {
    scene.kubeconfig(&usable.url());
    let running = Running::start(scene, Arc::clone(reaction), false, logged);
    let conf = conf(scene, true, 2);
    scene.expect("ADD", Mode::Attachment, &conf, &works().within(Duration::from_secs(2)));
    scene.expect("DEL", Mode::Attachment, &conf, &works());
    running.healed.store(true, Ordering::SeqCst);
    let recovered = recovers(scene);
    let mut problems = running.problems(MAX_LINES);
    problems.extend(recovered.is_none().then(|| format!("the agent does not recover: {:#?}", running.agent.log())));
    let fault = scene.fault.clone();
    scene.rows.push(Row::other(&fault, "the agent afterwards", 0, "", recovered.unwrap_or_default(), problems));
}

#[test]
fn an_agent_survives_each_fault_of_its_api_server() {
    let usable = Server::healthy();
    let of = |(name, logged, reaction): (&'static str, &'static str, Reaction)| {
        let usable = &usable;
        let name = format!("agent's API server: {name}");
        case(&name, move |name| Scene::run(name, |scene| attempt(scene, logged, &reaction, usable)))
    };
    run("agent", &faults().into_iter().map(of).collect::<Vec<Case<'_>>>());
}

/// Connects clients that send these bytes and nothing more.
fn clients(scene: &Scene, count: usize, bytes: &[u8]) -> Vec<UnixStream> {
    let connect = |_| {
        let mut stream = UnixStream::connect(socket(scene)).ok()?;
        // The agent may have closed the connection of an earlier client.
        let _ = stream.write_all(bytes);
        Some(stream)
    };
    (0..count).filter_map(connect).collect()
}

#[test]
fn an_agent_serves_the_plugin_beside_many_faulty_clients() {
    let inputs: [(&str, Vec<u8>); 5] = [
        ("silent", Vec::new()),
        ("with garbage", b"\xff\0GET / HTTP/1.1\r\n\r\n\n".to_vec()),
        ("with half a request", b"{\"wait_ms\": 1000, \"ask\": {\"about\"".to_vec()),
        ("with 1 MiB", vec![b'x'; 1 << 20]),
        ("that do not read the answer", b"{\"wait_ms\": 1000, \"ask\": {\"about\": \"probe\"}}\n".to_vec()),
    ];
    let of = |(name, bytes): (&str, Vec<u8>)| {
        case(&format!("agent's socket: {CLIENTS} clients {name}"), move |name| {
            Scene::run(name, |scene| {
                let running = Running::start(scene, all(Vec::new()), true, "watching pods");
                let conf = conf(scene, false, 10);
                std::thread::scope(|scope| {
                    let shared = &*scene;
                    let others = scope.spawn(|| clients(shared, CLIENTS, &bytes));
                    shared.done("ADD", Mode::Attachment, &conf);
                    shared.done("DEL", Mode::Attachment, &conf);
                    others.join().expect("no panic")
                });
                scene.expect("ADD", Mode::Attachment, &conf, &works());
                scene.expect("DEL", Mode::Attachment, &conf, &works());
                // A malformed request of root is one line.
                let problems = running.problems(MAX_LINES + CLIENTS);
                let fault = scene.fault.clone();
                scene.rows.push(Row::other(&fault, "the agent afterwards", 0, "", Duration::ZERO, problems));
            })
        })
    };
    let count = if is_complete() { inputs.len() } else { 1 };
    run("agent", &inputs.into_iter().take(count).map(of).collect::<Vec<Case<'_>>>());
}

/// The agent waits for the API server when it is killed; the plugin asks that server itself.
#[test]
fn a_call_survives_the_end_of_the_agent() {
    let usable = Server::healthy();
    let of = |signal: Signal| {
        let usable = &usable;
        case(&format!("agent: {signal} while a call waits"), move |name| {
            Scene::run(name, |scene| {
                scene.kubeconfig(&usable.url());
                // A list without the pod: the agent asks for it, and gets no answer.
                let is_asked = Arc::new(AtomicBool::new(false));
                let flag = Arc::clone(&is_asked);
                let script = move |connection: &mut Connection| {
                    while let Some(request) = connection.request() {
                        if request.line.contains("/pods/web-0") {
                            flag.store(true, Ordering::SeqCst);
                            return connection.hang();
                        }
                        if is_watch(&request) {
                            connection.send(STREAM.as_bytes());
                            return connection.hang();
                        }
                        let empty = json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": []});
                        connection.send(&response(200, "", empty.to_string().as_bytes()));
                    }
                };
                let first = Running::start(scene, all(Vec::new()), true, "watching pods");
                let second = Server::start(Arc::new(script));
                first.agent.end(Signal::SIGTERM);
                let agent = agent(scene, &second);
                agent.wait_for_logs(&["watching pods", "serving the plugin's", SETTLED]);
                let conf = conf(scene, true, 10);
                let started = Instant::now();
                let child = scene.start("ADD", Mode::Attachment, &conf);
                while !is_asked.load(Ordering::SeqCst) {
                    assert!(started.elapsed() < DEADLINE, "the agent does not ask");
                    takes(Duration::from_millis(5));
                }
                agent.end(signal);
                let called = super::scene::ended(child, started);
                scene.judge("ADD", Mode::Attachment, &called, &works().within(Duration::from_secs(5)));
                scene.expect("DEL", Mode::Attachment, &conf, &works());
                drop(first.server);
            })
        })
    };
    run("agent", &[of(Signal::SIGKILL), of(Signal::SIGTERM)]);
}
