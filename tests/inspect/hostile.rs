//! Names with escape sequences, line breaks and bidi controls, chosen by a pod's author or a process in the pod, don't
//! reach the user's terminal. Needs root.

use crate::run::{Run, detour, file};
use crate::support::new_netns::in_new_netns;
use detour_cni::firewall::nfnetlink::NfSocket;
use detour_cni::firewall::rule::{Condition, Family, Hook, Key, Rule, Table, Target};
use detour_cni::firewall::{CreatedTables, LiveRuleset, RuleFormat, Ruleset};
use detour_cni::printable::is_interpreted;
use serde_json::{Value, json};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// ESC, BEL, a line break, C1's CSI, U+202E, a zero-width space.
const HOSTILE: &str = "X\u{1b}]0;t\u{7}\ndetour:\u{9b}2J\u{202e}\u{200b}";
/// An interface name has no line breaks and at most 15 bytes.
const INTERFACE: &str = "e\u{1b}[31m\u{7}\u{9b}\u{202e}";

/// Asserts that the text contains no character on which a terminal acts, except its own line breaks.
#[track_caller]
fn assert_harmless(text: &str, what: &str) {
    let bad = text.chars().find(|c| is_interpreted(*c) && *c != '\n');
    assert!(bad.is_none() && !text.lines().any(|line| line.starts_with("detour:\\u")), "{what}: {bad:?}: {text}");
}

/// Asserts that all output formats are harmless, and that JSON and YAML preserve the value.
fn assert_all_formats_harmless(arguments: &[&str], stdin: &str, contains: &str) {
    let run = |more: &[&str]| -> Run {
        let run = detour(&[arguments, more].concat(), stdin, &[]);
        assert_eq!(run.code, 0, "{run:?}");
        assert_harmless(&run.stdout, &more.join(" "));
        assert_harmless(&run.stderr, &more.join(" "));
        run
    };
    let table = run(&[]).stdout;
    assert!(table.contains("\\u{1b}") && table.contains("\\u{202e}") && table.contains("\\u{9b}"), "{table}");
    let json = run(&["-o", "json"]).json();
    let yaml: Value = serde_saphyr::from_str(&run(&["-o", "yaml"]).stdout).expect("YAML");
    assert_eq!(json, yaml);
    assert!(strings(&json).iter().any(|text| text.contains(contains)), "{json:#}");
}

fn strings(value: &Value) -> Vec<&str> {
    match value {
        Value::String(text) => vec![text],
        Value::Array(items) => items.iter().flat_map(strings).collect(),
        Value::Object(members) => members.values().flat_map(strings).collect(),
        _ => Vec::new(),
    }
}

/// Creates rules and an interface with hostile names, as a process with CAP_NET_ADMIN in the pod can.
fn commit_hostile_rules() {
    let mut rules = Ruleset::default();
    let table = rules.tables.entry((Family::Ip, Table::Nat)).or_default();
    table.append(HOSTILE, Rule::new(Target::Return).on(Condition::interface(Key::OutInterface, INTERFACE)));
    table.hook(Hook::Output, Rule::jump(HOSTILE).on(Condition::interface(Key::OutInterface, INTERFACE)));
    let mut socket = NfSocket::open().expect("nfnetlink");
    let before = LiveRuleset::read(&mut socket).expect("readable");
    let plan = RuleFormat::Iptables.plan(&before, &Ruleset::default(), &rules, &CreatedTables::default());
    plan.commit(&mut socket, &before).expect("the kernel takes any name");
    let veth = ["link", "add", INTERFACE, "type", "veth", "peer", "name", "far"];
    assert!(Command::new("ip").args(veth).status().expect("ip starts").success());
}

#[test]
fn names_in_a_pods_network_namespace_are_escaped() {
    in_new_netns(|| {
        commit_hostile_rules();
        let netns = format!("/proc/{}/task/{}/ns/net", std::process::id(), nix::unistd::gettid());
        assert_all_formats_harmless(&["rules", &netns], "", "detour:\u{9b}2J\u{202e}");
        let packet = ["--from", "uid=1", "--to", "1.2.3.4:5/tcp", "--interface", INTERFACE];
        assert_all_formats_harmless(&[&["trace", "--netns", &netns], &packet[..]].concat(), "", INTERFACE);
    });
}

/// Escapes C1 controls, which YAML requires.
fn manifest(pod: &Value) -> String {
    detour_cni::printable::json(&pod.to_string()).into_owned()
}

fn pod() -> Value {
    json!({
        "kind": "Pod",
        "metadata": {"name": HOSTILE, "namespace": "shop", "annotations": {"sidecar.istio.io/status": "{}"}},
        "spec": {"containers": [{"name": HOSTILE, "securityContext": {"runAsUser": 7}}, {"name": "istio-proxy"}]},
    })
}

