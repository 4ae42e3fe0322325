//! Faults of the agent as the plugin sees it through the socket: the plugin asks the API server instead. Without
//! one, it fails in time.

use super::expected::{Expected, fails, works};
use super::listener::{foreign_listener, listener, that_accepts_nothing};
use super::server::{Server, kubeconfig};
use super::{try_all, with_sources};
use crate::attachment::Slot;
use crate::call::Call;
use crate::subject::{FACTS, Mode, Subject, Verb};
use crate::support::directory::Directory;
use crate::support::server::takes;
use crate::table::{Table, is_complete};
use detour_cni::cluster;
use detour_cni::cni::Kubernetes;
use detour_cni::pod::PodRef;
use nix::sys::stat::Mode as Permissions;
use serde_json::{Value, json};
use std::any::Any;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

const MODES: [(Mode, &str); 1] = [(Mode::Redirect, "nftables")];
const HELLO: &str = "{\"version\":\"0.2.0\",\"facts\":3}\n";
/// What the error of a call without an API server contains.
const ALONE: [&str; 2] = ["no facts from the agent", "check that the agent's pod (detour-agent-…) runs on this node"];
const FALLBACK: &str = "asking the API server instead of the agent";

/// Sources of facts: the agent's socket, or a directory of manifests.
fn sources(agent_socket: Option<PathBuf>, manifests_dir: Option<PathBuf>) -> Kubernetes {
    Kubernetes {
        kubeconfig: None,
        agent_socket,
        manifests_dir,
        exclude_namespaces: Vec::new(),
        cni_bin_dir: None,
        timeout: Duration::from_secs(1),
        agent_namespace: None,
        agent_pod_prefixes: Vec::new(),
        cluster_dns: Vec::new(),
    }
}

fn pod() -> PodRef {
    PodRef { namespace: "shop".into(), name: "web-0".into(), uid: None }
}

