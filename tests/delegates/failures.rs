//! Executables that fail: the order of the undo, signals, and text for terminals. `convergence::faults::executables` has
//! the faults of executables.

use crate::pod::{Pod, conf, start, with};
use crate::recorders::{Recorders, add_prints, fails};
use crate::support::called::Called;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Runs an ADD whose executable `second` fails after `first` has succeeded.
#[track_caller]
fn failed(recorders: &Recorders, pod: &Pod, more: &Value) -> Called {
    let executables = [json!({"type": "first"}), json!({"type": "second"}), json!({"type": "third"})];
    let output = pod.call("ADD", &recorders.bin(), &with(conf("1.0.0", &executables), more));
    assert!(!output.success, "{output:?}");
    assert_eq!(pod.rules(), [""; 0]);
    output
}

fn recorders() -> Recorders {
    let first = add_prints(&json!({"cniVersion": "1.0.0", "ips": []}));
    Recorders::new().with("first", &first).with("third", "")
}

fn nothing() -> Value {
    json!({})
}

#[test]
fn a_failed_add_is_undone_in_reverse_and_keeps_its_code() {
    let recorders = recorders().with("second", &fails("ADD", &json!({"code": 11, "msg": "later", "details": "why"})));
    let pod = Pod::new();
    let output = failed(&recorders, &pod, &nothing());
    let wanted = json!({
        "cniVersion": "1.0.0", "code": 11, "msg": "plugin type=\"second\" failed (add): later", "details": "why",
    });
    assert_eq!(output.stdout, wanted);
    assert_eq!(recorders.order(), ["ADD first", "ADD second", "DEL second", "DEL first"]);
    let seen = recorders.seen();
    assert_eq!(seen[3].stdin["prevResult"], json!({"cniVersion": "1.0.0", "ips": []}));
    let state = std::path::Path::new("/run/detour/attachments").join(&pod.name);
    assert!(!state.exists(), "no state is left");
}

/// Like stopping the runtime's service.
#[test]
fn sigterm_to_the_plugin_kills_the_executable_and_undoes_the_add() {
    let hang = "if [ $CNI_COMMAND = ADD ]; then /bin/sleep 1000 & echo $$ > ${0%/bin/*}/pid; wait; fi";
    let recorders = recorders().with("second", hang);
    let pod = Pod::new();
    let conf = conf("1.0.0", &[json!({"type": "first"}), json!({"type": "second"})]);
    let bin = recorders.bin();
    let child = start(&pod.environment("ADD", &bin.display().to_string()), &conf);
    let file = bin.with_file_name("pid");
    let deadline = Instant::now() + Duration::from_secs(120);
    let group = loop {
        assert!(Instant::now() < deadline, "it does not start");
        if let Some(pid) = std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok()) {
            break Pid::from_raw(pid);
        }
        std::thread::yield_now();
    };
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).expect("it runs");
    let output = Called::ended(child);
    assert_eq!(output.stdout["code"], 11, "{}", output.stdout);
    assert!(output.stdout["msg"].as_str().is_some_and(|msg| msg.contains("SIGTERM was received")), "{}", output.stdout);
    assert_eq!(recorders.order(), ["ADD first", "ADD second", "DEL second", "DEL first"]);
    assert_eq!(pod.rules(), [""; 0]);
    // Its child is killed too; init reaps it later.
    while killpg(group, None) != Err(Errno::ESRCH) {
        assert!(Instant::now() < deadline, "something of its process group still runs");
        std::thread::yield_now();
    }
}

#[test]
fn a_missing_executable_is_detected_before_anything_runs() {
    let recorders = recorders();
    let output = failed(&recorders, &Pod::new(), &nothing());
    assert_eq!(output.stdout["code"], 7);
    let wanted = format!("failed to find plugin \"second\" in path [{}]", recorders.bin().display());
    assert!(output.stdout["msg"].as_str().is_some_and(|msg| msg.contains(&wanted)), "{}", output.stdout);
    assert_eq!(recorders.order(), [""; 0]);
}

/// Runtimes copy the message to Events, and stderr to their log.
#[test]
fn control_characters_in_its_output_are_escaped() {
    let bad = "a\u{1b}[2J\u{7}\n\u{9b}\u{202e}";
    let escaped = r"a\u{1b}[2J\u{7}\n\u{9b}\u{202e}";
    let noise = r"if [ $CNI_COMMAND = ADD ]; then printf 'noise \033[2J\302\233\342\200\256\a\n' >&2; fi";
    let behaviour = format!("{noise}\n{}", fails("ADD", &json!({"code": 11, "msg": bad, "details": bad})));
    let output = failed(&recorders().with("second", &behaviour), &Pod::new(), &nothing());
    let msg = format!("plugin type=\"second\" failed (add): {escaped}");
    assert_eq!((&output.stdout["msg"], &output.stdout["details"]), (&msg.into(), &escaped.into()));
    assert!(output.stderr.contains(r"noise \u{1b}[2J\u{9b}\u{202e}\u{7}"), "{}", output.stderr);
    assert!(!output.stderr.chars().any(|c| detour_cni::printable::is_interpreted(c) && c != '\n'), "{}", output.stderr);
}
