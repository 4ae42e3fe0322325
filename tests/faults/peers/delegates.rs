//! Faults of executables: entries of `chain` for an attachment, and networks of the primary plugin. In each case, the
//! executable before the faulty one succeeds, so that its work must be undone.

use super::case::{Case, case, run};
use super::healthy;
use super::scene::{Expected, Mode, Scene, fails, works};
use crate::table::is_complete;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// `delegate_timeout_seconds`, if the fault needs no longer one.
const TIMEOUT: u64 = 1;
/// A call starts up to six processes: those of ADD, and of its undo.
const LIMIT: Duration = Duration::from_secs(2);
/// An executable that creates a file for ADD and removes it for DEL, as others do with an interface.
const HEALTHY: &str = "case $CNI_COMMAND in ADD) : > \"${0%/bin/*}/state/${0##*/}\"; printf '%s' 'RESULT' ;; \
    DEL) /bin/rm -f \"${0%/bin/*}/state/${0##*/}\" ;; esac";

/// How the faulty executable gets to its place.
type Place = Box<dyn Fn(&Scene) + Send + Sync>;

/// A fault of the executable `second`.
struct Fault {
    name: &'static str,
    place: Place,
    /// The answer to the verb in which the fault occurs.
    expected: Expected,
    verb: &'static str,
    timeout: u64,
    /// Whether the executable leaves a process, which is expected.
    leaves_process: bool,
}

fn fault(name: &'static str, place: Place, expected: Expected) -> Fault {
    let expected = expected.without_pod().within(LIMIT);
    Fault { name, place, expected, verb: "ADD", timeout: TIMEOUT, leaves_process: false }
}

/// An executable that works, except that it runs a script for this verb.
fn script_for(verb: &'static str, script: &str) -> Place {
    let (script, healthy) = (script.to_owned(), HEALTHY.replace("RESULT", &result("net1")));
    Box::new(move |scene| {
        scene.script("second", &format!("if [ \"$CNI_COMMAND\" = {verb} ]; then\n{script}\nelse\n{healthy}\nfi"));
    })
}

/// An executable that runs a script for each verb.
fn always(script: &str) -> Place {
    let script = script.to_owned();
    Box::new(move |scene| scene.script("second", &script))
}

fn in_add(name: &'static str, script: &str, expected: Expected) -> Fault {
    fault(name, script_for("ADD", script), expected)
}

fn result(interface: &str) -> String {
    healthy::result(interface, "10.99.0.2/24").to_string()
}

fn prints(text: &Value) -> String {
    format!("printf '%s' '{text}'")
}

/// Replaces the executable by something else.
fn instead(name: &'static str, expected: Expected, place: fn(&Path)) -> Fault {
    let place: Place = Box::new(move |scene| {
        let path = scene.root.join("bin/second");
        let _ = fs::remove_file(&path);
        place(&path);
    });
    fault(name, place, expected)
}

fn writes(path: &Path, content: &[u8], mode: u32) {
    fs::write(path, content).expect("writable");
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("set");
}

