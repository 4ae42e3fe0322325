//! Arguments, exit codes and forms.

use crate::run::{detour, file};
use std::fs::File;
use std::path::Path;
use std::process::Command;

const POD: &str = "
kind: Pod
metadata: {name: web, namespace: shop, annotations: {sidecar.istio.io/status: '{}'}}
spec: {containers: [{name: app}, {name: istio-proxy}]}
";

#[test]
fn wrong_usage_is_code_2_and_says_what_is_wanted() {
    for (arguments, said) in [
        (&["explain"][..], "name a pod: -f FILE, or -n NS POD"),
        (&["explain", "-f", "/no/such/file"], "/no/such/file can't be read"),
        (&["explain", "-f", "-", "--config", "-"], "stdin can be one of the files only"),
        (&["explain", "-f", "-", "--kubeconfig", "a"], "cannot be used with"),
        (&["explain", "web"], "name the pod's namespace with -n"),
        (&["explain", "-n", "a"], "-n NS POD"),
        (&["explain", "-f", "-", "--rules", "pf"], "iptables"),
        (&["trace", "-f", "-", "--from", "me", "--to", "1.2.3.4:5/tcp"], "--from: invalid value \"me\"; expected "),
        (&["trace", "-f", "-", "--from", "uid=1", "--to", "1.2.3.4"], "--to: invalid value \"1.2.3.4\"; expected "),
        (
            &["trace", "-f", "-", "--from", "inbound:fd::1", "--to", "1.2.3.4:5/tcp"],
            "--from fd::1 and --to 1.2.3.4 are of different families",
        ),
        (&["rules"], "--pid"),
        (&["rules", "-n", "shop"], "--pid"),
        (&["rules", "-n", "shop", "--pid", "1"], "-n NS POD"),
        (&["rules", "web", "--container", "a"], "cannot be used with"),
        (&["trace", "--live", "--from", "uid=1", "--to", "1.2.3.4:5/tcp"], "POD"),
        (&["trace", "--netns", "a", "--pid", "1", "--from", "uid=1", "--to", "1.2.3.4:5/tcp"], "cannot be used with"),
        (&["trace", "-f", "-", "--container", "a", "--from", "uid=1", "--to", "1.2.3.4:5/tcp"], "cannot be used with"),
        (&["completion", "basic"], "bash"),
        (&["nonsense"], "nonsense"),
    ] {
        let run = detour(arguments, POD, &[]);
        assert_eq!(run.code, 2, "{arguments:?}: {run:?}");
        assert!(run.stderr.contains(said) && run.stdout.is_empty(), "{arguments:?}: {run:?}");
    }
}

#[test]
fn wrong_input_is_code_2() {
    let list = file("foreign.conflist", r#"{"name": "l", "plugins": [{"type": "bridge"}]}"#);
    for (arguments, stdin, said) in [
        (&["explain", "-f", "-"][..], "kind: Service\nmetadata: {name: s}", "got Service s"),
        (&["explain", "-f", "-"], "kind: [", "manifest -: "),
        (
            &["explain", "-f", "-", "--config", &list],
            POD,
            "expected one plugin of type detour, istio-cni, excludedns, got 0",
        ),
        (&["rules", "no-such-name"], "", "/run/netns/no-such-name: there is no network namespace"),
        (&["rules", "no-such-name"], "", "a pod is named as -n NS no-such-name"),
        (&["rules", "/no/such/netns"], "", "/no/such/netns"),
        (&["rules", "--pid", "1", "--root", "/no/such/root"], "", "--root /no/such/root: No such file"),
        (&["explain", "-f", "-", "--config", "/no/such/conf"], POD, "/no/such/conf"),
        (&["explain", "-f", "-", "--definitions", "/no/such/definitions"], POD, "/no/such/definitions"),
        (&["explain", "-f", "-", "--namespace-file", "/no/such/namespace"], POD, "/no/such/namespace"),
        (&["explain", "-n", "a", "b", "--kubeconfig", "/no/such/kubeconfig"], "", "--kubeconfig /no/such/kubeconfig: "),
        (&["doctor", "--kubeconfig", "/no/such/kubeconfig"], "", "--kubeconfig /no/such/kubeconfig: No such file"),
        (&["doctor", "--conf", "/no/such/conf"], "", "--conf /no/such/conf: No such file"),
        (&["validate", "/no/such/conf"], "", "/no/such/conf can't be read"),
        (&["validate", "-", "--bin-dir", "/no/such/bin"], "{}", "--bin-dir /no/such/bin: No such file"),
    ] {
        let run = detour(arguments, stdin, &[]);
        assert_eq!(run.code, 2, "{arguments:?}: {run:?}");
        assert!(run.stderr.starts_with("detour: ") && run.stderr.contains(said), "{arguments:?}: {run:?}");
    }
}

#[test]
fn what_is_wrong_with_what_the_arguments_name_is_code_1() {
    for (arguments, said) in [
        (&["explain", "-n", "shop", "web"][..], "give --kubeconfig, set KUBECONFIG or write ~/.kube/config"),
        (&["rules", "/dev/null"], "/dev/null: there is no network namespace"),
    ] {
        let run = detour(arguments, "", &[]);
        assert_eq!(run.code, 1, "{arguments:?}: {run:?}");
        assert!(run.stderr.starts_with("detour: ") && run.stderr.contains(said), "{arguments:?}: {run:?}");
    }
}

#[test]
fn output_that_cannot_be_written_is_reported() {
    let pod = file("pod.yaml", POD);
    for arguments in [
        &["explain", "-f", &pod][..],
        &["explain", "-f", &pod, "-o", "json"],
        &["trace", "-f", &pod, "--from", "uid=1", "--to", "1.2.3.4:5/tcp"],
        &["rules", "/proc/self/ns/net"],
        &["doctor", "--node"],
        &["validate", concat!(env!("CARGO_MANIFEST_DIR"), "/conf/node.json")],
        &["install", "--dry-run", "--kubeconfig", "/k", "--allow-missing-credentials"],
        &["uninstall", "--dry-run"],
        &["completion", "bash"],
        &["version"],
        &["--help"],
        &["--version"],
    ] {
        let full = File::options().write(true).open("/dev/full").expect("/dev/full");
        let run = Command::new(env!("CARGO_BIN_EXE_detour")).args(arguments).env_clear().stdout(full).output();
        let run = run.expect("run detour");
        let said = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains("stdout: No space left on device"), "{arguments:?}: {said}");
    }
}

