//! Requests that are invalid, pinned or outside the bounds: each counts as absent, and a bypass ends. Limits: busy network
//! namespaces, an API server that does not answer, and a missing permission.

use crate::live_policy::scene::{CHAIN, EXCLUDE_PORTS, EXCLUDE_UIDS, sample, scene};
use crate::support::node_pod::NodePod as Pod;
use crate::support::simulated_node::id;
use crate::support::wait::{pause, until};
use nix::sys::signal::Signal;
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::MetadataExt;

#[test]
fn a_bad_value_counts_as_absent_and_its_event_contains_it() {
    scene(|scene| {
        let _agent = scene.agent(&[]);
        let pod = scene.added("web-0", &[(EXCLUDE_PORTS, "3306")]);
        scene.wait_for_counts([1, 0, 0, 0]);
        scene.annotate(&pod, EXCLUDE_PORTS, "80,33o6\u{1b}[2J");
        let message = scene.wait_for_event(&pod, "DetourPolicyRejected", "33o6");
        assert!(message.contains("web-0") && message.contains(EXCLUDE_PORTS), "{message}");
        assert!(message.contains("without effect for the running pod") && !message.contains('\u{1b}'), "{message}");
        pod.until(|pod| !pod.excludes_port(3306) && !pod.excludes_port(80));
        let report = scene.wait_for_counts([0, 1, 0, 0]);
        assert_eq!(report.findings[0].state, "rejected");
        // A valid value of another sub-plugin is applied.
        scene.annotate(&pod, EXCLUDE_UIDS, "6000");
        pod.until(|pod| pod.excludes_uid(6000));
        // An unrelated change does not repeat the Event.
        scene.annotate(&pod, "example.com/other", "1");
        pod.set(EXCLUDE_PORTS, "80");
        scene.annotate(&pod, EXCLUDE_UIDS, "abc");
        scene.wait_for_event(&pod, "DetourPolicyRejected", "abc");
        pod.until(|pod| pod.excludes_port(80) && !pod.excludes_uid(6000));
        assert_eq!(scene.events(&pod, "DetourPolicyRejected").len(), 2);
        scene.annotate(&pod, EXCLUDE_UIDS, "7000");
        pod.until(|pod| pod.excludes_uid(7000) && pod.excludes_port(80));
        scene.wait_for_counts([1, 0, 0, 0]);
    });
}

/// A second attachment with another value for a setting that a pod has once: only the first one follows the node's
/// configuration.
#[test]
fn attachments_with_different_settings_capture_what_one_of_them_captures() {
    scene(|scene| {
        let without = r#"[{"type": "istio-redirect", "capture_secondary_networks": false}, {"type": "uid-exclude"}]"#;
        scene.configure(without);
        let _agent = scene.agent(&[]);
        let pod = scene.pod("web-0");
        scene.publish_and_add(&pod);
        let mut other = scene.entry();
        other["name"] = json!("other");
        pod.call("ADD", &other).expect("it agrees");
        scene.wait_for_counts([1, 0, 0, 0]);
        scene.configure(&without.replace("false", "true"));
        scene.wait_for_event(&pod, "DetourPolicyChanged", "capture_secondary_networks: true (before: false)");
        scene.annotate(&pod, EXCLUDE_PORTS, "3306");
        pod.until(|pod| pod.excludes_port(3306));
        scene.wait_for_counts([1, 0, 0, 0]);
    });
}

