//! A node with a pod, peers that fail, and calls of the plugin whose answer, time, memory and traces are observed.

use super::case::Row;
use super::healthy;
use crate::call::{Answer, Ended};
use crate::ruleset::{Reader, Ruleset};
use crate::support::directory::Directory;
use crate::support::netns_pod::Pod;
use crate::support::private_node::{left_in_state, on_a_node_with};
use crate::support::program::program;
use crate::table::{is_answer, is_complete};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The bearer token of all requests; it must not appear in any output.
pub(crate) const TOKEN: &str = "s3cr3t-t0ken-0f-this-n0de";
/// The pod of all calls.
pub(crate) const POD: &str = "pod shop/web-0";
/// `timeout_seconds` of the configuration, if the fault needs no longer one.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(1);
/// How much longer than its timeout a call may take. The sample must not depend on the speed of the machine.
fn slack() -> Duration {
    Duration::from_secs(if is_complete() { 1 } else { 30 })
}

/// The memory that a call may use, in KiB, whatever a peer sends: a response has at most 16 MiB.
const MEMORY: u64 = 80 << 10;
/// The interval at which memory is read while a call runs, in milliseconds.
const SAMPLE_MS: u16 = 5;

/// How the plugin is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Attachment,
    Primary,
}

impl Mode {
    pub(crate) const BOTH: [Self; 2] = [Self::Attachment, Self::Primary];

    fn ifname(self) -> &'static str {
        if self == Self::Primary { "eth0" } else { "net1" }
    }
}

/// A node whose state directory is private, with one pod.
pub(crate) struct Scene {
    pub(crate) root: Directory,
    pub(crate) pod: Pod,
    reader: Reader,
    /// The state of the pod before any ADD.
    before: Ruleset,
    /// The calls so far.
    pub(crate) rows: Vec<Row>,
    pub(crate) fault: String,
    /// The path of the network namespace, if it is not that of the pod.
    pub(crate) netns: Option<PathBuf>,
}

/// What a call must do.
#[derive(Debug, Clone)]
pub(crate) struct Expected {
    /// The accepted codes; empty for success.
    pub(crate) codes: Vec<u64>,
    /// What the error must contain.
    pub(crate) parts: Vec<String>,
    /// The timeout that limits the call.
    pub(crate) within: Duration,
    pub(crate) memory: u64,
    /// Whether the error names the pod.
    pub(crate) names_pod: bool,
}

/// A call that fails with this code and a text that contains these parts.
pub(crate) fn fails(code: u64, parts: &[&str]) -> Expected {
    Expected { codes: vec![code], ..works().with(parts) }
}

/// A call that succeeds.
pub(crate) fn works() -> Expected {
    Expected { codes: Vec::new(), parts: Vec::new(), within: TIMEOUT, memory: MEMORY, names_pod: true }
}

impl Expected {
    pub(crate) fn with(mut self, parts: &[&str]) -> Self {
        self.parts.extend(parts.iter().map(ToString::to_string));
        self
    }

    pub(crate) fn within(self, within: Duration) -> Self {
        Self { within, ..self }
    }

    /// The error of an executable names the executable.
    pub(crate) fn without_pod(self) -> Self {
        Self { names_pod: false, ..self }
    }
}

/// A call that has ended.
#[derive(Debug)]
pub(crate) struct Called {
    pub(crate) ended: Ended,
    stdout: String,
    /// The maximum resident memory in KiB, as far as it was seen.
    memory: u64,
}

impl Scene {
    /// Runs `test` on a node of its own; returns its rows.
    pub(crate) fn run(fault: &str, test: impl FnOnce(&mut Self) + Send) -> Vec<Row> {
        on_a_node_with("size=16m", || {
            let pod = Pod::new();
            let reader = Reader::new(&pod.netns());
            let before = reader.read();
            let root = Directory::new("faults");
            fs::create_dir(root.join("bin")).expect("made");
            fs::create_dir(root.join("run")).expect("made");
            let mut scene = Self { root, pod, reader, before, rows: Vec::new(), fault: fault.to_owned(), netns: None };
            scene.plugin("default", &healthy::result("eth0", "10.88.0.2/24"));
            scene.plugin("second", &healthy::result("net1", "10.99.0.2/24"));
            test(&mut scene);
            scene.rows
        })
    }

