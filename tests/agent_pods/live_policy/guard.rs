//! The guard of running pods: what it rejects is counted and reported, and it follows the labels of the ambient mesh.

use crate::live_policy::scene::{EXCLUDE_UIDS, sample, scene};
use crate::support::agent_node::AgentNode;
use crate::support::new_netns::in_netns;
use crate::support::node_pod::NodePod as Pod;
use crate::support::wait::{pause, until};
use serde_json::json;
use std::io::ErrorKind;
use std::net::TcpStream;

const SIDECAR: &str = r#"[{"type": "istio-redirect"}, {"type": "uid-exclude"}, {"type": "mesh-guard"}]"#;
/// Another tool redirects.
const ALONE: &str = r#"[{"type": "uid-exclude"}, {"type": "mesh-guard"}]"#;
const OUTBOUND: &str = "detour_guard_rejected_total{direction=\"outbound\"}";

fn has_guard(pod: &Pod) -> bool {
    pod.rules().contains("chain GUARD_OUTPUT")
}

/// Connects from the pod to another address, which the guard rejects.
fn is_rejected(pod: &Pod) {
    let connected = in_netns(&pod.netns(), || TcpStream::connect("10.88.0.9:80"));
    assert_eq!(connected.expect_err("nothing leaves").kind(), ErrorKind::ConnectionRefused);
}

/// Changes the pod until the agent has compared its rules again and `holds`.
fn check_until(scene: &AgentNode<'_>, pod: &Pod, holds: impl Fn() -> bool) {
    let mut number = 0;
    until("the agent has compared the rules", || {
        number += 1;
        pod.label("changed", &number.to_string());
        scene.publish(pod);
        holds()
    });
}

#[test]
fn rejected_connections_are_counted_and_get_one_event() {
    scene(|scene| {
        scene.configure(SIDECAR);
        let (_agent, address) = scene.agent_with_metrics(&[]);
        let pod = scene.added("web-0", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        let flush = || drop(pod.tool("iptables", &["-t", "nat", "-F", "OUTPUT"], ""));
        let rejected = || sample(&address, OUTBOUND).unwrap_or_default();
        flush();
        is_rejected(&pod);
        check_until(scene, &pod, || rejected() > 0);
        let message = scene.wait_for_event(&pod, "DetourGuardRejected", "outbound packets");
        assert!(message.contains("detour doctor -n shop web-0"), "{message}");
        pod.until(|pod| pod.rules().contains("-A OUTPUT -j ISTIO_OUTPUT"));
        let before = rejected();
        flush();
        is_rejected(&pod);
        check_until(scene, &pod, || rejected() > before);
        assert_eq!(scene.events(&pod, "DetourGuardRejected").len(), 1);
    });
}

#[test]
fn a_pod_that_joins_the_ambient_mesh_gets_the_guard_and_loses_it_when_it_leaves() {
    scene(|scene| {
        scene.configure(ALONE);
        let _agent = scene.agent(&[]);
        let pod = scene.pod("web-0").without_sidecar();
        pod.unset("sidecar.istio.io/status");
        scene.publish_and_add(&pod);
        assert!(!has_guard(&pod));
        scene.label_namespace(&json!({"istio.io/dataplane-mode": "ambient"}));
        pod.until(has_guard);
        is_rejected(&pod);
        scene.label_namespace(&json!({}));
        pod.until(|pod| !has_guard(pod));
    });
}

/// Beside another tool's redirection. Its author can't switch the guard off.
#[test]
fn a_pod_keeps_its_guard_if_its_author_turns_the_injection_off_later() {
    scene(|scene| {
        scene.configure(ALONE);
        let _agent = scene.agent(&[]);
        let pod = scene.added("web-0", &[]);
        assert!(has_guard(&pod));
        pod.label("sidecar.istio.io/inject", "false");
        pod.set("sidecar.istio.io/inject", "false");
        scene.annotate(&pod, EXCLUDE_UIDS, "7000");
        // Nothing else changes with it, so wait for a comparison.
        pause();
        scene.wait_for_counts([1, 0, 0, 0]);
        check_until(scene, &pod, || scene.report().counts.current == 1);
        assert!(has_guard(&pod));
        pod.unset("sidecar.istio.io/status");
        scene.publish(&pod);
        scene.configure(&ALONE.replace(r#""uid-exclude""#, r#""uid-exclude", "uids": "9000""#));
        pod.until(|pod| pod.excludes_uid(9000));
        assert!(has_guard(&pod));
    });
}

#[test]
fn an_event_names_a_pod_that_can_not_have_a_guard() {
    scene(|scene| {
        scene.configure(ALONE);
        let _agent = scene.agent(&[]);
        let pod = scene.pod("web-0").with_init_containers(&["istio-init"]);
        scene.publish_and_add(&pod);
        let message = scene.wait_for_event(&pod, "DetourNotGuarded", "istio-init");
        assert!(message.contains("use Istio's CNI plugin or detour"), "{message}");
        assert!(!has_guard(&pod));
    });
}
