//! Executables that fail: the ADD reports the cause and leaves nothing behind.

use crate::pod::{Output, Pod, conf, ended, start, with};
use crate::recorders::{Recorders, add_prints, fails};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Runs an ADD whose executable `second` fails after `first` has succeeded.
#[track_caller]
fn failed(recorders: &Recorders, pod: &Pod, more: &Value) -> Output {
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

/// Returns the error message of an ADD whose executable `second` behaves as given; checks that the ADD is undone.
#[track_caller]
fn message(behaviour: &str, more: &Value) -> String {
    let recorders = recorders().with("second", behaviour);
    let output = failed(&recorders, &Pod::new(), more);
    assert_eq!(output.stdout["code"], 106, "{}", output.stdout);
    assert_eq!(recorders.order()[..2], ["ADD first", "ADD second"]);
    assert!(recorders.order().ends_with(&["DEL second".to_owned(), "DEL first".to_owned()]));
    let message = output.stdout["msg"].as_str().expect("a message").to_owned();
    assert!(message.starts_with("plugin type=\"second\" failed (add): "), "{message}");
    message
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

#[test]
fn a_failed_undo_is_logged_and_the_first_error_is_reported() {
    let no = |msg: &str| format!("printf '%s' '{}'; exit 1", json!({"code": 7, "msg": msg}));
    let recorders = recorders().with("second", &format!("{}\n{}", fails("ADD", &json!({"msg": "a"})), no("b")));
    let output = failed(&recorders, &Pod::new(), &nothing());
    assert_eq!(output.stdout["msg"], "plugin type=\"second\" failed (add): a");
    assert!(output.stderr.contains("failed (delete): b"), "{}", output.stderr);
}

#[test]
fn an_executable_that_hangs_is_killed_at_the_timeout() {
    let hang = "if [ $CNI_COMMAND = ADD ]; then echo waiting for godot >&2; exec /bin/sleep 1000; fi";
    let message = message(hang, &json!({"delegate_timeout_seconds": 1}));
    assert!(message.contains("did not end within 1 s"), "{message}");
    assert!(message.contains("waiting for godot") && message.contains("delegate_timeout_seconds"), "{message}");
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
    let deadline = Instant::now() + Duration::from_secs(30);
    let group = loop {
        assert!(Instant::now() < deadline, "it does not start");
        if let Some(pid) = std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok()) {
            break Pid::from_raw(pid);
        }
        std::thread::yield_now();
    };
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).expect("it runs");
    let output = ended(child);
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
fn an_invalid_result_is_quoted() {
    let message = message("if [ $CNI_COMMAND = ADD ]; then echo hello; fi", &nothing());
    assert!(
        message.contains("invalid result on stdout: expected JSON") && message.contains(r#""hello\n""#),
        "{message}"
    );
}

#[test]
fn a_failure_without_an_error_object_reports_the_exit_status() {
    let message = message("if [ $CNI_COMMAND = ADD ]; then echo oh no >&2; exit 3; fi", &nothing());
    assert!(message.contains("exit status: 3") && message.contains("oh no"), "{message}");
}

#[test]
fn a_child_killed_by_a_signal_is_reported() {
    let message = message("if [ $CNI_COMMAND = ADD ]; then kill -KILL $$; fi", &nothing());
    assert!(message.contains("signal: 9"), "{message}");
}

#[test]
fn ten_megabytes_on_stdout_are_refused() {
    let flood = "if [ $CNI_COMMAND = ADD ]; then exec /usr/bin/head -c 10000000 /dev/zero; fi";
    assert!(message(flood, &nothing()).contains("more than 4 MiB"));
}

#[test]
fn a_result_with_a_wrong_type_is_refused() {
    let message = message(&add_prints(&json!({"cniVersion": "1.0.0", "ips": "10.0.0.1/8"})), &nothing());
    assert!(message.contains("result.ips: invalid value \"10.0.0.1/8\""), "{message}");
}

#[test]
fn stderr_is_forwarded() {
    let recorders = recorders().with("second", "echo a line of its own >&2");
    let executables = [json!({"type": "second"})];
    let output = Pod::new().call("ADD", &recorders.bin(), &conf("1.0.0", &executables));
    assert!(output.success && output.stderr.contains("a line of its own\n"), "{output:?}");
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

#[test]
fn a_file_without_x_bits_has_a_hint() {
    let recorders = recorders().with_file("second", "#!/bin/sh\n", 0o644);
    let output = failed(&recorders, &Pod::new(), &nothing());
    assert!(output.stdout["msg"].as_str().is_some_and(|msg| msg.contains("x bits")), "{}", output.stdout);
    assert_eq!(recorders.order(), ["ADD first", "DEL first"]);
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