    /// Writes an executable that prints a result for ADD.
    fn plugin(&self, name: &str, result: &Value) {
        self.script(name, &format!("if [ \"$CNI_COMMAND\" = ADD ]; then printf '%s' '{result}'; fi"));
    }

    /// Writes an executable that runs a shell script.
    pub(crate) fn script(&self, name: &str, text: &str) {
        self.executable(name, format!("#!/bin/sh\n{text}\n").as_bytes());
    }

    pub(crate) fn executable(&self, name: &str, content: &[u8]) {
        let path = self.root.join("bin").join(name);
        let _ = fs::remove_file(&path);
        fs::write(&path, content).expect("writable");
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("permissions");
    }

    /// Writes a kubeconfig for a server, with the token of all requests; returns its path.
    pub(crate) fn kubeconfig(&self, server: &str) -> PathBuf {
        self.kubeconfig_with(&json!({"server": server}), &json!({"token": TOKEN}))
    }

    pub(crate) fn kubeconfig_with(&self, cluster: &Value, user: &Value) -> PathBuf {
        let path = self.root.join("kubeconfig");
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": cluster}], "users": [{"name": "u", "user": user}],
        });
        fs::write(&path, text.to_string()).expect("writable");
        path
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.root.join("run/agent.sock")
    }

    /// Returns a configuration with these sources of facts.
    pub(crate) fn conf(&self, mode: Mode, kubernetes: &Value) -> Value {
        let mut conf = json!({
            "cniVersion": "1.1.0", "name": "mesh", "type": "detour", "log_level": "debug", "kubernetes": kubernetes,
            "chain": [{"type": "istio-redirect"}, {"type": "uid-exclude", "uids": ["1337"]}],
        });
        if conf["kubernetes"]["timeout_seconds"].is_null() {
            conf["kubernetes"]["timeout_seconds"] = TIMEOUT.as_secs().into();
        }
        if mode == Mode::Primary {
            conf["delegates"] = json!([{"cniVersion": "1.1.0", "name": "cluster", "type": "default"}]);
            conf["cniDir"] = json!(self.root.join("state"));
            conf["binDir"] = json!(self.root.join("bin"));
        }
        conf
    }

    /// Starts a call.
    pub(crate) fn start(&self, verb: &str, mode: Mode, conf: &Value) -> Child {
        let mut conf = conf.clone();
        if verb == "CHECK" {
            conf["prevResult"] = json!({});
        }
        let mut child = Command::new(program())
            .env_clear()
            .envs([
                ("CNI_COMMAND", verb),
                ("CNI_CONTAINERID", &self.pod.container_id),
                ("CNI_NETNS", &self.netns.clone().unwrap_or_else(|| self.pod.netns()).display().to_string()),
                ("CNI_IFNAME", mode.ifname()),
                ("CNI_PATH", &self.root.join("bin").display().to_string()),
                ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
                ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=uid-1"),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        child.stdin.take().expect("a pipe").write_all(conf.to_string().as_bytes()).expect("it reads");
        child
    }

    /// Runs a call, which must do what is expected; adds a row.
    pub(crate) fn expect(&mut self, verb: &str, mode: Mode, conf: &Value, expected: &Expected) -> Called {
        self.expect_as(verb, verb, mode, conf, expected)
    }

    /// The same with another name of the call.
    pub(crate) fn expect_as(
        &mut self,
        name: &str,
        verb: &str,
        mode: Mode,
        conf: &Value,
        expected: &Expected,
    ) -> Called {
        let called = self.call(verb, mode, conf);
        self.judge(name, mode, &called, expected);
        called
    }

    /// Adds the row of a call, whose name starts with its verb.
    pub(crate) fn judge(&mut self, name: &str, mode: Mode, called: &Called, expected: &Expected) {
        let mut problems = called.problems(expected);
        let is_add = name.starts_with("ADD");
        let left = if (is_add && called.is_done()) || name == "CHECK" {
            "all rules".to_owned()
        } else {
            let left = self.left();
            let must_be_clean = name == "DEL" || is_add;
            problems.extend(left.iter().filter(|_| must_be_clean).map(|what| format!("left behind: {what}")));
            if left.is_empty() { "nothing".to_owned() } else { stable(&left.join("; "), self) }
        };
        let call = format!("{name}{}", if mode == Mode::Primary { ", primary" } else { "" });
        let mut ended = called.ended.clone();
        if let Answer::Refused(_, text) = &mut ended.answer {
            *text = stable(text, self);
        }
        self.rows.push(Row { fault: self.fault.clone(), call, ended, left, problems });
    }

    /// Runs a call that prepares others, and must succeed.
    #[track_caller]
    pub(crate) fn done(&self, verb: &str, mode: Mode, conf: &Value) -> Called {
        let called = self.call(verb, mode, conf);
        assert!(called.is_done(), "{}: {verb}: {called:?}", self.fault);
        called
    }

    /// Runs a call without a row.
    pub(crate) fn call(&self, verb: &str, mode: Mode, conf: &Value) -> Called {
        let started = Instant::now();
        ended(self.start(verb, mode, conf), started)
    }

    /// Returns the rules, files and processes that calls have left behind.
    pub(crate) fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        if self.reader.read() != self.before {
            left.push("rules".to_owned());
        }
        left.extend(left_in_state().iter().map(|path| path.display().to_string()));
        let state = self.root.join("state");
        left.extend(files(&state).into_iter().map(|path| path.display().to_string()));
        // A process that was killed still needs the processor once.
        let deadline = Instant::now() + Duration::from_secs(20);
        while !self.processes().is_empty() && Instant::now() < deadline {
            thread::park_timeout(Duration::from_millis(20));
        }
        left.extend(self.processes().iter().map(|pid| format!("process {pid}")));
        left
    }

    /// Returns the processes that have the environment of a call for this pod.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let variable = format!("CNI_CONTAINERID={}", self.pod.container_id);
        let is_of_call = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|part| part == variable.as_bytes())
        };
        let entries = fs::read_dir("/proc").expect("readable").flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(is_of_call).collect()
    }
}

