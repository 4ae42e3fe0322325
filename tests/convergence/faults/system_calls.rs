//! Each system call of an ADD fails once, or the process is killed before it. Then the kernel has all rules or none, and
//! the saved state lets the next DEL remove them. Without `FAULTS=all`, one call of each kind fails.

use super::call::{Answer, Ended};
use super::subject::{Mode, Subject, Verb};
use crate::node::{STATE, on_a_node_with};
use std::collections::BTreeMap;
use std::path::Path;

/// The system calls and the errors that the kernel can return, according to their manual pages. A call without
/// errors can't fail with valid arguments. The plugin has no signal handlers, so only calls with a timeout can return
/// EINTR, after SIGSTOP and SIGCONT (signal(7)). `close` closes the descriptor whatever it returns, which strace can't
/// imitate.
const ERRORS: [(&str, &[&str]); 80] = [
    ("access", &["EACCES", "EIO"]),
    ("arch_prctl", &[]),
    ("bind", &["ENOMEM"]),
    ("brk", &["ENOMEM"]),
    ("clock_gettime", &[]),
    ("clone", &["EAGAIN"]),
    ("clone3", &["EAGAIN"]),
    ("close", &[]),
    ("connect", &["ENOBUFS", "EINTR"]),
    ("execve", &[]),
    ("exit_group", &[]),
    ("fchmod", &["EIO", "EROFS"]),
    ("fcntl", &["ENOMEM", "EMFILE"]),
    ("flock", &["ENOLCK", "EINTR"]),
    ("fstat", &["EIO"]),
    ("fstatfs", &["EIO"]),
    ("fsync", &["EIO", "ENOSPC"]),
    ("ftruncate", &["EIO"]),
    ("futex", &[]),
    ("getdents64", &["EIO"]),
    ("geteuid", &[]),
    ("getegid", &[]),
    ("getgid", &[]),
    ("getpid", &[]),
    ("getppid", &[]),
    ("getrandom", &["EINTR", "ENOSYS"]),
    ("getsockname", &["ENOBUFS"]),
    ("getsockopt", &["ENOMEM"]),
    ("gettid", &[]),
    ("getuid", &[]),
    ("ioctl", &["ENOTTY"]),
    ("kill", &["ESRCH"]),
    ("lseek", &["EINVAL"]),
    ("lstat", &["EIO", "EACCES"]),
    ("madvise", &["ENOMEM"]),
    ("mkdir", &["ENOSPC", "EROFS", "EACCES"]),
    ("mmap", &["ENOMEM"]),
    ("mprotect", &["ENOMEM"]),
    ("mremap", &["ENOMEM"]),
    ("munmap", &["ENOMEM"]),
    ("newfstatat", &["EIO", "EACCES"]),
    ("open", &["EMFILE", "ENOMEM", "EACCES", "EIO"]),
    ("openat", &["EMFILE", "ENOMEM", "EACCES", "EIO"]),
    ("openat2", &["EMFILE", "ENOMEM", "EACCES", "EIO", "EAGAIN", "ENOSYS"]),
    ("pidfd_open", &["EMFILE", "ENOSYS"]),
    ("pidfd_send_signal", &["EPERM", "ENOSYS"]),
    ("pipe2", &["EMFILE", "ENFILE"]),
    ("poll", &["ENOMEM", "EINTR"]),
    ("ppoll", &["ENOMEM", "EINTR"]),
    ("prctl", &["EINVAL"]),
    ("pread64", &["EIO"]),
    ("prlimit64", &["EPERM"]),
    ("read", &["EIO", "EINTR"]),
    ("readlink", &["EIO", "EACCES"]),
    ("recvfrom", &["ENOBUFS", "EINTR", ALWAYS]),
    ("recvmsg", &["ENOBUFS", "EINTR"]),
    ("rename", &["EIO", "ENOSPC", "EROFS"]),
    ("renameat2", &["EIO", "ENOSPC", "EROFS", "ENOSYS"]),
    ("rmdir", &["EBUSY", "EIO"]),
    ("rseq", &[]),
    ("rt_sigaction", &[]),
    ("rt_sigprocmask", &[]),
    ("rt_sigreturn", &[]),
    ("sched_getaffinity", &[]),
    ("sendmsg", &["ENOBUFS", "EINTR"]),
    ("sendto", &["ENOBUFS", "EINTR", ALWAYS]),
    ("set_robust_list", &[]),
    ("set_tid_address", &[]),
    ("setns", &["EPERM", "ENOMEM"]),
    ("setsockopt", &["ENOMEM"]),
    ("sigaltstack", &["ENOMEM"]),
    ("signalfd4", &["EMFILE", "ENOMEM"]),
    ("socket", &["EMFILE", "ENOBUFS"]),
    ("socketpair", &["EMFILE"]),
    ("stat", &["EIO", "EACCES"]),
    ("statx", &["EIO", "EACCES", "ENOSYS"]),
    ("unlink", &["EIO", "EROFS"]),
    ("wait4", &["EINTR"]),
    ("waitid", &["EINTR"]),
    ("write", &["ENOSPC", "EIO", "EINTR"]),
];
/// From this call on, all calls of its kind fail.
const ALWAYS: &str = "ENOMEM";
/// Without memory, the process can't start or continue, and can't always report it.
const MEMORY: [&str; 8] = ["brk", "fcntl", "madvise", "mmap", "mprotect", "mremap", "munmap", "sigaltstack"];
/// One system call of a call, and what happens to it.
struct Fault {
    system_call: String,
    number: usize,
    /// An error, or `SIGKILL`.
    error: &'static str,
}