fn behaviors() -> Vec<Fault> {
    let failed = |parts: &[&str]| fails(106, &["plugin type=\"second\" failed (add): "]).with(parts);
    let late = || failed(&["did not end within 1 s", "delegate_timeout_seconds sets this timeout"]);
    let ok = result("net1");
    let prints_ok = format!("printf '%s' '{ok}'");
    let daemon = format!("/usr/bin/env -i /bin/sleep 60 & echo $! > ${{0%/bin/*}}/daemon; {prints_ok}");
    let quiet = format!("/usr/bin/env -i /bin/sleep 60 >&- 2>&- & echo $! > ${{0%/bin/*}}/daemon; {prints_ok}");
    let older = json!({"cniVersion": "0.4.0", "interfaces": [{"name": "net1"}], "ips": [{"version": "4", "address": "10.99.0.2/24"}]});
    let own_error = json!({"cniVersion": "1.1.0", "code": 42, "msg": "no carrier", "details": "port 7"});
    vec![
        in_add("hangs", "exec /bin/sleep 1000", late()),
        fault("hangs in ADD and its undo", always("exec /bin/sleep 1000"), late()),
        in_add("hangs and ignores SIGTERM", "trap '' TERM INT HUP; while :; do /bin/sleep 1; done", late()),
        in_add("hangs with children", "/bin/sleep 1000 & /bin/sleep 1000 & wait", late()),
        in_add("prints without pause", "exec /usr/bin/yes >&2", late()),
        Fault { leaves_process: true, ..in_add("leaves a daemon that keeps stdout open", &daemon, works()) },
        Fault { leaves_process: true, ..in_add("leaves a daemon", &quiet, works()) },
        in_add("prints 100 MB to stdout", "exec /usr/bin/head -c 100000000 /dev/zero", failed(&["more than 4 MiB"])),
        Fault {
            timeout: 30,
            ..in_add(
                "prints 100 MB to stderr",
                &format!("/usr/bin/yes $(printf %0100d 7) | /usr/bin/head -c 100000000 >&2; {prints_ok}"),
                works().within(Duration::from_secs(30)),
            )
        },
        in_add("prints an endless line", "exec /usr/bin/tr '\\0' x < /dev/zero", failed(&["more than 4 MiB"])),
        in_add("prints nothing", ":", works()),
        in_add("prints text", "echo hello", failed(&["expected JSON, got \"hello\\n\""])),
        in_add("prints truncated JSON", &format!("printf '%s' '{}'", &ok[..20]), failed(&["expected JSON, got"])),
        in_add("prints two results", &format!("{prints_ok}; {prints_ok}"), failed(&["expected JSON, got"])),
        in_add("prints a list", "echo '[]'", failed(&["result"])),
        in_add(
            "prints a value of a wrong type",
            "echo '{\"cniVersion\": \"1.1.0\", \"ips\": \"10.0.0.1/8\"}'",
            failed(&["result.ips: invalid value"]),
        ),
        in_add("prints nested JSON", "/usr/bin/yes '[' | /usr/bin/head -c 1000000", failed(&["expected JSON, got"])),
        in_add("prints binary data", "printf '\\377\\376\\001'", failed(&["expected JSON, got"])),
        in_add("prints a result of version 0.4.0", &prints(&older), works()),
        in_add("prints a result of an unknown version", "echo '{\"cniVersion\": \"9.0.0\"}'", failed(&["9.0.0"])),
        in_add("prints an error and exits with 0", &prints(&own_error), works()),
        in_add(
            "fails with code 42",
            &format!("{}; exit 1", prints(&own_error)),
            Expected { codes: vec![42], ..failed(&["no carrier", "port 7"]) },
        ),
        in_add("fails with code 999", "echo '{\"code\": 999, \"msg\": \"odd\"}'; exit 1", failed(&["odd"])),
        in_add("fails with exit code 3 without text", "exit 3", failed(&["exit status: 3", "got nothing"])),
        in_add(
            "fails with exit code 255 and text on stderr",
            "echo no such thing >&2; exit 255",
            failed(&["exit status: 255", "no such thing"]),
        ),
        in_add("is killed by SIGKILL", "kill -KILL $$", failed(&["signal: 9"])),
        in_add("is killed by SIGSEGV", "kill -SEGV $$", failed(&["signal: 11"])),
        in_add("is killed by SIGPIPE", "kill -PIPE $$", failed(&["signal: 13"])),
        in_add("does not read stdin", &prints_ok, works()),
        in_add("closes stdin early", &format!("exec <&-; {prints_ok}"), works()),
        in_add("closes stdout early, then hangs", "exec >&- 2>&-; exec /bin/sleep 1000", late()),
        in_add("changes directory, umask and limits", &format!("cd /; umask 0; ulimit -n 8; {prints_ok}"), works()),
        in_add("removes its own file", &format!("/bin/rm $0; {prints_ok}; exit 1"), failed(&[])),
    ]
}

fn files() -> Vec<Fault> {
    let missing = || fails(7, &["failed to find plugin \"second\" in path"]);
    let not_used = |why: &str| fails(7, &["plugin \"second\" is not executed", why]);
    let not_started = |why: &str| fails(106, &["can't be started", "check that it is an executable", why]);
    vec![
        instead("is missing", missing(), |_| {}),
        instead("is a dangling symbolic link", missing(), |path| symlink("/nowhere", path).expect("made")),
        instead("is a directory", missing(), |path| fs::create_dir(path).expect("made")),
        instead("is not executable", not_started("Permission denied"), |path| writes(path, b"#!/bin/sh\n", 0o644)),
        instead("has a missing interpreter", not_started("No such file"), |path| writes(path, b"#!/no/such\n", 0o755)),
        instead("is not a program", not_started("Exec format error"), |path| writes(path, b"text", 0o755)),
        instead("is empty", not_started("Exec format error"), |path| writes(path, b"", 0o755)),
        instead("belongs to another user", not_used("is owned by UID 12345"), |path| {
            writes(path, b"#!/bin/sh\n", 0o755);
            chown(path, Some(12345), None).expect("root");
        }),
        instead("is writable for others", not_used("expected one that only root can write to"), |path| {
            writes(path, b"#!/bin/sh\n", 0o777)
        }),
    ]
}

