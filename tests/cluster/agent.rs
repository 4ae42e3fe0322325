//! Faults of the agent as the plugin sees it through the socket. `tests/agent` has the fallback to the
//! API server.

use crate::scene::{manifests, namespace, pod, settings, wanted};
use crate::server::takes;
use crate::support::directory::Directory;
use crate::support::listener::{foreign_listener, listener, that_accepts_nothing};
use detour_cni::cluster;
use detour_cni::cni::{Error, Kubernetes};
use nix::sys::stat::Mode as Permissions;
use serde_json::{Value, json};
use std::any::Any;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

const HELLO: &str = "{\"version\":\"0.2.0\",\"facts\":3}\n";

/// Returns the error of a request for facts about the pod.
fn error(socket: &Path, timeout: Duration) -> Option<Error> {
    let conf = Kubernetes { agent_socket: Some(socket.to_owned()), ..settings(timeout) };
    cluster::source(&conf).expect("a source").facts(&wanted(), true).err()
}

/// Returns the agent's correct answer about the pod.
fn facts() -> Value {
    let dir = Directory::new("agent-facts");
    fs::write(dir.join("pod.json"), pod("uid-1").to_string()).expect("written");
    fs::write(dir.join("namespace.json"), namespace().to_string()).expect("written");
    let facts = cluster::source(&manifests(&dir)).expect("a source").facts(&wanted(), true).expect("the pod's facts");
    json!({"answer": "facts", "pod": facts.pod, "namespace": facts.namespace})
}

