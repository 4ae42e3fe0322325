//! The logs of the node: recorded journals of several distributions, behind a program in place of `journalctl`.

use crate::api::event;
use crate::scene::{POD, Plan, Scene, line, scene};
use crate::support::program::write_executable;
use std::fs;
use std::process::Command;

const CRIO: &str = "2026-01-01T10:00:00+0000 node-1 crio[901]: time=\"2026-01-01 10:00:00\" level=info msg=\"Adding pod \
    shop_web-0 to CNI network\"";
const CONTAINERD: &str = "2026-01-01T10:00:01+0000 node-1 containerd[77]: time=\"2026-01-01T10:00:01Z\" level=error \
    msg=\"RunPodSandbox for name:\\\"web-0\\\" namespace:\\\"shop\\\" failed\" error=\"plugin type=\\\"multus\\\" failed (add): failed to find plugin \
    \\\"istio-cni\\\" in path [/opt/cni/bin]\"";
const KUBELET: &str = "2026-01-01T10:00:02+0000 node-1 kubelet[42]: I0101 10:00:02.000000 42 kubelet.go:2000] \"SyncLoop \
    UPDATE\" source=\"api\" pods=[\"shop/web-0\"]";
const OTHER: &str = "2026-01-01T10:00:03+0000 node-1 crio[901]: level=error msg=\"no such image\" pod=shop/db-0";

/// Puts a program in place of `journalctl`, whose journal has these lines of the units, the oldest first.
fn record(scene: &Scene, lines: &[&str]) {
    fs::create_dir_all(scene.path("var/log/journal")).expect("made");
    fs::create_dir_all(scene.path("tools")).expect("made");
    scene.write("tools/lines", &lines.iter().rev().map(|line| format!("{line}\n")).collect::<String>());
    let tools = scene.path("tools").display().to_string();
    let program = format!(
        "#!/bin/sh\ncase \"$*\" in\n\
         *--reverse*) echo \"$*\" >{tools}/arguments; cat {tools}/lines ;;\n*) exit 1 ;;\nesac\n"
    );
    write_executable(&scene.path("tools/journalctl"), &program);
}

/// The outcome, the text and the next step of `runtime-log`.
fn checked(scene: &Scene, arguments: &[&str]) -> (String, String, String) {
    let report = scene.report(&[&POD[..], arguments].concat());
    let (outcome, found, next) = line(&report, "runtime-log");
    (outcome.to_owned(), found.to_owned(), next.to_owned())
}

#[test]
fn the_units_of_all_distributions_are_read() {
    let units = [
        "crio",
        "containerd",
        "docker",
        "cri-docker",
        "kubelet",
        "k3s",
        "k3s-agent",
        "rke2-server",
        "rke2-agent",
        "k0scontroller",
        "k0sworker",
        "snap.microk8s.daemon-containerd",
        "snap.microk8s.daemon-kubelite",
        "microshift",
    ];
    scene(Plan::new(), |scene| {
        record(scene, &[KUBELET, OTHER]);
        let (outcome, found, _) = checked(scene, &[]);
        assert!(outcome == "pass" && found.starts_with("lines of the last day: 1, the last: "), "{found}");
        let arguments = fs::read_to_string(scene.path("tools/arguments")).expect("it ran");
        let asked: Vec<&str> = arguments.split(" -u ").skip(1).map(str::trim).collect();
        assert_eq!(asked, units, "{arguments}");
        assert!(arguments.contains(&format!("--directory {}", scene.path("var/log/journal").display())));
    });
}

