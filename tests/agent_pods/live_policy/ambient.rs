//! Labels that enroll running pods in the ambient mesh, beside the rules of Istio's own code.

use crate::live_policy::api::{Api, NAMESPACES};
use crate::live_policy::scene::{EXCLUDE_UIDS, Pod, Scene, events, publish, sample, scene, wait_for_event};
use crate::support::new_netns::in_netns;
use crate::support::wait::{DEADLINE, until, until_within};
use serde_json::json;
use std::net::TcpListener;
use std::time::Instant;

const MODE: &str = "istio.io/dataplane-mode";

/// Redirects the pod to ztunnel, as istio-cni does with nftables.
fn redirect(pod: &Pod) {
    pod.tool("nft", &["-f", "-"], include_str!("../../golden/ambient.nft"));
}

/// Removes the redirection.
fn remove(pod: &Pod) {
    let tables = ["nat", "mangle", "raw"].map(|table| format!("delete table inet istio-ambient-{table}\n"));
    pod.tool("nft", &["-f", "-"], &tables.concat());
}

fn label_namespace(api: &Api, mode: Option<&str>) {
    let labels = mode.map(|mode| json!({MODE: mode})).unwrap_or_default();
    api.put(NAMESPACES, &json!({"metadata": {"name": "shop", "labels": labels}}));
}

/// Creates a pod without a sidecar, with exclusions, and calls ADD for it. It has no rules yet.
fn added(scene: &Scene<'_>, api: &Api, name: &str) -> Pod {
    let pod = Pod::new(scene, name).without_sidecar();
    pod.unset("sidecar.istio.io/status");
    pod.annotate(api, EXCLUDE_UIDS, "0,7000");
    pod.call(scene, "ADD").expect("added");
    assert!(!pod.rules().contains("detour-exclusions"), "{}", pod.rules());
    pod
}

fn enroll_and_leave(redirected_first: bool) {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let pod = added(scene, api, "web-0");
        if redirected_first {
            redirect(&pod);
        }
        let labeled = Instant::now();
        label_namespace(api, Some("ambient"));
        pod.until(|pod| pod.excludes_uid(7000));
        println!("istio-cni first: {redirected_first}: {:?} from the label to the rules", labeled.elapsed());
        if !redirected_first {
            redirect(&pod);
        }
        wait_for_event(api, &pod, "DetourPolicyChanged", "excluded: UID 0, UID 7000");
        pod.call(scene, "CHECK").expect("no drift");
        // istio-cni writes its rules again.
        remove(&pod);
        redirect(&pod);
        pod.call(scene, "CHECK").expect("no drift");
        if redirected_first {
            remove(&pod);
        }
        label_namespace(api, None);
        pod.until(|pod| !pod.rules().contains("detour-exclusions"));
        if !redirected_first {
            remove(&pod);
        }
        wait_for_event(api, &pod, "DetourPolicyChanged", "no longer excluded: UID 0, UID 7000");
        // The pod's own label overrides that of the namespace.
        pod.label(MODE, "ambient");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_uid(7000));
        pod.label(MODE, "none");
        label_namespace(api, Some("ambient"));
        publish(api, &pod);
        pod.until(|pod| !pod.excludes_uid(7000));
        assert_eq!(events(api, &pod, "DetourPolicyRejected"), [""; 0]);
        pod.call(scene, "DEL").expect("deleted");
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
    scene(|scene, api| {
        let (_agent, metrics) = scene.agent_with_metrics(&[]);
        let outside = || sample(&metrics, "detour_pods{policy=\"outside\"}");
        let pods = ["web-0", "web-1", "web-2"].map(|name| added(scene, api, name));
        let [enrolled, without_listeners, without_rules] = &pods;
        redirect(enrolled);
        redirect(without_listeners);
        let _listeners = [enrolled, without_rules].map(ztunnel);
        label_namespace(api, Some("ambient"));
        // After a minute, at the next check.
        let reported = |pod: &Pod, lacking: &str| {
            until_within(3 * DEADLINE, lacking, || events(api, pod, OUTSIDE).iter().any(|text| text.contains(lacking)));
        };
        reported(without_listeners, "lacks ztunnel's listener on port 15001, ");
        reported(without_rules, "lacks istio-cni's redirection;");
        until("the metric counts them", || outside() == Some(2));
        assert_eq!(events(api, enrolled, OUTSIDE), [""; 0]);
        // Enrolled again, it is no finding any more.
        redirect(without_rules);
        without_rules.label("changed", "true");
        publish(api, without_rules);
        until("the metric counts one", || outside() == Some(1));
    });
}

#[test]
fn a_running_pod_follows_the_labels_if_istio_cni_redirects_it_first() {
    enroll_and_leave(true);
}

#[test]
fn a_running_pod_follows_the_labels_if_istio_cni_redirects_it_later() {
    enroll_and_leave(false);
}
