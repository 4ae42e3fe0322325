//! A node that was off for a month: the plugin's token has expired, and the agent starts with or without an API server.

use crate::node::{Node, OWN_LIST, SETTLED, meshed_pod, on_a_node};
use crate::shipped::{NAMESPACE, base, cluster};
use crate::support::health::get;
use crate::support::netns_pod::Pod;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use std::fs;

const CALICO: &str = include_str!("../golden/10-calico.conflist");
const KUBECONFIG: &str = "var/lib/cni/detour/kubeconfig";

/// Replaces the plugin's token by one that expired in 2001. The API server answers 401 in any case, because the
/// signature is invalid.
fn expire_token(node: &Node<'_>) -> String {
    let part = |value: &Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
    let claims = json!({"sub": format!("system:serviceaccount:{NAMESPACE}:detour-plugin"), "exp": 1_000_000_000});
    let expired = format!("{}.{}.c2lnbmF0dXJl", part(&json!({"alg": "RS256", "typ": "JWT"})), part(&claims));
    let text = node.read(KUBECONFIG).replace(&node.plugin_token(), &expired);
    fs::write(node.path(KUBECONFIG), text).expect("a tmpfs");
    assert_eq!(node.plugin_token(), expired);
    expired
}

/// Installs the plugin with an agent that ends, and replaces the token as [`expire_token`] does.
fn leave_expired_token(node: &Node<'_>) -> String {
    let agent = node.start_agent("a");
    agent.wait_for_log(SETTLED);
    assert!(agent.ended().0.success());
    expire_token(node)
}

#[track_caller]
fn the_pod_starts(node: &Node<'_>, pod: &Value) {
    let sandbox = Pod::new();
    node.call_with("ADD", &sandbox, pod, &annotations(pod)).expect("added");
    assert!(sandbox.redirects());
    node.call("DEL", &sandbox, pod).expect("deleted");
}

/// Returns the status of the agent's readiness.
fn readiness(serving: &str) -> String {
    let (_, port) = serving.rsplit_once(':').expect("an address");
    get(&format!("[::1]:{}", port.trim()), "/readyz").0
}

fn annotations(pod: &Value) -> Value {
    json!({"io.kubernetes.cri.pod-annotations": pod["metadata"]["annotations"]})
}

/// Checks that a pod with a sidecar fails with this code and text, and that one without starts.
#[track_caller]
fn only_the_pod_with_a_sidecar_waits(node: &Node<'_>, pod: &Value, code: u64, part: &str) {
    let (sandbox, plain) = (Pod::new(), Pod::new());
    let refused = node.call_with("ADD", &sandbox, pod, &annotations(pod)).expect_err("it waits");
    assert_eq!(refused["code"], code, "{refused}");
    let text = format!("{}: {}", refused["msg"], refused["details"]);
    assert!(text.contains("pod shop/web-0") && text.contains(part) && text.contains("the pod has a sidecar"), "{text}");
    assert!(!sandbox.redirects());
    let source = json!({"io.kubernetes.cri.pod-annotations": {"kubernetes.io/config.source": "api"}});
    for verb in ["ADD", "DEL"] {
        node.call_with(verb, &plain, pod, &source).expect("it needs no facts");
    }
    node.call_with("DEL", &sandbox, pod, &annotations(pod)).expect("deleted");
}

#[test]
fn with_an_expired_token_only_pods_with_a_sidecar_wait_for_the_agent() {
    let plane = cluster();
    let admin = plane.admin();
    let pod = meshed_pod(&admin, "web-0");
    on_a_node(&plane, &base("kubernetes"), |node| {
        let expired = leave_expired_token(node);
        only_the_pod_with_a_sidecar_waits(node, &pod, 101, "401");

        // The agent renews the token with its own one, before the node is ready.
        let second = node.start_agent("b");
        let serving = second.wait_for_log("serving /healthz");
        second.wait_for_log(SETTLED);
        assert_ne!(node.plugin_token(), expired);
        second.wait_for_log("the plugin is ready on this node");
        assert!(readiness(&serving) == "200");
        the_pod_starts(node, &pod);
    });
}

#[test]
fn without_a_valid_token_and_an_api_server_the_agent_still_restores_the_configuration_list() {
    let plane = cluster();
    let admin = plane.admin();
    let pod = meshed_pod(&admin, "web-0");
    on_a_node(&plane, &base("kubernetes"), |node| {
        let expired = leave_expired_token(node);
        plane.kill_api();

        let second = node.start_agent("b");
        let serving = second.wait_for_log("serving /healthz");
        second.wait_for_log("missing: a valid token of the plugin, whose token expired at 2001-09-09");
        node.write(OWN_LIST, CALICO);
        second.wait_for_log("write /etc/cni/net.d/00-detour.conflist");
        assert!(node.read(OWN_LIST).contains("\"detour\""), "{}", node.read(OWN_LIST));
        assert_eq!(node.plugin_token(), expired);
        assert_eq!(readiness(&serving), "503");
        only_the_pod_with_a_sidecar_waits(node, &pod, 11, "no usable answer");

        plane.start_api();
        second.wait_for_log("write /var/lib/cni/detour/kubeconfig");
        second.wait_for_log(SETTLED);
        assert_ne!(node.plugin_token(), expired);
        the_pod_starts(node, &pod);
    });
}
