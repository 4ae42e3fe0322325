//! Arguments, exit codes, error messages and output formats.

use crate::run::{detour, file};
use crate::support::api::kubeconfig_of;
use serde_json::{Value, json};
use std::fs::File;
use std::process::Command;

const POD: &str = "
kind: Pod
metadata: {name: web, namespace: shop, annotations: {sidecar.istio.io/status: '{}'}}
spec: {containers: [{name: app}, {name: istio-proxy}]}
";

#[test]
fn refused_commands_have_an_exit_code_and_name_what_is_expected() {
    let rows: Vec<(i32, String, String, String)> =
        serde_saphyr::from_str(include_str!("command_line.yaml")).expect("YAML");
    for (code, arguments, stdin, message) in rows {
        let stdin = if stdin == "POD" { POD } else { &stdin };
        let run = detour(&arguments.split_whitespace().collect::<Vec<_>>(), stdin, &[]);
        assert_eq!(run.code, code, "{arguments}: {run:?}");
        assert!(run.stderr.contains(&message) && run.stdout.is_empty(), "{arguments}: {run:?}");
        assert!(run.stderr.starts_with("error: "), "{arguments}: {run:?}");
    }
}

#[test]
fn output_that_cannot_be_written_is_reported() {
    let pod = file("pod.yaml", POD);
    let credentials = kubeconfig_of(&json!({"server": "https://a"}), &json!({}));
    let kubeconfig = file("kubeconfig", &credentials);
    for arguments in [
        &["explain", "-f", &pod][..],
        &["explain", "-f", &pod, "-o", "json"],
        &["trace", "-f", &pod, "--from", "uid=1", "--to", "1.2.3.4:5/tcp"],
        &["rules", "/proc/self/ns/net"],
        &["doctor", "--node"],
        &["validate", concat!(env!("CARGO_MANIFEST_DIR"), "/conf/node.json")],
        &["install", "--dry-run", "--kubeconfig", &kubeconfig],
        &["uninstall", "--dry-run"],
        &["completion", "bash"],
        &["version"],
        &["--help"],
        &["--version"],
    ] {
        let full = File::options().write(true).open("/dev/full").expect("/dev/full");
        let run = Command::new(env!("CARGO_BIN_EXE_detour")).args(arguments).env_clear().stdout(full).output();
        let run = run.expect("run detour");
        let message = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(1), "{arguments:?}: {message}");
        assert!(message.contains("stdout: No space left on device"), "{arguments:?}: {message}");
    }
}

#[test]
fn the_kubeconfigs_of_users_are_left_to_kubectl() {
    for environment in [&[("KUBECONFIG", "/no/such/kubeconfig")][..], &[("HOME", "/no/such/home")]] {
        for command in ["explain", "rules"] {
            let run = detour(&[command, "-n", "shop", "web"], "", environment);
            assert!(run.code == 1 && run.stderr.contains("use kubectl detour"), "{run:?}");
            assert!(!run.stderr.contains("/no/such"), "{run:?}");
        }
    }
}

/// The plugin retries for ten seconds. A user sees the cause of the first attempt.
#[test]
fn an_unreachable_api_server_is_reported_without_a_retry() {
    let kubeconfig = kubeconfig_of(&json!({"server": "http://127.0.0.1:1"}), &json!({"token": "t"}));
    let kubeconfig = file("config", &kubeconfig);
    let conf = json!({"name": "a", "type": "detour", "kubernetes": {"kubeconfig": *kubeconfig}});
    let conf = file("a.conf", &conf.to_string());
    let packet = ["--from", "uid=1", "--to", "1.2.3.4:5/tcp"];
    for command in [
        &["explain"][..],
        &["rules"],
        &[&["trace"][..], &packet].concat(),
        &[&["trace", "--live"][..], &packet].concat(),
    ] {
        let arguments = [command, &["-n", "shop", "web", "--config", &conf]].concat();
        let run = detour(&arguments, "", &[]);
        assert!(run.code == 1 && run.stderr.contains("Connection refused"), "{arguments:?}: {run:?}");
        assert!(!run.stderr.contains("this node") && !run.stderr.contains("attempt"), "{arguments:?}: {run:?}");
    }
}

