//! Refusals of the kernel: missing capabilities, a seccomp filter, an older kernel, answers cut short.

use crate::call::{Answer, Ended};
use crate::node::on_a_node_with;
use crate::pod::Pod;
use crate::subject::{MODES, Mode, Subject, Verb};
use crate::system_calls::system_calls;
use crate::table::{Table, is_answer, is_complete, is_refused};

const VERBS: [Verb; 7] = Verb::ALL;

fn modes() -> Vec<(Mode, &'static str)> {
    MODES.into_iter().enumerate().filter(|(at, _)| is_complete() || at % 4 == 1).map(|(_, mode)| mode).collect()
}

#[test]
fn missing_capabilities() {
    let mut table = Table::new("kernel");
    on_a_node_with("size=64m", || {
        for (mode, dialect) in modes() {
            let subject = Subject::new(mode, dialect);
            for verb in VERBS {
                for (fault, options) in [
                    ("no CAP_NET_ADMIN", &["--bounding-set=-net_admin"][..]),
                    ("no CAP_SYS_ADMIN", &["--bounding-set=-sys_admin"]),
                    ("not root", &["--reuid=65534", "--regid=65534", "--clear-groups"]),
                ] {
                    let runner = [&["setpriv"], options].concat();
                    let is_right = |ended: &Ended| match &ended.answer {
                        Answer::Refused(102, text) if !text.contains("CAP_NET_ADMIN") && verb.command() == "ADD" => {
                            Err("the missing capability is not named".into())
                        }
                        _ => is_answer(ended),
                    };
                    subject.try_fault(&mut table, verb, fault, |call| call.under(&runner), is_right);
                }
            }
        }
    });
    table.end();
}

/// System calls that each process needs to start or end, and those that can't fail.
const ESSENTIAL: [&str; 13] = [
    "arch_prctl",
    "brk",
    "close",
    "execve",
    "exit_group",
    "mmap",
    "mprotect",
    "munmap",
    "mremap",
    "rt_sigaction",
    "rt_sigprocmask",
    "set_tid_address",
    "sigaltstack",
];

/// A filter of the container in which a runtime or Multus runs, or a kernel without the system call.
#[test]
fn system_calls_that_are_always_refused() {
    let mut table = Table::new("kernel");
    on_a_node_with("size=64m", || {
        for (mode, dialect) in modes() {
            let subject = Subject::new(mode, dialect);
            for (at, verb) in VERBS.into_iter().enumerate() {
                subject.prepare(verb);
                let names = system_calls(&subject, verb);
                subject.done(Verb::Del);
                for (number, name) in names.keys().filter(|name| !ESSENTIAL.contains(&name.as_str())).enumerate() {
                    for error in ["EPERM", "ENOSYS"] {
                        if !is_complete() && (number + at) % 12 != 0 {
                            continue;
                        }
                        let (trace, option) = (format!("trace={name}"), format!("inject={name}:error={error}:when=1+"));
                        let runner = ["strace", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &option];
                        let is_right = |ended: &Ended| match &ended.answer {
                            Answer::Silent(_) if ["write", "poll"].contains(&name.as_str()) => Ok(()),
                            // The runtime of the language examines the descriptors of stdin, stdout and stderr.
                            Answer::Signaled(6) if name == "poll" => Ok(()),
                            _ => is_answer(ended).map_err(|why| format!("{name}: {why}")),
                        };
                        let fault = format!("{error} from each system call of one kind");
                        subject.try_fault(&mut table, verb, &fault, |call| call.under(&runner), is_right);
                    }
                }
            }
        }
    });
    table.end();
}

/// The kernel returns less than a message, or nothing.
#[test]
fn netlink_answers_cut_short() {
    let mut table = Table::new("kernel");
    on_a_node_with("size=64m", || {
        for (mode, dialect) in modes() {
            let subject = Subject::new(mode, dialect);
            for verb in VERBS {
                subject.prepare(verb);
                let count = system_calls(&subject, verb).get("recvfrom").copied().unwrap_or_default();
                subject.done(Verb::Del);
                for number in (1..=count).filter(|number| is_complete() || number % 7 == 1) {
                    for length in [0, 1, 16, 20] {
                        let option = format!("inject=recvfrom:retval={length}:when={number}");
                        let runner = ["strace", "-qq", "-o", "/dev/null", "-e", "trace=recvfrom", "-e", &option];
                        let fault = "netlink: an answer of 0, 1, 16 or 20 bytes";
                        subject.try_fault(&mut table, verb, fault, |call| call.under(&runner), is_answer);
                    }
                }
            }
        }
    });
    table.end();
}

/// The kernel refuses `-m owner` if the network namespace belongs to another user namespace
/// (net/netfilter/xt_owner.c), as it refuses an extension that it does not have.
#[test]
fn rules_that_the_kernel_refuses() {
    let mut table = Table::new("kernel");
    on_a_node_with("size=64m", || {
        for dialect in ["nftables", "auto"] {
            let subject = Subject::of(Pod::of_another_user(), Mode::Redirect, dialect);
            for verb in VERBS {
                let fault = format!("another user namespace owns the network namespace, dialect {dialect}");
                subject.try_fault(&mut table, verb, &fault, |call| call, |ended| is_refused(ended, &[0]));
            }
        }
        let subject = Subject::of(Pod::of_another_user(), Mode::Redirect, "nftables");
        let mut configuration = subject.configuration(Verb::Add);
        configuration["dialect"] = "iptables".into();
        let fault = "the kernel refuses an xt extension, dialect iptables";
        let change = |call: crate::call::Call| call.with_stdin(configuration.to_string());
        subject.try_fault(&mut table, Verb::Add, fault, change, |ended| match &ended.answer {
            Answer::Refused(102, text) if text.contains("-m owner") => Ok(()),
            _ => Err("expected code 102 and the rule".into()),
        });
    });
    table.end();
}