#[test]
fn kubeconfig_is_found_by_the_environment_and_by_a_relative_path() {
    let of = |more: &[&str], environment: &[(&str, &str)]| {
        detour(&[&["explain", "-n", "shop", "web"][..], more].concat(), "", environment)
    };
    let run = of(&[], &[("KUBECONFIG", "/no/such/kubeconfig:/other")]);
    assert!(run.code == 1 && run.stderr.contains("/no/such/kubeconfig"), "{run:?}");
    let run = of(&["--kubeconfig", "no-such-kubeconfig"], &[("KUBECONFIG", "/other")]);
    assert!(run.code == 2 && run.stderr.contains("no-such-kubeconfig"), "{run:?}");
}

#[test]
fn the_kubeconfig_of_the_home_directory_comes_after_the_environments() {
    let file = file("x", "");
    let home = Path::new(&*file).parent().expect("a directory");
    let kubeconfig = home.join(".kube/config");
    std::fs::create_dir(home.join(".kube")).expect("a new directory");
    std::fs::write(&kubeconfig, "kind: [").expect("writable");
    let (home, kubeconfig) = (home.display().to_string(), kubeconfig.display().to_string());
    let of = |command: &[&str], environment: &[(&str, &str)]| {
        detour(&[command, &["-n", "shop", "web"][..]].concat(), "", &[environment, &[("HOME", home.as_str())]].concat())
    };
    for command in ["explain", "rules"] {
        let run = of(&[command], &[]);
        assert!(run.code == 1 && run.stderr.contains(&kubeconfig), "{run:?}");
        let run = of(&[command], &[("KUBECONFIG", "/no/such/kubeconfig")]);
        assert!(run.stderr.contains("/no/such/kubeconfig") && !run.stderr.contains(&home), "{run:?}");
    }
    let doctor = of(&["doctor", "-o", "json"], &[]);
    assert!(doctor.stdout.contains(&kubeconfig), "{doctor:?}");
    std::fs::remove_file(&kubeconfig).expect("removable");
    assert!(of(&["explain"], &[]).stderr.contains("no kubeconfig: give --kubeconfig"));
}

#[test]
fn a_trace_tells_programs_where_it_arrives_and_by_which_rule() {
    let run = detour(&["trace", "-f", "-", "--from", "uid=1000", "--to", "1.2.3.4:443/tcp", "-o", "json"], POD, &[]);
    let said = run.json();
    assert_eq!(said["arrives_at"], "sidecar:15001");
    assert_eq!(said["decided_by"]["rule"], "-p tcp -j REDIRECT --to-ports 15001");
    assert_eq!(said["from"]["process"]["uid"], 1000);
    let inbound = ["trace", "-f", "-", "--from", "inbound:10.0.0.9", "--to", "10.0.0.2:15020/tcp", "-o", "json"];
    assert_eq!(detour(&inbound, POD, &[]).json()["arrives_at"], "direct");
    let own = ["trace", "-f", "-", "--from", "uid=1337", "--to", "10.0.0.2:80/tcp", "-o", "json"];
    assert_eq!(detour(&own, POD, &[]).json()["arrives_at"], "direct");
    let own = [&own[..], &["--pod-ip", "fd00::2,10.0.0.2"]].concat();
    assert_eq!(detour(&own, POD, &[]).json()["arrives_at"], "sidecar:15006");
}

