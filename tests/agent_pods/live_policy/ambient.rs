//! Labels that enroll running pods in the ambient mesh, beside the rules of Istio's own code. `tests/netns` has the effect
//! of exclusions beside them in both formats and orders.

use crate::live_policy::scene::{EXCLUDE_UIDS, sample, scene};
use crate::support::agent_node::AgentNode;
use crate::support::new_netns::in_netns;
use crate::support::node_pod::NodePod as Pod;
use crate::support::wait::{DEADLINE, until, until_within};
use serde_json::json;
use std::net::TcpListener;

const MODE: &str = "istio.io/dataplane-mode";

/// Redirects the pod to ztunnel, as istio-cni does.
fn redirect(pod: &Pod) {
    pod.tool("nft", &["-f", "-"], include_str!("../../golden/ambient.nft"));
}

/// Creates a pod without a sidecar, with exclusions, and calls ADD for it. It has no rules yet.
fn added(scene: &AgentNode<'_>, name: &str) -> Pod {
    let pod = scene.pod(name).without_sidecar();
    pod.unset("sidecar.istio.io/status");
    pod.set(EXCLUDE_UIDS, "0,7000");
    scene.publish_and_add(&pod);
    assert!(!pod.rules().contains("detour-exclusions"), "{}", pod.rules());
    pod
}

#[test]
fn a_running_pod_follows_the_labels_before_and_after_istio_cni_redirects_it() {
    scene(|scene| {
        let _agent = scene.agent(&[]);
        let pods = ["first", "later"].map(|name| added(scene, name));
        redirect(&pods[0]);
        scene.label_namespace(&json!({MODE: "ambient"}));
        pods.iter().for_each(|pod| pod.until(|pod| pod.excludes_uid(7000)));
        redirect(&pods[1]);
        for pod in &pods {
            scene.wait_for_event(pod, "DetourPolicyChanged", "excluded: UID 0, UID 7000");
            scene.call(pod, "CHECK").expect("no drift");
        }
        scene.label_namespace(&json!({}));
        for pod in &pods {
            pod.until(|pod| !pod.rules().contains("detour-exclusions"));
            scene.wait_for_event(pod, "DetourPolicyChanged", "no longer excluded: UID 0, UID 7000");
            assert_eq!(scene.events(pod, "DetourPolicyRejected"), [""; 0]);
        }
        // The pod's own label overrides that of the namespace.
        let [pod, _] = &pods;
        pod.label(MODE, "ambient");
        scene.publish(pod);
        pod.until(|pod| pod.excludes_uid(7000));
        pod.label(MODE, "none");
        scene.label_namespace(&json!({MODE: "ambient"}));
        scene.publish(pod);
        pod.until(|pod| !pod.excludes_uid(7000));
        scene.call(pod, "DEL").expect("deleted");
    });
}

/// ztunnel's listeners in the pod, until the result is dropped.
fn ztunnel(pod: &Pod) -> Vec<TcpListener> {
    in_netns(&pod.netns(), || {
        [15001, 15006, 15008].map(|port| TcpListener::bind(("0.0.0.0", port)).expect("a port")).into()
    })
}

#[test]
fn a_pod_outside_of_the_ambient_mesh_is_reported_with_what_it_lacks() {
    const OUTSIDE: &str = "DetourOutsideMesh";
    scene(|scene| {
        let (_agent, metrics) = scene.agent_with_metrics(&[]);
        let outside = || sample(&metrics, "detour_pods{policy=\"outside\"}");
        let pods = ["web-0", "web-1", "web-2"].map(|name| added(scene, name));
        let [enrolled, without_listeners, without_rules] = &pods;
        redirect(enrolled);
        redirect(without_listeners);
        let _listeners = [enrolled, without_rules].map(ztunnel);
        scene.label_namespace(&json!({MODE: "ambient"}));
        // After a minute, at the next check.
        let reported = |pod: &Pod, lacking: &str| {
            until_within(3 * DEADLINE, lacking, || {
                scene.events(pod, OUTSIDE).iter().any(|text| text.contains(lacking))
            });
        };
        reported(without_listeners, "lacks ztunnel's listener on port 15001, ");
        reported(without_rules, "lacks istio-cni's redirection;");
        until("the metric counts them", || outside() == Some(2));
        assert_eq!(scene.events(enrolled, OUTSIDE), [""; 0]);
        // Enrolled again, it is no finding any more.
        redirect(without_rules);
        without_rules.label("changed", "true");
        scene.publish(without_rules);
        until("the metric counts one", || outside() == Some(1));
    });
}
