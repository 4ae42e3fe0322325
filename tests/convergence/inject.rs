//! Each system call of an ADD and of a DEL fails once, and from some on all fail: nothing or all of it is in
//! the kernel, or state is still there from which the next DEL removes it. `FAULTS=all` tries every one in
//! every combination; else each is tried in one of them.

use crate::attachment::{Attachment, Facts, Slot};
use crate::kernel::Kernel;
use crate::node::{STATE, left_in_state, on_a_node};
use crate::pod::Pod;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The calls that can fail, and how. After EINTR the plugin must go on as if nothing had happened.
const ERRORS: [(&str, &[&str]); 22] = [
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
    ("sendto", &["ENOBUFS", "EINTR", ALWAYS]),
    ("setns", &["EPERM"]),
    ("setsockopt", &["ENOMEM"]),
    ("socket", &["EMFILE"]),
    ("unlink", &["EIO"]),
    ("write", &["ENOSPC"]),
];
/// From this call on, all of its kind fail.
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

/// A pod, and an attachment that is added to it and deleted again.
struct Scenario {
    pod: Pod,
    attachment: Attachment,
    configuration: Value,
    before: Kernel,
    after: Kernel,
    step: usize,
    tried: usize,
}

impl Scenario {
    fn new(facts: Facts, dialect: &str) -> Self {
        let (pod, attachment) = (Pod::new(), Slot::Detour.with(facts));
        let mut configuration = attachment.configuration();
        configuration["dialect"] = dialect.into();
        configuration["log_level"] = "none".into();
        let before = Kernel::of(&pod);
        let mut scenario = Self { pod, attachment, configuration, after: before.clone(), before, step: 0, tried: 0 };
        scenario.done("ADD");
        scenario.after = Kernel::of(&scenario.pod);
        assert_ne!(scenario.after, scenario.before);
        scenario.done("DEL");
        scenario
    }

    fn done(&self, verb: &str) {
        let netns = self.pod.netns().display().to_string();
        self.pod.call_with(verb, self.attachment.slot.ifname(), &self.configuration, &netns).done();
    }

    /// The call below strace.
    fn traced(&self, verb: &str, options: &[&str]) -> Output {
        let input = Path::new(STATE).join("stdin");
        std::fs::write(&input, self.configuration.to_string()).expect("writable");
        let mut command = Command::new("strace");
        command.args(["-f", "-qq"]).args(options).arg(env!("CARGO_BIN_EXE_detour"));
        command.env_clear().envs([
            ("PATH", std::env::var("PATH").expect("a path").as_str()),
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", &self.pod.container_id),
            ("CNI_NETNS", &self.pod.netns().display().to_string()),
            ("CNI_IFNAME", self.attachment.slot.ifname()),
            ("CNI_PATH", "/opt/cni/bin"),
            ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"),
        ]);
        command.stdin(std::fs::File::open(&input).expect("it was written"));
        let output = command.output().expect("strace is needed");
        std::fs::remove_file(input).expect("it was written");
        output
    }

    /// What can fail in a call, from where it comes to the pod's namespace.
    fn faults(&self, verb: &str) -> Vec<Fault> {
        let log = Path::new(STATE).join("strace");
        let calls: Vec<&str> = ERRORS.iter().map(|(call, _)| *call).collect();
        // What an architecture or a kernel does not have is passed over.
        let calls = format!("trace=?{}", calls.join(",?"));
        let output = self.traced(verb, &["-e", &calls, "-o", log.to_str().expect("text")]);
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

    /// Whether a fault is tried in this scenario.
    fn is_sampled(&mut self, index: usize, of: usize) -> bool {
        self.step += 1;
        std::env::var("FAULTS").is_ok_and(|which| which == "all") || self.step % of == index
    }

    fn fail(&mut self, verb: &str, fault: &Fault) {
        self.tried += 1;
        let option = fault.option();
        let output = self.traced(verb, &["-o", "/dev/null", "-e", &format!("trace={}", fault.call), "-e", &option]);
        let kernel = Kernel::of(&self.pod);
        let context = format!("{verb} with {option}: {}", String::from_utf8_lossy(&output.stdout));
        let wanted = if verb == "ADD" { &self.after } else { &self.before };
        if output.status.success() {
            kernel.assert_is(wanted, &context);
        } else {
            assert_ne!(fault.error, "EINTR", "{context}");
            let error: Option<Value> = serde_json::from_slice(&output.stdout).ok();
            let code = error.and_then(|error| error["code"].as_u64());
            // Stdout may be what can't be written to; and no thread may go on in a pod's namespace.
            let is_internal = fault.call == "setns" && code == Some(108);
            let is_answered = code.is_some_and(|code| code != 108) || is_internal;
            assert!(is_answered || fault.call == "write", "{context} {output:?}");
            assert!(verb == "DEL" || kernel == self.before || self.state().exists(), "{context}\n{kernel:?}");
            assert!(verb == "ADD" || kernel == self.before || self.state().exists(), "{context}\n{kernel:?}");
        }
        if verb == "ADD" && self.tried.is_multiple_of(5) {
            self.done("ADD");
            Kernel::of(&self.pod).assert_is(&self.after, &format!("an ADD after {context}"));
        }
        self.done("DEL");
        Kernel::of(&self.pod).assert_is(&self.before, &format!("a DEL after {context}"));
        assert_eq!(left_in_state(), Vec::<PathBuf>::new(), "after {context}");
    }

    fn all_fail(mut self, verb: &str, (index, of): (usize, usize)) {
        let prepare = |scenario: &Self| {
            if verb == "DEL" {
                scenario.done("ADD")
            }
        };
        prepare(&self);
        let faults = self.faults(verb);
        self.done("DEL");
        for fault in &faults {
            if self.is_sampled(index, of) {
                prepare(&self);
                self.fail(verb, fault);
            }
        }
        println!("{} of {} faults of {verb}", self.tried, faults.len());
    }
}

#[test]
fn an_add_with_nat() {
    on_a_node(|| Scenario::new(Facts::DnsCaptured, "iptables").all_fail("ADD", (0, 4)));
}

#[test]
fn an_add_with_nat_as_nftables() {
    on_a_node(|| Scenario::new(Facts::DnsCaptured, "nftables").all_fail("ADD", (1, 4)));
}

#[test]
fn an_add_with_tproxy() {
    on_a_node(|| Scenario::new(Facts::Tproxy, "iptables").all_fail("ADD", (2, 4)));
}

#[test]
fn an_add_with_tproxy_as_nftables() {
    on_a_node(|| Scenario::new(Facts::Tproxy, "nftables").all_fail("ADD", (3, 4)));
}

#[test]
fn a_del_with_tproxy() {
    on_a_node(|| Scenario::new(Facts::Tproxy, "iptables").all_fail("DEL", (0, 2)));
}

#[test]
fn a_del_with_nat_as_nftables() {
    on_a_node(|| Scenario::new(Facts::DnsCaptured, "nftables").all_fail("DEL", (1, 2)));
}