/// Returns the agent's correct answer about the pod.
fn facts() -> Value {
    let configuration = Slot::Detour.with(FACTS).configuration();
    let manifests = configuration["kubernetes"]["manifests_dir"].as_str().expect("a path").into();
    let source = cluster::source(&sources(None, Some(manifests))).expect("a source");
    let facts = source.facts(&pod(), true).expect("the pod's facts");
    let mut answer = json!({"answer": "facts", "pod": facts.pod, "namespace": facts.namespace});
    answer["pod"]["uid"] = "uid-1".into();
    answer
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

/// What the plugin makes of the agent's answer.
enum AgentAnswer {
    Facts,
    /// None, for this reason, which the log or the error contains.
    None(&'static str),
    /// The agent's error: the code for the runtime, and its text.
    Failed(u64, &'static str),
}

use AgentAnswer::{Facts as Usable, Failed, None as Unusable};

type Faults = Vec<(String, (AgentAnswer, Place))>;

fn nothing(place: fn(&Path)) -> Place {
    Box::new(move |path| {
        place(path);
        Box::new(())
    })
}

fn symlink(to: impl AsRef<Path>, path: &Path) {
    std::os::unix::fs::symlink(to, path).expect("made");
}

fn sockets() -> Faults {
    let no_agent = || Unusable("no agent listens on the socket");
    let refused = || Unusable("connection refused");
    let own_socket: Place = Box::new(|path| {
        let own = path.with_file_name("own.sock");
        symlink(&own, path);
        says(changed(|_| {}))(&own)
    });
    let faults: [(&str, AgentAnswer, Place); 11] = [
        ("the socket is missing", no_agent(), nothing(|_| {})),
        ("the socket's process has ended", no_agent(), nothing(|path| drop(UnixListener::bind(path)))),
        ("the queue is full", Unusable("queue is full"), Box::new(|path| Box::new(that_accepts_nothing(path)))),
        ("accepts nothing", Unusable("no greeting: timeout"), Box::new(|path| Box::new(UnixListener::bind(path)))),
        ("another user's", Unusable("expected root as listener"), Box::new(|path| Box::new(foreign_listener(path)))),
        ("a file", refused(), nothing(|path| fs::write(path, "x").expect("written"))),
        ("a directory", refused(), nothing(|path| fs::create_dir(path).expect("made"))),
        ("a FIFO", refused(), nothing(|path| nix::unistd::mkfifo(path, Permissions::S_IRUSR).expect("made"))),
        ("a dangling symbolic link", no_agent(), nothing(|path| symlink("/nowhere", path))),
        ("a loop of links", Unusable("too many symbolic links"), nothing(|path| symlink(path, path))),
        ("a symbolic link to the socket", Usable, own_socket),
    ];
    faults.map(|(name, answer, place)| (format!("agent's socket: {name}"), (answer, place))).into()
}

/// Sends the text byte by byte from this one on, each after a pause.
fn slow(pause: Duration, from: usize) -> Place {
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
}

fn conversations() -> Faults {
    let before_the_end = changed(|_| {}).len() - 3;
    let pause = Duration::from_millis(100);
    let nested = format!("{HELLO}{{\"answer\":{}\n", "[".repeat(1 << 20));
    let large = changed(|answer| answer["pod"]["labels"] = json!({"a": "x".repeat(50_000_000)}));
    let later = changed(|answer| answer["pod"]["later"] = json!({}));
    let closed = || Unusable("the agent closed the connection");
    let other = || Unusable("answered another request");
    let (no_greeting, no_answer) = (|| Unusable("no greeting"), || Unusable("no answer"));
    let half = || changed(|_| {})[..90].to_owned();
    let with = |change: fn(&mut Value)| says(changed(change));
    let failed =
        |code: u64, msg: &str| says(format!("{HELLO}{}\n", json!({"answer": "failed", "code": code, "msg": msg})));
    let faults: [(&str, AgentAnswer, Place); 34] = [
        ("hangs after accept", Unusable("no greeting: timeout"), serves(hang)),
        ("hangs in the greeting", Unusable("no greeting: timeout"), stops_after(&HELLO[..9])),
        ("hangs after the greeting", Unusable("no answer: timeout"), stops_after(HELLO)),
        ("hangs in the answer", Unusable("no answer: timeout"), stops_after(half())),
        ("sends one byte each 100 ms", Unusable("timeout; the agent is stuck or too slow"), slow(pause, 0)),
        ("answers after 0.3 s", Usable, slow(pause, before_the_end)),
        ("closes after accept", closed(), serves(|_| {})),
        ("closes after the greeting", closed(), says(HELLO)),
        ("closes in the answer", closed(), says(half())),
        ("an answer without line end", closed(), says(changed(|_| {}).trim_end())),
        ("facts of another UID", other(), with(|a| a["pod"]["uid"] = "uid-7".into())),
        ("facts of another pod", other(), with(|a| a["pod"]["name"] = "web-7".into())),
        ("facts of another namespace", other(), with(|a| a["pod"]["namespace"] = "prod".into())),
        ("another namespace object", other(), with(|a| a["namespace"]["name"] = "prod".into())),
        ("facts without the namespace", other(), with(|a| a["namespace"] = Value::Null)),
        ("facts without the UID", Usable, with(|a| a["pod"]["uid"] = Value::Null)),
        ("facts without a pod", other(), with(|a| drop(a.as_object_mut().map(|a| a.remove("pod"))))),
        ("the answer to another request", other(), says(format!("{HELLO}{{\"answer\":\"done\"}}\n"))),
        ("a later answer", Unusable("not support the request"), says(format!("{HELLO}{{\"answer\":\"later\"}}\n"))),
        ("an earlier version", Unusable("earlier version"), says(format!("{{\"version\":\"0.0.9\"}}\n{}\n", facts()))),
        ("unknown fields", Usable, says(later.replace("\"facts\":3", "\"facts\":9,\"later\":{}"))),
        ("data after the answer", Usable, says(changed(|_| {}) + "more\n{\"answer\":\"done\"}\n")),
        ("data in the line of the answer", no_answer(), says(format!("{HELLO}{} x\n", facts()))),
        ("not the protocol (SSH)", no_greeting(), says("SSH-2.0-OpenSSH_9.2\r\n")),
        ("binary data", no_greeting(), says([0xff, 0, 0xfe, b'\n'])),
        ("a pod of a wrong type", no_answer(), with(|a| a["pod"]["containers"] = json!({"a": 1}))),
        ("1 MiB of nested JSON", no_answer(), says(nested)),
        ("50 MB", no_answer(), says(large)),
        ("an endless greeting", no_greeting(), endless("", "x")),
        ("an endless answer", no_answer(), endless(HELLO, "{}, ")),
        ("endless lines", no_greeting(), endless("", "\n")),
        ("fails with code 101", Failed(101, "no right"), failed(101, "no right")),
        ("fails with code 999", Failed(11, "odd code"), failed(999, "odd code")),
        ("fails with control characters", Failed(11, "\\u{1b}[2J"), failed(11, "\u{1b}[2J")),
    ];
    faults.map(|(name, answer, place)| (format!("agent: {name}"), (answer, place))).into()
}

/// Tries a fault with and without an API server as fallback.
fn attempt(name: &str, (answer, place): &(AgentAnswer, Place), usable: &str, subject: &Subject, table: &mut Table) {
    let path = kubeconfig(subject.directory(), &json!({"server": usable}));
    let run = subject.directory().join("run");
    let socket = run.join("agent.sock");
    let shown = socket.display().to_string();
    let alone = json!({"agent_socket": socket});
    let with_api = json!({"agent_socket": socket, "kubeconfig": path});
    let in_each_case: [(&str, &Value, Expected); 2] = match answer {
        Usable => [("alone", &alone, works()), ("with an API server", &with_api, works())],
        Unusable(why) => [
            ("alone", &alone, fails(11, &ALONE).with(&[why, &shown])),
            ("with an API server", &with_api, works().with(&[why, FALLBACK])),
        ],
        Failed(code, why) => {
            [("alone", &alone, fails(*code, &[why])), ("with an API server", &with_api, works().with(&[why, FALLBACK]))]
        }
    };
    for (case, kubernetes, expected) in in_each_case {
        let make = |call: Call| {
            fs::create_dir(&run).expect("made");
            let peer = place(&socket);
            let ended = with_sources(call, kubernetes.clone(), &expected).run();
            drop(peer);
            fs::remove_dir_all(&run).expect("removed");
            ended
        };
        let fault = format!("{name}, {case}");
        subject.attempt(table, Verb::Add, (&fault, ""), make, |ended| expected.check(ended));
    }
}

#[test]
fn each_fault_of_the_agent_is_answered_in_time() {
    let url = Server::healthy().url();
    let faults: Faults = sockets().into_iter().chain(conversations()).collect();
    try_all("agent", &MODES, &faults, |name, fault, subject, table| attempt(name, fault, &url, subject, table));
}

/// "Pod not found" from the agent is final.
#[test]
fn an_unknown_pod_is_not_looked_up_again() {
    let server = Server::healthy();
    let answer = json!({"answer": "failed", "code": 100, "msg": "pod shop/web-0: not found in 6 attempts"});
    let faults = [("agent: fails with code 100 (pod unknown)".to_owned(), format!("{HELLO}{answer}\n"))];
    try_all("agent", &MODES, &faults, |name, text, subject, table| {
        let socket = subject.directory().join("agent.sock");
        let path = kubeconfig(subject.directory(), &json!({"server": server.url()}));
        let _peer = says(text.as_str())(&socket);
        let expected = fails(100, &["not found"]);
        let kubernetes = json!({"agent_socket": socket, "kubeconfig": path});
        let make = |call: Call| with_sources(call, kubernetes, &expected).run();
        subject.attempt(table, Verb::Add, (name, ""), make, |ended| expected.check(ended));
    });
    assert_eq!(server.requests(), [""; 0]);
}

/// The agent ends after each number of bytes of its answer; this process asks, because it takes many requests.
#[test]
fn an_agent_that_ends_at_any_byte_of_its_answer_is_no_agent() {
    let text = changed(|_| {});
    let root = Directory::new("faults");
    let socket = root.join("agent.sock");
    for length in (0..text.len()).step_by(if is_complete() { 1 } else { 37 }) {
        let _peer = says(&text[..length])(&socket);
        let source = cluster::source(&sources(Some(socket.clone()), None)).expect("a source");
        let error = source.facts(&pod(), true).expect_err("half an answer");
        let is_right = error.number() == 11 && error.to_string().contains("the agent closed the connection");
        assert!(is_right, "after {length} bytes: {error}");
    }
}
