//! What a running pod follows: annotations, its namespace, and the node's configuration; one of several agents acts.

use crate::live_policy::scene::{CHAIN, EXCLUDE_PORTS, EXCLUDE_UIDS, sample, scene};
use crate::support::agent_node::write;
use crate::support::api::PODS;
use crate::support::wait::until;
use serde_json::json;

#[test]
fn a_pod_follows_its_annotations_and_those_of_its_namespace() {
    scene(|scene| {
        let (_agent, pod) = scene.agent_and_pod();
        scene.annotate(&pod, EXCLUDE_PORTS, "3306");
        pod.until(|pod| pod.excludes_port(3306));
        let message = scene.wait_for_event(&pod, "DetourPolicyChanged", "outbound_ports_exclude: 3306");
        assert!(message.contains("(before: 15020)"), "{message}");
        scene.annotate_namespace(&json!({EXCLUDE_UIDS: "7000"}));
        pod.until(|pod| pod.excludes_uid(7000) && pod.excludes_port(3306));
        scene.wait_for_event(&pod, "DetourPolicyChanged", "excluded: UID 7000");
        scene.annotate_namespace(&json!({}));
        pod.unset(EXCLUDE_PORTS);
        scene.publish(&pod);
        pod.until(|pod| !pod.excludes_uid(7000) && !pod.excludes_port(3306));
        scene.wait_for_event(&pod, "DetourPolicyChanged", "no longer excluded: UID 7000");
        scene.wait_for_counts([1, 0, 0, 0]);
        assert_eq!(scene.events(&pod, "DetourPolicyRejected"), [""; 0]);
        scene.annotate(&pod, "detour.io/exclude-containers", "web");
        pod.until(|pod| pod.rules().contains("set excluded-all"));
        scene.call(&pod, "CHECK").expect("no drift");
        scene.call(&pod, "DEL").expect("deleted");
        assert!(!pod.rules().contains("ISTIO_"), "{}", pod.rules());
    });
}

