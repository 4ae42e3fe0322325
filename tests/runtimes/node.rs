//! A node with a real container runtime, and the kubelet's requests to the runtime.

use crate::support::control_groups::remove_groups;
pub(crate) use crate::support::wait::{DEADLINE, until};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

/// The TCP port of the destination on the node, and that of DNS.
const DESTINATION: [&str; 2] = ["8000", "53"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runtime {
    Containerd,
    CriO,
}

impl Runtime {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Containerd => "containerd",
            Self::CriO => "cri-o",
        }
    }

    fn endpoint(self) -> &'static str {
        match self {
            Self::Containerd => "unix:///run/containerd/containerd.sock",
            Self::CriO => "unix:///run/crio/crio.sock",
        }
    }
}

/// Dropping it ends the node with all its processes.
pub(crate) struct Node {
    pub(crate) runtime: Runtime,
    directory: PathBuf,
    /// The process that runs the node, and its standard input.
    script: Child,
    cri: Cri,
    /// The control group of all pods.
    pub(crate) group: String,
}

impl Node {
    /// Starts a node. `prepare` writes files into its directory before the runtime starts.
    pub(crate) fn start(runtime: Runtime, prepare: impl FnOnce(&Path)) -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(1);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let unique = format!("detour-runtimes-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(&unique);
        fs::create_dir_all(&directory).expect("made");
        prepare(&directory);
        let (script, cri) = boot(runtime, &directory);
        Self { runtime, directory, script, cri, group: format!("/{unique}") }
    }

    /// Ends all processes of the node, as a power failure does. Its files stay, except for those in `/run`.
    pub(crate) fn power_off(&mut self) {
        drop(self.script.stdin.take());
        let _ = self.script.wait();
    }

    /// Starts the node again.
    pub(crate) fn power_on(&mut self) {
        (self.script, self.cri) = boot(self.runtime, &self.directory);
    }

    /// Ends the runtime and starts it again; the containers keep running.
    pub(crate) fn restart_runtime(&self) {
        let pid = fs::read_to_string(self.path("runtime.pid")).expect("written by node.sh");
        self.ok(&["kill", pid.trim()]);
        until("the runtime ends", || !self.run(&["test", "-e", &format!("/proc/{}/fd", pid.trim())]).status.success());
        let configuration = |file: &str| self.path(file).display().to_string();
        let mut command = match self.runtime {
            Runtime::Containerd => self.command("containerd"),
            Runtime::CriO => self.command("crio"),
        };
        match self.runtime {
            Runtime::Containerd => command.args(["--config", &configuration("containerd.toml")]),
            Runtime::CriO => command.args(["--config", &configuration("crio.toml"), "--config-dir", ""]),
        };
        let log = fs::File::options().append(true).open(self.path(&format!("{}.log", self.runtime.name())));
        let process = command.stderr(log.expect("written by node.sh")).stdout(Stdio::null()).spawn();
        // It ends with the node.
        thread::spawn(move || process.expect("nsenter starts").wait());
        until("the runtime is ready", || self.run(&["crictl", "info"]).status.success());
    }

    /// A file in the node's directory.
    pub(crate) fn path(&self, within: &str) -> PathBuf {
        self.directory.join(within)
    }

    /// The runtime's answer to a request; see `containerd/cri/main.go`.
    pub(crate) fn ask(&self, request: Value) -> Result<Value, String> {
        self.cri.ask(request)
    }

    /// The same for a request that must succeed.
    #[track_caller]
    pub(crate) fn asked(&self, request: Value) -> Value {
        self.ask(request.clone()).unwrap_or_else(|why| panic!("{request}: {why}"))
    }

