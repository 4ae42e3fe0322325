//! Another process rewrites the cluster network's list at random times and in random ways, while a runtime reads the
//! directory all the time.

use crate::agent_process::{Agent, SETTLED};
use crate::cluster_cni::ClusterCni;
use crate::golden::{FLAG, node};
use crate::runtime::{self, Runtime, compact, used};
use crate::scene::Scene;
use crate::support::background::Running;
use crate::support::wait::until;
use nix::sys::signal::Signal;
use serde_json::json;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc::{TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// The list that is always there, and the one that sometimes sorts before it.
const LIST: &str = "10-calico.conflist";
const EARLIER: &str = "05-cilium.conflist";
/// A list that no runtime may use: it takes the place of [`LIST`] only if that is missing for long.
const OTHER: (&str, &str) =
    ("87-podman-bridge.conflist", r#"{"cniVersion":"0.4.0","name":"podman","plugins":[{"type":"bridge"}]}"#);
/// How long the list is missing or invalid at most: less than the 500 ms after which another one takes its place.
const MAX_GAP: u64 = 100;

/// Random numbers (xorshift64). A failed test prints the seed.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock");
        let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or(u64::from(now.subsec_nanos()) | 1);
        println!("SEED={seed}");
        Self(seed)
    }

    /// Returns a number below `end`.
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    fn milliseconds(&mut self, end: u64) -> Duration {
        Duration::from_micros(self.below(end * 1000))
    }
}

/// A shell in the configuration directory: the process that rewrites the lists.
struct Shell {
    process: Running,
    answers: BufReader<ChildStdout>,
}

impl Shell {
    fn start(directory: &Path) -> Self {
        let mut shell = Command::new("sh");
        shell.arg("-e").current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = shell.spawn().expect("it starts");
        let answers = BufReader::new(process.stdout.take().expect("a pipe"));
        Self { process: Running(process), answers }
    }

    /// Runs commands and waits until they are done.
    fn run(&mut self, commands: &str) {
        writeln!(self.process.0.stdin.as_mut().expect("a pipe"), "{commands}\necho done").expect("it reads");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("it answers");
        assert_eq!(answer, "done\n", "{commands}");
    }
}

/// A cluster CNI that rewrites its list.
struct Rewriter<'a> {
    directory: PathBuf,
    /// The directory for new versions.
    versions: PathBuf,
    shell: Shell,
    runtime: &'a Runtime,
    random: Random,
    number: u32,
    /// Whether a list was unusable for too long, because the machine is too slow.
    slow: bool,
    /// The current version of [`LIST`], and of [`EARLIER`] if it is there.
    list: String,
    earlier: Option<String>,
}

impl<'a> Rewriter<'a> {
    fn new(scene: &Scene, directory: &Path, runtime: &'a Runtime) -> Self {
        let versions = scene.path("versions");
        fs::create_dir_all(&versions).expect("made");
        let list = fs::read_to_string(directory.join(LIST)).expect("the list");
        Self {
            directory: directory.to_owned(),
            versions,
            shell: Shell::start(directory),
            runtime,
            random: Random::new(),
            number: 0,
            slow: false,
            list,
            earlier: None,
        }
    }

    /// Writes a new version beside the directory. Returns its text and path.
    fn version(&mut self, name: &str) -> (String, String) {
        self.number += 1;
        let plugins = (0..self.random.below(6)).map(|index| format!(",\n    {{\"type\": \"plugin-{index}\"}}"));
        let text = format!(
            "{{\n  \"name\": \"{name}\",\n  \"cniVersion\": \"0.3.1\",\n  \"plugins\": [\n    {{\"type\": \"{name}\", \
             \"mtu\": {}}}{}\n  ]\n}}\n",
            self.number,
            plugins.collect::<String>()
        );
        let path = self.versions.join(self.number.to_string());
        fs::write(&path, &text).expect("written");
        self.runtime.allow(&text);
        (text, path.display().to_string())
    }

    /// Rewrites a list in a random way.
    fn rewrite(&mut self) {
        let (way, gap) = (self.random.below(100), self.random.below(MAX_GAP));
        if way < 2 {
            return self.rewrite_earlier();
        }
        let (text, new) = self.version("calico");
        let (number, part) = (self.number, self.random.below(text.len() as u64));
        let write = format!("if test -L {LIST}; then rm {LIST}; fi; cp -f {new} {LIST}");
        let later = format!("sleep 0.{gap:03}; {write}");
        let start = Instant::now();
        self.shell.run(&match way {
            2..30 => write,
            30..50 => format!("cp {new} {LIST}.tmp; mv -fT {LIST}.tmp {LIST}"),
            50..60 => format!("rm -f {LIST}; cp {new} {LIST}"),
            60..72 => format!(
                "mkdir ..v{number}; cp {new} ..v{number}/{LIST}; ln -sfnT ..v{number} ..data_tmp; mv -fT ..data_tmp \
                 ..data; ln -sfnT ..data/{LIST} link; mv -fT link {LIST}"
            ),
            72..80 => format!("rm -f {LIST}; head -c {part} {new} > {LIST}; {later}"),
            80..86 => format!("rm -f {LIST}; : > {LIST}; {later}"),
            86..92 => format!("rm -f {LIST}; echo '{{\"name\": \"calico\", \"plugins\": []}}' > {LIST}; {later}"),
            _ => format!("rm -f {LIST}; {later}"),
        });
        // The list may have been missing for so long that the other one could take its place.
        if way >= 50 && start.elapsed() > Duration::from_secs(4) {
            self.slow = true;
        }
        self.list = text;
    }

