//! Refusals of the kernel: missing capabilities, a seccomp filter, an older kernel, answers cut short.

use crate::call::{Answer, Ended};
use crate::node::{STATE, on_a_node_with};
use crate::pod::Pod;
use crate::subject::{MODES, Mode, Subject, Verb};
use crate::system_calls::system_calls;
use crate::table::{Table, is_answer, is_complete, is_refused};
use std::fs;
use std::path::Path;

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
                for number in (1..=count).filter(|number| is_complete() || number % 23 == 1) {
                    // A sample tries one length for each answer.
                    let is_tried = |at: &usize| is_complete() || *at == number % 4;
                    for length in (0..4).filter(is_tried).map(|at| [0, 1, 16, 20][at]) {
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

/// A transaction of a call: the numbers of its system calls `sendto` and `recvfrom`, its length, and the sequence
/// numbers of its messages.
struct Sent {
    send: usize,
    receive: usize,
    length: usize,
    sequences: Vec<u32>,
}

fn transactions(subject: &Subject, verb: Verb) -> Vec<Sent> {
    let log = Path::new(STATE).join("strace");
    let path = log.to_str().expect("text");
    let ended =
        subject.call(verb).under(&["strace", "-qq", "-v", "-s", "1", "-e", "trace=sendto,recvfrom", "-o", path]).run();
    assert_eq!(ended.answer, Answer::Done, "{}", ended.stderr);
    let text = fs::read_to_string(&log).expect("written");
    fs::remove_file(&log).expect("it was written");
    let (mut send, mut receive, mut found) = (0, 0, Vec::new());
    for line in text.lines() {
        send += usize::from(line.starts_with("sendto("));
        receive += usize::from(line.starts_with("recvfrom("));
        // NFNL_MSG_BATCH_BEGIN
        if line.starts_with("sendto(") && line.contains("nlmsg_type=0x10 ") {
            let numbers = line.split("nlmsg_seq=").skip(1);
            let numbers = numbers.map(|rest| rest.split(',').next().and_then(|number| number.parse().ok()));
            let all: Vec<u32> = numbers.map(|number| number.expect("a number")).collect();
            let length = line.rsplit(" = ").next().and_then(|length| length.parse().ok()).expect("a length");
            // Without the marks of beginning and end.
            found.push(Sent { send, receive, length, sequences: all[1..all.len() - 1].to_vec() });
        }
    }
    found
}

/// Returns strace with the answer to a transaction that is not sent: an error for one message, and the acknowledgement
/// of the last one.
fn refused_by(sent: &Sent, refused: u32, last: u32, error: i32) -> Vec<String> {
    let message = |sequence: u32, error: i32| {
        let header = [36_u32.to_ne_bytes(), 2_u32.to_ne_bytes(), sequence.to_ne_bytes(), [0; 4]].concat();
        [header, error.to_ne_bytes().to_vec(), vec![0; 16]].concat()
    };
    let mut bytes = message(refused, -error);
    if refused != last {
        bytes.extend(message(last, 0));
    }
    let data: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let (send, receive) = (sent.send, sent.receive + 1);
    let words = "strace -qq -o /dev/null -e trace=sendto,recvfrom".split(' ').map(str::to_owned);
    let injections = [
        "-e".to_owned(),
        format!("inject=sendto:retval={}:when={send}", sent.length),
        "-e".to_owned(),
        format!("inject=recvfrom:retval={}:poke_exit=@arg2={data}:when={receive}", bytes.len()),
    ];
    words.chain(injections).collect()
}

/// Errors that nf_tables returns: no memory, no such extension or expression, not supported, invalid, busy, no space.
const REFUSALS: [(&str, i32); 7] = [
    ("ENOMEM", 12),
    ("ENOBUFS", 105),
    ("ENOENT", 2),
    ("EOPNOTSUPP", 95),
    ("EINVAL", 22),
    ("EBUSY", 16),
    ("ENOSPC", 28),
];

/// The kernel refuses one message of a transaction, and thereby all of it. The test sends nothing and writes the
/// kernel's answer itself.
#[test]
fn transactions_that_the_kernel_refuses() {
    let mut table = Table::new("kernel");
    on_a_node_with("size=64m", || {
        for (mode, dialect) in modes() {
            let subject = Subject::new(mode, dialect);
            for verb in [Verb::Add, Verb::AddChanged, Verb::Del] {
                subject.prepare(verb);
                let all = transactions(&subject, verb);
                subject.done(Verb::Del);
                assert!(!all.is_empty(), "{}: expected a transaction", verb.name());
                for sent in all {
                    for (at, refused) in sent.sequences.iter().enumerate() {
                        for (name, error) in REFUSALS {
                            if !is_complete() && (at + usize::try_from(error).expect("small")) % 61 != 0 {
                                continue;
                            }
                            let last = *sent.sequences.last().expect("one");
                            let runner = refused_by(&sent, *refused, last, error);
                            let runner: Vec<&str> = runner.iter().map(String::as_str).collect();
                            let expected: &[u64] = if ["ENOMEM", "ENOBUFS"].contains(&name) { &[11] } else { &[102] };
                            let fault = format!("nf_tables refuses a message: {name}");
                            subject.try_fault(
                                &mut table,
                                verb,
                                &fault,
                                |call| call.under(&runner),
                                |ended| is_refused(ended, expected),
                            );
                        }
                    }
                }
            }
        }
    });
    table.end();
}

/// A kernel without an xt extension, for a pod without rules: dialect `auto` writes them in nftables format.
#[test]
fn an_extension_that_the_kernel_does_not_have() {
    let mut table = Table::new("kernel");
    on_a_node_with("size=64m", || {
        let mut subject = Subject::new(Mode::Redirect, "auto");
        let first = transactions(&subject, Verb::Add).into_iter().next().expect("a transaction");
        subject.done(Verb::Del);
        subject.added = Subject::new(Mode::Redirect, "nftables").added;
        for (at, refused) in first.sequences.iter().enumerate().filter(|(at, _)| is_complete() || at % 61 == 0) {
            for (name, error) in
                REFUSALS.into_iter().filter(|(name, _)| ["ENOENT", "EOPNOTSUPP", "EINVAL"].contains(name))
            {
                let last = first.sequences[first.sequences.len() - 1];
                let runner = refused_by(&first, *refused, last, error);
                let runner: Vec<&str> = runner.iter().map(String::as_str).collect();
                let fault = format!("nf_tables refuses a message of dialect auto: {name}");
                let is_right = |ended: &Ended| is_refused(ended, &[0]).map_err(|why| format!("message {at}: {why}"));
                subject.try_fault(&mut table, Verb::Add, &fault, |call| call.under(&runner), is_right);
            }
        }
    });
    table.end();
}