/// The proxy's own configuration depends on everything else.
#[test]
fn the_redirection_stays_as_it_was_when_the_pod_started() {
    scene(|scene| {
        let (_agent, address) = scene.agent_with_metrics(&[]);
        let pod = scene.added("web-0", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        pod.set("sidecar.istio.io/interceptionMode", "TPROXY");
        scene.annotate(&pod, EXCLUDE_PORTS, "3306");
        pod.until(|pod| pod.excludes_port(3306));
        let mangle = || pod.tool("iptables-save", &["-t", "mangle"], "");
        assert!(!mangle().contains("TPROXY"));
        pod.set("sidecar.istio.io/inject", "false");
        pod.unset("sidecar.istio.io/status");
        scene.annotate(&pod, EXCLUDE_PORTS, "3307");
        pod.until(|pod| pod.excludes_port(3307) && pod.rules().contains("ISTIO_REDIRECT"));
        scene.wait_for_counts([1, 0, 0, 0]);
        until("the metric", || sample(&address, "detour_pods{policy=\"current\"}") == Some(1));
    });
}

#[test]
fn without_live_policy_a_pod_keeps_its_policy_and_its_rules_are_restored() {
    scene(|scene| {
        let _agent = scene.agent(&["--live-policy=off"]);
        let pod = scene.added("web-0", &[]);
        let report = scene.wait_for_counts([1, 0, 0, 0]);
        assert_eq!(report.follows, Some(false));
        let before = pod.rules();
        pod.tool("iptables", &["-t", "nat", "-F", "ISTIO_OUTPUT"], "");
        scene.annotate(&pod, EXCLUDE_PORTS, "3306");
        scene.wait_for_event(&pod, "DetourRepaired", "drifted");
        assert_eq!(pod.rules(), before);
        assert_eq!(scene.events(&pod, "DetourPolicyChanged"), [""; 0]);
    });
}

/// The agent catches up with changes that were made while it did not run, and its metrics are right at once.
#[test]
fn a_change_while_no_agent_ran_is_applied_and_counted_after_the_start() {
    scene(|scene| {
        let (agent, pod) = scene.agent_and_pod();
        drop(agent);
        scene.annotate(&pod, EXCLUDE_PORTS, "3306");
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
    scene(|scene| {
        let _agent = scene.agent(&["--repair=off"]);
        let plain = scene.pod("plain").without_sidecar();
        scene.publish_and_add(&plain);
        let missed = scene.pod("missed");
        scene.publish(&missed);
        let report = scene.wait_for_counts([0, 0, 0, 1]);
        assert_eq!((report.findings[0].pod.name.as_str(), report.findings[0].state.as_str()), ("missed", "none"));
        // Its ADD, as by a repair, is noticed without a change in the cluster.
        scene.call(&missed, "ADD").expect("added");
        scene.wait_for_counts([1, 0, 0, 0]);
        scene.api.delete(PODS, "shop", "missed");
        scene.wait_for_counts([0, 0, 0, 0]);
    });
}

/// Its author selects how long its containers go on.
#[test]
fn a_pod_that_is_being_deleted_loses_a_bypass_until_it_ends() {
    scene(|scene| {
        let _agent = scene.agent(&[]);
        scene.annotate_namespace(&json!({EXCLUDE_UIDS: "7000"}));
        let (pod, ended) = (scene.added("deleted", &[]), scene.added("ended", &[]));
        pod.until(|pod| pod.excludes_uid(7000));
        ended.until(|pod| pod.excludes_uid(7000));
        let mut object = ended.object();
        object["status"]["phase"] = json!("Succeeded");
        scene.api.put(PODS, &object);
        scene.wait_for_counts([1, 0, 0, 0]);
        let mut object = pod.object();
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        scene.api.put(PODS, &object);
        scene.annotate_namespace(&json!({}));
        pod.until(|pod| !pod.excludes_uid(7000));
        assert!(ended.excludes_uid(7000));
    });
}

/// During a rolling update, the earlier agent changes pods, and the later one takes over when it has ended.
#[test]
fn one_of_two_agents_changes_a_pod() {
    scene(|scene| {
        let (first, address) = scene.agent_with_metrics(&[]);
        let pod = scene.added("web-0", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        let second = scene.start_agent("b", &["--health-address=127.0.0.1:0"]);
        second.wait_for_logs(&["watching pods", "watching namespaces", "this agent is on standby"]);
        let other = second.address();
        scene.annotate(&pod, EXCLUDE_PORTS, "3306");
        pod.until(|pod| pod.excludes_port(3306));
        scene.wait_for_event(&pod, "DetourPolicyChanged", "3306");
        let applied = "detour_policy_changes_total{result=\"applied\"}";
        until("the metric", || sample(&address, applied) == Some(1));
        assert_eq!(sample(&other, applied), Some(0));
        assert_eq!(sample(&address, applied), Some(1), "the first agent does not repeat its change");
        first.wait_for_log(CHANGE);
        assert_eq!(changes(&first.log()), 1);
        drop(first);
        scene.annotate(&pod, EXCLUDE_PORTS, "3307");
        pod.until(|pod| pod.excludes_port(3307));
        until("the metric", || sample(&other, "detour_pods{policy=\"current\"}") == Some(1));
        scene.wait_for_event(&pod, "DetourPolicyChanged", "3307");
        // An agent on a busy machine sends a request again that has no answer in time, so the Events are not counted.
        let messages = scene.events(&pod, "DetourPolicyChanged");
        let is_of = |message: &String, port: &str| message.contains(port);
        let first_of_second = messages.iter().position(|message| is_of(message, "3307")).expect("an Event");
        let (of_first, of_second) = messages.split_at(first_of_second);
        assert!(!of_first.is_empty() && of_first.iter().all(|message| is_of(message, "3306")), "{messages:#?}");
        assert!(of_second.iter().all(|message| is_of(message, "3307")), "{messages:#?}");
        // The watch of the second agent can lag, so that it applies an older state first: its changes are not counted.
        second.wait_for_log(CHANGE);
    });
}

/// An agent logs each Event once.
const CHANGE: &str = "the pod's rules changed";

fn changes(log: &[String]) -> usize {
    log.iter().filter(|line| line.contains(CHANGE)).count()
}

#[test]
fn running_pods_follow_the_nodes_configuration() {
    scene(|scene| {
        let _agent = scene.agent(&[]);
        let pods = ["a", "b"].map(|name| scene.added(name, &[]));
        scene.wait_for_counts([2, 0, 0, 0]);
        scene.configure(&CHAIN.replace(r#""uid-exclude""#, r#""uid-exclude", "uids": ["7000"]"#));
        for pod in &pods {
            pod.until(|pod| pod.excludes_uid(7000));
            scene.wait_for_event(pod, "DetourPolicyChanged", "excluded: UID 7000");
        }
        scene.wait_for_counts([2, 0, 0, 0]);
        // A pod that starts now has the same policy.
        let new = scene.added("new", &[]);
        assert!(new.excludes_uid(7000));
        scene.wait_for_counts([3, 0, 0, 0]);
        // An invalid configuration is refused for the whole node.
        scene.configure(&CHAIN.replace(r#""uid-exclude""#, r#""uid-exclude", "uids": ["abc"]"#));
        scene.annotate(&pods[0], EXCLUDE_PORTS, "3306");
        pods[0].until(|pod| pod.excludes_port(3306) && pod.excludes_uid(7000));
        scene.configure(CHAIN);
        for pod in &pods {
            pod.until(|pod| !pod.excludes_uid(7000));
        }
        scene.wait_for_counts([3, 0, 0, 0]);
        // An agent's container has no mount of the node's groups.
        write("/proc/1/root/etc/group", "builders:x:4321:\n");
        let redirect = r#""istio-redirect", "owner_groups_exclude": ["builders"]"#;
        scene.configure(&CHAIN.replace(r#""istio-redirect""#, redirect));
        pods[0].until(|pod| pod.rules().contains("--gid-owner 4321"));
    });
}