/// The answer with a change.
fn changed(facts: &Value, change: impl FnOnce(&mut Value)) -> String {
    let mut answer = facts.clone();
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
    Usable,
    /// No answer, for this reason, which the error contains.
    Unusable(&'static str),
    /// The agent's error: the code for the runtime, and its text.
    Failed(u32, &'static str),
}

use AgentAnswer::{Failed, Unusable, Usable};

type Fault = (&'static str, AgentAnswer, Place);

fn nothing(place: fn(&Path)) -> Place {
    Box::new(move |path| {
        place(path);
        Box::new(())
    })
}

fn symlink(to: impl AsRef<Path>, path: &Path) {
    std::os::unix::fs::symlink(to, path).expect("made");
}

fn sockets(facts: &Value) -> [Fault; 11] {
    let no_agent = || Unusable("no agent listens on the socket");
    let refused = || Unusable("connection refused");
    let text = changed(facts, |_| {});
    let own_socket: Place = Box::new(move |path| {
        let own = path.with_file_name("own.sock");
        symlink(&own, path);
        says(text.as_str())(&own)
    });
    [
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
    ]
}

/// Sends the text byte by byte from this one on, each after a pause.
fn slow(text: String, pause: Duration, from: usize) -> Place {
    serves(move |mut stream| {
        request(stream);
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

fn conversations(facts: &Value) -> [Fault; 33] {
    let all = || changed(facts, |_| {});
    let before_the_end = all().len() - 3;
    let pause = Duration::from_millis(100);
    let nested = format!("{HELLO}{{\"answer\":{}\n", "[".repeat(1 << 20));
    let large = changed(facts, |answer| answer["pod"]["labels"] = json!({"a": "x".repeat(50_000_000)}));
    let later = changed(facts, |answer| answer["pod"]["later"] = json!({}));
    let closed = || Unusable("the agent closed the connection");
    let other = || Unusable("answered another request");
    let (no_greeting, no_answer) = (|| Unusable("no greeting"), || Unusable("no answer"));
    let half = || changed(facts, |_| {})[..90].to_owned();
    let with = |change: fn(&mut Value)| says(changed(facts, change));
    let failed =
        |code: u32, msg: &str| says(format!("{HELLO}{}\n", json!({"answer": "failed", "code": code, "msg": msg})));
    [
        ("hangs after accept", Unusable("no greeting: timeout"), serves(hang)),
        ("hangs in the greeting", Unusable("no greeting: timeout"), stops_after(&HELLO[..9])),
        ("hangs after the greeting", Unusable("no answer: timeout"), stops_after(HELLO)),
        ("hangs in the answer", Unusable("no answer: timeout"), stops_after(half())),
        ("sends one byte each 100 ms", Unusable("timeout; the agent is stuck or too slow"), slow(all(), pause, 0)),
        ("answers after 0.3 s", Usable, slow(all(), pause, before_the_end)),
        ("closes after accept", closed(), serves(|_| {})),
        ("closes after the greeting", closed(), says(HELLO)),
        ("closes in the answer", closed(), says(half())),
        ("an answer without line end", closed(), says(changed(facts, |_| {}).trim_end())),
        ("facts of another UID", other(), with(|a| a["pod"]["uid"] = "uid-7".into())),
        ("facts of another pod", other(), with(|a| a["pod"]["name"] = "web-7".into())),
        ("facts of another namespace", other(), with(|a| a["pod"]["namespace"] = "prod".into())),
        ("another namespace object", other(), with(|a| a["namespace"]["name"] = "prod".into())),
        ("facts without the namespace", other(), with(|a| a["namespace"] = Value::Null)),
        ("facts without the UID", Usable, with(|a| a["pod"]["uid"] = Value::Null)),
        ("facts without a pod", no_answer(), with(|a| drop(a.as_object_mut().map(|a| a.remove("pod"))))),
        ("the answer to another request", other(), says(format!("{HELLO}{{\"answer\":\"done\"}}\n"))),
        ("a later answer", other(), says(format!("{HELLO}{{\"answer\":\"later\"}}\n"))),
        ("an earlier version", Unusable("earlier version"), says(format!("{{\"version\":\"0.0.9\"}}\n{facts}\n"))),
        ("unknown fields", Usable, says(later.replace("\"facts\":3", "\"facts\":9,\"later\":{}"))),
        ("data after the answer", Usable, says(changed(facts, |_| {}) + "more\n{\"answer\":\"done\"}\n")),
        ("data in the line of the answer", no_answer(), says(format!("{HELLO}{facts} x\n"))),
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
    ]
}

/// Checks what the plugin makes of a fault.
fn check((name, answer, place): Fault, socket: &Path, timeout: Duration) {
    fs::create_dir(socket.parent().expect("a directory")).expect("made");
    let _peer = place(socket);
    let got = error(socket, timeout);
    let next_step = "check that the agent's pod (detour-agent-…) runs on this node";
    let (code, parts) = match answer {
        Usable => (None, vec![]),
        Unusable(why) => (Some(11), vec!["no facts from the agent", next_step, why, socket.to_str().expect("text")]),
        Failed(code, why) => (Some(code), vec![why]),
    };
    assert_eq!(got.as_ref().map(Error::number), code, "{name}: {got:?}");
    let text = got.map(|error| error.to_string()).unwrap_or_default();
    assert!(code.is_none() || text.contains("pod shop/web-0"), "{name}: {text}");
    assert!(parts.iter().all(|part| text.contains(part)), "{name}: {text}; expected {parts:?}");
}

/// An answer that can be used arrives in time on a loaded machine, too; only what hangs reaches the timeout.
#[test]
fn each_fault_of_the_agent_is_an_error_with_its_reason() {
    let facts = facts();
    let root = Directory::new("agent");
    let faults = sockets(&facts).into_iter().chain(conversations(&facts)).enumerate();
    thread::scope(|scope| {
        for (at, fault) in faults {
            let socket = root.join(format!("{at}/agent.sock"));
            match fault.1 {
                Unusable(why) if why.contains("timeout") => {
                    drop(scope.spawn(move || check(fault, &socket, Duration::from_secs(5))));
                }
                _ => check(fault, &socket, Duration::from_secs(60)),
            }
        }
    });
}
