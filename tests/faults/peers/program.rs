//! Faults of the peers of the agent as a program: its API server and its clients. The plugin has another way to the API
//! server, so that its calls succeed; the agent recovers when its peer does.

use super::expected::works;
use super::server::{Connection, Request, Script, Server, healthy, kubeconfig, namespace, pod, response, status};
use super::{try_all, with_sources};
use crate::call::{Answer, Call, ended};
use crate::subject::{Mode, Subject, Verb};
use crate::support::agent_process::{Agent, SETTLED, TOKEN};
use crate::support::server::takes;
use crate::table::{Table, is_complete};
use nix::sys::signal::Signal;
use serde_json::json;
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MODES: [(Mode, &str); 1] = [(Mode::Redirect, "nftables")];
/// How long a test waits for a condition.
const DEADLINE: Duration = Duration::from_secs(60);
/// The memory that the agent may use, in KiB: a page of a list is at most 64 MiB.
const MEMORY: u64 = 160 << 10;
/// The descriptors that the agent may have in addition to those after its start: connections of the moment.
const DESCRIPTORS: usize = 8;
/// The lines that the agent may log about a fault.
const MAX_LINES: usize = 200;
/// The clients that connect to the socket at the same time.
const CLIENTS: usize = 48;
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
        "/api/v1/pods" => (json!([pod()]), "v1"),
        "/api/v1/namespaces" => (json!([namespace()]), "v1"),
        "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions" => (json!([]), "k8s.cni.cncf.io/v1"),
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
            None => connection.send(&healthy(&request.line)),
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
fn faults() -> Vec<(String, (&'static str, Reaction))> {
    const LATE: &str = "can't watch pods";
    let sized = |size: usize| format!("{{\"items\":[{}", " ".repeat(size)).into_bytes();
    let resets: Reaction = Arc::new(|connection, _, _| {
        connection.reset();
        false
    });
    let echoes: Reaction = Arc::new(|connection, request, _| connection.send(&status(500, "", &request.authorization)));
    let starts_and = |react: fn(&mut Connection, &AtomicBool) -> bool| {
        watches(move |connection, healed| connection.send(STREAM.as_bytes()) && react(connection, healed))
    };
    let resets_watches = starts_and(|connection, _| {
        connection.reset();
        false
    });
    let large_event = starts_and(|connection, _| {
        let part = chunk(&"x".repeat(1 << 20));
        (0..50).all(|_| connection.send(part.as_bytes()))
    });
    let expired = watch_sends(&[
        r#"{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}"#,
    ]);
    let bookmarks = watch_sends(&[
        r#"{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"9"}}}"#,
    ]);
    let redirect = response(302, "Location: http://127.0.0.1:1/\r\n", b"");
    let faults: [(&str, &str, Reaction); 18] = [
        ("hangs", "", Arc::new(|connection, _, healed| hangs(connection, healed))),
        ("closes each connection", LATE, Arc::new(|_, _, _| false)),
        ("resets each connection", LATE, resets),
        ("answers 500", LATE, all(status(500, "", "broken"))),
        ("answers 429 with Retry-After: 3600", LATE, all(status(429, "Retry-After: 3600\r\n", "later"))),
        ("answers 401", LATE, all(status(401, "", "Unauthorized"))),
        ("answers 403", LATE, all(status(403, "", "forbidden"))),
        ("answers 404", "has no pods", all(status(404, "", "not found"))),
        ("answers 410", LATE, all(status(410, "", "too old"))),
        ("redirects to another host", LATE, all(redirect)),
        ("answers with HTML", LATE, all(response(200, "", b"<html>"))),
        ("sends a list of 70 MB", "page of at most 67108864 bytes", all(response(200, "", &sized(70_000_000)))),
        ("answers with the token", "(redacted)", echoes),
        ("resets watches", LATE, resets_watches),
        ("sends garbage on watches", "watching pods", watch_sends(&["garbage", "[]", r#"{"type":"ADDED"}"#])),
        ("sends 410 on watches", "watching pods", expired),
        ("sends only bookmarks", "watching pods", bookmarks),
        ("sends an event of 50 MB", "watching pods", large_event),
    ];
    faults.map(|(name, logged, reaction)| (format!("agent's API server: {name}"), (logged, reaction))).into()
}

/// A running agent with its API server.
struct Running {
    agent: Agent,
    healed: Arc<AtomicBool>,
    descriptors: usize,
}

impl Running {
    fn start(subject: &Subject, reaction: Reaction, healed: bool, logged: &str) -> Self {
        let healed = Arc::new(AtomicBool::new(healed));
        let flag = Arc::clone(&healed);
        let script = move |connection: &mut Connection| serve(connection, &reaction, &flag);
        Self::with(subject, Arc::new(script), healed, logged)
    }

    fn with(subject: &Subject, script: Script, healed: Arc<AtomicBool>, logged: &str) -> Self {
        let server = Server::start(script);
        let running = Self { agent: agent(subject, &server), healed, descriptors: 0 };
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

fn socket(subject: &Subject) -> PathBuf {
    subject.directory().join("node/run/detour/agent.sock")
}

/// Starts an agent for the node of the subject.
fn agent(subject: &Subject, server: &Server) -> Agent {
    let more = ["--repair=off", "--live-policy=off"];
    Agent::on_openshift("agent", &subject.directory().join("node"), &server.url(), &more)
}

/// Calls the plugin until the agent alone answers.
fn recovers(subject: &Subject) -> Result<(), String> {
    let (started, expected) = (Instant::now(), works());
    while started.elapsed() < DEADLINE {
        let call = with_sources(subject.call(Verb::Add), json!({"agent_socket": socket(subject)}), &expected);
        let ended = call.run();
        subject.done(Verb::Del);
        if ended.answer == Answer::Done {
            return Ok(());
        }
    }
    Err("the agent does not recover".to_owned())
}

fn attempt(name: &str, (logged, reaction): &(&str, Reaction), usable: &str, subject: &Subject, table: &mut Table) {
    let path = kubeconfig(subject.directory(), &json!({"server": usable}));
    let expected = works().within(2);
    let kubernetes = json!({"agent_socket": socket(subject), "kubeconfig": path});
    let running = Running::start(subject, Arc::clone(reaction), false, logged);
    let make = |call: Call| with_sources(call, kubernetes, &expected).run();
    subject.attempt(table, Verb::Add, (name, ""), make, |ended| {
        expected.check(ended)?;
        subject.done(Verb::Del);
        running.healed.store(true, Ordering::SeqCst);
        recovers(subject)?;
        let problems = running.problems(MAX_LINES);
        if problems.is_empty() { Ok(()) } else { Err(format!("{problems:?}: {:#?}", running.agent.log())) }
    });
    drop(running);
    fs::remove_dir_all(subject.directory().join("node")).expect("removed");
}

#[test]
fn an_agent_survives_each_fault_of_its_api_server() {
    let url = Server::healthy().url();
    try_all("agent", &MODES, &faults(), |name, fault, subject, table| attempt(name, fault, &url, subject, table));
}

/// Connects clients that send these bytes and nothing more.
fn clients(socket: &PathBuf, bytes: &[u8]) -> Vec<UnixStream> {
    let connect = |_| {
        let mut stream = UnixStream::connect(socket).ok()?;
        // The agent may have closed the connection of an earlier client.
        let _ = stream.write_all(bytes);
        Some(stream)
    };
    (0..CLIENTS).filter_map(connect).collect()
}

#[test]
fn an_agent_serves_the_plugin_beside_many_faulty_clients() {
    let inputs: [(&str, &[u8]); 5] = [
        ("with half a request", b"{\"wait_ms\": 1000, \"ask\": {\"about\""),
        ("silent", b""),
        ("with garbage", b"\xff\0GET / HTTP/1.1\r\n\r\n\n"),
        ("with 1 MiB", &[b'x'; 1 << 20]),
        ("that do not read the answer", b"{\"wait_ms\": 1000, \"ask\": {\"about\": \"probe\"}}\n"),
    ];
    let count = if is_complete() { inputs.len() } else { 1 };
    let faults = inputs.map(|(name, bytes)| (format!("agent's socket: {CLIENTS} clients {name}"), bytes));
    try_all("agent", &MODES, &faults[..count], |name, bytes, subject, table| {
        let running = Running::start(subject, all(Vec::new()), true, "watching pods");
        let (socket, expected) = (socket(subject), works().within(10));
        let make = |call: Call| {
            let call = with_sources(call, json!({"agent_socket": socket}), &expected);
            std::thread::scope(|scope| {
                let others = scope.spawn(|| clients(&socket, bytes));
                let ended = call.run();
                others.join().expect("no panic");
                ended
            })
        };
        subject.attempt(table, Verb::Add, (name, ""), make, |ended| {
            expected.check(ended)?;
            // A malformed request of root is one line.
            let problems = running.problems(MAX_LINES + CLIENTS);
            if problems.is_empty() { Ok(()) } else { Err(format!("{problems:?}")) }
        });
        drop(running);
        fs::remove_dir_all(subject.directory().join("node")).expect("removed");
    });
}

/// The agent waits for the API server when it is killed; the plugin asks that server itself.
#[test]
fn a_call_survives_the_end_of_the_agent() {
    let usable = Server::healthy();
    let signals =
        [Signal::SIGKILL, Signal::SIGTERM].map(|signal| (format!("agent: {signal} while a call waits"), signal));
    try_all("agent", &MODES, &signals, |name, signal, subject, table| {
        let path = kubeconfig(subject.directory(), &json!({"server": usable.url()}));
        // Lists without the pod: the agent asks for it, and gets no answer.
        let is_asked = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&is_asked);
        let script: Script = Arc::new(move |connection: &mut Connection| {
            while let Some(request) = connection.request() {
                if request.line.contains("/pods/web-0") {
                    flag.store(true, Ordering::SeqCst);
                    return connection.hang();
                }
                if is_watch(&request) {
                    connection.send(STREAM.as_bytes());
                    return connection.hang();
                }
                let metadata = json!({"resourceVersion": "7"});
                let empty = json!({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": []});
                connection.send(&response(200, "", empty.to_string().as_bytes()));
            }
        });
        let Running { agent, .. } = Running::with(subject, script, Arc::default(), "watching pods");
        let expected = works().within(10);
        let kubernetes = json!({"agent_socket": socket(subject), "kubeconfig": path});
        let make = |call: Call| {
            let started = Instant::now();
            let child = with_sources(call, kubernetes, &expected).start();
            while !is_asked.load(Ordering::SeqCst) {
                assert!(started.elapsed() < DEADLINE, "the agent does not ask");
                takes(Duration::from_millis(5));
            }
            agent.end(*signal);
            ended(child, DEADLINE)
        };
        subject.attempt(table, Verb::Add, (name, ""), make, |ended| expected.check(ended));
        fs::remove_dir_all(subject.directory().join("node")).expect("removed");
    });
}
