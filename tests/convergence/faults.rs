//! One fault in a call: a system call fails, the process is killed, the saved state is damaged, the file system accepts
//! no state, the network namespace is something else, calls run at the same time. Then the kernel has all rules or none,
//! and the next call completes the work. `FAULTS=all` tries each system call instead of one of each kind.

use crate::attachment::{Facts, Slot};
use crate::call::Answer;
use crate::kernel::Kernel;
use crate::node::{STATE, left_in_state, on_a_node_with};
use crate::pod::Pod;
use crate::support::directory::Directory;
use crate::support::program::write_executable;
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Output;

/// A call of the plugin in a situation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Add,
    /// ADD after ADD, with other annotations.
    AddChanged,
    Check,
    Del,
}

impl Call {
    const ALL: [Self; 4] = [Self::Add, Self::AddChanged, Self::Check, Self::Del];

    const fn verb(self) -> &'static str {
        match self {
            Self::Add | Self::AddChanged => "ADD",
            Self::Check => "CHECK",
            Self::Del => "DEL",
        }
    }
}

/// The default network's plugin, whose interface is a file.
const NETWORK: &str = r#"#!/bin/sh
file="${0%/*}/$CNI_CONTAINERID"
case $CNI_COMMAND in
ADD) : > "$file"
    echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"x"}],"ips":[{"interface":0,"address":"10.88.0.2/24"}]}' ;;
DEL) /bin/rm -f "$file" ;;
esac
"#;
const PRIMARY_STATE: &str = "/run/detour/primary";

/// A pod, and the states of its network namespace.
struct Subject {
    pod: Pod,
    /// With a default network, as the primary plugin.
    is_primary: bool,
    dialect: &'static str,
    programs: Directory,
    trials: Cell<usize>,
    /// Before any ADD, after ADD, and after an ADD with other annotations.
    none: Kernel,
    added: Kernel,
    changed: Kernel,
}

impl Subject {
    fn new(is_primary: bool, dialect: &'static str) -> Self {
        let (pod, programs) = (Pod::new(), Directory::new("faults"));
        write_executable(&programs.join("network"), NETWORK);
        let none = Kernel::of(&pod);
        let (added, changed) = (none.clone(), none.clone());
        let mut subject = Self { pod, is_primary, dialect, programs, trials: Cell::new(0), none, added, changed };
        subject.done(Call::Add);
        subject.added = Kernel::of(&subject.pod);
        subject.done(Call::AddChanged);
        subject.changed = Kernel::of(&subject.pod);
        subject.done(Call::Del);
        assert!(subject.none != subject.added && subject.added != subject.changed, "the states differ");
        subject
    }

    fn configuration(&self, call: Call) -> Value {
        let facts = if call == Call::AddChanged { Facts::AnnotatedOtherwise } else { Facts::DnsCaptured };
        let mut configuration = Slot::Detour.with(facts).configuration();
        configuration["dialect"] = self.dialect.into();
        if self.is_primary {
            configuration["delegates"] = json!([{ "cniVersion": "1.0.0", "name": "cluster", "type": "network" }]);
            configuration["binDir"] = json!(&*self.programs);
            configuration["cniDir"] = PRIMARY_STATE.into();
        }
        configuration
    }

    /// Runs a call, or lets another program run it. Returns `None` if the process ended without an answer.
    fn run(&self, call: Call, runner: &[&str], netns: &str) -> Option<Answer> {
        let ifname = if self.is_primary { "eth0" } else { Slot::Detour.ifname() };
        let child = self.pod.start_under(runner, call.verb(), ifname, &self.configuration(call), netns);
        answer(&child.wait_with_output().expect("it ends"))
    }

    fn call(&self, call: Call, runner: &[&str]) -> Option<Answer> {
        self.run(call, runner, &self.pod.netns().display().to_string())
    }

    #[track_caller]
    fn done(&self, call: Call) {
        assert_eq!(self.call(call, &[]), Some(Answer::Done), "{call:?}");
    }

    /// Makes the calls that come before this one.
    fn prepare(&self, call: Call) {
        if call != Call::Add {
            self.done(Call::Add);
        }
    }