/// A pod without sidecar has no policy that could be rejected.
#[test]
fn a_bad_value_on_a_pod_without_sidecar_is_not_reported() {
    scene(|scene| {
        let _agent = scene.agent(&[]);
        let plain = scene.pod("plain").without_sidecar();
        scene.publish_and_add(&plain);
        let meshed = scene.added("meshed", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        scene.annotate_namespace(&json!({EXCLUDE_UIDS: "abc"}));
        scene.wait_for_event(&meshed, "DetourPolicyRejected", "abc");
        (0..10).for_each(|_| pause());
        assert_eq!(scene.events(&plain, "DetourPolicyRejected"), [""; 0]);
    });
}

const PINNED: &str = r#""uid-exclude", "uids": ["8000"], "pod_overrides": false"#;

#[test]
fn a_pinned_policy_ends_bypasses_also_beside_an_invalid_annotation() {
    scene(|scene| {
        let _agent = scene.agent(&[]);
        let added = |name: &str, more: Option<(&str, &str)>| {
            let pod = scene.added(name, &[(EXCLUDE_UIDS, "7000")]);
            more.iter().for_each(|(key, value)| pod.set(key, value));
            scene.publish(&pod);
            pod
        };
        let pods = [added("valid", None), added("invalid", Some(("detour.io/exclude-dns", "10.0.0.300")))];
        pods.iter().for_each(|pod| pod.until(|pod| pod.excludes_uid(7000)));
        scene.wait_for_event(&pods[1], "DetourPolicyRejected", "10.0.0.300");
        scene.configure(&CHAIN.replace(r#""uid-exclude""#, PINNED));
        pods.iter().for_each(|pod| pod.until(|pod| !pod.excludes_uid(7000) && pod.excludes_uid(8000)));
        scene.wait_for_counts([1, 1, 0, 0]);
    });
}

#[test]
fn the_newest_sandbox_of_a_pod_follows() {
    scene(|scene| {
        let _agent = scene.agent(&[]);
        let older = scene.added("web-0", &[]);
        // The kernel's clock for files has a coarse resolution.
        pause();
        let mut newer = Pod::with_sandbox(scene.node, Some("web-0"), id("a"));
        newer.uid.clone_from(&older.uid);
        assert!(newer.sandbox < older.sandbox);
        scene.call(&newer, "ADD").expect("added");
        scene.annotate(&newer, EXCLUDE_UIDS, "7000");
        newer.until(|pod| pod.excludes_uid(7000));
        assert!(!older.excludes_uid(7000));
    });
}

#[test]
fn tighter_bounds_end_bypasses_also_of_other_attachments_and_beside_an_invalid_value() {
    scene(|scene| {
        let _agent = scene.agent(&[]);
        let pod = scene.added("web-0", &[(EXCLUDE_UIDS, "7000,8000")]);
        let invalid = scene.added("invalid", &[(EXCLUDE_UIDS, "7000,8000")]);
        scene.annotate(&invalid, EXCLUDE_UIDS, "7000,8000,x");
        // The agent does not know the configuration of this network.
        let attached = scene.added("attached", &[(EXCLUDE_UIDS, "7000,8000")]);
        scene.call(&attached, "DEL").expect("removed");
        let mut other = scene.entry();
        other["name"] = json!("other");
        attached.call("ADD", &other).expect("added");
        scene.wait_for_event(&invalid, "DetourPolicyRejected", "\"x\"");
        invalid.until(|pod| !pod.excludes_uid(7000) && !pod.excludes_uid(8000));
        let pods = [&pod, &attached];
        pods.iter().for_each(|pod| pod.until(|pod| pod.excludes_uid(7000) && pod.excludes_uid(8000)));
        scene.configure(&CHAIN.replace(r#""uid-exclude""#, r#""uid-exclude", "allow": {"uids": "7000"}"#));
        pods.iter().for_each(|pod| pod.until(|pod| pod.excludes_uid(7000) && !pod.excludes_uid(8000)));
        for pod in [&pod, &attached] {
            let message = scene.wait_for_event(pod, "DetourPolicyRejected", "\"8000\" is outside the bounds");
            assert!(
                message.contains("chain[1].allow.uids (the node configuration /var/lib/cni/detour/node.json)"),
                "{message}"
            );
        }
        // A new pod with such a request does not start, and the wider bounds apply to running pods too.
        let new = scene.pod("new");
        scene.annotate(&new, EXCLUDE_UIDS, "8000");
        let error = scene.call(&new, "ADD").expect_err("outside the bounds");
        assert!(error.contains("outside the bounds"), "{error}");
        scene.configure(CHAIN);
        [&pod, &attached].iter().for_each(|pod| pod.until(|pod| pod.excludes_uid(8000)));
    });
}

#[test]
fn a_pod_loses_what_only_a_label_of_its_namespace_permitted() {
    scene(|scene| {
        let label = |tier: &str| scene.label_namespace(&json!({"tier": tier}));
        let allow =
            r#""uid-exclude", "allow": [{"uids": "8000"}, {"namespace_selector": {"matchLabels": {"tier": "batch"}}}]"#;
        scene.configure(&CHAIN.replace(r#""uid-exclude""#, allow));
        label("batch");
        let _agent = scene.agent(&[]);
        let pod = scene.added("web-0", &[(EXCLUDE_UIDS, "7000,8000")]);
        pod.until(|pod| pod.excludes_uid(7000) && pod.excludes_uid(8000));
        label("web");
        pod.until(|pod| !pod.excludes_uid(7000) && pod.excludes_uid(8000));
        let message = scene.wait_for_event(&pod, "DetourPolicyRejected", "\"7000\" is outside the bounds");
        assert!(message.contains("chain[1].allow[0].uids") || message.contains("chain[0].allow[0].uids"), "{message}");
        label("batch");
        pod.until(|pod| pod.excludes_uid(7000));
    });
}

#[test]
fn a_busy_network_namespace_is_retried_and_delays_no_other_pod() {
    scene(|scene| {
        let (_agent, address) = scene.agent_with_metrics(&[]);
        // More than there are threads.
        let busy: Vec<Pod> = (0..6).map(|number| scene.added(&format!("busy-{number}"), &[])).collect();
        let free = scene.added("free", &[]);
        scene.wait_for_counts([7, 0, 0, 0]);
        let locks: Vec<_> = busy
            .iter()
            .map(|pod| {
                let netns = std::fs::metadata(pod.netns()).expect("there");
                let path = format!("/run/detour/locks/{}-{}", netns.dev(), netns.ino());
                let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
                let lock = nix::fcntl::Flock::lock(file.expect("a lock"), nix::fcntl::FlockArg::LockExclusive);
                lock.map_err(|(_, errno)| errno).expect("locked")
            })
            .collect();
        scene.annotate_namespace(&json!({EXCLUDE_UIDS: "7000"}));
        free.until(|pod| pod.excludes_uid(7000));
        let report = scene.wait_for_counts([1, 0, 6, 0]);
        assert!(busy.iter().all(|pod| !pod.excludes_uid(7000)), "{report:?}");
        until("each failure is counted", || {
            sample(&address, "detour_policy_changes_total{result=\"failed\"}").is_some_and(|failed| failed >= 6)
        });
        drop(locks);
        scene.wait_for_counts([7, 0, 0, 0]);
        assert!(busy.iter().all(|pod| pod.excludes_uid(7000)));
    });
}

/// Rules change although nothing can be written, and the reports follow.
#[test]
fn without_the_api_server_rules_still_change_and_reports_wait() {
    scene(|scene| {
        let (agent, pod) = scene.agent_and_pod();
        scene.api.refuse_writes(Some(503));
        scene.annotate(&pod, EXCLUDE_PORTS, "3306");
        pod.until(|pod| pod.excludes_port(3306));
        scene.wait_for_counts([1, 0, 0, 0]);
        assert_eq!(scene.events(&pod, "DetourPolicyChanged"), [""; 0]);
        scene.api.refuse_writes(None);
        scene.wait_for_event(&pod, "DetourPolicyChanged", "3306");
        // A change that was delivered before the connection broke.
        scene.annotate(&pod, EXCLUDE_PORTS, "3307");
        scene.api.go_down();
        pod.until(|pod| pod.excludes_port(3307));
        assert!(agent.end(Signal::SIGTERM).success(), "the end does not wait for the API server");
    });
}

#[test]
fn a_missing_right_is_logged_once_and_stops_nothing() {
    scene(|scene| {
        scene.api.refuse_writes(Some(403));
        let agent = scene.agent(&[]);
        let pods: Vec<Pod> = (0..3).map(|number| scene.added(&format!("web-{number}"), &[])).collect();
        scene.wait_for_counts([3, 0, 0, 0]);
        for port in [3306, 3307] {
            for pod in &pods {
                scene.annotate(pod, EXCLUDE_PORTS, &port.to_string());
            }
            pods.iter().for_each(|pod| pod.until(|pod| pod.excludes_port(port)));
        }
        agent.wait_for_log("Event not created");
        let logged = agent.log();
        let is_about = |line: &&String| line.contains("Event not created") && line.contains("level=warn");
        assert_eq!(logged.iter().filter(is_about).count(), 1, "{logged:#?}");
    });
}