    /// Writes or removes the list that sorts first.
    fn rewrite_earlier(&mut self) {
        if self.earlier.is_some() && self.random.below(2) == 0 {
            self.shell.run(&format!("rm {EARLIER}"));
            self.earlier = None;
        } else {
            let (text, new) = self.version("cilium");
            self.shell.run(&format!("cp {new} .{EARLIER}7; mv -f .{EARLIER}7 {EARLIER}"));
            self.earlier = Some(text);
        }
    }

    /// Returns the list that the runtime must use, without the plugin's entry.
    fn expected(&self) -> String {
        compact(self.earlier.as_ref().unwrap_or(&self.list))
    }

    /// Waits until the runtime uses the current list. Returns how long that took.
    #[track_caller]
    fn follow(&self) -> Duration {
        let (start, expected) = (Instant::now(), self.expected());
        until(&format!("version {}", self.number), || used(&self.directory).as_ref() == Some(&expected));
        start.elapsed()
    }

    /// Fails the test if the runtime could have started a pod outside the mesh.
    #[track_caller]
    fn check(&mut self) {
        if self.slow {
            self.runtime.tolerate(OTHER.1);
        }
        self.runtime.assert_no_violation();
    }

    /// Rewrites the lists this often, with random pauses. At every fourth pause or so, waits until the runtime uses the
    /// current list. Returns how long each of these took, except for changes to a list that sorts later.
    fn run(&mut self, times: u32) -> Vec<Duration> {
        let mut followed = Vec::new();
        for _ in 0..times {
            let had_earlier = self.earlier.is_some();
            self.rewrite();
            if self.random.below(4) == 0 {
                let took = self.follow();
                followed.extend(Some(took).filter(|_| !had_earlier || self.earlier.is_some()));
            }
            self.check();
            let pause = self.random.milliseconds(20);
            thread::park_timeout(pause);
        }
        followed
    }
}

/// Returns a node with [`LIST`] and [`OTHER`], its configuration directory, and an agent that is ready there.
fn ready_node(test: &str) -> (Scene, PathBuf, Agent) {
    let (scene, directory) = node(&ClusterCni::named("calico"), test);
    fs::write(directory.join(OTHER.0), OTHER.1).expect("written");
    let agent = agent(&scene, "a", "info");
    agent.wait_for_log(SETTLED);
    (scene, directory, agent)
}

fn agent(scene: &Scene, name: &str, log_level: &str) -> Agent {
    Agent::start(scene, name, &[FLAG, &scene.config(name, &json!({"log_level": log_level}))])
}

#[test]
fn rewrites_never_show_a_runtime_another_list_and_each_one_is_followed() {
    let (scene, directory, agent) = ready_node("rewrites");
    let runtime = Runtime::start(&directory, &[&ClusterCni::named("calico").text()]);
    let mut rewriter = Rewriter::new(&scene, &directory, &runtime);
    let mut followed = rewriter.run(300);
    rewriter.follow();
    rewriter.check();
    drop(rewriter);
    runtime.end();
    followed.sort();
    // Usually within 0.1 s; after a failure, the agent would wait 5 s.
    assert!(followed[followed.len() / 2] < Duration::from_secs(4), "the agent follows at once: {followed:?}");
    let logged = agent.logged();
    assert!(!logged.iter().any(|line| line.contains("keeps reverting")), "following is not a repair");
}

#[test]
fn rewrites_while_the_agent_is_killed_at_random_instants() {
    let (scene, directory, agent) = ready_node("kills");
    agent.end(Signal::SIGKILL);
    let runtime = Runtime::start(&directory, &[&ClusterCni::named("calico").text()]);
    let mut rewriter = Rewriter::new(&scene, &directory, &runtime);
    let mut random = Random(rewriter.random.0 | 1);
    thread::scope(|scope| {
        let (end, ended) = channel::<()>();
        let scene = &scene;
        scope.spawn(move || {
            // The sender is dropped at the end, and if the test fails.
            while ended.try_recv() != Err(TryRecvError::Disconnected) {
                let agent = crate::rewrites::agent(scene, "a", "info");
                thread::park_timeout(random.milliseconds(1000));
                agent.end(Signal::SIGKILL);
            }
        });
        let end = end;
        for _ in 0..100 {
            rewriter.rewrite();
            let pause = rewriter.random.milliseconds(100);
            thread::park_timeout(pause);
            rewriter.check();
        }
        drop(end);
    });
    let agent = crate::rewrites::agent(&scene, "a", "info");
    rewriter.follow();
    rewriter.check();
    drop(rewriter);
    runtime.end();
    drop(agent);
}

#[test]
fn rewrites_while_the_agent_is_replaced() {
    let (scene, directory, first) = ready_node("upgrades");
    let runtime = Runtime::start(&directory, &[&ClusterCni::named("calico").text()]);
    let mut rewriter = Rewriter::new(&scene, &directory, &runtime);
    let mut running = first;
    for (name, log_level) in [("b", "debug"), ("c", "info"), ("d", "debug")] {
        rewriter.run(20);
        // As in a rolling update with maxSurge: the new agent starts before the old one ends.
        let next = agent(&scene, name, log_level);
        rewriter.run(20);
        next.wait_for_log("this agent is on standby");
        running.end(Signal::SIGTERM);
        next.wait_for_log(SETTLED);
        running = next;
        rewriter.follow();
        rewriter.run(20);
        rewriter.follow();
    }
    let list = runtime::read(&directory).choice.expect("the own list").list;
    let entry = list["plugins"].as_array().and_then(|plugins| plugins.last()).expect("the entry");
    assert_eq!(entry["log_level"], "debug", "the entry of the last agent");
    drop(rewriter);
    runtime.end();
}