    /// Tries a fault in a call; fails unless `is_right` accepts the answer, what the call left is allowed, and the next
    /// call completes the work.
    fn attempt(&self, call: Call, fault: &str, runner: &[&str], is_right: impl FnOnce(Option<&Answer>) -> bool) {
        self.prepare(call);
        let answer = self.call(call, runner);
        if answer.is_none() {
            self.wait_for_executables();
        }
        let context = format!("{call:?} ({}, primary: {}), {fault}: {answer:?}", self.dialect, self.is_primary);
        assert!(is_right(answer.as_ref()), "{context}");
        let now = Kernel::of(&self.pod);
        let (from, to) = match call {
            Call::Add => (&self.none, &self.added),
            Call::AddChanged => (&self.added, &self.changed),
            Call::Check => (&self.added, &self.added),
            Call::Del => (&self.added, &self.none),
        };
        // An ADD of the primary plugin that fails undoes the whole pod, also if an earlier one succeeded.
        let is_undone = self.is_primary && call.verb() == "ADD" && now.has_same_rules(&self.none);
        let is_whole = [from, to].iter().any(|state| now.has_same_rules(state)) || is_undone;
        assert!(is_whole, "{context}: there is a part of the rules: {now:?}");
        assert!(answer != Some(Answer::Done) || now.has_same_rules(to), "{context}: the call did nothing");
        self.trials.set(self.trials.get() + 1);
        if self.trials.get().is_multiple_of(2) {
            assert_eq!(self.call(Call::Add, &[]), Some(Answer::Done), "the next ADD; {context}");
            Kernel::of(&self.pod).assert_is(&self.added, &context);
        }
        assert_eq!(self.call(Call::Del, &[]), Some(Answer::Done), "the next DEL; {context}");
        Kernel::of(&self.pod).assert_is(&self.none, &context);
        let mut files = left_in_state();
        files.retain(|path| path != Path::new(PRIMARY_STATE));
        assert!(files.is_empty() && !self.programs.join(&self.pod.container_id).exists(), "{context}: {files:?}");
    }

    /// Waits for the executables of a call that was killed: they keep running.
    fn wait_for_executables(&self) {
        let own = format!("CNI_CONTAINERID={}", self.pod.container_id);
        let runs = || {
            let processes = fs::read_dir("/proc").expect("readable").flatten();
            let mut environments = processes.filter_map(|process| fs::read(process.path().join("environ")).ok());
            environments.any(|text| text.split(|byte| *byte == 0).any(|variable| variable == own.as_bytes()))
        };
        crate::support::wait::until("the executables end", || !runs());
    }

    /// Returns the file with the saved state of the attachment.
    fn record(&self) -> PathBuf {
        let name = format!("detour@{}.json", Slot::Detour.ifname());
        Path::new(STATE).join("attachments").join(&self.pod.container_id).join(name)
    }
}

/// Returns the answer of a call that ended; `None` if a signal ended it, or if it printed nothing.
fn answer(output: &Output) -> Option<Answer> {
    let has_ended = output.status.signal().is_none() && (output.status.success() || !output.stdout.is_empty());
    has_ended.then(|| Answer::of(output))
}

/// Returns whether an answer is success, or an error with a code of the contract and a text. A bug of the plugin (108) is
/// no such code.
fn is_answer(answer: Option<&Answer>) -> bool {
    match answer {
        Some(Answer::Done) => true,
        Some(Answer::Refused(code, text)) => matches!(code, 1 | 4..=8 | 11 | 50 | 100..=107) && text.len() > 10,
        None => false,
    }
}

/// System calls that can't fail with valid arguments, whose failure strace can't imitate, or that only the loader makes.
const RELIABLE: [&str; 22] = [
    "access",
    "arch_prctl",
    "clock_gettime",
    "close",
    "execve",
    "exit_group",
    "futex",
    "getegid",
    "geteuid",
    "getgid",
    "getpid",
    "getppid",
    "getrandom",
    "gettid",
    "getuid",
    "pread64",
    "rseq",
    "rt_sigaction",
    "rt_sigprocmask",
    "sched_getaffinity",
    "set_robust_list",
    "set_tid_address",
];
/// Without memory, the process can't start or continue, and can't always report it.
const MEMORY: [&str; 8] = ["brk", "fcntl", "madvise", "mmap", "mprotect", "mremap", "munmap", "sigaltstack"];

