//! Several agents on a node.

use crate::live_policy::pod::{EXCLUDE_PORTS, Pod};
use crate::live_policy::scene::{events, until};
use crate::live_policy::scene::{publish, sample, scene, wait_for_event};

/// During a rolling update, the earlier agent changes pods, and the later one takes over when it has ended.
#[test]
fn one_of_two_agents_changes_a_pod() {
    scene(|scene, api| {
        let (first, address) = scene.agent_with_metrics(&[]);
        let pod = Pod::added(scene, api, "web-0", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        let second = scene.starting_agent("b", &["--health-address=127.0.0.1:0"]);
        let lines = second.wait_for_logs(&["serving /healthz", "this agent is on standby"]);
        let line = lines.iter().find(|line| line.contains("address=")).expect("its address");
        let other = line.split("address=").nth(1).expect("one").trim().to_owned();
        pod.set(EXCLUDE_PORTS, "3306");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_port(3306));
        wait_for_event(api, &pod, "DetourPolicyChanged", "3306");
        let applied = "detour_policy_changes_total{result=\"applied\"}";
        until("the metric", || sample(&address, applied) == Some(1));
        assert_eq!(sample(&other, applied), Some(0));
        drop(first);
        pod.set(EXCLUDE_PORTS, "3307");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_port(3307));
        until("the metric", || sample(&other, "detour_pods{policy=\"current\"}") == Some(1));
        wait_for_event(api, &pod, "DetourPolicyChanged", "3307");
        assert_eq!(events(api, &pod, "DetourPolicyChanged").len(), 2);
    });
}
