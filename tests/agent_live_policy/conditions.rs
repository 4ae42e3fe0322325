//! The condition and the Events of pods in a real cluster.

use crate::cluster::{added, annotate_namespace, cluster, reference};
use crate::control_plane::ControlPlane;
use crate::pod::EXCLUDE_UIDS;
use crate::scene::{Scene, until};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Runs kubectl, which must succeed. Returns its stdout.
#[track_caller]
fn kubectl(plane: &ControlPlane, arguments: &[&str]) -> String {
    let tool = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("tools").join("kubectl");
    let tool = if tool.exists() { tool } else { "kubectl".into() };
    let mut command = Command::new(tool);
    command.arg("--kubeconfig").arg(plane.kubeconfig()).args(["--namespace", "shop"]).args(arguments);
    let output = command.output().expect("kubectl is needed");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn condition(plane: &ControlPlane, pod: &str) -> Value {
    let pod = plane.admin().get(&reference("Pod", pod)).expect("there");
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == "detour.io/policy").unwrap_or_default()
}

#[test]
fn kubectl_shows_and_waits_for_the_condition() {
    cluster(|plane, scene: &Scene<'_>| {
        let agent = scene.agent(&[]);
        let admin = plane.admin();
        // The kubelet, which decides about readiness, is not part of this test.
        let gate = json!({"readinessGates": [{"conditionType": "detour.io/policy"}]});
        let pod = added(&admin, scene, "web-0", &gate);
        kubectl(plane, &["wait", "--for=condition=detour.io/policy", "pod/web-0", "--timeout=60s"]);
        let first = condition(plane, "web-0");
        assert_eq!((&first["status"], &first["reason"]), (&json!("True"), &json!("Current")), "{first}");
        let hash = first["message"].as_str().expect("text").to_owned();
        assert!(hash.starts_with("policy ") && hash.len() == 19, "{first}");
        let since = first["lastTransitionTime"].clone();
        assert!(since.is_string(), "{first}");

        // Other conditions stay, and the time of the transition too while the status is the same.
        let other = json!({"type": "example.com/other", "status": "True"});
        let conditions = json!({"status": {"conditions": [first, other]}});
        admin.merge_status(&reference("Pod", "web-0"), &conditions).expect("accepted");
        annotate_namespace(&admin, &json!({EXCLUDE_UIDS: "7000"}));
        until("another hash", || condition(plane, "web-0")["message"].as_str().is_some_and(|text| text != hash));
        let second = condition(plane, "web-0");
        assert_eq!((&second["status"], &second["lastTransitionTime"]), (&json!("True"), &since), "{second}");
        let all = admin.get(&reference("Pod", "web-0")).expect("there")["status"]["conditions"].clone();
        assert!(all.as_array().expect("a list").iter().any(|it| it["type"] == "example.com/other"), "{all}");

        annotate_namespace(&admin, &json!({EXCLUDE_UIDS: "70o0"}));
        kubectl(plane, &["wait", "--for=condition=detour.io/policy=False", "pod/web-0", "--timeout=60s"]);
        let rejected = condition(plane, "web-0");
        assert_eq!(rejected["reason"], "Rejected", "{rejected}");
        assert!(rejected["message"].as_str().expect("text").contains("70o0"), "{rejected}");
        let columns =
            "custom-columns=POD:.metadata.name,CURRENT:.status.conditions[?(@.type==\"detour.io/policy\")].status";
        let shown = kubectl(plane, &["get", "pods", "-o", columns]);
        assert!(shown.contains("web-0") && shown.contains("False"), "{shown}");

        let events = || kubectl(plane, &["get", "events", "-o", "custom-columns=R:.reason,M:.message"]);
        until("the Event", || events().contains("DetourPolicyRejected"));
        let events = events();
        assert!(events.contains("excluded: UID 7000") && events.contains("70o0"), "{events}");
        assert!(pod.excludes_uid(7000));

        // Another agent finds the condition as it is, and does not set it again.
        let version = |plane: &ControlPlane| {
            plane.admin().get(&reference("Pod", "web-0")).expect("there")["metadata"]["resourceVersion"].clone()
        };
        let before = version(plane);
        drop(agent);
        let _agent = scene.agent(&[]);
        scene.wait_for_counts([0, 0, 1, 0]);
        annotate_namespace(&admin, &json!({EXCLUDE_UIDS: "70o0", "example.com/other": "1"}));
        scene.wait_for_counts([0, 0, 1, 0]);
        assert_eq!(version(plane), before);
        annotate_namespace(&admin, &json!({EXCLUDE_UIDS: null}));
        kubectl(plane, &["wait", "--for=condition=detour.io/policy", "pod/web-0", "--timeout=60s"]);
        assert!(!pod.excludes_uid(7000));
    });
}