/// Returns the system calls of a call, by name, with their numbers.
fn system_calls(subject: &Subject, call: Call) -> BTreeMap<String, usize> {
    let log = Path::new(STATE).join("strace");
    subject.prepare(call);
    let answer = subject.call(call, &["strace", "-qq", "-o", log.to_str().expect("text")]);
    assert_eq!(answer, Some(Answer::Done));
    let text = fs::read_to_string(&log).expect("written");
    fs::remove_file(log).expect("it was written");
    subject.done(Call::Del);
    let mut counts = BTreeMap::new();
    for name in text.lines().filter_map(|line| line.split_once('(')).map(|(name, _)| name) {
        if name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            *counts.entry(name.to_owned()).or_default() += 1;
        }
    }
    counts
}

/// Injects a fault into system calls of a call, one after another.
fn each_system_call(is_primary: bool, dialect: &'static str, call: Call, fault: &str) {
    let is_complete = std::env::var("FAULTS").is_ok_and(|which| which == "all");
    on_a_node_with("size=64m", || {
        let subject = Subject::new(is_primary, dialect);
        for (system_call, count) in system_calls(&subject, call) {
            let is_kill = fault.starts_with("signal");
            if !is_kill && RELIABLE.contains(&system_call.as_str()) {
                continue;
            }
            // The first calls are those of the loader of a debug build, which the release build has not.
            let sample = if is_kill { count.div_ceil(2) } else { count };
            for number in if is_complete { 1..=count } else { sample..=sample } {
                let option = format!("inject={system_call}:{fault}:when={number}");
                let trace = format!("trace={system_call}");
                let runner = ["strace", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &option];
                // The fault may affect stdout.
                let may_be_silent = is_kill || [&MEMORY[..], &["poll", "write"]].concat().contains(&&*system_call);
                subject.attempt(call, &option, &runner, |answer| match answer {
                    None => may_be_silent,
                    // No process may continue in a pod's network namespace.
                    Some(Answer::Refused(108, _)) if system_call == "setns" => true,
                    // The kernel lacks memory, which is temporary, and did not refuse the rules.
                    Some(Answer::Refused(102, _)) => false,
                    answer => is_answer(answer),
                });
            }
        }
    });
}

#[test]
fn each_system_call_of_an_add_fails() {
    each_system_call(false, "iptables", Call::Add, "error=ENOMEM");
}

#[test]
fn an_add_is_killed_before_a_system_call() {
    each_system_call(true, "nftables", Call::AddChanged, "signal=KILL");
}

#[test]
fn a_del_is_killed_before_a_system_call() {
    each_system_call(false, "iptables", Call::Del, "signal=KILL");
}

/// An ADD that must save state fails; a DEL succeeds.
#[test]
fn a_file_system_that_takes_no_state_fails_add_and_not_del() {
    let filler = Path::new(STATE).join("filler");
    let remount = |flags: MsFlags| {
        mount(None::<&str>, STATE, None::<&str>, MsFlags::MS_REMOUNT | flags, None::<&str>).expect("needs root");
    };
    for is_full in [false, true] {
        on_a_node_with("size=256k", || {
            let subject = Subject::new(false, "nftables");
            for call in Call::ALL {
                subject.prepare(call);
                if is_full {
                    fs::write(&filler, vec![0; 1 << 20]).expect_err("it is full");
                } else {
                    remount(MsFlags::MS_RDONLY);
                }
                let answer = subject.call(call, &[]);
                if is_full {
                    fs::remove_file(&filler).expect("written")
                } else {
                    remount(MsFlags::empty())
                }
                let is_right = match call.verb() {
                    "ADD" => matches!(answer, Some(Answer::Refused(5, _))),
                    _ => answer == Some(Answer::Done),
                };
                assert!(is_right, "{call:?}, full: {is_full}: {answer:?}");
                subject.done(Call::Del);
                Kernel::of(&subject.pod).assert_is(&subject.none, &format!("{call:?}, full: {is_full}"));
            }
        });
    }
}

