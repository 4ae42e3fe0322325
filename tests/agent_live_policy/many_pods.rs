//! Many pods on a node whose namespace changes again and again.

use crate::cluster::{added, annotate_namespace, cluster};
use crate::pod::{EXCLUDE_PORTS, EXCLUDE_UIDS, Pod};
use crate::scene::{Scene, until};
use crate::traffic::{Traffic, retransmissions};
use serde_json::json;

const PODS: usize = 30;
const CHANGES: u32 = 8;

/// Whether the rules that exclude this UID are committed.
fn has_policy(pod: &Pod, uid: u32) -> bool {
    let excluded = format!("\"Uid\":{{\"first\":{uid},\"last\":{uid}}}");
    pod.records().iter().all(|record| record.contains(&excluded) && record.contains("\"before\":null"))
}

#[test]
fn all_pods_of_a_node_follow_their_namespace_and_no_long_connection_fails() {
    cluster(|plane, scene: &Scene<'_>| {
        let admin = plane.admin();
        let _agent = scene.agent(&[]);
        let pods: Vec<Pod> =
            (0..PODS).map(|number| added(&admin, scene, &format!("web-{number}"), &json!({}))).collect();
        let expected = u32::try_from(PODS).expect("a number");
        scene.wait_for_counts([expected, 0, 0, 0]);
        // One connection to the proxy and one past it, whose exclusion ends with the changes.
        annotate_namespace(&admin, &json!({EXCLUDE_UIDS: "6999"}));
        until("the first policy", || pods.iter().all(|pod| has_policy(pod, 6999)));
        for pod in &pods[..4] {
            let annotations = json!({"metadata": {"annotations": {EXCLUDE_PORTS: "81"}}});
            admin.merge(&crate::cluster::reference("Pod", &pod.name), &annotations).expect("accepted");
            pod.until(|pod| pod.excludes_port(81));
        }
        let traffic: Vec<Traffic> = pods[..4].iter().map(|pod| Traffic::start(scene, pod, &[80, 81])).collect();
        for pod in &pods[..4] {
            let annotations = json!({"metadata": {"annotations": {EXCLUDE_PORTS: null}}});
            admin.merge(&crate::cluster::reference("Pod", &pod.name), &annotations).expect("accepted");
            pod.until(|pod| !pod.excludes_port(81));
        }
        scene.wait_for_counts([expected, 0, 0, 0]);
        for change in 0..CHANGES {
            let uid = 7000 + change;
            annotate_namespace(&admin, &json!({EXCLUDE_UIDS: uid.to_string()}));
            until("the policy of each pod", || pods.iter().all(|pod| has_policy(pod, uid)));
            // The saved state is not evidence of the rules.
            for pod in pods.iter().step_by(if change + 1 == CHANGES { 1 } else { 20 }) {
                assert!(pod.excludes_uid(uid) && !pod.excludes_uid(uid - 1), "{}", pod.rules());
            }
        }
        scene.wait_for_counts([expected, 0, 0, 0]);
        let exchanges: Vec<Vec<u64>> = traffic.into_iter().map(Traffic::end).collect();
        assert!(exchanges.iter().flatten().all(|count| *count > 10), "{exchanges:?}");
        let resent: u64 = pods[..4].iter().map(retransmissions).sum();
        println!("{PODS} pods, {CHANGES} changes: exchanges {exchanges:?}, retransmissions {resent}");
        for pod in &pods {
            pod.call(scene, "CHECK").expect("no drift");
        }
    });
}