impl Fault {
    fn option(&self) -> String {
        let Self { system_call, number, error } = self;
        let after = if *error == ALWAYS && system_call.starts_with(['r', 's']) { "+" } else { "" };
        match error.strip_prefix("SIG") {
            Some(signal) => format!("inject={system_call}:signal={signal}:when={number}"),
            None => format!("inject={system_call}:error={error}:when={number}{after}"),
        }
    }
}

/// Returns the system calls of a call, by name, with their numbers.
pub(crate) fn system_calls(subject: &Subject, verb: Verb) -> BTreeMap<String, usize> {
    let log = Path::new(STATE).join("strace");
    let ended = subject.call(verb).under(&["strace", "-qq", "-o", log.to_str().expect("text")]).run();
    assert_eq!(ended.answer, Answer::Done, "{}", ended.stderr);
    let text = std::fs::read_to_string(&log).expect("written");
    std::fs::remove_file(log).expect("it was written");
    let mut counts = BTreeMap::new();
    for name in text.lines().filter_map(|line| line.split_once('(')).map(|(name, _)| name) {
        if name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            *counts.entry(name.to_owned()).or_default() += 1;
        }
    }
    let unknown: Vec<_> = counts.keys().filter(|name| !ERRORS.iter().any(|(known, _)| known == name)).collect();
    assert!(unknown.is_empty(), "add the errors of these system calls to ERRORS: {unknown:?}");
    counts
}

fn errors(system_call: &str) -> &'static [&'static str] {
    ERRORS.iter().find(|(known, _)| *known == system_call).map_or(&[], |(_, errors)| errors)
}

/// Returns whether the answer to a fault satisfies the contract.
fn is_right(fault: &Fault, ended: &Ended) -> Result<(), String> {
    let Fault { system_call, error, .. } = fault;
    match &ended.answer {
        Answer::Signaled(9) if *error == "SIGKILL" => Ok(()),
        Answer::Done => Ok(()),
        _ if *error == "EINTR" => Err("a call must continue after EINTR".into()),
        Answer::Signaled(_) | Answer::Silent(_) if MEMORY.contains(&system_call.as_str()) => Ok(()),
        // The fault may affect stdout.
        Answer::Silent(_) if ["write", "poll"].contains(&system_call.as_str()) => Ok(()),
        // No process may continue in a pod's network namespace.
        Answer::Refused(108, _) if system_call == "setns" => Ok(()),
        Answer::Refused(102, _) if ["EMFILE", "ENOBUFS", "ENOMEM"].contains(error) => {
            Err("the kernel lacks memory, which is temporary, and did not refuse the rules".into())
        }
        _ => ended.is_answer(),
    }
}

/// Tries the faults that `faults` returns for each system call, in a subject and with a verb of each row.
fn all_fail(rows: &[(Mode, &'static str, Verb)], faults: fn(usize, &str) -> Option<&'static str>) {
    let is_complete = std::env::var("FAULTS").is_ok_and(|which| which == "all");
    on_a_node_with("size=64m", || {
        for (mode, dialect, verb) in rows {
            let subject = Subject::new(*mode, dialect);
            subject.prepare(*verb);
            let counts = system_calls(&subject, *verb);
            subject.done(Verb::Del);
            for (at, (system_call, count)) in counts.into_iter().enumerate() {
                for number in if is_complete { 1..=count } else { count.div_ceil(2)..=count.div_ceil(2) } {
                    if let Some(error) = faults(at + number, &system_call) {
                        fail(&subject, *verb, &Fault { system_call: system_call.clone(), number, error });
                    }
                }
            }
        }
    });
}

fn fail(subject: &Subject, verb: Verb, fault: &Fault) {
    let (trace, option) = (format!("trace={}", fault.system_call), fault.option());
    let runner = ["strace", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &option];
    subject.attempt(verb, &option, |call| call.under(&runner).run(), |ended| is_right(fault, ended));
}

/// The errors of a system call take turns.
fn error(number: usize, system_call: &str) -> Option<&'static str> {
    let errors = errors(system_call);
    errors.get(number % errors.len().max(1)).copied()
}

#[test]
fn each_system_call_of_an_add_fails() {
    all_fail(&[(Mode::Redirect, "iptables", Verb::Add), (Mode::Primary, "nftables", Verb::AddChanged)], error);
}

#[test]
fn killed_before_a_system_call() {
    all_fail(&[(Mode::Tproxy, "nftables", Verb::AddChanged), (Mode::Primary, "iptables", Verb::Add)], |_, _| {
        Some("SIGKILL")
    });
    all_fail(&[(Mode::Redirect, "iptables", Verb::Del)], |_, _| Some("SIGKILL"));
}
