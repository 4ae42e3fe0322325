//! Fault injection: each system call of an ADD and of a DEL fails once, or from one call on all fail. Then the kernel
//! has all rules or none, or the saved state lets the next DEL remove them. `FAULTS=all` tries every fault in every
//! scenario; otherwise each fault is tried in one of them.

use crate::attachment::{Facts, Slot};
use crate::kernel::Kernel;
use crate::node::{STATE, left_in_state, on_a_node};
use crate::pod::Pod;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The system calls and their possible errors. After EINTR the plugin must continue as if it had not occurred.
const ERRORS: [(&str, &[&str]); 24] = [
    ("bind", &["ENOMEM"]),
    ("clone", &["EAGAIN"]),
    ("clone3", &["EAGAIN"]),
    ("connect", &["ENOBUFS", "EINTR"]),
    ("flock", &["ENOLCK", "EINTR"]),
    ("fstat", &["EIO"]),
    ("fstatfs", &["EIO"]),
    ("getdents64", &["EIO"]),
    ("mkdir", &["ENOSPC"]),
    ("newfstatat", &["EIO"]),
    ("openat", &["EMFILE"]),
    ("poll", &["ENOMEM", "EINTR"]),
    ("read", &["EIO", "EINTR"]),
    ("recvfrom", &["ENOBUFS", "EINTR", ALWAYS]),
    ("recvmsg", &["ENOBUFS"]),
    ("rename", &["EIO"]),
    ("renameat2", &["EIO"]),
    ("sendto", &["ENOBUFS", "EINTR", ALWAYS]),
    ("setns", &["EPERM"]),
    ("setsockopt", &["ENOMEM"]),
    ("socket", &["EMFILE"]),
    ("statx", &["EIO"]),
    ("unlink", &["EIO"]),
    ("write", &["ENOSPC"]),
];
/// From this call on, all calls of its kind fail.
const ALWAYS: &str = "ENOMEM";

/// One system call that fails.
#[derive(Debug)]
struct Fault {
    call: &'static str,
    number: usize,
    error: &'static str,
}

impl Fault {
    fn option(&self) -> String {
        let after = if self.error == ALWAYS { "+" } else { "" };
        format!("inject={}:error={}:when={}{after}", self.call, self.error, self.number)
    }
}

/// A pod, and an attachment that is added and deleted.
struct Scenario {
    pod: Pod,
    verb: &'static str,
    configuration: Value,
    /// The configuration of an ADD before the call that fails.
    first: Option<Value>,
    /// The kernel's state before any ADD.
    before: Kernel,
    /// The kernel's states before and after the call.
    from: Kernel,
    to: Kernel,
    step: usize,
    tried: usize,
}

fn configuration(facts: Facts, dialect: &str) -> Value {
    let mut configuration = Slot::Detour.with(facts).configuration();
    configuration["dialect"] = dialect.into();
    configuration["log_level"] = "none".into();
    configuration
}

impl Scenario {
    fn new(verb: &'static str, first: Option<Value>, configuration: Value) -> Self {
        let pod = Pod::new();
        let before = Kernel::of(&pod);
        let (from, to) = (before.clone(), before.clone());
        let mut scenario = Self { pod, verb, configuration, first, before, from, to, step: 0, tried: 0 };
        scenario.prepare();
        scenario.from = Kernel::of(&scenario.pod);
        scenario.done(verb, &scenario.configuration);
        scenario.to = Kernel::of(&scenario.pod);
        assert_ne!(scenario.from, scenario.to);
        scenario.done("DEL", &scenario.configuration);
        scenario
    }

    fn prepare(&self) {
        self.first.iter().for_each(|first| self.done("ADD", first));
    }

    fn done(&self, verb: &str, configuration: &Value) {
        let netns = self.pod.netns().display().to_string();
        self.pod.call_with(verb, Slot::Detour.ifname(), configuration, &netns).done();
    }

    /// Runs the call under strace.
    fn traced(&self, options: &[&str]) -> Output {
        let input = Path::new(STATE).join("stdin");
        std::fs::write(&input, self.configuration.to_string()).expect("writable");
        let mut command = Command::new("strace");
        command.args(["-f", "-qq"]).args(options).arg(env!("CARGO_BIN_EXE_detour"));
        command.env_clear().envs([
            ("PATH", std::env::var("PATH").expect("a path").as_str()),
            ("CNI_COMMAND", self.verb),
            ("CNI_CONTAINERID", &self.pod.container_id),
            ("CNI_NETNS", &self.pod.netns().display().to_string()),
            ("CNI_IFNAME", Slot::Detour.ifname()),
            ("CNI_PATH", "/opt/cni/bin"),
            ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"),
        ]);
        command.stdin(std::fs::File::open(&input).expect("it was written"));
        let output = command.output().expect("strace is needed");
        std::fs::remove_file(input).expect("it was written");
        output
    }