/// Returns the text without the scene's directory, the server's port, and the number and the time of the attempts.
fn stable(text: &str, scene: &Scene) -> String {
    let text = text.replace(&scene.root.display().to_string(), "DIRECTORY");
    let text = text.split("127.0.0.1:").enumerate().fold(String::new(), |text, (at, part)| match at {
        0 => part.to_owned(),
        _ => text + "API" + part.trim_start_matches(|c: char| c.is_ascii_digit()),
    });
    let attempts = text.split_once(" attempt").and_then(|(before, behind)| {
        let (before, _) = before.rsplit_once(" in ")?;
        let (_, behind) = behind.split_once(" s")?;
        Some(format!("{before}{behind}"))
    });
    attempts.unwrap_or(text)
}

/// Returns the files below a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.flat_map(|entry| if entry.path().is_dir() { files(&entry.path()) } else { vec![entry.path()] }).collect()
}

/// Waits for the end of a call that was started then.
pub(crate) fn ended(mut child: Child, started: Instant) -> Called {
    let read = |mut pipe: Box<dyn Read + Send>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let stdout = read(Box::new(child.stdout.take().expect("a pipe")));
    let stderr = read(Box::new(child.stderr.take().expect("a pipe")));
    let pid = rustix::process::Pid::from_child(&child);
    let exit = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("it is not reaped");
    let status_file = format!("/proc/{}/status", child.id());
    let mut memory = 0;
    // Until the kernel has replaced the image, the memory is that of this process.
    let name: String = program().file_name().and_then(OsStr::to_str).expect("text").chars().take(15).collect();
    let name = format!("Name:\t{name}\n");
    loop {
        let text = fs::read_to_string(&status_file).ok().filter(|text| text.starts_with(&name)).unwrap_or_default();
        let peak = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        memory = memory.max(peak.unwrap_or(0));
        let mut descriptors = [PollFd::new(exit.as_fd(), PollFlags::POLLIN)];
        if poll(&mut descriptors, PollTimeout::from(SAMPLE_MS)).is_ok_and(|ready| ready > 0) {
            break;
        }
    }
    // Without the time in which other processes had the processor (Documentation/scheduler/sched-stats.rst).
    let waited = fs::read_to_string(format!("/proc/{}/schedstat", child.id())).unwrap_or_default();
    let waited = waited.split(' ').nth(1).and_then(|text| text.parse().ok()).map(Duration::from_nanos);
    let took = started.elapsed().saturating_sub(waited.unwrap_or_default());
    let status = child.wait().expect("it ended");
    let [stdout, stderr] = [stdout, stderr].map(|thread| thread.join().expect("no panic"));
    let answer = match (status.code(), error(&stdout)) {
        (None, _) => Answer::Signaled(status.signal().expect("it ended by a signal")),
        (Some(0), _) => Answer::Done,
        (Some(_), Some((code, text))) => Answer::Refused(code, text),
        (Some(exit), None) => Answer::Silent(exit),
    };
    Called { ended: Ended { answer, stderr, took }, stdout, memory }
}