#[test]
fn trace_reports_the_arrival_and_the_deciding_rule() {
    let run = detour(&["trace", "-f", "-", "--from", "uid=1000", "--to", "1.2.3.4:443/tcp", "-o", "json"], POD, &[]);
    let message = run.json();
    assert_eq!(message["arrives_at"], "sidecar:15001");
    assert_eq!(message["decided_by"]["rule"], "-p tcp -j REDIRECT --to-ports 15001");
    assert_eq!(message["from"]["process"]["uid"], 1000);
    let inbound = ["trace", "-f", "-", "--from", "inbound:10.0.0.9", "--to", "10.0.0.2:15020/tcp", "-o", "json"];
    assert_eq!(detour(&inbound, POD, &[]).json()["arrives_at"], "direct");
    let own = ["trace", "-f", "-", "--from", "uid=1337", "--to", "10.0.0.2:80/tcp", "-o", "json"];
    assert_eq!(detour(&own, POD, &[]).json()["arrives_at"], "direct");
    let own = [&own[..], &["--pod-ip", "fd00::2,10.0.0.2"]].concat();
    assert_eq!(detour(&own, POD, &[]).json()["arrives_at"], "sidecar:15006");
}

#[test]
fn a_container_sends_with_the_ids_in_its_manifest() {
    let pod = "
kind: Pod
metadata: {name: web, namespace: shop, annotations: {sidecar.istio.io/status: '{}'}}
spec:
  securityContext: {runAsUser: 7, runAsGroup: 8}
  containers: [{name: app}, {name: istio-proxy, securityContext: {runAsUser: 1337, runAsGroup: 1337}}]
  ephemeralContainers: [{name: debugger, securityContext: {runAsUser: 9}}]
";
    let trace = |pod: &str, from: &str| {
        detour(&["trace", "-f", "-", "--from", from, "--to", "1.2.3.4:443/tcp", "-o", "json"], pod, &[])
    };
    let message = trace(pod, "container=app").json();
    assert_eq!(message["from"]["process"], json!({"uid": 7, "gid": 8}));
    assert_eq!(message["arrives_at"], "sidecar:15001");
    assert_eq!(trace(pod, "container=istio-proxy").json()["arrives_at"], "direct");
    assert_eq!(trace(pod, "container=debugger").json()["from"]["process"]["uid"], 9);
    for (run, message) in [
        (trace(pod, "container=ap"), "--from: container \"ap\": pod shop/web: expected one of app, istio-proxy"),
        (trace(POD, "container=app"), "--from: container \"app\": pod shop/web: unknown UID: runAsUser is not set"),
    ] {
        assert!(run.code == 2 && run.stderr.contains(message), "{run:?}");
    }
}

