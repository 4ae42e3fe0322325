//! What a running pod follows.

use crate::live_policy::api::PODS;
use crate::live_policy::pod::{EXCLUDE_PORTS, EXCLUDE_UIDS, Pod};
use crate::live_policy::scene::{annotate_namespace, events, publish, sample, scene, until, wait_for_event};
use serde_json::json;

#[test]
fn a_pod_follows_its_annotations_and_those_of_its_namespace() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let pod = Pod::added(scene, api, "web-0", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        pod.set(EXCLUDE_PORTS, "3306");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_port(3306));
        let message = wait_for_event(api, &pod, "DetourPolicyChanged", "outbound_ports_exclude: 3306");
        assert!(message.contains("(before: 15020)"), "{message}");
        annotate_namespace(api, &json!({EXCLUDE_UIDS: "7000"}));
        pod.until(|pod| pod.excludes_uid(7000) && pod.excludes_port(3306));
        wait_for_event(api, &pod, "DetourPolicyChanged", "excluded: UID 7000");
        annotate_namespace(api, &json!({}));
        pod.unset(EXCLUDE_PORTS);
        publish(api, &pod);
        pod.until(|pod| !pod.excludes_uid(7000) && !pod.excludes_port(3306));
        wait_for_event(api, &pod, "DetourPolicyChanged", "no longer excluded: UID 7000");
        scene.wait_for_counts([1, 0, 0, 0]);
        assert_eq!(events(api, &pod, "DetourPolicyRejected"), [""; 0]);
        pod.call(scene, "CHECK").expect("no drift");
        pod.call(scene, "DEL").expect("deleted");
        assert!(!pod.rules().contains("ISTIO_"), "{}", pod.rules());
    });
}

/// The proxy's own configuration depends on everything else.
#[test]
fn the_redirection_stays_as_it_was_when_the_pod_started() {
    scene(|scene, api| {
        let (_agent, address) = scene.agent_with_metrics(&[]);
        let pod = Pod::added(scene, api, "web-0", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        pod.set("sidecar.istio.io/interceptionMode", "TPROXY");
        pod.set(EXCLUDE_PORTS, "3306");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_port(3306));
        let mangle = || crate::support::new_netns::tool_in(&pod.netns(), "iptables-save", &["-t", "mangle"], "");
        assert!(!mangle().contains("TPROXY"));
        pod.set("sidecar.istio.io/inject", "false");
        pod.unset("sidecar.istio.io/status");
        pod.set(EXCLUDE_PORTS, "3307");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_port(3307) && pod.rules().contains("ISTIO_REDIRECT"));
        scene.wait_for_counts([1, 0, 0, 0]);
        until("the metric", || sample(&address, "detour_pods{policy=\"current\"}") == Some(1));
    });
}

#[test]
fn without_live_policy_a_pod_keeps_its_policy_and_its_rules_are_restored() {
    scene(|scene, api| {
        let _agent = scene.agent(&["--live-policy=off"]);
        let pod = Pod::added(scene, api, "web-0", &[]);
        let report = scene.wait_for_counts([1, 0, 0, 0]);
        assert_eq!(report.follows, Some(false));
        let before = pod.rules();
        crate::support::new_netns::tool_in(&pod.netns(), "iptables", &["-t", "nat", "-F", "ISTIO_OUTPUT"], "");
        pod.set(EXCLUDE_PORTS, "3306");
        publish(api, &pod);
        wait_for_event(api, &pod, "DetourRepaired", "drifted");
        assert_eq!(pod.rules(), before);
        assert_eq!(events(api, &pod, "DetourPolicyChanged"), [""; 0]);
    });
}

#[test]
fn excluded_containers_follow() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let pod = Pod::added(scene, api, "web-0", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        let has_table = || {
            let tables = crate::support::new_netns::tool_in(&pod.netns(), "nft", &["list", "tables"], "");
            tables.contains("inet detour-exclusions")
        };
        assert!(!has_table());
        pod.set("detour.io/exclude-containers", "web");
        publish(api, &pod);
        // Without cgroup v2 or the kernel's nft_socket, the change is rejected.
        until("the table or a refusal", || has_table() || scene.report().failed == 1);
        if has_table() {
            scene.wait_for_counts([1, 0, 0, 0]);
        }
    });
}

/// The agent catches up with changes that were made while it did not run, and its metrics are right at once.
#[test]
fn a_change_while_no_agent_ran_is_applied_and_counted_after_the_start() {
    scene(|scene, api| {
        let agent = scene.agent(&[]);
        let pod = Pod::added(scene, api, "web-0", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        drop(agent);
        pod.set(EXCLUDE_PORTS, "3306");
        publish(api, &pod);
        let (_agent, address) = scene.agent_with_metrics(&[]);
        pod.until(|pod| pod.excludes_port(3306));
        scene.wait_for_counts([1, 0, 0, 0]);
        let count = |policy: &str| sample(&address, &format!("detour_pods{{policy=\"{policy}\"}}"));
        assert_eq!(["current", "rejected", "failed", "none"].map(count), [Some(1), Some(0), Some(0), Some(0)]);
        assert_eq!(sample(&address, "detour_policy_changes_total{result=\"applied\"}"), Some(1));
    });
}

#[test]
fn a_pod_without_rules_is_counted_as_none_and_a_pod_without_sidecar_is_not_counted() {
    scene(|scene, api| {
        let _agent = scene.agent(&["--repair=off"]);
        let plain = Pod::new(scene, "plain").without_sidecar();
        publish(api, &plain);
        plain.call(scene, "ADD").expect("added");
        let missed = Pod::new(scene, "missed");
        publish(api, &missed);
        let report = scene.wait_for_counts([0, 0, 0, 1]);
        assert_eq!((report.findings[0].pod.name.as_str(), report.findings[0].state.as_str()), ("missed", "none"));
        // Its ADD, as by a repair, is noticed without a change in the cluster.
        missed.call(scene, "ADD").expect("added");
        scene.wait_for_counts([1, 0, 0, 0]);
        api.delete(PODS, "shop", "missed");
        scene.wait_for_counts([0, 0, 0, 0]);
    });
}

#[test]
fn a_pod_that_is_being_deleted_is_not_changed() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let (ends, stays) = (Pod::added(scene, api, "ends", &[]), Pod::added(scene, api, "stays", &[]));
        scene.wait_for_counts([2, 0, 0, 0]);
        let mut object = ends.object();
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        api.put(PODS, &object);
        scene.wait_for_counts([1, 0, 0, 0]);
        annotate_namespace(api, &json!({EXCLUDE_UIDS: "7000"}));
        stays.until(|pod| pod.excludes_uid(7000));
        scene.wait_for_counts([1, 0, 0, 0]);
        assert!(!ends.excludes_uid(7000));
    });
}