/// Returns code and whole text of an error object, if it is the only document.
fn error(stdout: &str) -> Option<(u64, String)> {
    let error: Value = serde_json::from_str(stdout).ok()?;
    let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
    Some((error["code"].as_u64()?, format!("{}: {}", text("msg"), text("details"))))
}

impl Called {
    pub(crate) fn is_done(&self) -> bool {
        self.ended.answer == Answer::Done
    }

    fn problems(&self, expected: &Expected) -> Vec<String> {
        let Ended { answer, stderr, took } = &self.ended;
        // An executable's own code is returned.
        let is_expected = matches!(answer, Answer::Refused(code, _) if expected.codes.contains(code));
        let mut problems: Vec<String> = is_answer(&self.ended).err().filter(|_| !is_expected).into_iter().collect();
        let text = match answer {
            Answer::Done => stderr,
            Answer::Refused(_, text) => text,
            _ => return problems,
        };
        match answer {
            Answer::Refused(code, _) if !expected.codes.contains(code) => {
                problems.push(format!("expected {}", expected.name()));
            }
            Answer::Done if !expected.codes.is_empty() => problems.push(format!("expected {}", expected.name())),
            _ => {}
        }
        let pod = (*answer != Answer::Done && expected.names_pod).then_some(POD);
        let missing = expected.parts.iter().map(String::as_str).chain(pod).filter(|part| !text.contains(part));
        problems.extend(missing.map(|part| format!("the text does not contain {part:?}")));
        if [&self.stdout, stderr].iter().any(|text| text.contains(TOKEN)) {
            problems.push("the token is in the output".to_owned());
        }
        if *took > expected.within + slack() {
            problems.push(format!("expected at most {:?} + {:?}, took {took:?}", expected.within, slack()));
        }
        if self.memory > expected.memory {
            problems.push(format!("expected at most {} KiB of memory, got {} KiB", expected.memory, self.memory));
        }
        problems
    }
}

impl Expected {
    fn name(&self) -> String {
        if self.codes.is_empty() { "success".into() } else { format!("code {:?}", self.codes) }
    }
}