/// The last ones are as OVN-Kubernetes reports a primary user-defined network: `eth0` only serves the kubelet.
#[test]
fn a_packet_uses_lo_to_the_pods_own_addresses_and_else_the_interface_of_the_default_route() {
    let both = "status: {podIP: 10.0.0.2, podIPs: [{ip: 10.0.0.2}, {ip: 'fd00::2'}]}";
    let one = "status: {podIP: 10.0.0.2}";
    let secondary = r#"k8s.v1.cni.cncf.io/network-status: '[{"name": "ovn", "ips": ["10.0.0.2"], "default": true},
        {"name": "a", "ips": ["192.168.7.2"]}]', "#;
    let primary = r#"traffic.sidecar.istio.io/excludeInterfaces: eth0, k8s.v1.cni.cncf.io/network-status: '[
        {"name": "ovn-kubernetes", "interface": "eth0", "ips": ["10.0.0.2"]},
        {"name": "ovn-kubernetes", "interface": "ovn-udn1", "ips": ["203.203.0.5"], "default": true}]', "#;
    let lo = ["lo", "direct"];
    for (annotations, status, to, more, expected) in [
        ("", both, "10.0.0.2:80/tcp", &[][..], lo),
        ("", both, "[fd00::2]:80/tcp", &[], lo),
        ("", one, "10.0.0.2:80/tcp", &[], lo),
        ("", both, "10.0.0.3:80/tcp", &[], ["eth0", "sidecar:15001"]),
        ("", both, "10.0.0.2:80/tcp", &["--pod-ip", "10.0.0.9"], ["eth0", "sidecar:15001"]),
        ("", "status: null", "10.0.0.2:80/tcp", &[], ["eth0", "sidecar:15001"]),
        (secondary, "", "192.168.7.2:80/tcp", &[], lo),
        (secondary, "", "10.0.0.2:80/tcp", &[], lo),
        (secondary, "", "192.168.7.3:80/tcp", &[], ["eth0", "sidecar:15001"]),
        (primary, "", "203.203.0.9:80/tcp", &[], ["ovn-udn1", "sidecar:15001"]),
        (primary, "", "203.203.0.9:80/tcp", &["--interface", "eth0"], ["eth0", "direct"]),
    ] {
        let pod = POD.replace("annotations: {", &format!("annotations: {{{annotations}")) + status;
        let arguments = ["trace", "-f", "-", "--from", "uid=1000", "--to", to, "-o", "json"];
        let found = detour(&[&arguments[..], more].concat(), &pod, &[]).json();
        assert_eq!([&found["interface"], &found["arrives_at"]], expected, "{pod} {to} {more:?}");
    }
}

#[test]
fn output_is_not_colored_without_a_terminal() {
    let run = detour(&["explain", "-f", "-"], POD, &[("TERM", "xterm-256color")]);
    assert!(run.code == 0 && !run.stdout.contains('\u{1b}'), "{run:?}");
}

#[test]
fn version_and_completion_are_printed() {
    let version = detour(&["version", "-o", "json"], "", &[]).json();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(version["cni_versions"][0], "0.1.0");
    for shell in ["bash", "zsh", "fish"] {
        let run = detour(&["completion", shell], "", &[]);
        assert!(run.code == 0 && run.stdout.contains("explain") && run.stdout.contains("netns"), "{run:?}");
    }
}

/// Programs that read reports get the error, too.
#[test]
fn json_and_yaml_have_the_error_of_unreadable_input() {
    let missing = "/no/such/file";
    let commands: [&[&str]; 7] = [
        &["validate", missing],
        &["explain", "-f", missing],
        &["trace", "-f", missing, "--from", "uid=7", "--to", "10.0.0.1:53/udp"],
        &["trace", "--netns", missing, "--from", "uid=7", "--to", "10.0.0.1:53/udp"],
        &["rules", missing],
        &["doctor", "--root", missing],
        &["audit", "--root", missing],
    ];
    for arguments in commands {
        let json = detour(&[arguments, &["-o", "json"]].concat(), "", &[]);
        let report: Value = serde_json::from_str(&json.stdout).unwrap_or_else(|_| panic!("{arguments:?}: {json:?}"));
        assert_eq!((json.code, &report["exit_code"]), (2, &json!(2)), "{arguments:?}: {json:?}");
        let error = report["error"].as_str().unwrap_or_default();
        assert!(error.contains(missing), "{report}");
        assert_eq!(json.stderr.trim_end(), format!("error: {error}"));
        let yaml = detour(&[arguments, &["-o", "yaml"]].concat(), "", &[]);
        assert!(yaml.code == 2 && yaml.stdout.contains("exit_code: 2"), "{yaml:?}");
        let table = detour(arguments, "", &[]);
        assert_eq!((table.code, table.stdout.as_str()), (2, ""), "{arguments:?}");
    }
}
