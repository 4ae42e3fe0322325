//! The policies of running pods: what the agent reports about the node's pods.

use crate::compare;
use crate::scene::{AGENT_POLICIES, POD, Plan, Scene, scene};
use serde_json::{Value, json};

fn policy_lines(report: &Value) -> Vec<&Value> {
    report["checks"].as_array().expect("checks").iter().filter(|line| line["group"] == "policies").collect()
}

fn pod(name: &str, state: &str, reason: &str) -> Value {
    json!({"pod": {"namespace": "shop", "name": name}, "state": state, "reason": reason})
}

/// The agent's answer: counts in the order of the report, and findings.
fn answer(scene: &Scene, follows: bool, counts: [u32; 4], findings: &[Value]) {
    let [current, rejected, failed, none] = counts;
    let report = json!({
        "follows": follows, "current": current, "rejected": rejected, "failed": failed, "none": none,
        "findings": findings,
    });
    scene.write(AGENT_POLICIES, &report.to_string());
}

#[test]
fn pods_that_are_not_current_have_their_reason_and_the_next_step() {
    scene(Plan::new(), |scene| {
        let report = scene.report(&["--node"]);
        let lines = policy_lines(&report);
        assert_eq!(lines.len(), 1, "{report:#}");
        assert_eq!((&lines[0]["id"], &lines[0]["outcome"]), (&json!("policies"), &json!("pass")), "{report:#}");
        assert_eq!(report["policies"]["current"], 1, "{report:#}");

        let value = "pod shop/bad-0: annotation \"detour.io/exclude-uids\": invalid UID \"\u{1b}[2Jabc\"";
        let rejected = pod("bad-0", "rejected", value);
        answer(scene, true, [7, 1, 0, 0], std::slice::from_ref(&rejected));
        let report = scene.report(&["--node"]);
        let outcomes: Vec<&Value> = policy_lines(&report).into_iter().map(|line| &line["outcome"]).collect();
        assert_eq!(outcomes, ["warn"], "{report:#}");
        assert_eq!(report["healthy"], true, "a rejected request is no failure: {report:#}");

        let failed = pod("busy-0", "failed", "another call is running in the network namespace");
        let none = pod("bare-0", "none", "the plugin was not called for it");
        answer(scene, true, [7, 1, 1, 1], &[rejected, failed, none]);
        let report = scene.report(&["--node"]);
        assert_eq!(report["healthy"], false, "{report:#}");
        assert_eq!(report["policies"]["findings"][0]["reason"], value, "{report:#}");
        compare("policies", &scene.printed(&["--node"]));

        // The other pods are not the subject.
        let report = scene.report(&POD);
        assert_eq!(report["healthy"], true, "{report:#}");
    });
}

#[test]
fn an_agent_that_does_not_know_policies_is_no_failure() {
    scene(Plan::new(), |scene| {
        for (text, why) in [
            ("unknown", "the agent answered another request, or its version does not support this one"),
            ("{}", "the agent does not read the rules of pods (chart values livePolicy and repair.enabled)"),
        ] {
            scene.write(AGENT_POLICIES, text);
            let report = scene.report(&["--node"]);
            let lines = policy_lines(&report);
            assert_eq!(lines.len(), 1, "{report:#}");
            assert_eq!((&lines[0]["outcome"], &lines[0]["found"]), (&json!("not-checked"), &json!(why)), "{report:#}");
            assert_eq!(report["healthy"], true, "{report:#}");
        }
    });
    let mut plan = Plan::new();
    plan.config["kubernetes"] = json!({"agent_socket": "/run/detour/no-agent.sock"});
    scene(plan, |scene| {
        let report = scene.report(&["--node"]);
        let lines = policy_lines(&report);
        assert_eq!(lines[0]["outcome"], "not-checked", "{report:#}");
        assert_eq!(lines[0]["found"], "because agent-reachable failed", "{report:#}");
        assert_eq!(report["policies"], Value::Null, "{report:#}");
    });
}

#[test]
fn many_pods_are_counted_and_the_worst_are_listed() {
    scene(Plan::new(), |scene| {
        let failed = |number: u32| pod(&format!("old-{number}"), "failed", "busy");
        let mut pods: Vec<Value> = (0..99).map(failed).collect();
        pods.push(pod("bare-0", "none", "no rules"));
        answer(scene, false, [u32::MAX, 0, u32::MAX, 1], &pods);
        let report = scene.report(&["--node"]);
        let lines = policy_lines(&report);
        assert_eq!(lines.len(), 1, "{report:#}");
        let found = lines[0]["found"].as_str().expect("text");
        assert!(
            found.starts_with("4294967295 current, 0 with rejected requests, 4294967295 failed, 1 without rules; "),
            "{found}"
        );
        let named: Vec<&str> = found.split("; ").filter(|part| part.starts_with("shop/")).collect();
        assert_eq!((named.len(), named[0]), (10, "shop/bare-0: none: no rules"), "{found}");
    });
}

/// Returns the line about the pod.
fn pod_line(scene: &Scene) -> Value {
    let report = scene.report(&POD);
    let lines = policy_lines(&report);
    assert_eq!((lines.len(), &lines[0]["id"]), (1, &json!("pod-policy")), "{report:#}");
    lines[0].clone()
}

#[track_caller]
fn assert_line(scene: &Scene, outcome: &str, found: &[&str], next: &str) {
    let line = pod_line(scene);
    let text = |key: &str| line[key].as_str().unwrap_or_default();
    assert_eq!(line["outcome"], outcome, "{line:#}");
    assert!(found.iter().all(|part| text("found").contains(part)), "{line:#}\nexpected {found:?}");
    assert!(text("next").contains(next), "{line:#}");
}

#[test]
fn the_line_of_a_pod_is_what_the_agent_reports_about_it() {
    scene(Plan::new(), |scene| {
        assert_line(scene, "pass", &["running pods follow changes of their policies"], "");
        answer(scene, false, [1, 0, 0, 0], &[]);
        assert_line(scene, "pass", &["running pods follow no change (livePolicy is off)"], "");
        let reason = "annotation \"detour.io/exclude-uids\": invalid UID \"20\u{1b}x\"";
        answer(scene, true, [0, 1, 0, 0], &[pod("web-0", "rejected", reason)]);
        assert_line(scene, "warn", &["rejected: ", "detour.io/exclude-uids"], "correct the value");
        let text = scene.printed(&POD);
        assert!(!text.contains('\u{1b}') && text.contains("20\\u{1b}x"), "{text}");
        answer(scene, true, [0, 0, 0, 1], &[pod("web-0", "none", "the plugin was not called for it")]);
        assert_line(scene, "fail", &["none: the plugin was not called"], "delete the pod");
    });
}