    /// Returns the faults that can occur in a call after it has entered the pod's network namespace.
    fn faults(&self) -> Vec<Fault> {
        let log = Path::new(STATE).join("strace");
        let calls: Vec<&str> = ERRORS.iter().map(|(call, _)| *call).collect();
        // Calls that the architecture or the kernel does not have are ignored.
        let calls = format!("trace=?{}", calls.join(",?"));
        let output = self.traced(&["-e", &calls, "-o", log.to_str().expect("text")]);
        assert!(output.status.success(), "{output:?}");
        let text = std::fs::read_to_string(&log).expect("written");
        std::fs::remove_file(log).expect("it was written");
        let mut counts = std::collections::BTreeMap::<&str, usize>::new();
        let (mut begun, mut found) = (false, Vec::new());
        for line in text.lines() {
            begun |= line.contains(&self.pod.netns().display().to_string());
            let name = line.split_once('(').map_or("", |(before, _)| before.rsplit(' ').next().unwrap_or(before));
            let Some((call, errors)) = ERRORS.iter().find(|(call, _)| *call == name) else { continue };
            let number = counts.entry(call).or_default();
            *number += 1;
            if begun {
                found.extend(errors.iter().map(|error| Fault { call, number: *number, error }));
            }
        }
        assert!(found.len() > 50, "{text}");
        found
    }

    fn state(&self) -> PathBuf {
        Path::new(STATE).join("attachments").join(&self.pod.container_id)
    }

    /// Returns whether a fault is tried in this scenario.
    fn is_sampled(&mut self, index: usize, of: usize) -> bool {
        self.step += 1;
        std::env::var("FAULTS").is_ok_and(|which| which == "all") || self.step % of == index
    }

    fn fail(&mut self, fault: &Fault) {
        self.tried += 1;
        let option = fault.option();
        let output = self.traced(&["-o", "/dev/null", "-e", &format!("trace={}", fault.call), "-e", &option]);
        let kernel = Kernel::of(&self.pod);
        let context = format!("{} with {option}: {}", self.verb, String::from_utf8_lossy(&output.stdout));
        if output.status.success() {
            assert!(kernel.has_same_rules(&self.to), "{context}\n{kernel:?}");
            // Only fixtures that are no longer needed may remain until DEL.
            if self.verb == "DEL" || self.first.is_none() {
                kernel.assert_is(&self.to, &context);
            }
        } else {
            assert_ne!(fault.error, "EINTR", "{context}");
            let error: Option<Value> = serde_json::from_slice(&output.stdout).ok();
            let code = error.and_then(|error| error["code"].as_u64());
            // The fault may affect stdout; and no thread may continue in a pod's network namespace.
            let is_answered = code.is_some_and(|code| code != 108 || fault.call == "setns");
            assert!(is_answered || fault.call == "write", "{context} {output:?}");
            assert!(fault.error != "ENOBUFS" || code != Some(102) || !context.contains("does the node's kernel"));
            assert!(kernel.has_same_rules(&self.from) || kernel.has_same_rules(&self.to), "{context}\n{kernel:?}");
            assert!(kernel == self.before || self.state().exists(), "{context}\n{kernel:?}");
        }
        if self.verb == "ADD" && self.tried.is_multiple_of(5) {
            self.done("ADD", &self.configuration);
            Kernel::of(&self.pod).assert_is(&self.to, &format!("an ADD after {context}"));
        }
        self.done("DEL", &self.configuration);
        Kernel::of(&self.pod).assert_is(&self.before, &format!("a DEL after {context}"));
        assert_eq!(left_in_state(), Vec::<PathBuf>::new(), "after {context}");
    }

    /// Tries every fault, or this scenario's share.
    fn all_fail(mut self, (index, of): (usize, usize)) {
        self.prepare();
        let faults = self.faults();
        self.done("DEL", &self.configuration);
        for fault in &faults {
            if self.is_sampled(index, of) {
                self.prepare();
                self.fail(fault);
            }
        }
        println!("{} of {} faults of {}", self.tried, faults.len(), self.verb);
    }
}

#[test]
fn faults_in_add_with_nat() {
    on_a_node(|| Scenario::new("ADD", None, configuration(Facts::DnsCaptured, "iptables")).all_fail((0, 4)));
}

#[test]
fn faults_in_add_with_nat_in_nftables_format() {
    on_a_node(|| Scenario::new("ADD", None, configuration(Facts::DnsCaptured, "nftables")).all_fail((1, 4)));
}

#[test]
fn faults_in_add_with_tproxy() {
    on_a_node(|| Scenario::new("ADD", None, configuration(Facts::Tproxy, "iptables")).all_fail((2, 4)));
}

#[test]
fn faults_in_add_with_tproxy_in_nftables_format() {
    on_a_node(|| Scenario::new("ADD", None, configuration(Facts::Tproxy, "nftables")).all_fail((3, 4)));
}

#[test]
fn faults_in_add_that_changes_tproxy_to_nat() {
    let (first, then) = (configuration(Facts::Tproxy, "iptables"), configuration(Facts::DnsCaptured, "iptables"));
    on_a_node(|| Scenario::new("ADD", Some(first), then).all_fail((0, 3)));
}

#[test]
fn faults_in_del_with_tproxy() {
    let added = configuration(Facts::Tproxy, "iptables");
    on_a_node(|| Scenario::new("DEL", Some(added.clone()), added).all_fail((0, 3)));
}

#[test]
fn faults_in_del_with_nat_in_nftables_format() {
    let added = configuration(Facts::DnsCaptured, "nftables");
    on_a_node(|| Scenario::new("DEL", Some(added.clone()), added).all_fail((1, 3)));
}