fn other_verbs() -> Vec<Fault> {
    let of = |verb: &'static str, name, script: &str, expected| Fault {
        verb,
        ..fault(name, script_for(verb, script), expected)
    };
    vec![
        of("CHECK", "hangs in CHECK", "exec /bin/sleep 1000", fails(106, &["did not end within 1 s"])),
        of("CHECK", "fails in CHECK", "echo '{\"code\": 42, \"msg\": \"no link\"}'; exit 1", fails(42, &["no link"])),
        of("DEL", "hangs in DEL", "exec /bin/sleep 1000", fails(106, &["did not end within 1 s"])),
        of("DEL", "fails in DEL", "echo '{\"code\": 42, \"msg\": \"busy\"}'; exit 1", fails(42, &["busy"])),
        of("DEL", "is killed in DEL", "kill -KILL $$", fails(106, &["signal: 9"])),
    ]
}

/// Writes the objects of a healthy cluster and the healthy executables.
fn prepare(scene: &Scene) {
    let manifests = scene.root.join("manifests");
    fs::create_dir(&manifests).expect("made");
    fs::create_dir(scene.root.join("state")).expect("made");
    for (name, object) in
        [("pod", healthy::pod()), ("namespace", healthy::namespace()), ("definition", healthy::definition())]
    {
        fs::write(manifests.join(format!("{name}.json")), object.to_string()).expect("writable");
    }
    for name in ["default", "first", "second"] {
        scene.script(name, &HEALTHY.replace("RESULT", &result(if name == "second" { "net1" } else { "eth0" })));
    }
}

fn conf(scene: &Scene, mode: Mode, timeout: u64) -> Value {
    let mut conf = scene.conf(mode, &json!({"manifests_dir": scene.root.join("manifests")}));
    conf["delegate_timeout_seconds"] = timeout.into();
    // As for an attachment, a DEL that failed can be repeated.
    conf["retryDeleteOnError"] = true.into();
    if mode == Mode::Attachment {
        let chain = conf["chain"].as_array_mut().expect("a list");
        chain.extend([json!({"type": "first"}), json!({"type": "second"})]);
    }
    conf
}

/// Ends the process that an executable has left.
fn end_daemon(scene: &Scene) {
    let Ok(pid) = fs::read_to_string(scene.root.join("daemon")) else { return };
    let _ = kill(Pid::from_raw(pid.trim().parse().expect("a number")), Signal::SIGKILL);
    let _ = fs::remove_file(scene.root.join("daemon"));
}

fn attempt(scene: &mut Scene, fault: &Fault) {
    prepare(scene);
    for mode in Mode::BOTH.into_iter().take(if is_complete() { 2 } else { 1 }) {
        let conf = conf(scene, mode, fault.timeout);
        scene.script("second", &HEALTHY.replace("RESULT", &result("net1")));
        if fault.verb != "ADD" {
            scene.done("ADD", mode, &conf);
        }
        (fault.place)(scene);
        let expected = fault.expected.clone().within(Duration::from_secs(fault.timeout).max(fault.expected.within));
        if fault.verb == "DEL" {
            scene.expect_as("first DEL", "DEL", mode, &conf, &expected);
        } else {
            scene.expect(fault.verb, mode, &conf, &expected);
        }
        if fault.leaves_process {
            end_daemon(scene);
        }
        let path = scene.root.join("bin/second");
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
        scene.script("second", &HEALTHY.replace("RESULT", &result("net1")));
        scene.expect("DEL", mode, &conf, &works());
    }
}