#[test]
fn the_last_line_about_the_pod_decides() {
    scene(Plan::new(), |scene| {
        record(scene, &[CRIO, CONTAINERD, OTHER]);
        let (outcome, found, next) = checked(scene, &[]);
        assert!(outcome == "fail" && found.contains("failed to find plugin"), "{found}");
        assert_eq!(next, "see the reason in the message");
        record(scene, &[CONTAINERD, KUBELET, OTHER]);
        let (outcome, found, _) = checked(scene, &[]);
        assert!(outcome == "pass" && found.contains(": 2, the last: ") && found.contains("SyncLoop"), "{found}");
        record(scene, &[OTHER]);
        let (outcome, found, _) = checked(scene, &[]);
        let expected = "the journal of the last day has no line about this pod";
        assert_eq!((outcome.as_str(), found.as_str()), ("pass", expected));
        // Pods whose name begins with that of the pod, or with its name in another namespace.
        let others = [CONTAINERD.replace("web-0", "web-01"), CONTAINERD.replace("shop", "bank")];
        record(scene, &[&others[0], &others[1], OTHER]);
        let (outcome, found, _) = checked(scene, &[]);
        assert_eq!((outcome.as_str(), found.as_str()), ("pass", expected));
    });
}

#[test]
fn more_than_the_limit_of_the_journal_is_cut_at_the_oldest_lines() {
    scene(Plan::new(), |scene| {
        let old = format!("{CONTAINERD} {}", "x".repeat(1000));
        let lines: Vec<&str> = std::iter::repeat_n(old.as_str(), 6000).chain([KUBELET]).collect();
        record(scene, &lines);
        let (outcome, found, _) = checked(scene, &[]);
        assert!(outcome == "pass" && found.contains("SyncLoop"), "{found}");
    });
}

#[test]
fn without_journalctl_or_entries_the_line_shows_what_to_run() {
    scene(Plan::new(), |scene| {
        record(scene, &[]);
        let (outcome, found, next) = checked(scene, &[]);
        assert_eq!(
            (outcome.as_str(), next.as_str()),
            ("not-checked", "run on the node: journalctl -u crio -u containerd -u kubelet | grep web-0")
        );
        assert!(found.starts_with("the journal has no entries of the units crio, containerd, "), "{found}");
        scene.write("tools/journalctl", "#!/bin/sh\nexit 1\n");
        let (outcome, found, _) = checked(scene, &[]);
        let expected = "the journal was not read: journalctl: failed (exit status: 1)";
        assert_eq!((outcome.as_str(), found.as_str()), ("not-checked", expected));
    });
}

/// Events, logs and rules hold text of a pod's author or of a process in the pod.
#[test]
fn terminals_do_not_act_on_text_of_others_and_no_secret_is_shown() {
    let hostile = "\u{1b}]0;t\u{7}\n       next: run this\u{9b}2J\u{202e}";
    let mut plan = Plan::new();
    let planted = plan.token.clone();
    plan.cluster.events = vec![event("FailedCreatePodSandBox", &format!("failed {hostile} password=s3cr3t"))];
    scene(plan, |scene| {
        let text = format!("{} sent Bearer {planted} to http://u:s3cr3t@host", hostile.replace('\n', ""));
        record(scene, &[&format!("node-1 containerd[77]: level=error msg=\"{text}\" pod=shop/web-0")]);
        scene.netns.within(|| {
            let iptables = |arguments: &[&str]| {
                let status = Command::new("iptables").args(["-t", "nat"]).args(arguments).status();
                assert!(status.expect("iptables starts").success());
            };
            iptables(&["-N", "C\u{1b}[2J\u{9b}\u{202e}"]);
            iptables(&["-I", "OUTPUT", "-o", "e\u{1b}\u{202e}", "-j", "C\u{1b}[2J\u{9b}\u{202e}"]);
        });
        for form in ["table", "json", "yaml"] {
            let output = scene.doctor(&[&POD[..], &["-o", form]].concat());
            let text = String::from_utf8(output.stdout).expect("text");
            let bad = text.chars().find(|c| detour_cni::printable::is_interpreted(*c) && !matches!(c, '\n' | '\t'));
            assert!(bad.is_none() && !text.contains("s3cr3t") && !text.contains(&planted), "{bad:?}: {text}");
            let forged = text.lines().any(|line| line.trim_start().starts_with("next: run this"));
            assert!(!forged, "{text}");
        }
    });
}
