//! The CNI protocol of the binary: environment and stdin, stdout, stderr and the exit code. Messages and codes are
//! those of the reference library (`pkg/skel`).

use crate::support::directory::Directory;
use crate::support::netns_pod::Pod;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The variables of a complete call.
const WHOLE: [(&str, &str); 5] = [
    ("CNI_CONTAINERID", "protocol-test"),
    ("CNI_NETNS", "/run/netns/protocol-test-none"),
    ("CNI_IFNAME", "net1"),
    ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=kube-system;K8S_POD_NAME=p"),
    ("CNI_PATH", "/opt/cni/bin"),
];

/// Runs the binary with only `environment`.
fn run(environment: &[(&str, &str)], arguments: &[&str], stdin: Stdio) -> Output {
    let mut detour = Command::new(env!("CARGO_BIN_EXE_detour"));
    detour.env_clear().envs(environment.iter().copied()).args(arguments).stdin(stdin);
    detour.stdout(Stdio::piped()).stderr(Stdio::piped());
    detour.output().expect("the binary starts")
}

fn pipe(text: &str) -> Stdio {
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    writer.write_all(text.as_bytes()).expect("it fits into the pipe");
    reader.into()
}

/// Runs a complete call with `changed` variables; an empty value removes one.
fn call(command: &str, changed: &[(&str, &str)], stdin: &str) -> Output {
    let mut environment = vec![("CNI_COMMAND", command)];
    environment.extend(WHOLE.iter().filter(|(name, _)| !changed.iter().any(|(n, _)| n == name)));
    environment.extend(changed.iter().filter(|(_, value)| !value.is_empty()));
    run(&environment, &[], pipe(stdin))
}

fn json(output: &Output) -> Value {
    let text = std::str::from_utf8(&output.stdout).expect("UTF-8");
    assert_eq!(text.lines().count(), 1, "one line on stdout: {text:?}");
    serde_json::from_str(text).expect("JSON on stdout")
}

/// Returns the error object of a failed call after checking its form.
fn error(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = json(output);
    let keys: Vec<_> = error.as_object().expect("an object").keys().map(String::as_str).collect();
    assert!(keys == ["cniVersion", "code", "msg"] || keys == ["cniVersion", "code", "msg", "details"], "{error}");
    assert!(VERSIONS.iter().any(|v| error["cniVersion"] == *v), "{error}");
    assert_ne!(error["code"], 999);
    error
}

/// Returns code and message of a failed call.
fn refusal(output: &Output) -> (u64, String) {
    let error = error(output);
    (error["code"].as_u64().expect("a number"), error["msg"].as_str().expect("a string").to_owned())
}

