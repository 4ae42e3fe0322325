//! What a running pod follows.

use crate::api::PODS;
use crate::pod::{EXCLUDE_PORTS, EXCLUDE_UIDS, Pod};
use crate::scene::{annotate_namespace, conditions, events, publish, sample, scene, until, wait_for_event};
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
        assert!(message.contains("(before: 15020)") && message.starts_with("policy "), "{message}");
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

/// With the scope `exclusions`, the basics of the redirection need a new pod; with `all`, only its end does.
#[test]
fn the_scope_decides_whether_the_redirection_follows() {
    for (scope, follows) in [("exclusions", false), ("all", true)] {
        scene(|scene, api| {
            let (_agent, address) = scene.agent_with_metrics(&[&format!("--live-policy={scope}")]);
            let pod = Pod::added(scene, api, "web-0", &[]);
            scene.wait_for_counts([1, 0, 0, 0]);
            pod.set("sidecar.istio.io/interceptionMode", "TPROXY");
            pod.set(EXCLUDE_PORTS, "3306");
            publish(api, &pod);
            pod.until(|pod| pod.excludes_port(3306));
            let has_tproxy = || {
                let rules = crate::support::new_netns::tool_in(&pod.netns(), "iptables-save", &["-t", "mangle"], "");
                rules.contains("TPROXY")
            };
            if follows {
                until("TPROXY", has_tproxy);
                scene.wait_for_counts([1, 0, 0, 0]);
                assert_eq!(sample(&address, "detour_pods{policy=\"current\"}"), Some(1));
                pod.set("sidecar.istio.io/inject", "false");
                pod.unset("sidecar.istio.io/status");
                publish(api, &pod);
                let message = wait_for_event(api, &pod, "DetourPolicyOutdated", "only a new pod gets");
                assert!(message.contains("not redirected (before: redirected)"), "{message}");
                scene.wait_for_counts([0, 1, 0, 0]);
                assert!(has_tproxy() && pod.excludes_port(3306));
            } else {
                until("the reason", || scene.report().pods.iter().any(|it| it.reason.contains("only a new pod gets")));
                let report = scene.wait_for_counts([0, 1, 0, 0]);
                assert!(!has_tproxy());
                let status = &report.pods[0];
                assert_eq!((status.state.as_str(), status.pod.name.as_str()), ("older", "web-0"));
                assert!(status.reason.contains("inbound_interception_mode: TPROXY (before: REDIRECT)"), "{status:?}");
                assert!(status.applied != status.desired && status.applied.len() == 12, "{status:?}");
                let message = wait_for_event(api, &pod, "DetourPolicyOutdated", "only a new pod gets");
                assert!(message.contains(&status.applied) && message.contains(&status.desired), "{message}");
                until("the condition", || {
                    conditions(api).last().is_some_and(|it| it["status"] == "False" && it["reason"] == "Older")
                });
                assert_eq!(sample(&address, "detour_pods{policy=\"older\"}"), Some(1));
                assert_eq!(sample(&address, "detour_pods{policy=\"current\"}"), Some(0));
                // A further change does not repeat the Event for the same desired part.
                assert_eq!(events(api, &pod, "DetourPolicyOutdated").len(), 1);
            }
        });
    }
}

#[test]
fn without_live_policy_the_agent_only_reports() {
    scene(|scene, api| {
        let (_agent, address) = scene.agent_with_metrics(&["--live-policy=off"]);
        let pod = Pod::added(scene, api, "web-0", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        let before = pod.rules();
        pod.set(EXCLUDE_PORTS, "3306");
        publish(api, &pod);
        let report = scene.wait_for_counts([0, 1, 0, 0]);
        assert_eq!(report.scope, "off");
        assert!(report.pods[0].reason.contains("--live-policy is off"), "{report:?}");
        pod.set(EXCLUDE_PORTS, "none");
        publish(api, &pod);
        scene.wait_for_counts([0, 0, 1, 0]);
        assert_eq!(pod.rules(), before);
        assert_eq!(sample(&address, "detour_pods{policy=\"rejected\"}"), Some(1));
        assert_eq!(sample(&address, "detour_policy_changes_total{result=\"applied\"}"), Some(0));
        let written: Vec<_> = api.requests().into_iter().filter(|request| !request.starts_with("GET ")).collect();
        assert_eq!(written, [""; 0], "neither Events nor conditions");
    });
}

#[test]
fn a_pod_or_its_namespace_can_opt_out() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        annotate_namespace(api, &json!({"detour.io/live-policy": "false"}));
        let stays = Pod::added(scene, api, "stays", &[]);
        let follows = Pod::added(scene, api, "follows", &[("detour.io/live-policy", "true")]);
        scene.wait_for_counts([2, 0, 0, 0]);
        annotate_namespace(api, &json!({"detour.io/live-policy": "false", EXCLUDE_UIDS: "7000"}));
        follows.until(|pod| pod.excludes_uid(7000));
        // "follows" can still be reported as older, and "stays" as current, when the rules have changed.
        let mut report = scene.report();
        until("only \"stays\" is older", || {
            report = scene.report();
            matches!(report.pods.as_slice(), [status] if status.pod.name == "stays" && status.state == "older")
        });
        assert!(report.pods[0].reason.contains("annotation \"detour.io/live-policy\" is false"), "{report:?}");
        assert!(!stays.excludes_uid(7000));
        // Without the annotation, the pod catches up.
        annotate_namespace(api, &json!({EXCLUDE_UIDS: "7000"}));
        stays.until(|pod| pod.excludes_uid(7000));
        scene.wait_for_counts([2, 0, 0, 0]);
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
        until("the table or a refusal", || has_table() || scene.report().older + scene.report().rejected == 1);
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
        let [older, current] = ["older", "current"].map(|name| Pod::added(scene, api, name, &[]));
        scene.wait_for_counts([2, 0, 0, 0]);
        drop(agent);
        older.set("sidecar.istio.io/interceptionMode", "TPROXY");
        publish(api, &older);
        current.set(EXCLUDE_PORTS, "3306");
        publish(api, &current);
        let (_agent, address) = scene.agent_with_metrics(&[]);
        current.until(|pod| pod.excludes_port(3306));
        scene.wait_for_counts([1, 1, 0, 0]);
        let count = |policy: &str| sample(&address, &format!("detour_pods{{policy=\"{policy}\"}}"));
        assert_eq!(["current", "older", "rejected", "none"].map(count), [Some(1), Some(1), Some(0), Some(0)]);
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
        assert_eq!((report.pods[0].pod.name.as_str(), report.pods[0].state.as_str()), ("missed", "none"));
        assert_eq!(report.pods[0].applied, "");
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
