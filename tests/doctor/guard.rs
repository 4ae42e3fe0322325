//! What is seen of a pod whose guard has rejected packets.

use crate::scene::{POD, Plan, Scene, line, scene};
use serde_json::{Value, json};

const APP: &str = "uid=1000650000";

/// Plays a scene with the guard.
fn guarded(play: impl FnOnce(&Scene) + Send) {
    let mut plan = Plan::new();
    plan.config["chain"].as_array_mut().expect("an array").push(json!({ "type": "mesh-guard" }));
    scene(plan, play);
}

fn audited(scene: &Scene) -> Value {
    let output = scene.command("audit", &["-o", "json"]);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"))
}

#[test]
fn doctor_and_audit_count_what_the_guard_rejected() {
    const REJECTED: &str = "the guard (mesh-guard) rejected 2 outbound packets, so these connections failed";
    guarded(|scene| {
        let connect = || scene.netns.connect(1_000_650_000, "192.0.2.1:443");
        connect();
        let report = scene.report(&POD);
        let (outcome, found, _) = line(&report, "rules-equal");
        assert!(outcome == "pass" && !found.contains("guard"), "{found}");
        scene.netns.run("iptables -t nat -F");
        connect();
        connect();
        let report = scene.report(&POD);
        let (outcome, found, next) = line(&report, "rules-equal");
        assert_eq!(outcome, "fail", "the redirection is missing: {found}");
        assert!(found.contains(REJECTED), "{found}");
        assert!(next.contains("the agent restores it") && next.contains("istio-cni's agent"), "{next}");
        let report = audited(scene);
        let reason = &report["pods"][0]["reason"];
        let expected =
            "not redirected: the rules for network istio-cni are missing; the guard rejected 2 outbound packets";
        assert_eq!(reason, expected, "{report:#}");
    });
}

#[test]
fn a_trace_of_live_rules_ends_at_the_guard() {
    guarded(|scene| {
        let trace = |more: &[&str]| {
            let arguments = ["--live", "-n", "shop", "web-0", "--from", APP, "--to", "192.0.2.1:443/tcp"];
            let output = scene.command("trace", &[&arguments[..], more].concat());
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).expect("text")
        };
        let json = || serde_json::from_str::<Value>(&trace(&["-o", "json"])).expect("JSON");
        assert_eq!(json()["arrives_at"], "sidecar:15001");
        scene.netns.run("iptables -t nat -F");
        let report = json();
        assert_eq!(
            (&report["arrives_at"], &report["decided_by"]["chain"]),
            (&json!("rejected"), &json!("GUARD_REJECT_OUTBOUND"))
        );
        let text = trace(&[]);
        assert!(text.lines().next().is_some_and(|line| line.ends_with("rejected")), "{text}");
    });
}