    /// A command on the node.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(self.path("enter"));
        command.arg(program);
        command
    }

    pub(crate) fn run(&self, command: &[&str]) -> Output {
        self.command(command[0]).args(&command[1..]).output().expect("nsenter starts")
    }

    /// The output of a command on the node, which must succeed.
    #[track_caller]
    pub(crate) fn ok(&self, command: &[&str]) -> String {
        let output = self.run(command);
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    /// The process ID of the node's first process.
    pub(crate) fn first_process(&self) -> u32 {
        let enter = fs::read_to_string(self.path("enter")).expect("written by node.sh");
        let mut words = enter.split_whitespace().skip_while(|word| *word != "--target");
        words.nth(1).and_then(|pid| pid.parse().ok()).expect("a process ID")
    }

    /// A path as the processes of the node see it.
    pub(crate) fn inside(&self, path: &str) -> PathBuf {
        // The link /var/run is absolute, and would lead to the machine's directory.
        let path = path.strip_prefix("/var/run").map_or_else(|| path.to_owned(), |rest| format!("/run{rest}"));
        PathBuf::from(format!("/proc/{}/root{path}", self.first_process()))
    }

    /// The log of the runtime since the node started.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path(&format!("{}.log", self.runtime.name()))).unwrap_or_default()
    }
}

/// Starts a node with its destination. Waits until the runtime answers.
fn boot(runtime: Runtime, directory: &Path) -> (Child, Cri) {
    let mut script = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/runtimes/node.sh"))
        .args([runtime.name(), &directory.display().to_string()])
        .env("TOOLS", tools())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("node.sh starts");
    let mut ready = String::new();
    let mut lines = BufReader::new(script.stdout.take().expect("a pipe"));
    while ready != "ready\n" {
        ready.clear();
        let read = lines.read_line(&mut ready).expect("readable");
        let log = directory.join(format!("{}.log", runtime.name()));
        assert_ne!(read, 0, "{} does not start: {}", runtime.name(), fs::read_to_string(log).unwrap_or_default());
    }
    let enter = directory.join("enter");
    let cri = Cri::start(Command::new(&enter).args(["cri", runtime.endpoint()]));
    let destination = Command::new(&enter)
        .arg(directory.join("image/traffic"))
        .args(["answer", "D"])
        .args(DESTINATION)
        .stdout(Stdio::null())
        .spawn();
    // It ends with the node.
    thread::spawn(move || destination.expect("nsenter starts").wait());
    (script, cri)
}

/// The directory of the tools that hack/e2e.sh builds.
pub(crate) fn tools() -> PathBuf {
    let usual = || Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("tools");
    std::env::var_os("TOOLS").map_or_else(usual, PathBuf::from)
}

impl Drop for Node {
    fn drop(&mut self) {
        self.power_off();
        if std::env::var_os("KEEP").is_none() {
            let _ = fs::remove_dir_all(&self.directory);
        }
        remove_groups(&self.group);
    }
}

/// The program `cri`: any number of requests at the same time.
struct Cri {
    input: Mutex<ChildStdin>,
    waiting: Arc<Mutex<HashMap<u64, Sender<Value>>>>,
}

impl Cri {
    fn start(command: &mut Command) -> Self {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("nsenter starts");
        let input = Mutex::new(process.stdin.take().expect("a pipe"));
        let output = BufReader::new(process.stdout.take().expect("a pipe"));
        let waiting = Arc::<Mutex<HashMap<u64, Sender<Value>>>>::default();
        let requests = Arc::clone(&waiting);
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let answer: Value = serde_json::from_str(&line).expect("JSON");
                let id = answer["id"].as_u64().expect("an ID");
                let sender = requests.lock().expect("no panic while locked").remove(&id).expect("its request");
                let _ = sender.send(answer);
            }
            // A waiting receiver fails.
            requests.lock().expect("no panic while locked").clear();
            let _ = process.wait();
        });
        Self { input, waiting }
    }

    fn ask(&self, mut request: Value) -> Result<Value, String> {
        static COUNTER: AtomicU32 = AtomicU32::new(1);
        let id = COUNTER.fetch_add(1, Ordering::Relaxed);
        request["id"] = json!(id);
        let (sender, answer) = channel();
        self.waiting.lock().expect("no panic while locked").insert(id.into(), sender);
        writeln!(self.input.lock().expect("no panic while locked"), "{request}").map_err(|why| why.to_string())?;
        let answer = answer.recv_timeout(3 * DEADLINE).map_err(|why| format!("no answer: {why}"))?;
        answer["error"].as_str().map_or(Ok(answer.clone()), |why| Err(why.to_owned()))
    }
}