/// Without the record, detour can't identify the redirection in iptables format as its own.
#[test]
fn a_damaged_record_fails_add_and_check_and_not_del() {
    type Damage = (&'static str, fn(&Path));
    let damages: [Damage; 4] = [
        ("truncated", |path| {
            let text = fs::read(path).expect("saved");
            fs::write(path, &text[..text.len() / 2]).expect("writable");
        }),
        ("a key has another type", |path| {
            let mut record: Value = serde_json::from_slice(&fs::read(path).expect("saved")).expect("JSON");
            record["policy"] = 7.into();
            fs::write(path, record.to_string()).expect("writable");
        }),
        ("17 MB", |path| fs::write(path, format!("[{}0]", "0,".repeat(17 << 19))).expect("writable")),
        ("a directory", |path| fs::remove_file(path).and_then(|()| fs::create_dir(path)).expect("writable")),
    ];
    on_a_node_with("size=64m", || {
        for dialect in ["iptables", "nftables"] {
            let subject = Subject::new(false, dialect);
            for (what, damage) in damages {
                for call in [Call::AddChanged, Call::Check, Call::Del] {
                    subject.prepare(call);
                    damage(&subject.record());
                    let answer = subject.call(call, &[]);
                    let is_right = match answer {
                        Some(Answer::Done) => call == Call::Del,
                        Some(Answer::Refused(code, _)) => code == 105 && call != Call::Del,
                        None => false,
                    };
                    assert!(is_right, "{call:?} ({dialect}), {what}: {answer:?}");
                    subject.done(Call::Del);
                    let left = Kernel::of(&subject.pod);
                    let is_foreign = dialect == "iptables" && !left.has_exclusions();
                    assert!(left.has_same_rules(&subject.none) || is_foreign, "{what}: {left:?}");
                    assert!(!subject.record().exists(), "{what}");
                    subject.pod.tool("nft", &["flush", "ruleset"], "");
                }
            }
        }
    });
}

#[test]
fn a_path_without_network_namespace() {
    on_a_node_with("size=1m", || {
        let directory = Directory::new("netns");
        let file = |name: &str| directory.join(name).display().to_string();
        fs::write(file("empty"), "").expect("writable");
        nix::unistd::mkfifo(&*file("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("writable");
        let subject = Subject::new(false, "nftables");
        for (path, code) in [
            (String::new(), 4),
            (file("none"), 8),
            (file("empty/below"), 8),
            (file("empty"), 8),
            (STATE.into(), 8),
            (file("fifo"), 8),
            ("/dev/zero".into(), 8),
        ] {
            for call in [Call::Add, Call::Check, Call::Del] {
                subject.prepare(call);
                let answer = subject.run(call, &[], &path);
                let is_right = match &answer {
                    Some(Answer::Refused(got, _)) => call != Call::Del && *got == code,
                    answer => call == Call::Del && *answer == Some(Answer::Done) && !subject.record().exists(),
                };
                assert!(is_right, "{call:?}, {path:?}: {answer:?}");
                subject.done(Call::Del);
                subject.pod.tool("nft", &["flush", "ruleset"], "");
            }
        }
    });
}

/// Each call sees the rules of before or after another one.
#[test]
fn concurrent_calls_for_one_attachment() {
    on_a_node_with("size=64m", || {
        for dialect in ["iptables", "nftables"] {
            let subject = Subject::new(false, dialect);
            let netns = subject.pod.netns().display().to_string();
            let start = |at: usize| {
                let call = Call::ALL[at % 4];
                let configuration = subject.configuration(call);
                (call, subject.pod.start_with(call.verb(), Slot::Detour.ifname(), &configuration, &netns))
            };
            for (call, child) in (0..24).map(start).collect::<Vec<_>>() {
                let answer = answer(&child.wait_with_output().expect("it ends"));
                let is_right = match (call.verb(), &answer) {
                    ("CHECK", Some(Answer::Refused(code, _))) => [11, 103, 104].contains(code),
                    ("ADD", Some(Answer::Refused(code, _))) => *code == 11,
                    (_, answer) => *answer == Some(Answer::Done),
                };
                assert!(is_right, "{call:?}: {answer:?}");
            }
            let now = Kernel::of(&subject.pod);
            let states = [&subject.none, &subject.added, &subject.changed];
            assert!(states.iter().any(|state| now.has_same_rules(state)), "there is a part of the rules: {now:?}");
            subject.done(Call::Add);
            Kernel::of(&subject.pod).assert_is(&subject.added, "ADD after concurrent calls");
            subject.done(Call::Del);
            Kernel::of(&subject.pod).assert_is(&subject.none, "DEL after concurrent calls");
        }
    });
}
