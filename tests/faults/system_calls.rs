//! Each system call of a call fails once, or the process is killed before it. Then the kernel has all rules or none,
//! and the saved state lets the next DEL remove them. `FAULTS=all` tries every fault in every mode and rule format.

use crate::call::{Answer, Ended};
use crate::node::{STATE, on_a_node_with};
use crate::subject::{MODES, Mode, Subject, Verb};
use crate::table::{Table, is_answer, is_complete};
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
/// In a sample, each of these numbers of faults is tried once.
const SAMPLE: usize = 41;

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

    /// Returns the name of the row.
    fn name(&self) -> String {
        match self.error {
            "SIGKILL" => "SIGKILL before each system call".into(),
            "SIGTERM" => "SIGTERM before each system call".into(),
            error if self.option().ends_with('+') => {
                format!("{}: {error}, each call and all after it", self.system_call)
            }
            error => format!("{}: {error}, each call", self.system_call),
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
        Answer::Signaled(15) if *error == "SIGTERM" => Ok(()),
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
        _ => is_answer(ended),
    }
}

/// Tries the faults of these calls that `faults` returns for a system call.
fn all_fail(verbs: &[Verb], faults: fn(&str, Mode) -> Vec<&'static str>) {
    on_a_node_with("size=64m", || {
        let (mut table, mut step, mut tried) = (Table::new("system calls"), 0, 0);
        for (at, verb) in verbs.iter().enumerate() {
            for (mode_at, (mode, dialect)) in MODES.into_iter().enumerate() {
                // A sample tries each verb in one mode.
                if !is_complete() && mode_at != (at * 3 + verbs.len()) % MODES.len() {
                    continue;
                }
                let subject = Subject::new(mode, dialect);
                subject.prepare(*verb);
                let counts = system_calls(&subject, *verb);
                subject.done(Verb::Del);
                for (system_call, count) in counts {
                    for error in faults(&system_call, mode) {
                        for number in 1..=count {
                            step += 1;
                            if is_complete() || step % SAMPLE == 0 {
                                tried += 1;
                                let fault = Fault { system_call: system_call.clone(), number, error };
                                fail(&subject, *verb, &fault, &mut table);
                            }
                        }
                    }
                }
            }
        }
        assert!(tried > 0, "no fault was tried");
        table.end();
    });
}

fn fail(subject: &Subject, verb: Verb, fault: &Fault, table: &mut Table) {
    let (trace, option) = (format!("trace={}", fault.system_call), fault.option());
    let runner = ["strace", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &option];
    let name = (&*fault.name(), &*option);
    subject.attempt(table, verb, name, |call| call.under(&runner).run(), |ended| is_right(fault, ended));
}

fn with_errors(system_call: &str, _: Mode) -> Vec<&'static str> {
    errors(system_call).to_vec()
}

/// SIGTERM differs from SIGKILL only while the plugin runs an executable.
fn with_signals(_: &str, mode: Mode) -> Vec<&'static str> {
    if mode == Mode::Primary { vec!["SIGKILL", "SIGTERM"] } else { vec!["SIGKILL"] }
}

#[test]
fn errors_in_the_first_add() {
    all_fail(&[Verb::Add], with_errors);
}

#[test]
fn errors_in_later_adds() {
    all_fail(&[Verb::AddAgain, Verb::AddChanged], with_errors);
}

#[test]
fn errors_in_check_and_status() {
    all_fail(&[Verb::Check, Verb::Status], with_errors);
}

#[test]
fn errors_in_del_and_gc() {
    all_fail(&[Verb::Del, Verb::Gc], with_errors);
}

#[test]
fn killed_before_each_system_call_of_add() {
    all_fail(&[Verb::Add, Verb::AddAgain, Verb::AddChanged], with_signals);
}

#[test]
fn killed_before_each_system_call_of_other_calls() {
    all_fail(&[Verb::Check, Verb::Status, Verb::Del, Verb::Gc], with_signals);
}
