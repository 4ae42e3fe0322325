//! Bad values and conflicts change nothing of what they concern.

use crate::pod::{EXCLUDE_PORTS, EXCLUDE_UIDS, Pod};
use crate::scene::{annotate_namespace, conditions, events, pause, publish, scene, until, wait_for_event};
use serde_json::json;

#[test]
fn a_bad_value_changes_nothing_and_its_event_contains_it() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let pod = Pod::added(scene, api, "web-0", &[(EXCLUDE_PORTS, "3306")]);
        scene.wait_for_counts([1, 0, 0, 0]);
        let (before, applied) = (pod.rules(), pod.records());
        pod.set(EXCLUDE_PORTS, "80,33o6\u{1b}[2J");
        publish(api, &pod);
        let message = wait_for_event(api, &pod, "DetourPolicyRejected", "33o6");
        assert!(message.contains("web-0") && message.contains(EXCLUDE_PORTS), "{message}");
        assert!(message.contains("the pod keeps policy ") && !message.contains('\u{1b}'), "{message}");
        let report = scene.wait_for_counts([0, 0, 1, 0]);
        assert_eq!(report.pods[0].state, "rejected");
        until("the condition", || {
            conditions(api).last().is_some_and(|it| it["status"] == "False" && it["reason"] == "Rejected")
        });
        assert_eq!((pod.rules(), pod.records()), (before, applied));
        // A valid value of another sub-plugin is applied.
        pod.set(EXCLUDE_UIDS, "6000");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_uid(6000) && pod.excludes_port(3306) && !pod.excludes_port(80));
        // An unrelated change does not repeat the Event.
        pod.set("example.com/other", "1");
        publish(api, &pod);
        pod.set(EXCLUDE_PORTS, "80");
        pod.set(EXCLUDE_UIDS, "abc");
        publish(api, &pod);
        wait_for_event(api, &pod, "DetourPolicyRejected", "abc");
        assert_eq!(events(api, &pod, "DetourPolicyRejected").len(), 2);
        pod.set(EXCLUDE_UIDS, "7000");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_uid(7000) && pod.excludes_port(80) && !pod.excludes_port(3306));
        scene.wait_for_counts([1, 0, 0, 0]);
        until("the condition", || conditions(api).last().is_some_and(|it| it["status"] == "True"));
    });
}

#[test]
fn a_bad_value_of_the_opt_out_annotation_is_reported_and_changes_nothing() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let pod = Pod::added(scene, api, "web-0", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        annotate_namespace(api, &json!({"detour.io/live-policy": "maybe"}));
        let message = wait_for_event(api, &pod, "DetourPolicyRejected", "\"maybe\"");
        assert!(message.contains("namespace shop: annotation \"detour.io/live-policy\""), "{message}");
        assert!(message.contains("expected true or false"), "{message}");
        scene.wait_for_counts([0, 0, 1, 0]);
        annotate_namespace(api, &json!({"detour.io/live-policy": "maybe", EXCLUDE_UIDS: "7000"}));
        (0..10).for_each(|_| pause());
        scene.wait_for_counts([0, 0, 1, 0]);
        assert!(!pod.excludes_uid(7000));
    });
}

/// A second attachment with another value for a setting that a pod has once: the container's policies contradict each
/// other only after the change.
#[test]
fn a_conflict_between_attachments_leaves_the_old_rules() {
    scene(|scene, api| {
        let _agent = scene.agent(&["--live-policy=all"]);
        let pod = Pod::added(scene, api, "web-0", &[]);
        let mut other = scene.entry();
        other["name"] = json!("other");
        other["chain"] =
            json!([{"type": "istio-redirect", "inbound_interception_mode": "REDIRECT", "pod_overrides": false}]);
        pod.call_with(&other, "ADD").expect("it agrees");
        scene.wait_for_counts([1, 0, 0, 0]);
        let (before, applied) = (pod.rules(), pod.records());
        pod.set("sidecar.istio.io/interceptionMode", "TPROXY");
        pod.set(EXCLUDE_PORTS, "3306");
        publish(api, &pod);
        let message = wait_for_event(api, &pod, "DetourPolicyRejected", "inbound_interception_mode");
        assert!(message.contains("TPROXY") && message.contains("REDIRECT"), "{message}");
        scene.wait_for_counts([0, 0, 1, 0]);
        assert_eq!((pod.rules(), pod.records()), (before, applied));
    });
}

/// A pod without sidecar has no policy that could be rejected.
#[test]
fn a_bad_value_on_a_pod_without_sidecar_is_not_reported() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let plain = Pod::new(scene, "plain").without_sidecar();
        publish(api, &plain);
        plain.call(scene, "ADD").expect("added");
        let meshed = Pod::added(scene, api, "meshed", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        annotate_namespace(api, &json!({EXCLUDE_UIDS: "abc"}));
        wait_for_event(api, &meshed, "DetourPolicyRejected", "abc");
        (0..10).for_each(|_| pause());
        assert_eq!(events(api, &plain, "DetourPolicyRejected"), [""; 0]);
    });
}
