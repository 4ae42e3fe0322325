//! Arguments, exit codes, error messages and output formats.

use crate::run::{detour, file};
use crate::support::api::kubeconfig_of;
use serde_json::{Value, json};
use std::fs::File;
use std::process::Command;
use std::time::{Duration, Instant};

const POD: &str = "
kind: Pod
metadata: {name: web, namespace: shop, annotations: {sidecar.istio.io/status: '{}'}}
spec: {containers: [{name: app}, {name: istio-proxy}]}
";

#[test]
fn invalid_arguments_exit_with_2_and_name_what_is_expected() {
    for (arguments, message) in [
        (&["explain"][..], "expected a pod: -f FILE, or -n NAMESPACE POD"),
        (&["explain", "-f", "/no/such/file"], "can't read /no/such/file: No such file"),
        (
            &["explain", "-f", "-", "--config", "-"],
            "stdin can be read only once: expected - for only one of --file, --config and --namespace-file",
        ),
        (&["explain", "web"], "pod \"web\": unknown namespace; add -n NAMESPACE"),
        (&["explain", "-n", "a"], "-n NAMESPACE POD"),
        (&["explain", "-f", "-", "--rules", "pf"], "iptables"),
        (
            &["trace", "-f", "-", "--from", "me", "--to", "1.2.3.4:5/tcp"],
            "invalid value 'me' for '--from <SENDER>': expected uid=UID, ",
        ),
        (
            &["trace", "-f", "-", "--from", "uid=1", "--to", "1.2.3.4"],
            "invalid value '1.2.3.4' for '--to <DESTINATION>': expected ADDRESS:PORT/tcp ",
        ),
        (
            &["trace", "-f", "-", "--from", "uid=1", "--to", "1.2.3.4:53"],
            "invalid value '1.2.3.4:53' for '--to <DESTINATION>': expected ADDRESS:PORT/tcp or ADDRESS:PORT/udp",
        ),
        (
            &["trace", "-f", "-", "--from", "inbound:fd::1", "--to", "1.2.3.4:5/tcp"],
            "expected two IPv4 or two IPv6 addresses, got --from fd::1 and --to 1.2.3.4",
        ),
        (&["rules"], "--pid"),
        (&["rules", "-n", "shop"], "--pid"),
        (&["rules", "-n", "shop", "--pid", "1"], "-n NAMESPACE POD"),
        (&["rules", "web", "--container", "a"], "cannot be used with"),
        (&["trace", "--live", "--from", "uid=1", "--to", "1.2.3.4:5/tcp"], "POD"),
        (&["trace", "--netns", "a", "--pid", "1", "--from", "uid=1", "--to", "1.2.3.4:5/tcp"], "cannot be used with"),
        (&["trace", "-f", "-", "--container", "a", "--from", "uid=1", "--to", "1.2.3.4:5/tcp"], "cannot be used with"),
        (&["completion", "basic"], "bash"),
        (&["nonsense"], "nonsense"),
    ] {
        let run = detour(arguments, POD, &[]);
        assert_eq!(run.code, 2, "{arguments:?}: {run:?}");
        assert!(run.stderr.contains(message) && run.stdout.is_empty(), "{arguments:?}: {run:?}");
    }
}

