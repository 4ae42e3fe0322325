//! An invalid request counts as absent, and the others apply.

use crate::live_policy::pod::{EXCLUDE_PORTS, EXCLUDE_UIDS, Pod};
use crate::live_policy::scene::{annotate_namespace, events, pause, publish, scene, wait_for_event};
use serde_json::json;

#[test]
fn a_bad_value_counts_as_absent_and_its_event_contains_it() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let pod = Pod::added(scene, api, "web-0", &[(EXCLUDE_PORTS, "3306")]);
        scene.wait_for_counts([1, 0, 0, 0]);
        pod.set(EXCLUDE_PORTS, "80,33o6\u{1b}[2J");
        publish(api, &pod);
        let message = wait_for_event(api, &pod, "DetourPolicyRejected", "33o6");
        assert!(message.contains("web-0") && message.contains(EXCLUDE_PORTS), "{message}");
        assert!(message.contains("without effect for the running pod") && !message.contains('\u{1b}'), "{message}");
        pod.until(|pod| !pod.excludes_port(3306) && !pod.excludes_port(80));
        let report = scene.wait_for_counts([0, 1, 0, 0]);
        assert_eq!(report.findings[0].state, "rejected");
        // A valid value of another sub-plugin is applied.
        pod.set(EXCLUDE_UIDS, "6000");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_uid(6000));
        // An unrelated change does not repeat the Event.
        pod.set("example.com/other", "1");
        publish(api, &pod);
        pod.set(EXCLUDE_PORTS, "80");
        pod.set(EXCLUDE_UIDS, "abc");
        publish(api, &pod);
        wait_for_event(api, &pod, "DetourPolicyRejected", "abc");
        pod.until(|pod| pod.excludes_port(80) && !pod.excludes_uid(6000));
        assert_eq!(events(api, &pod, "DetourPolicyRejected").len(), 2);
        pod.set(EXCLUDE_UIDS, "7000");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_uid(7000) && pod.excludes_port(80));
        scene.wait_for_counts([1, 0, 0, 0]);
    });
}

/// A second attachment with another value for a setting that a pod has once: only the first one follows the node's
/// configuration.
#[test]
fn attachments_with_different_settings_capture_what_one_of_them_captures() {
    scene(|scene, api| {
        let without = r#"[{"type": "istio-redirect", "capture_secondary_networks": false}, {"type": "uid-exclude"}]"#;
        scene.configure(without);
        let _agent = scene.agent(&[]);
        let pod = Pod::new(scene, "web-0");
        publish(api, &pod);
        pod.call(scene, "ADD").expect("added");
        let mut other = scene.entry();
        other["name"] = json!("other");
        pod.call_with(&other, "ADD").expect("it agrees");
        scene.wait_for_counts([1, 0, 0, 0]);
        scene.configure(&without.replace("false", "true"));
        wait_for_event(api, &pod, "DetourPolicyChanged", "capture_secondary_networks: true (before: false)");
        pod.set(EXCLUDE_PORTS, "3306");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_port(3306));
        scene.wait_for_counts([1, 0, 0, 0]);
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
