//! The policies of running pods: what the agent reports about the node's pods.

use crate::compare;
use crate::faults::edit;
use crate::scene::{AGENT_POLICIES, POD, Plan, Scene, scene};
use serde_json::{Value, json};

fn policy_lines(report: &Value) -> Vec<&Value> {
    report["checks"].as_array().expect("checks").iter().filter(|line| line["group"] == "policies").collect()
}

fn pod(name: &str, state: &str, applied: &str, reason: &str) -> Value {
    json!({
        "pod": {"namespace": "shop", "name": name}, "state": state, "applied": applied, "desired": "", "reason": reason,
        "needs_new_pod": state == "older",
    })
}

/// The agent's answer: its scope, counts in the order of the report, and pods.
fn answer(scene: &Scene, scope: &str, counts: [u32; 4], pods: &[Value]) {
    let [current, older, rejected, none] = counts;
    let report = json!({
        "scope": scope, "current": current, "older": older, "rejected": rejected, "none": none, "pods": pods,
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

        let older = pod("old-0", "older", "0123456789ab", "only a new pod gets: drop_invalid: true; recreate the pod");
        answer(scene, "exclusions", [7, 1, 0, 0], std::slice::from_ref(&older));
        let report = scene.report(&["--node"]);
        let outcomes: Vec<&Value> = policy_lines(&report).into_iter().map(|line| &line["outcome"]).collect();
        assert_eq!(outcomes, ["warn", "warn"], "{report:#}");
        assert_eq!(report["healthy"], true, "an older policy is no failure: {report:#}");

        let value = "pod shop/bad-0: annotation \"detour.io/exclude-uids\": invalid UID \"\u{1b}[2Jabc\"";
        let rejected = pod("bad-0", "rejected", "0123456789ab", value);
        let none = pod("bare-0", "none", "", "the plugin did not run for this pod");
        answer(scene, "exclusions", [7, 1, 1, 1], &[older, rejected, none]);
        let report = scene.report(&["--node"]);
        assert_eq!(report["healthy"], false, "{report:#}");
        assert_eq!(report["policies"]["pods"][1]["reason"], value, "{report:#}");
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
            ("unknown", "the agent's version does not support the request"),
            ("{}", "the agent does not compare policies (chart value livePolicy, flag --live-policy)"),
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
        let older = |number: u32| pod(&format!("old-{number}"), "older", "0123456789ab", "not applied yet");
        let mut pods: Vec<Value> = (0..99).map(older).collect();
        pods.push(pod("bare-0", "none", "", "no rules"));
        answer(scene, "all", [u32::MAX, u32::MAX, 0, 1], &pods);
        let report = scene.report(&["--node"]);
        let lines = policy_lines(&report);
        assert_eq!(lines.len(), 11, "{report:#}");
        let found = lines[0]["found"].as_str().expect("text");
        assert!(found.starts_with("4294967295 current, 4294967295 older, 0 rejected, 1 without rules; "), "{found}");
        assert!(found.ends_with("; 4294967285 of them are not listed"), "{found}");
        assert!(lines[1]["found"].as_str().is_some_and(|text| text.starts_with("shop/bare-0: none")), "{report:#}");
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

fn annotate(scene: &Scene, key: &str, value: &str) {
    scene.cluster.lock().expect("unpoisoned").annotate(key, value);
}

const RECREATE: &str = "kubectl delete pod -n shop web-0";

#[test]
fn the_difference_of_a_pods_policy_is_shown_with_what_follows() {
    scene(Plan::new(), |scene| {
        assert_line(scene, "pass", &["policy ", ", current; the pod follows changes of exclusions"], "");
        annotate(scene, "detour.io/exclude-uids", "2000");
        let follows = &["older: policy ", "a new pod gets policy ", "the agent applies: ", "UID 2000"];
        assert_line(scene, "warn", follows, "wait some seconds");
        compare("pod-policy-older", &scene.printed(&POD));

        edit(scene, |conf| conf["chain"][0]["drop_invalid"] = true.into());
        let part = &["the agent applies: ", "UID 2000", "only a new pod gets: drop_invalid: true (before: false)"];
        assert_line(scene, "warn", part, RECREATE);

        annotate(scene, "detour.io/live-policy", "false");
        let opted_out = &["annotation \"detour.io/live-policy\" is false; only a new pod gets: ", "UID 2000"];
        assert_line(scene, "warn", opted_out, RECREATE);
        annotate(scene, "detour.io/live-policy", "true");
        answer(scene, "off", [1, 0, 0, 0], &[]);
        assert_line(scene, "warn", &["--live-policy is off; only a new pod gets: ", "UID 2000"], RECREATE);
        scene.write(AGENT_POLICIES, "unknown");
        let why = &["UID 2000", "; no agent applies changes: the agent's version does not support the request"];
        assert_line(scene, "warn", why, RECREATE);
    });
}

#[test]
fn a_refused_policy_names_the_value_and_the_rules_stay() {
    scene(Plan::new(), |scene| {
        annotate(scene, "detour.io/exclude-uids", "20\u{1b}x");
        let found = &["rejected: ", "detour.io/exclude-uids", "; the pod keeps policy "];
        assert_line(scene, "fail", found, "correct the value");
        let text = scene.printed(&POD);
        assert!(!text.contains('\u{1b}') && text.contains("20\\u{1b}x"), "{text}");
        annotate(scene, "detour.io/exclude-uids", "");
        annotate(scene, "detour.io/live-policy", "no");
        assert_line(scene, "fail", &["invalid value \"no\"; expected true or false"], "correct the value");
    });
}

#[test]
fn a_pod_without_saved_rules_is_no_failure() {
    let mut plan = Plan::new();
    plan.is_added = false;
    scene(plan, |scene| assert_line(scene, "not-checked", &["the pod has no saved rules"], ""));
}
