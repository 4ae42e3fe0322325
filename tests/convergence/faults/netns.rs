//! Network namespaces that are missing, are something else, or vanish during a call.

use super::call::{Answer, Call, Ended, ended};
use super::subject::{Mode, Subject, Verb};
use crate::attachment::{Facts, Slot};
use crate::node::{STATE, left_in_state, on_a_node_with};
use crate::pod::Pod;
use crate::support::directory::Directory;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_path_without_network_namespace() {
    on_a_node_with("size=1m", || {
        let directory = Directory::new("netns");
        let file = |name: &str| directory.join(name).display().to_string();
        fs::write(file("empty"), "").expect("writable");
        nix::unistd::mkfifo(&*file("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("writable");
        let paths = [
            ("is empty", String::new(), &[4][..]),
            ("does not exist", file("none"), &[8]),
            ("ends below a file", file("empty/below"), &[8]),
            ("is an empty file, after an unmount", file("empty"), &[8]),
            ("is of a process that ended", "/proc/4194304/ns/net".into(), &[8]),
            ("is a directory", STATE.into(), &[8]),
            ("is a FIFO", file("fifo"), &[8]),
            ("is a device", "/dev/zero".into(), &[8]),
            ("is a mount namespace", "/proc/self/ns/mnt".into(), &[8]),
            ("is the plugin's own", "/proc/self/ns/net".into(), &[8]),
        ];
        for (mode, dialect) in [(Mode::Redirect, "iptables"), (Mode::Primary, "nftables")] {
            let subject = Subject::new(mode, dialect);
            for (what, path, codes) in &paths {
                for verb in [Verb::Add, Verb::Check, Verb::Del] {
                    // A namespace of another kind, or its own, is refused by each call.
                    let is_odd = path.starts_with("/proc/self");
                    let expected = match verb {
                        Verb::Del if is_odd => &[0, 8],
                        Verb::Del => &[0][..],
                        _ => codes,
                    };
                    subject.prepare(verb);
                    let ended = subject.call(verb).with("CNI_NETNS", path).run();
                    let context = format!("{} ({mode:?}), CNI_NETNS {what}", verb.name());
                    ended.is_refused(expected).unwrap_or_else(|why| panic!("{context}: {why}: {ended:?}"));
                    assert!(ended.answer != Answer::Done || !subject.has_state(), "{context}: DEL left saved state");
                    // Rules go with the network namespace. This one still exists, for the next try.
                    subject.done(Verb::Del);
                    assert!(!subject.has_state() && !subject.has_interface(), "{context}: the next DEL left something");
                    clear(&subject);
                }
            }
        }
    });
}

/// Removes the rules that no record describes.
fn clear(subject: &Subject) {
    subject.pod.tool("nft", &["flush", "ruleset"], "");
    let _ = subject.pod.try_tool("sh", &["-c", "ip addr del 127.0.0.6/32 dev lo; ip -6 addr del ::6/128 dev lo"], "");
}

/// A network namespace that nothing but its mount keeps alive.
struct Mounted(PathBuf);

impl Mounted {
    fn new(name: &str) -> (Self, String) {
        let path = Path::new(STATE).join(name);
        fs::write(&path, "").expect("writable");
        let pod = Pod::new();
        mount(Some(&pod.netns()), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("needs root");
        (Self(path), pod.container_id.clone())
    }

    fn vanish(&self) {
        umount2(&self.0, MntFlags::MNT_DETACH).expect("it is mounted");
        fs::remove_file(&self.0).expect("it is a file");
    }
}

/// Runs a call, with `event` before its system call of this number; `None` if it makes fewer.
#[expect(clippy::zombie_processes, reason = "the loop waits with waitpid")]
fn with_event_before(call: Call, number: usize, event: impl FnOnce()) -> Option<Ended> {
    let child = call.in_shell("kill -STOP $$; exec \"$@\"").start();
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("an ID"));
    assert_eq!(waitpid(pid, Some(WaitPidFlag::WUNTRACED)), Ok(WaitStatus::Stopped(pid, Signal::SIGSTOP)));
    let options = ptrace::Options::PTRACE_O_TRACEEXEC | ptrace::Options::PTRACE_O_TRACESYSGOOD;
    ptrace::seize(pid, options).expect("a child");
    kill(pid, Signal::SIGCONT).expect("a child");
    let (mut is_plugin, mut stops, mut event) = (false, 0, Some(event));
    loop {
        let signal = match waitpid(pid, None).expect("a child") {
            WaitStatus::PtraceEvent(_, _, code) if code == ptrace::Event::PTRACE_EVENT_EXEC as i32 => {
                is_plugin = true;
                None
            }
            // Each system call stops the process twice; the end of `exec` is the first stop.
            WaitStatus::PtraceSyscall(_) if is_plugin => {
                stops += 1;
                if stops == 2 * number {
                    event.take().expect("once")();
                    ptrace::detach(pid, None).expect("stopped");
                    return Some(ended(child, LIMIT));
                }
                None
            }
            WaitStatus::PtraceSyscall(_) | WaitStatus::PtraceEvent(..) => None,
            WaitStatus::Stopped(_, Signal::SIGSTOP | Signal::SIGCONT | Signal::SIGTRAP) => None,
            WaitStatus::Stopped(_, signal) => Some(signal),
            // It has ended, and waitpid(2) has removed it.
            _ => return None,
        };
        ptrace::syscall(pid, signal).expect("stopped");
    }
}

/// The runtime deletes the pod while the plugin adds or removes it. The open file keeps the network namespace until
/// the process ends.
#[test]
fn a_network_namespace_that_vanishes_during_a_call() {
    on_a_node_with("size=64m", || {
        for (dialect, facts, verb) in [
            ("iptables", Facts::DnsCaptured, "ADD"),
            ("nftables", Facts::Tproxy, "CHECK"),
            ("nftables", Facts::Tproxy, "DEL"),
        ] {
            for number in (1..).step_by(29) {
                let (netns, container) = Mounted::new(&format!("netns-{number}"));
                let path = netns.0.display().to_string();
                let mut configuration = Slot::Detour.with(facts).configuration();
                configuration["dialect"] = dialect.into();
                let call = |verb| Call::new(verb, &container, &path, Slot::Detour.ifname(), &configuration);
                if verb != "ADD" {
                    assert_eq!(call("ADD").run().answer, Answer::Done);
                }
                let Some(ended) = with_event_before(call(verb), number, || netns.vanish()) else {
                    netns.vanish();
                    assert_eq!(call("DEL").run().answer, Answer::Done);
                    break;
                };
                let context = format!("{verb} ({facts:?}, {dialect}), before system call {number}");
                let verdict = ended.is_refused(if verb == "DEL" { &[0] } else { &[0, 8] });
                verdict.unwrap_or_else(|why| panic!("{context}: {why}: {ended:?}"));
                assert_eq!(call("DEL").run().answer, Answer::Done, "DEL after {context}");
                assert_eq!(left_in_state(), Vec::<PathBuf>::new(), "{context}");
            }
        }
    });
}
