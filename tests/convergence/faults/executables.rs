//! Faults of executables: the second entry of `chain` for an attachment, whose first one must be undone, and the default
//! network of the primary plugin.

use super::call::{Answer, Call, Ended};
use super::subject::{Mode, Subject, Verb};
use crate::node::on_a_node_with;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;

const MODES: [(Mode, &str); 2] = [(Mode::Executables, "nftables"), (Mode::Primary, "iptables")];
const LATE: &str = "did not end within 1 s";
const RESULT: &str =
    r#"{"cniVersion":"1.1.0","interfaces":[{"name":"net1"}],"ips":[{"interface":0,"address":"10.99.0.2/24"}]}"#;

/// What happens in a call of this verb.
struct Fault {
    name: &'static str,
    verb: Verb,
    place: Place,
    expected: Expected,
}

/// The answer to the call: success, or an error with this code and a text that contains these parts.
enum Expected {
    Done,
    Refused(u64, Vec<&'static str>),
}

fn fails(code: u64, parts: &[&'static str]) -> Expected {
    Expected::Refused(code, parts.to_vec())
}

impl Expected {
    fn check(&self, ended: &Ended) -> Result<(), String> {
        match (self, &ended.answer) {
            (Self::Done, Answer::Done) => Ok(()),
            (Self::Refused(code, parts), Answer::Refused(got, text)) if code == got => {
                parts.iter().find(|part| !text.contains(**part)).map_or(Ok(()), |part| Err(format!("no {part:?}")))
            }
            (Self::Done, _) => Err("expected success".into()),
            (Self::Refused(code, _), _) => Err(format!("expected code {code}")),
        }
    }
}

/// The file at the executable's path.
enum Place {
    /// An executable that runs this script for the verb; `RESULT` is a valid result.
    Script(&'static str),
    /// Something else at this path.
    Other(fn(&Path)),
}

fn writes(path: &Path, content: &[u8], mode: u32) {
    fs::write(path, content).expect("writable");
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("set");
}

fn faults() -> Vec<Fault> {
    let failed = |part: &'static str| fails(106, &["failed (", part]);
    let late = || failed(LATE);
    let scripts: [(&str, &'static str, Expected); 29] = [
        ("hangs", "exec /bin/sleep 1000", late()),
        ("hangs and ignores SIGTERM", "trap '' TERM INT HUP; while :; do /bin/sleep 1; done", late()),
        ("hangs with children", "/bin/sleep 1000 & /bin/sleep 1000 & wait", late()),
        ("closes stdout early, then hangs", "exec >&- 2>&-; exec /bin/sleep 1000", late()),
        ("prints without pause", "exec /usr/bin/yes >&2", late()),
        ("leaves a daemon", "/usr/bin/env -i /bin/sleep 60 & echo $! > ${0%/bin/*}/daemon; RESULT", Expected::Done),
        ("prints 100 MB to stdout", "exec /usr/bin/head -c 100000000 /dev/zero", failed("more than 4 MiB")),
        ("prints 10 MB to stderr", "/usr/bin/yes | /usr/bin/head -c 10000000 >&2; RESULT", Expected::Done),
        ("prints an endless line", "exec /usr/bin/tr '\\0' x < /dev/zero", failed("more than 4 MiB")),
        ("prints nothing", ":", Expected::Done),
        ("prints text", "echo hello", failed("expected JSON, got \"hello\\n\"")),
        ("prints truncated JSON", "printf '{\"cniVersion\": '", failed("expected JSON, got")),
        ("prints two results", "RESULT; RESULT", failed("expected JSON, got")),
        ("prints a list", "echo '[]'", failed("result")),
        ("prints a wrong type", "echo '{\"cniVersion\": \"1.1.0\", \"ips\": \"10.0.0.1/8\"}'", failed("result.ips")),
        ("prints nested JSON", "/usr/bin/yes '[' | /usr/bin/head -c 1000000", failed("expected JSON, got")),
        ("prints binary data", "printf '\\377\\376\\001'", failed("expected JSON, got")),
        ("prints a result of an unknown version", "echo '{\"cniVersion\": \"9.0.0\"}'", failed("9.0.0")),
        ("fails with code 42", "echo '{\"code\": 42, \"msg\": \"no carrier\"}'; exit 1", fails(42, &["no carrier"])),
        ("fails with code 999", "echo '{\"code\": 999, \"msg\": \"odd\"}'; exit 1", failed("odd")),
        ("fails with exit code 3 without text", "exit 3", failed("exit status: 3")),
        ("fails with text on stderr", "echo no such thing >&2; exit 255", failed("no such thing")),
        ("is killed by SIGKILL", "kill -KILL $$", failed("signal: 9")),
        ("is killed by SIGSEGV", "kill -SEGV $$", failed("signal: 11")),
        ("is killed by SIGPIPE", "kill -PIPE $$", failed("signal: 13")),
        ("does not read stdin", "RESULT", Expected::Done),
        ("closes stdin early", "exec <&-; RESULT", Expected::Done),
        ("changes directory, umask and limits", "cd /; umask 0; ulimit -n 8; RESULT", Expected::Done),
        ("removes its own file", "/bin/rm $0; RESULT; exit 1", failed("")),
    ];
    let of_other_verbs = [
        (Verb::Check, "hangs in CHECK", "exec /bin/sleep 1000", late()),
        (Verb::Check, "fails in CHECK", "echo '{\"code\": 42, \"msg\": \"no link\"}'; exit 1", fails(42, &["no link"])),
        (Verb::Del, "hangs in DEL", "exec /bin/sleep 1000", late()),
        (Verb::Del, "fails in DEL", "echo '{\"code\": 42, \"msg\": \"busy\"}'; exit 1", fails(42, &["busy"])),
        (Verb::Del, "is killed in DEL", "kill -KILL $$", failed("signal: 9")),
    ];
    let missing = || fails(7, &["failed to find plugin"]);
    let not_used = |why: &'static str| fails(7, &["is not executed", why]);
    let not_started = |why: &'static str| fails(106, &["can't be started", "check that it is an executable", why]);
    type File = (&'static str, fn(&Path), Expected);
    let files: [File; 9] = [
        ("is missing", |_| {}, missing()),
        ("is a dangling symbolic link", |path| symlink("/nowhere", path).expect("made"), missing()),
        ("is a directory", |path| fs::create_dir(path).expect("made"), missing()),
        ("is not executable", |path| writes(path, b"#!/bin/sh\n", 0o644), not_started("Permission denied")),
        ("has a missing interpreter", |path| writes(path, b"#!/no/such\n", 0o755), not_started("No such file")),
        ("is not a program", |path| writes(path, b"text", 0o755), not_started("Exec format error")),
        ("is empty", |path| writes(path, b"", 0o755), not_started("Exec format error")),
        (
            "belongs to another user",
            |path| {
                writes(path, b"#!/bin/sh\n", 0o755);
                chown(path, Some(12345), None).expect("root");
            },
            not_used("is owned by UID 12345"),
        ),
        ("is writable for others", |path| writes(path, b"#!/bin/sh\n", 0o777), not_used("only root can write to")),
    ];
    let in_add = scripts.map(|(name, script, expected)| (Verb::Add, name, Place::Script(script), expected));
    let in_others = of_other_verbs.map(|(verb, name, script, expected)| (verb, name, Place::Script(script), expected));
    let of_files = files.map(|(name, place, expected)| (Verb::Add, name, Place::Other(place), expected));
    let all = in_add.into_iter().chain(in_others).chain(of_files);
    all.map(|(verb, name, place, expected)| Fault { name, verb, place, expected }).collect()
}

/// Ends the process that an executable has left.
fn end_daemon(subject: &Subject) {
    let file = subject.directory().join("daemon");
    let Ok(pid) = fs::read_to_string(&file) else { return };
    let _ = kill(Pid::from_raw(pid.trim().parse().expect("a number")), Signal::SIGKILL);
    let _ = fs::remove_file(file);
}

fn attempt(Fault { name, verb, place, expected }: &Fault, subject: &Subject) {
    let executable = if subject.mode == Mode::Primary { "network" } else { "second" };
    let make = |call: Call| {
        match place {
            Place::Script(script) => {
                let script = script.replace("RESULT", &format!("printf '%s' '{RESULT}'"));
                subject.script_for(executable, verb.command(), &script);
            }
            Place::Other(place) => {
                let path = subject.executable(executable);
                let _ = fs::remove_file(&path);
                place(&path);
            }
        }
        // On a loaded machine, only what hangs may reach the timeout.
        let is_late = matches!(expected, Expected::Refused(_, parts) if parts.contains(&LATE));
        let timeout = if is_late { 1 } else { 30 };
        let call = call.configured(|configuration| {
            configuration["delegate_timeout_seconds"] = timeout.into();
            // As for an attachment, a DEL that failed can be repeated.
            configuration["retryDeleteOnError"] = true.into();
        });
        let ended = call.run();
        end_daemon(subject);
        subject.restore_executable(executable);
        ended
    };
    let is_right = |ended: &Ended| {
        expected.check(ended)?;
        let is_undone = *verb != Verb::Add || matches!(expected, Expected::Done) || !subject.has_interface();
        if is_undone { Ok(()) } else { Err("the interface of an executable is left".to_owned()) }
    };
    subject.attempt(*verb, name, make, is_right);
}

/// Each fault is tried in one of both modes.
#[test]
fn each_fault_of_an_executable_is_answered_in_time() {
    std::thread::scope(|scope| {
        for (at, (mode, dialect)) in MODES.into_iter().enumerate() {
            scope.spawn(move || {
                on_a_node_with("size=64m", || {
                    let subject = Subject::new(mode, dialect);
                    faults().iter().skip(at).step_by(MODES.len()).for_each(|fault| attempt(fault, &subject));
                });
            });
        }
    });
}