#[test]
fn a_container_sends_under_the_ids_of_its_manifest() {
    let pod = "
kind: Pod
metadata: {name: web, namespace: shop, annotations: {sidecar.istio.io/status: '{}'}}
spec:
  securityContext: {runAsUser: 7, runAsGroup: 8}
  containers: [{name: app}, {name: istio-proxy, securityContext: {runAsUser: 1337, runAsGroup: 1337}}]
";
    let trace = |pod: &str, from: &str| {
        detour(&["trace", "-f", "-", "--from", from, "--to", "1.2.3.4:443/tcp", "-o", "json"], pod, &[])
    };
    let said = trace(pod, "container=app").json();
    assert_eq!(said["from"]["process"], serde_json::json!({"uid": 7, "gid": 8}));
    assert_eq!(said["arrives_at"], "sidecar:15001");
    assert_eq!(trace(pod, "container=istio-proxy").json()["arrives_at"], "direct");
    let none = detour(&["trace", "--pid", "1", "--from", "container=app", "--to", "1.2.3.4:443/tcp"], "", &[]);
    for (run, said) in [
        (trace(pod, "container=ap"), "--from: container \"ap\": pod shop/web: expected one of app, istio-proxy"),
        (trace(POD, "container=app"), "--from: container \"app\": pod shop/web sets no runAsUser for it"),
        (trace(pod, "container="), "--from: invalid value \"container=\"; expected uid=U, uid=U,gid=G, container=NAME"),
        (none, "--from: container \"app\": the pod is not known; name it with -f FILE or -n NS POD"),
    ] {
        assert!(run.code == 2 && run.stderr.contains(said), "{run:?}");
    }
}

#[test]
fn a_trace_to_the_pods_own_address_goes_over_lo() {
    let traced = |status: &str, from: &str, to: &str, more: &[&str]| {
        let pod = format!("{POD}status: {status}\n");
        let arguments = ["trace", "-f", "-", "--from", from, "--to", to, "-o", "json"];
        let found = detour(&[&arguments[..], more].concat(), &pod, &[]).json();
        (found["interface"].to_string(), found["arrives_at"].to_string())
    };
    let (lo, eth0) = ("\"lo\"".to_owned(), "\"eth0\"".to_owned());
    let (direct, sidecar) = ("\"direct\"".to_owned(), "\"sidecar:15001\"".to_owned());
    let both = "{podIP: 10.0.0.2, podIPs: [{ip: 10.0.0.2}, {ip: 'fd00::2'}]}";
    assert_eq!(traced(both, "uid=1000", "10.0.0.2:80/tcp", &[]), (lo.clone(), direct.clone()));
    assert_eq!(traced(both, "uid=1000", "[fd00::2]:80/tcp", &[]), (lo.clone(), direct.clone()));
    assert_eq!(traced("{podIP: 10.0.0.2}", "uid=1000", "10.0.0.2:80/tcp", &[]), (lo, direct));
    assert_eq!(traced(both, "uid=1000", "10.0.0.3:80/tcp", &[]), (eth0.clone(), sidecar.clone()));
    let other = ["--pod-ip", "10.0.0.9"];
    assert_eq!(traced(both, "uid=1000", "10.0.0.2:80/tcp", &other), (eth0.clone(), sidecar.clone()));
    assert_eq!(traced("null", "uid=1000", "10.0.0.2:80/tcp", &[]), (eth0, sidecar));
}

#[test]
fn a_trace_to_an_address_of_a_secondary_network_goes_over_lo() {
    let status = r#"[{"name": "ovn", "ips": ["10.0.0.2"], "default": true}, {"name": "a", "ips": ["192.168.7.2"]}]"#;
    let annotation = format!("annotations: {{k8s.v1.cni.cncf.io/network-status: '{status}', ");
    let pod = POD.replace("annotations: {", &annotation);
    let traced = |to: &str| {
        let found = detour(&["trace", "-f", "-", "--from", "uid=1000", "--to", to, "-o", "json"], &pod, &[]).json();
        [found["interface"].clone(), found["arrives_at"].clone()]
    };
    assert_eq!(traced("192.168.7.2:80/tcp"), ["lo", "direct"]);
    assert_eq!(traced("10.0.0.2:80/tcp"), ["lo", "direct"]);
    assert_eq!(traced("192.168.7.3:80/tcp"), ["eth0", "sidecar:15001"]);
}

#[test]
fn without_a_terminal_there_is_no_colour() {
    let run = detour(&["explain", "-f", "-"], POD, &[("TERM", "xterm-256color")]);
    assert!(run.code == 0 && !run.stdout.contains('\u{1b}'), "{run:?}");
}

#[test]
fn version_and_completions() {
    let version = detour(&["version", "-o", "json"], "", &[]).json();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(version["cni_versions"][0], "0.1.0");
    for shell in ["bash", "zsh", "fish"] {
        let run = detour(&["completion", shell], "", &[]);
        assert!(run.code == 0 && run.stdout.contains("explain") && run.stdout.contains("netns"), "{run:?}");
    }
}
