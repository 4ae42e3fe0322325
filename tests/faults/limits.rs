//! Limits of the process, and its surroundings: stdin, stdout, environment, working directory.

use crate::call::{Answer, Ended};
use crate::node::on_a_node_with;
use crate::subject::{Mode, Subject, Verb};
use crate::support::cgroup::Cgroup;
use crate::table::{Table, is_answer, is_complete, is_done, is_refused};
use std::fs;

const VERBS: [Verb; 6] = [Verb::Add, Verb::AddChanged, Verb::Check, Verb::Del, Verb::Gc, Verb::Status];
const SUBJECTS: [(Mode, &str); 3] =
    [(Mode::Redirect, "iptables"), (Mode::Tproxy, "nftables"), (Mode::Primary, "nftables")];

/// Runs `work` with each verb in each mode; a sample uses one mode per verb.
fn with_each(group: &'static str, mut work: impl FnMut(&Subject, Verb, &mut Table) + Send) {
    let mut table = Table::new(group);
    on_a_node_with("size=64m", || {
        for (at, (mode, dialect)) in SUBJECTS.into_iter().enumerate() {
            let subject = Subject::new(mode, dialect);
            for (verb_at, verb) in VERBS.into_iter().enumerate() {
                if is_complete() || verb_at % SUBJECTS.len() == at {
                    work(&subject, verb, &mut table);
                }
            }
        }
    });
    table.end();
}

#[test]
fn few_descriptors() {
    with_each("limits", |subject, verb, table| {
        for limit in 3..=20 {
            if is_complete() || limit % 4 == 3 {
                let limit = format!("--nofile={limit}");
                let change = |call: crate::call::Call| call.under(&["prlimit", &limit]);
                // The delegate inherits the limit; without descriptors, its shell can't start.
                subject.try_fault(table, verb, "RLIMIT_NOFILE 3 to 20", change, is_answer);
            }
        }
    });
}

/// Without memory, a process can't always report it.
fn is_answer_or_end(ended: &Ended) -> Result<(), String> {
    match ended.answer {
        Answer::Signaled(6 | 9 | 11) | Answer::Silent(_) => Ok(()),
        _ => is_answer(ended),
    }
}

#[test]
fn little_memory() {
    with_each("limits", |subject, verb, table| {
        for megabytes in (1..=24).filter(|megabytes| is_complete() || megabytes % 8 == 4) {
            let limit = format!("--as={}", megabytes << 20);
            let change = |call: crate::call::Call| call.under(&["prlimit", &limit]);
            subject.try_fault(table, verb, "RLIMIT_AS 1 to 24 MiB", change, is_answer_or_end);
        }
        for kilobytes in (512..=8192).step_by(512).filter(|kilobytes| is_complete() || kilobytes % 4096 == 512) {
            let group = Cgroup::new();
            if fs::write(group.directory().join("memory.max"), format!("{kilobytes}K")).is_err() {
                table_without(subject, verb, table, "memory");
                return;
            }
            let directory = group.directory().display().to_string();
            let script = format!("echo $$ > {directory}/cgroup.procs && exec \"$@\"");
            let change = |call: crate::call::Call| call.in_shell(&script);
            subject.try_fault(table, verb, "memory of the control group 0.5 to 8 MiB", change, is_answer_or_end);
        }
    });
}

/// A row for a limit that this machine does not have.
fn table_without(subject: &Subject, verb: Verb, table: &mut Table, controller: &str) {
    let fault = format!("control group without the controller {controller}: not tried");
    subject.try_fault(table, verb, &fault, |call| call, is_done);
}

#[test]
fn small_files_and_no_processes() {
    with_each("limits", |subject, verb, table| {
        for size in [0, 100] {
            let limit = format!("--fsize={size}");
            let change = |call: crate::call::Call| call.under(&["prlimit", &limit]);
            let is_right = |ended: &Ended| match ended.answer {
                // SIGXFSZ ends the process when it would write the record.
                Answer::Signaled(25) => Ok(()),
                _ => is_answer(ended),
            };
            subject.try_fault(table, verb, "RLIMIT_FSIZE 0 and 100", change, is_right);
        }
        let group = Cgroup::new();
        if fs::write(group.directory().join("pids.max"), "1").is_err() {
            table_without(subject, verb, table, "pids");
            return;
        }
        let script = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", group.directory().display());
        let change = |call: crate::call::Call| call.in_shell(&script);
        subject.try_fault(table, verb, "no further process (pids.max 1)", change, is_answer);
    });
}

/// How a shell starts the plugin, and the codes of the answer; 0 stands for success.
const SURROUNDINGS: [(&str, &str, &[u64]); 10] = [
    ("stdin closed", r#"exec "$@" <&-"#, &[5, 6, 7]),
    ("stdin empty", r#"exec "$@" </dev/null"#, &[6]),
    ("stdin endless", r#"exec "$@" </dev/zero"#, &[7]),
    ("stdin a directory", r#"exec "$@" </"#, &[5]),
    ("stderr closed", r#"exec "$@" 2>&-"#, &[0]),
    ("stderr full", r#"exec "$@" 2>/dev/full"#, &[0]),
    ("all descriptors beyond stderr in use", r#"ulimit -n 5; exec "$@" 3</dev/null 4</dev/null"#, &[5, 7, 8, 11, 50]),
    ("working directory deleted", r#"d=$(mktemp -d); cd "$d"; rmdir "$d"; exec "$@""#, &[0]),
    (
        "environment of 1.5 MB",
        r#"v=$(head -c 100000 /dev/zero | tr '\0' x); for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do export "V$i=$v"; done; exec "$@""#,
        &[0],
    ),
    ("umask 777", r#"umask 777; exec "$@""#, &[0]),
];

#[test]
fn odd_surroundings() {
    with_each("limits", |subject, verb, table| {
        for (fault, script, codes) in SURROUNDINGS {
            let is_right = |ended: &Ended| is_refused(ended, codes);
            subject.try_fault(table, verb, fault, |call| call.in_shell(script), is_right);
        }
        // Then the runtime has no result of an ADD, and calls DEL.
        for (fault, script) in [("stdout closed", r#"exec "$@" >&-"#), ("stdout full", r#"exec "$@" >/dev/full"#)] {
            let is_right = |ended: &Ended| match ended.answer {
                Answer::Done if verb.command() != "ADD" => Ok(()),
                Answer::Done if fault == "stdout closed" => Ok(()),
                Answer::Silent(1) => Ok(()),
                _ => Err("expected exit code 1 without answer".into()),
            };
            subject.try_fault(table, verb, fault, |call| call.in_shell(script), is_right);
        }
    });
}