#[test]
fn invalid_input_exits_with_2() {
    let list = file("foreign.conflist", r#"{"name": "l", "plugins": [{"type": "bridge"}]}"#);
    for (arguments, stdin, message) in [
        (&["explain", "-f", "-"][..], "kind: Service\nmetadata: {name: s}", "got Service s"),
        (&["explain", "-f", "-"], "kind: [", "manifest -: "),
        (
            &["explain", "-f", "-", "--config", &list],
            POD,
            "expected one plugin of type detour or istio-cni or excludedns, got 0",
        ),
        (&["rules", "no-such-name"], "", "/run/netns/no-such-name: expected a network namespace, found none"),
        (&["rules", "no-such-name"], "", "to select a pod, use -n NAMESPACE no-such-name"),
        (&["rules", "/no/such/netns"], "", "/no/such/netns"),
        (&["rules", "--pid", "1", "--root", "/no/such/root"], "", "--root /no/such/root: expected a directory"),
        (&["explain", "-f", "-", "--config", "/no/such/conf"], POD, "/no/such/conf"),
        (&["explain", "-f", "-", "--definitions", "/no/such/definitions"], POD, "/no/such/definitions"),
        (&["explain", "-f", "-", "--namespace-file", "/no/such/namespace"], POD, "/no/such/namespace"),
        (&["validate", "/no/such/conf"], "", "can't read /no/such/conf: No such file"),
    ] {
        let run = detour(arguments, stdin, &[]);
        assert_eq!(run.code, 2, "{arguments:?}: {run:?}");
        assert!(run.stderr.starts_with("error: ") && run.stderr.contains(message), "{arguments:?}: {run:?}");
    }
}

#[test]
fn problems_with_the_selected_object_exit_with_1() {
    for (arguments, message) in [
        (&["explain", "-n", "shop", "web"][..], "from another machine, use kubectl detour"),
        (&["rules", "/dev/null"], "/dev/null: expected a network namespace, found none"),
    ] {
        let run = detour(arguments, "", &[]);
        assert_eq!(run.code, 1, "{arguments:?}: {run:?}");
        assert!(run.stderr.starts_with("error: ") && run.stderr.contains(message), "{arguments:?}: {run:?}");
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

/// The plugin retries for ten seconds. A user sees the cause at once.
#[test]
fn an_unreachable_api_server_is_reported_at_once() {
    let kubeconfig = kubeconfig_of(&json!({"server": "http://127.0.0.1:1"}), &json!({"token": "t"}));
    let kubeconfig = file("config", &kubeconfig);
    let conf = serde_json::json!({"name": "a", "type": "detour", "kubernetes": {"kubeconfig": *kubeconfig}});
    let conf = file("a.conf", &conf.to_string());
    let packet = ["--from", "uid=1", "--to", "1.2.3.4:5/tcp"];
    for command in [
        &["explain"][..],
        &["rules"],
        &[&["trace"][..], &packet].concat(),
        &[&["trace", "--live"][..], &packet].concat(),
    ] {
        let arguments = [command, &["-n", "shop", "web", "--config", &conf]].concat();
        let started = Instant::now();
        let run = detour(&arguments, "", &[]);
        assert!(started.elapsed() < Duration::from_secs(15), "{arguments:?}: {:?}", started.elapsed());
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
    let with_address = format!("{POD}status: {{podIPs: [{{ip: 'fd00::2'}}, {{ip: 10.0.0.2}}]}}");
    assert_eq!(detour(&own, &with_address, &[]).json()["arrives_at"], "sidecar:15006");
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
    assert_eq!(message["from"]["process"], serde_json::json!({"uid": 7, "gid": 8}));
    assert_eq!(message["arrives_at"], "sidecar:15001");
    assert_eq!(trace(pod, "container=istio-proxy").json()["arrives_at"], "direct");
    assert_eq!(trace(pod, "container=debugger").json()["from"]["process"]["uid"], 9);
    let none = detour(&["trace", "--pid", "1", "--from", "container=app", "--to", "1.2.3.4:443/tcp"], "", &[]);
    for (run, message) in [
        (trace(pod, "container=ap"), "--from: container \"ap\": pod shop/web: expected one of app, istio-proxy"),
        (trace(POD, "container=app"), "--from: container \"app\": pod shop/web: unknown UID: runAsUser is not set"),
        (
            trace(pod, "container="),
            "invalid value 'container=' for '--from <SENDER>': expected uid=UID, uid=UID,gid=GID, container=NAME",
        ),
        (
            none,
            "--from: container \"app\": unknown pod; use container=app,uid=UID, or select the pod: --live -n NAMESPACE POD",
        ),
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
    for (annotations, status, to, expected) in [
        ("", both, "10.0.0.2:80/tcp", lo),
        ("", both, "[fd00::2]:80/tcp", lo),
        ("", one, "10.0.0.2:80/tcp", lo),
        ("", both, "10.0.0.3:80/tcp", ["eth0", "sidecar:15001"]),
        ("", "status: null", "10.0.0.2:80/tcp", ["eth0", "sidecar:15001"]),
        (secondary, "", "192.168.7.2:80/tcp", lo),
        (secondary, "", "10.0.0.2:80/tcp", lo),
        (secondary, "", "192.168.7.3:80/tcp", ["eth0", "sidecar:15001"]),
        (primary, "", "203.203.0.9:80/tcp", ["ovn-udn1", "sidecar:15001"]),
    ] {
        let pod = POD.replace("annotations: {", &format!("annotations: {{{annotations}")) + status;
        let arguments = ["trace", "-f", "-", "--from", "uid=1000", "--to", to, "-o", "json"];
        let found = detour(&arguments, &pod, &[]).json();
        assert_eq!([&found["interface"], &found["arrives_at"]], expected, "{pod} {to}");
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