#[test]
fn each_fault_of_an_executable_is_answered_in_time() {
    let of = |fault: Fault| {
        let name = format!("executable: {}", fault.name);
        case(&name, move |name| Scene::run(name, |scene| attempt(scene, &fault)))
    };
    let faults = [behaviors(), files(), other_verbs()].into_iter().flatten();
    run("delegates", &faults.map(of).collect::<Vec<Case<'_>>>());
}

/// The kernel refuses to start a file that is open for writing; the plugin retries for five seconds.
#[test]
fn an_executable_that_is_being_written_is_retried() {
    let of = |name: &str, ends: bool| {
        case(name, move |name| {
            Scene::run(name, |scene| {
                prepare(scene);
                let conf = conf(scene, Mode::Attachment, 10);
                let writer: File = OpenOptions::new().append(true).open(scene.root.join("bin/second")).expect("there");
                let busy = fails(11, &["the file is being written (waited 5 s)", "the runtime should retry"]);
                if ends {
                    std::thread::scope(|scope| {
                        scope.spawn(|| {
                            crate::support::server::takes(Duration::from_millis(300));
                            drop(writer);
                        });
                        scene.expect("ADD", Mode::Attachment, &conf, &works());
                    });
                } else {
                    // The undo starts it too.
                    let expected = busy.within(Duration::from_secs(12)).without_pod();
                    scene.expect("ADD", Mode::Attachment, &conf, &expected);
                    drop(writer);
                }
                scene.expect("DEL", Mode::Attachment, &conf, &works());
            })
        })
    };
    let mut cases = vec![of("executable: is being written for 0.3 s", true)];
    cases.extend(is_complete().then(|| of("executable: is being written", false)));
    run("delegates", &cases);
}

/// The first error is reported, and the failure of the undo is logged.
#[test]
fn an_undo_that_fails_does_not_hide_the_cause() {
    let cases = [case("executable: fails after another one, whose DEL fails", |name| {
        Scene::run(name, |scene| {
            prepare(scene);
            for mode in Mode::BOTH {
                let first = if mode == Mode::Primary { "default" } else { "first" };
                let stuck = "if [ $CNI_COMMAND = DEL ]; then echo '{\"code\": 43, \"msg\": \"stuck\"}'; exit 1; fi";
                scene.script(first, &format!("{stuck}\n{}", HEALTHY.replace("RESULT", &result("eth0"))));
                scene.script(
                    "second",
                    "if [ $CNI_COMMAND = ADD ]; then echo '{\"code\": 42, \"msg\": \"no carrier\"}'; exit 1; fi",
                );
                let conf = conf(scene, mode, TIMEOUT);
                let called =
                    scene.expect_as("first ADD", "ADD", mode, &conf, &fails(42, &["no carrier"]).without_pod());
                assert!(called.ended.stderr.contains("stuck"), "{}", called.ended.stderr);
                scene.script(first, &HEALTHY.replace("RESULT", &result("eth0")));
                scene.script("second", &HEALTHY.replace("RESULT", &result("net1")));
                scene.expect("DEL", mode, &conf, &works());
            }
        })
    })];
    run("delegates", &cases);
}

/// The executable removes the network namespace of the pod, as `ip netns delete` does.
#[test]
fn an_executable_that_removes_the_network_namespace_does_not_block_del() {
    let cases = [case("executable: removes the network namespace", |name| {
        Scene::run(name, |scene| {
            prepare(scene);
            for (mode, fails_too) in [(Mode::Attachment, false), (Mode::Attachment, true), (Mode::Primary, true)] {
                let path: PathBuf = scene.root.join("netns");
                fs::write(&path, "").expect("writable");
                let at = path.clone();
                // Only the mount keeps it.
                let bind = move || {
                    unshare(CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
                    let own = Some("/proc/thread-self/ns/net");
                    mount(own, &at, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("needs root");
                };
                std::thread::spawn(bind).join().expect("a network namespace");
                scene.netns = Some(path.clone());
                let exit = if fails_too { "exit 1" } else { ":" };
                let script = format!("/bin/umount -l '{0}' && /bin/rm '{0}'; {exit}", path.display());
                script_for("ADD", &script)(scene);
                let conf = conf(scene, mode, TIMEOUT);
                let expected = if fails_too { fails(106, &["failed (add)"]).without_pod() } else { works() };
                let call = if fails_too { "ADD that fails" } else { "ADD" };
                scene.expect_as(call, "ADD", mode, &conf, &expected);
                scene.expect("DEL", mode, &conf, &works());
                let _ = umount2(&path, MntFlags::MNT_DETACH);
            }
        })
    })];
    run("delegates", &cases);
}
