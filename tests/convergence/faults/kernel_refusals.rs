//! Refusals of the kernel: missing capabilities, another user namespace, an older kernel, no memory.

use super::call::{Answer, Ended};
use super::subject::{Mode, Subject, Verb};
use crate::node::{STATE, on_a_node_with};
use crate::pod::Pod;
use std::fs;
use std::path::Path;

#[test]
fn missing_capabilities() {
    on_a_node_with("size=64m", || {
        for (mode, dialect) in [(Mode::Redirect, "nftables"), (Mode::Primary, "iptables")] {
            let subject = Subject::new(mode, dialect);
            for verb in Verb::ALL {
                for options in [
                    &["--bounding-set=-net_admin"][..],
                    &["--bounding-set=-sys_admin"],
                    &["--reuid=65534", "--regid=65534", "--clear-groups"],
                ] {
                    let runner = [&["setpriv"], options].concat();
                    let is_right = |ended: &Ended| match &ended.answer {
                        Answer::Refused(102, text) if !text.contains("CAP_NET_ADMIN") && verb.command() == "ADD" => {
                            Err("the missing capability is not named".into())
                        }
                        _ => ended.is_answer(),
                    };
                    subject.attempt(verb, options[0], |call| call.under(&runner).run(), is_right);
                }
            }
        }
    });
}

/// The kernel refuses `-m owner` if the network namespace belongs to another user namespace
/// (net/netfilter/xt_owner.c), as it refuses an extension that it does not have.
#[test]
fn rules_that_the_kernel_refuses() {
    on_a_node_with("size=64m", || {
        let subject = Subject::of(Pod::of_another_user(), Mode::Redirect, "auto");
        for verb in Verb::ALL {
            subject.attempt(verb, "another user namespace", |call| call.run(), Ended::is_done);
        }
        let refused = |call: super::call::Call| call.configured(|conf| conf["dialect"] = "iptables".into()).run();
        subject.attempt(Verb::Add, "the kernel refuses an xt extension", refused, |ended| match &ended.answer {
            Answer::Refused(102, text) if text.contains("-m owner") => Ok(()),
            _ => Err("expected code 102 and the rule".into()),
        });
    });
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
    on_a_node_with("size=64m", || {
        for (mode, dialect) in [(Mode::Redirect, "nftables"), (Mode::Primary, "iptables")] {
            let subject = Subject::new(mode, dialect);
            for verb in [Verb::Add, Verb::AddChanged, Verb::Del] {
                subject.prepare(verb);
                let all = transactions(&subject, verb);
                subject.done(Verb::Del);
                assert!(!all.is_empty(), "{}: expected a transaction", verb.name());
                for sent in all {
                    // Each error once, for messages that are spread over the transaction.
                    for (at, (name, error)) in REFUSALS.into_iter().enumerate() {
                        let refused = sent.sequences[at * (sent.sequences.len() - 1) / (REFUSALS.len() - 1)];
                        let last = *sent.sequences.last().expect("one");
                        let runner = refused_by(&sent, refused, last, error);
                        let runner: Vec<&str> = runner.iter().map(String::as_str).collect();
                        let expected: &[u64] = if ["ENOMEM", "ENOBUFS"].contains(&name) { &[11] } else { &[102] };
                        let make = |call: super::call::Call| call.under(&runner).run();
                        subject.attempt(verb, name, make, |ended| ended.is_refused(expected));
                    }
                }
            }
        }
    });
}

/// A kernel without an xt extension, for a pod without rules: dialect `auto` writes them in nftables format.
#[test]
fn an_extension_that_the_kernel_does_not_have() {
    on_a_node_with("size=64m", || {
        let mut subject = Subject::new(Mode::Redirect, "auto");
        let first = transactions(&subject, Verb::Add).into_iter().next().expect("a transaction");
        subject.done(Verb::Del);
        subject.added = Subject::new(Mode::Redirect, "nftables").added;
        for refused in first.sequences.iter().step_by(61) {
            for (name, error) in
                REFUSALS.into_iter().filter(|(name, _)| ["ENOENT", "EOPNOTSUPP", "EINVAL"].contains(name))
            {
                let last = first.sequences[first.sequences.len() - 1];
                let runner = refused_by(&first, *refused, last, error);
                let runner: Vec<&str> = runner.iter().map(String::as_str).collect();
                let make = |call: super::call::Call| call.under(&runner).run();
                subject.attempt(Verb::Add, name, make, Ended::is_done);
            }
        }
    });
}
