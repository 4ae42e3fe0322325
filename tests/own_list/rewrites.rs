//! Another process rewrites the cluster network's list at random times and in random ways, while a runtime reads the
//! directory all the time.

use crate::agent_process::{Agent, SETTLED};
use crate::cluster_cni::ClusterCni;
use crate::golden::{FLAG, node, wait_until};
use crate::runtime::{self, Runtime, compact, used};
use crate::scene::Scene;
use nix::sys::signal::Signal;
use nix::unistd::{SysconfVar, sysconf};
use serde_json::json;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
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
    process: Child,
    answers: BufReader<ChildStdout>,
}

impl Shell {
    fn start(directory: &Path) -> Self {
        let mut shell = Command::new("sh");
        shell.arg("-e").current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = shell.spawn().expect("it starts");
        let answers = BufReader::new(process.stdout.take().expect("a pipe"));
        Self { process, answers }
    }

    /// Runs commands and waits until they are done.
    fn run(&mut self, commands: &str) {
        writeln!(self.process.stdin.as_mut().expect("a pipe"), "{commands}\necho done").expect("it reads");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("it answers");
        assert_eq!(answer, "done\n", "{commands}");
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
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
    /// The reads of [`OTHER`] for this reason.
    tolerated: usize,
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
            tolerated: 0,
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
        if way < 10 {
            return self.rewrite_earlier();
        }
        let (text, new) = self.version("calico");
        let (number, part) = (self.number, self.random.below(text.len() as u64));
        let write = format!("if test -L {LIST}; then rm {LIST}; fi; cp -f {new} {LIST}");
        let later = format!("sleep 0.{gap:03}; {write}");
        let start = Instant::now();
        self.shell.run(&match way {
            10..30 => write,
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
        // The list may have been unusable for so long that the other one could take its place.
        if way >= 50 && start.elapsed() > Duration::from_millis(400) {
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
        wait_until(&format!("version {}", self.number), || used(&self.directory).as_ref() == Some(&expected));
        start.elapsed()
    }

    /// Fails the test if the runtime could have started a pod outside the mesh.
    #[track_caller]
    fn check(&mut self) {
        if self.slow {
            self.tolerated += self.runtime.tolerate(OTHER.1);
        }
        self.runtime.assert_no_violation();
    }

    /// Rewrites the lists this often, with random pauses. At every fourth pause or so, waits until the runtime uses the
    /// current list. Returns how long each of these took, and the same for changes to a list that sorts later.
    fn run(&mut self, times: u32) -> (Vec<Duration>, Vec<Duration>) {
        let (mut followed, mut handed_over) = (Vec::new(), Vec::new());
        for _ in 0..times {
            let had_earlier = self.earlier.is_some();
            self.rewrite();
            if self.random.below(4) == 0 {
                let is_later = had_earlier && self.earlier.is_none();
                if is_later { &mut handed_over } else { &mut followed }.push(self.follow());
            }
            self.check();
            let pause = self.random.milliseconds(20);
            thread::park_timeout(pause);
        }
        (followed, handed_over)
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

/// Returns the CPU time of a process (proc_pid_stat(5), utime and stime).
fn cpu_time(agent: &Agent) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{}/stat", agent.id())).expect("it runs");
    let (_, fields) = stat.rsplit_once(')').expect("fields");
    let ticks = |index: usize| fields.split_whitespace().nth(index).expect("a field").parse::<f64>().expect("a number");
    let per_second = sysconf(SysconfVar::CLK_TCK).expect("known").expect("known");
    Duration::from_secs_f64((ticks(11) + ticks(12)) / f64::from(i32::try_from(per_second).expect("small")))
}

/// Returns median, 99th percentile and maximum.
fn figures(mut times: Vec<Duration>) -> String {
    times.sort();
    let at = |part: usize| times.get((times.len() * part / 100).min(times.len().saturating_sub(1))).copied();
    let shown = |time: Option<Duration>| time.map_or("-".into(), |time| format!("{:.1} ms", time.as_secs_f64() * 1e3));
    format!(
        "{} times: median {}, p99 {}, max {}",
        times.len(),
        shown(at(50)),
        shown(at(99)),
        shown(times.last().copied())
    )
}

/// Prints figures; `--nocapture` shows them.
fn report(line: &str) {
    println!("{line}");
}

#[test]
fn a_thousand_rewrites_never_show_a_runtime_another_list_and_each_one_is_followed() {
    let (scene, directory, agent) = ready_node("rewrites");
    let runtime = Runtime::start(&directory, &[&ClusterCni::named("calico").text()]);
    let mut rewriter = Rewriter::new(&scene, &directory, &runtime);
    let (start, cpu) = (Instant::now(), cpu_time(&agent));
    let (followed, handed_over) = rewriter.run(1000);
    let last = rewriter.follow();
    rewriter.check();
    let slow = (rewriter.slow, rewriter.tolerated);
    let (elapsed, cpu) = (start.elapsed(), cpu_time(&agent).saturating_sub(cpu));
    drop(rewriter);
    let reads = runtime.end();
    let mut sorted = followed.clone();
    sorted.sort();
    report(&format!(
        "1000 rewrites in {elapsed:.1?}, {reads} reads; slow machine, tolerated reads: {slow:?}; CPU of the agent: {cpu:.1?}"
    ));
    report(&format!("followed {}; last {last:.1?}", figures(followed)));
    report(&format!("another list after the first one disappeared: {}", figures(handed_over)));
    // Usually within 0.1 s; after a failure, the agent would wait 5 s.
    assert!(sorted[sorted.len() / 2] < Duration::from_secs(4), "the agent follows at once");
    let logged = agent.logged();
    assert!(!logged.iter().any(|line| line.contains("keeps reverting")), "following is not a repair");
}

#[test]
fn rewrites_while_the_agent_is_killed_at_random_instants() {
    let (scene, directory, agent) = ready_node("kills");
    agent.end(Signal::SIGKILL);
    let runtime = Runtime::start(&directory, &[&ClusterCni::named("calico").text()]);
    let mut rewriter = Rewriter::new(&scene, &directory, &runtime);
    let (kills, mut random) = (AtomicU32::new(0), Random(rewriter.random.0 | 1));
    thread::scope(|scope| {
        let (end, ended) = channel::<()>();
        let (scene, kills) = (&scene, &kills);
        scope.spawn(move || {
            // The sender is dropped at the end, and if the test fails.
            while ended.try_recv() != Err(TryRecvError::Disconnected) {
                let agent = crate::rewrites::agent(scene, "a", "info");
                thread::park_timeout(random.milliseconds(1500));
                agent.end(Signal::SIGKILL);
                kills.fetch_add(1, Ordering::Relaxed);
            }
        });
        let end = end;
        for _ in 0..300 {
            rewriter.rewrite();
            let pause = rewriter.random.milliseconds(150);
            thread::park_timeout(pause);
            rewriter.check();
        }
        drop(end);
    });
    let agent = crate::rewrites::agent(&scene, "a", "info");
    rewriter.follow();
    rewriter.check();
    let slow = (rewriter.slow, rewriter.tolerated);
    drop(rewriter);
    report(&format!(
        "300 rewrites, {} kills, {} reads; slow machine, tolerated reads: {slow:?}",
        kills.into_inner(),
        runtime.end()
    ));
    drop(agent);
}

#[test]
fn rewrites_while_the_agent_is_replaced() {
    let (scene, directory, first) = ready_node("upgrades");
    let runtime = Runtime::start(&directory, &[&ClusterCni::named("calico").text()]);
    let mut rewriter = Rewriter::new(&scene, &directory, &runtime);
    let mut running = first;
    let mut times = Vec::new();
    for (name, log_level) in ["b", "c", "d", "e", "f"].into_iter().zip(["debug", "info"].into_iter().cycle()) {
        rewriter.run(20);
        // As in a rolling update with maxSurge: the new agent starts before the old one ends.
        let next = agent(&scene, name, log_level);
        rewriter.run(20);
        next.wait_for_log(SETTLED);
        running.end(Signal::SIGTERM);
        running = next;
        times.push(rewriter.follow());
        rewriter.run(20);
        times.push(rewriter.follow());
    }
    let list = runtime::read(&directory).choice.expect("the own list").list;
    let entry = list["plugins"].as_array().and_then(|plugins| plugins.last()).expect("the entry");
    assert_eq!(entry["log_level"], "debug", "the entry of the last agent");
    drop(rewriter);
    report(&format!("5 upgrades, {} reads; followed {}", runtime.end(), figures(times)));
}