#[test]
fn names_in_a_manifest_are_escaped() {
    assert_all_formats_harmless(&["explain", "-f", "-"], &manifest(&pod()), HOSTILE);
    let svg = detour(&["explain", "-f", "-", "--format", "svg"], &manifest(&pod()), &[]).stdout;
    assert_harmless(&svg, "svg");
    assert!(svg.contains("<title>Pod shop/X\\u{1b}]0;t\\u{7}\\ndetour:\\u{9b}2J\\u{202e}"), "{svg}");
    for format in ["iptables", "nft"] {
        let rules = detour(&["explain", "-f", "-", "--rules", format], &manifest(&pod()), &[]).stdout;
        assert_harmless(&rules.replace('\t', ""), format);
    }
}

#[test]
fn names_in_errors_are_escaped() {
    let mut pod = pod();
    pod["metadata"]["annotations"]["detour.io/exclude-uids"] = HOSTILE.into();
    let other = |kind: &str| manifest(&json!({"kind": kind, "metadata": {"name": HOSTILE, "namespace": HOSTILE}}));
    let others = format!("{}\n---\n{}\n---\n{}", other(HOSTILE), other("Service"), manifest(&self::pod()));
    let conf = file("c.conf", &json!({"name": HOSTILE, "type": HOSTILE, "chain": [{"type": HOSTILE}]}).to_string());
    for (arguments, stdin) in [
        (&["explain", "-f", "-"][..], manifest(&pod)),
        (&["explain", "-f", "-", "--config", &conf], manifest(&pod)),
        (&["explain", "-f", "-"], others.clone()),
        (&["explain", "-f", "-", "none"], others),
        (&["explain", "-f", "-"], format!("kind: Pod\nmetadata: {{name: [\"{}\"]}}", "\\e[2J\\u202e")),
        (&["explain", "-f", "-"], "a: \u{9b}\u{202e}: [".to_owned()),
        (&["rules", HOSTILE], String::new()),
        (&["install", "--root", HOSTILE], String::new()),
        (&["uninstall", "--root", HOSTILE, "--dry-run"], String::new()),
    ] {
        let run = detour(arguments, &stdin, &[]);
        assert_harmless(&run.stderr, &arguments.join(" "));
        assert_harmless(&run.stdout, &arguments.join(" "));
        let starts: Vec<_> = run.stderr.lines().filter(|line| line.starts_with("error:")).collect();
        let is_report = run.code == 0 || run.stdout.starts_with("an ADD fails: ");
        assert!(starts.len() == 1 || is_report, "{arguments:?}: {run:?}");
    }
}

#[test]
fn arguments_in_errors_are_escaped() {
    let long = format!("--{HOSTILE}");
    let destination = ["--to", "1.2.3.4:5/tcp"];
    for program in ["detour", "kubectl-detour"] {
        for arguments in [
            &[HOSTILE][..],
            &[&long],
            &["explain", &long],
            &["explain", "a", HOSTILE],
            &["explain", "-f", HOSTILE],
            &["explain", "-f", "-", "-o", HOSTILE],
            &["explain", "-f", "-", "-n", "a", HOSTILE],
            &["rules", "--pid", HOSTILE],
            &["trace", "-f", "-", "--to", HOSTILE, "--from", "uid=1"],
            &["trace", "-f", "-", "--pod-ip", HOSTILE, "--from", "uid=1", destination[0], destination[1]],
            &["trace", "-f", "-", "--from", HOSTILE, destination[0], destination[1]],
            &["trace", "--pid", "1", "--from", &format!("container={HOSTILE}"), destination[0], destination[1]],
            &["doctor", HOSTILE],
            &["doctor", "--platform", HOSTILE],
            &["doctor", "--config", HOSTILE],
            &["audit", "--platform", HOSTILE],
            &["install", "--conf-dir", HOSTILE],
            &["agent", "--node-name", "a", HOSTILE],
            &["validate", HOSTILE],
            &["completion", HOSTILE],
        ] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_detour"));
            let run = command.arg0(program).args(arguments).env_clear().output().expect("run detour");
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
            let (stdout, stderr) = (text(&run.stdout), text(&run.stderr));
            let what = format!("{program} {arguments:?}");
            assert!(!stderr.is_empty() && stdout.is_empty() && !run.status.success(), "{what}: {run:?}");
            assert_harmless(&stderr, &what);
            assert!(!stderr.lines().skip(1).any(|line| line.starts_with("detour:")), "{what}: {stderr}");
        }
    }
}