fn succeeds(output: &Output) {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

fn silent(output: &Output) {
    succeeds(output);
    assert!(output.stdout.is_empty(), "{output:?}");
}

/// Returns a configuration of this version that skips pods in kube-system.
fn conf(version: &str) -> String {
    let conf = json!({
        "cniVersion": version, "name": "n", "type": "detour", "exclude_namespaces": ["kube-system"], "log_level": "none",
    });
    conf.to_string()
}

#[test]
fn an_answer_that_cannot_be_written_to_stdout_is_reported_on_stderr() {
    for (command, what) in [("VERSION", "result"), ("ADD", "error")] {
        let mut detour = Command::new(env!("CARGO_BIN_EXE_detour"));
        detour.env_clear().envs(WHOLE).env("CNI_COMMAND", command).stdin(pipe("{}"));
        detour.stdout(File::create("/dev/full").expect("writable")).stderr(Stdio::piped());
        let output = detour.output().expect("the binary starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(&format!("can't write the {what} of the call to stdout: No space left")), "{text}");
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn without_a_command_the_binary_prints_its_version_and_help() {
    for environment in [&[][..], &[("CNI_COMMAND", "")]] {
        let output = run(environment, &[], Stdio::null());
        succeeds(&output);
        let help = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(help.contains("Usage: detour <COMMAND>") && help.contains("detour explain -f pod.yaml"), "{help}");
        let about = String::from_utf8(output.stderr).expect("UTF-8");
        let lines: Vec<_> = about.lines().collect();
        assert!(lines[0].starts_with("CNI plugin detour v"), "{about}");
        assert_eq!(lines[1], format!("CNI protocol versions supported: {}", VERSIONS.join(", ")));
        assert_eq!(lines.len(), 2);
    }
}

#[test]
fn version_requires_no_other_variable_no_stdin_and_no_arguments() {
    let unreadable = File::open("/").expect("it is there");
    let output = run(&[("CNI_COMMAND", "VERSION")], &["--help"], unreadable.into());
    succeeds(&output);
    assert_eq!(json(&output), json!({"cniVersion": "1.1.0", "supportedVersions": VERSIONS}));
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn malformed_variables_are_refused_before_stdin_is_read() {
    let too_long = json!("interface name should be less than 16 characters");
    for (name, value, msg, details) in [
        ("CNI_CONTAINERID", "a/b", "invalid characters in containerID", json!("a/b")),
        ("CNI_CONTAINERID", "-a", "invalid characters in containerID", json!("-a")),
        ("CNI_IFNAME", "1234567890123456", "interface name is too long", too_long),
        ("CNI_IFNAME", ".", "interface name is . or ..", Value::Null),
        ("CNI_IFNAME", "..", "interface name is . or ..", Value::Null),
        ("CNI_IFNAME", "a/b", "interface name contains / or : or whitespace characters", Value::Null),
        ("CNI_IFNAME", "a:b", "interface name contains / or : or whitespace characters", Value::Null),
        ("CNI_IFNAME", "a b", "interface name contains / or : or whitespace characters", Value::Null),
    ] {
        for command in ["ADD", "CHECK", "DEL"] {
            let error = error(&call(command, &[(name, value)], "garbage"));
            assert_eq!((&error["code"], &error["msg"]), (&json!(4), &json!(msg)), "{command} {value}");
            assert_eq!(error["details"], details);
        }
    }
    let (code, msg) = refusal(&call("ADD", &[("CNI_CONTAINERID", "a/b"), ("CNI_IFNAME", "")], ""));
    assert_eq!((code, msg.as_str()), (4, "invalid characters in containerID"));
}

#[test]
fn stdin_that_is_not_a_configuration_is_refused() {
    for stdin in ["", "garbage", "{\"name\":\"n\"", "[]", "7", "{\"name\":\"n\"} x", &"[".repeat(60_000)] {
        for command in ["ADD", "CHECK", "DEL", "GC", "STATUS"] {
            let output = call(command, &[], stdin);
            let (code, msg) = refusal(&output);
            assert_eq!(code, 6, "{stdin:?}");
            assert!(msg.starts_with("error unmarshall network config: "), "{msg}");
            assert_eq!(error(&output)["cniVersion"], "1.1.0");
        }
    }
}

#[test]
fn unreadable_stdin_is_an_io_error() {
    let mut environment = vec![("CNI_COMMAND", "ADD")];
    environment.extend(WHOLE);
    let directory = File::open("/").expect("it is there");
    let (code, msg) = refusal(&run(&environment, &[], directory.into()));
    assert!(code == 5 && msg.starts_with("error reading from stdin: "), "{code} {msg}");
}

#[test]
fn the_error_for_an_invalid_configuration_has_its_version() {
    let stdin = r#"{"cniVersion":"0.3.1","name":"n","type":"detour","chain":[{"type":"../sh"}]}"#;
    let error = error(&call("ADD", &[], stdin));
    assert_eq!((&error["code"], &error["cniVersion"]), (&json!(7), &json!("0.3.1")));
    assert!(error["msg"].as_str().expect("a string").starts_with("chain[0].type: "), "{error}");
}

#[test]
fn the_name_of_the_binary_replaces_a_missing_type() {
    let directory = Directory::new("protocol");
    let status_as = |name: &str| {
        let link = directory.join(name);
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_detour"), &link).expect("a link");
        let mut plugin = Command::new(link);
        plugin.env_clear().env("CNI_COMMAND", "STATUS").env("CNI_PATH", "/");
        plugin.stdin(pipe(r#"{"cniVersion":"1.1.0","name":"n"}"#)).output().expect("it starts")
    };
    let (known, unknown) = (status_as("excludedns"), status_as("renamed"));
    silent(&known);
    let (code, msg) = refusal(&unknown);
    assert!(code == 7 && msg.starts_with("type: "), "{msg}");
}

#[test]
fn the_network_namespace_of_the_plugin_is_refused() {
    let own = ("CNI_NETNS", "/proc/self/ns/net");
    let wanted = (8, "plugin's netns and netns from CNI_NETNS should not be the same".to_owned());
    for command in ["ADD", "DEL", "CHECK"] {
        assert_eq!(refusal(&call(command, &[own], &conf("1.1.0"))), wanted);
        assert_eq!(refusal(&call(command, &[own, ("CNI_NETNS_OVERRIDE", "0")], &conf("1.1.0"))), wanted);
    }
    for value in ["1", "true", "TRUE"] {
        let output = call("ADD", &[own, ("CNI_NETNS_OVERRIDE", value)], &conf("1.1.0"));
        succeeds(&output);
        succeeds(&call("DEL", &[own, ("CNI_NETNS_OVERRIDE", value)], &conf("1.1.0")));
    }
}

/// The reference plugins do the same.
#[test]
fn check_without_the_result_of_add_is_refused() {
    let missing = "prevResult: missing; CHECK needs the result of ADD, which the runtime must pass".to_owned();
    for (previous, wanted) in [
        ("", missing.clone()),
        (r#","prevResult":null"#, missing),
        (r#","prevResult":7"#, "prevResult: expected an object, which the runtime sets".to_owned()),
    ] {
        for more in ["", r#","delegates":[{"type":"bridge","name":"b"}]"#] {
            let conf = format!(r#"{{"cniVersion":"1.1.0","name":"n","type":"detour"{more}{previous}}}"#);
            assert_eq!(refusal(&call("CHECK", &[], &conf)), (7, wanted.clone()), "{conf}");
        }
    }
}

#[test]
fn del_succeeds_without_a_netns_and_again() {
    for netns in ["", "/run/netns/protocol-test-gone"] {
        for _ in 0..2 {
            silent(&call("DEL", &[("CNI_NETNS", netns)], &conf("1.1.0")));
        }
    }
}

#[test]
fn del_needs_only_the_name_of_an_invalid_configuration() {
    for wrong in [r#""chain":7"#, r#""kubernetes":{"timeout_seconds":0}"#, r#""dialect":"ipfw""#, r#""type":"no-such""#]
    {
        let conf = format!(r#"{{"cniVersion":"1.1.0","name":"n","type":"detour",{wrong}}}"#);
        assert_eq!(refusal(&call("CHECK", &[], &conf)).0, 7, "{wrong}");
        succeeds(&call("DEL", &[], &conf));
    }
}

#[test]
fn number_and_length_of_log_lines_are_limited() {
    let mut odd: serde_json::Map<String, Value> = (0..300).map(|i| (format!("odd{i}"), json!(1))).collect();
    odd.insert("0".repeat(10_000), json!(1));
    let conf = json!({"cniVersion": "1.1.0", "name": "n", "type": "detour", "kubernetes": odd}).to_string();
    let output = call("ADD", &[("CNI_NETNS", "/proc/self/ns/net")], &conf);
    let logged: Vec<&str> = std::str::from_utf8(&output.stderr).expect("UTF-8").lines().collect();
    assert_eq!(logged.iter().filter(|line| line.contains("unknown key, ignored")).count(), 100, "{logged:?}");
    assert!(logged[100].contains("level=error"), "errors are logged whatever was before: {logged:?}");
    assert!(logged[101].contains("201 log lines of this call dropped"), "{logged:?}");
    assert!(logged.iter().all(|line| line.len() < 4096 && line.contains("command=ADD")));
}

#[test]
fn log_lines_are_written_to_stderr_and_to_the_file() {
    let logs = Directory::below(Path::new("/var/log"), "protocol");
    let file = logs.join("log");
    let stdin = json!({
        "cniVersion": "1.1.0", "name": "n", "type": "detour", "log_file": file, "kubernetes": {"odd": 1},
        "exclude_namespaces": "kube-system",
    });
    let own = ("CNI_NETNS", "/proc/self/ns/net");
    let outputs = [call("ADD", &[own], &stdin.to_string()), call("ADD", &[own], &stdin.to_string())];
    let logged = std::fs::read_to_string(&file).expect("the file is there");
    let stderr: String = outputs.iter().map(|output| String::from_utf8_lossy(&output.stderr)).collect();
    assert_eq!(logged, stderr);
    let warning = logged.lines().find(|line| line.contains(" level=warn ")).expect("a warning");
    for pair in ["kubernetes.odd", "command=ADD", "network=n", "container=protocol-test", "pod=kube-system/p"] {
        assert!(warning.contains(pair), "{pair} in {warning}");
    }
    assert!(logged.lines().any(|line| line.contains(" level=error ") && line.contains(" code=8 ")), "{logged}");
    assert!(logged.lines().all(|line| line.starts_with("time=2")) && !logged.contains('\u{1b}'), "{logged}");
}

#[test]
fn the_command_line_has_three_exit_codes() {
    let help = run(&[], &["--help"], Stdio::null());
    succeeds(&help);
    assert!(String::from_utf8_lossy(&help.stdout).contains("Examples:"));
    let version = run(&[], &["version"], Stdio::null());
    succeeds(&version);
    let text = String::from_utf8_lossy(&version.stdout);
    assert!(text.contains(env!("CARGO_PKG_VERSION")) && text.contains(&VERSIONS.join(", ")), "{text}");
    for wrong in [&["frobnicate"][..], &["version", "--odd"]] {
        let output = run(&[], wrong, Stdio::null());
        assert_eq!(output.status.code(), Some(2));
        assert!(output.stdout.is_empty() && !output.stderr.is_empty());
    }
}

#[test]
fn a_skipped_pod_without_a_previous_result_has_an_empty_one_in_the_configurations_version() {
    let sandbox = Pod::new();
    let netns = sandbox.netns().display().to_string();
    let changed = [("CNI_CONTAINERID", "protocol-empty"), ("CNI_NETNS", netns.as_str())];
    for (version, wanted) in [
        ("", json!({"cniVersion": "0.1.0", "dns": {}})),
        ("0.3.1", json!({"cniVersion": "0.3.1", "dns": {}})),
        ("1.0.0", json!({"cniVersion": "1.0.0"})),
    ] {
        let output = call("ADD", &changed, &conf(version));
        succeeds(&output);
        assert_eq!(json(&output), wanted);
        silent(&call("DEL", &changed, &conf(version)));
    }
}

#[test]
fn the_previous_result_is_returned_unchanged() {
    let sandbox = Pod::new();
    let netns = sandbox.netns().display().to_string();
    let changed = [("CNI_CONTAINERID", "protocol-previous"), ("CNI_NETNS", netns.as_str())];
    let previous = json!({
        "own": {"z": 1, "a": null},
        "interfaces": [{"name": "cni0"}, {"name": "eth0", "sandbox": netns, "mtu": 1450}],
        "ips": [{"interface": 0, "address": "10.85.0.2/16"}, {"address": "fd00::2/64"}],
        "cniVersion": "1.0.0",
    });
    let mut stdin: Value = serde_json::from_str(&conf("1.1.0")).expect("JSON");
    stdin["prevResult"] = previous.clone();
    let output = call("ADD", &changed, &stdin.to_string());
    succeeds(&output);
    let wanted = previous.to_string().replace("1.0.0", "1.1.0");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), wanted);
    silent(&call("DEL", &changed, &stdin.to_string()));
    stdin["prevResult"]["cniVersion"] = json!("0.4.0");
    let (code, msg) = refusal(&call("ADD", &changed, &stdin.to_string()));
    assert!(code == 7 && msg.starts_with("prevResult.cniVersion: "), "{msg}");
    silent(&call("DEL", &changed, &stdin.to_string()));
}

#[test]
fn excluded_containers_need_facts_and_a_pod() {
    let sandbox = Pod::new();
    let netns = sandbox.netns().display().to_string();
    let with = |args| [("CNI_CONTAINERID", "protocol-containers"), ("CNI_NETNS", netns.as_str()), ("CNI_ARGS", args)];
    let pod = with("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=p");
    let chain = json!([{"type": "container-exclude", "containers": ["init-containers"]}]);
    let conf = json!({"cniVersion": "1.1.0", "name": "n", "type": "detour", "chain": chain}).to_string();
    let (code, msg) = refusal(&call("ADD", &pod, &conf));
    let wanted = "chain[0].containers: \"init-containers\" needs facts of the pod: set kubernetes.kubeconfig";
    assert!(code == 7 && msg.starts_with(wanted), "{msg}");
    silent(&call("DEL", &pod, &conf));
    // A sandbox that is not a pod has no containers with names.
    let no_pod = with("IgnoreUnknown=1");
    succeeds(&call("ADD", &no_pod, &conf));
    silent(&call("DEL", &no_pod, &conf));
}

/// Errors appear in Events, and the author of an attachment chooses version, name and type.
#[test]
fn control_characters_in_errors_are_escaped() {
    let bad = "x\u{1b}[2J\u{7}\n\u{9b}\u{202e}";
    for conf in [
        json!({"cniVersion": "1.1.0", "name": bad, "type": "detour"}),
        json!({"cniVersion": bad, "name": "n", "type": "detour"}),
        json!({"cniVersion": "1.1.0", "name": "n", "type": bad}),
        json!({"cniVersion": "1.1.0", "name": "n", "type": "detour", "chain": [{"type": "uid-exclude", "uids": bad}]}),
        json!({"cniVersion": "1.1.0", "name": "n", "type": "detour", "chain": [{"type": "container-exclude", "containers": bad}]}),
        json!({"cniVersion": "1.1.0", "name": "n", "type": "detour", "log_level": bad}),
    ] {
        let output = call("ADD", &[], &conf.to_string());
        let acts = |text: &str| text.chars().any(|c| detour_cni::printable::is_interpreted(c) && c != '\n');
        let printed = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert!(!printed.iter().any(|text| acts(text)), "{printed:?}");
        let error = json(&output);
        let decoded = ["msg", "details"].map(|key| error[key].as_str().unwrap_or_default().replace('\n', "\0"));
        assert!(!decoded.iter().any(|text| acts(text)), "{error}");
    }
}
