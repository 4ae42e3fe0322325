//! The plugin's own token: renewed, expired, and reused while the API server is down; the agent's answers to the plugin.

use crate::control_plane::ControlPlane;
use crate::node::{NAME, Node, SETTLED, meshed_pod, on_a_node};
use crate::shipped::{NAMESPACE, apply, base, chart, cluster, cluster_with, established, namespaces, types};
use crate::support::health::get;
use crate::support::netns_pod::Pod;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use detour_cni::cluster::{DefinitionQuery, Lookup, ObjectRef, Token};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::fs;

#[test]
fn the_plugin_works_with_a_token_of_its_own() {
    let plane = cluster();
    let admin = plane.admin();
    let pod = meshed_pod(&admin, "web-0");
    on_a_node(&plane, &base("kubernetes"), |node| {
        let agent = node.settled_agent("a");
        let token = Token::of_account(&node.plugin_token(), NAMESPACE, "detour-plugin").expect("the plugin's");
        let minutes = (token.expires.as_second() - Timestamp::now().as_second()) / 60;
        assert!((50..=60).contains(&minutes), "{minutes}");

        let sandbox = Pod::new();
        node.call("ADD", &sandbox, &pod).expect("added");
        assert!(sandbox.redirects());

        // The agent's own token becomes invalid with its pod.
        let (status, _) = agent.ended();
        assert!(status.success());
        let another = Pod::new();
        node.call("ADD", &another, &pod).expect("it works without an agent");
        node.call("DEL", &another, &pod).expect("deleted");
        node.call("DEL", &sandbox, &pod).expect("deleted");
        assert!(!sandbox.redirects());

        let plugin = plane.with_token(&node.plugin_token());
        admin.delete(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NAME}})).expect("deleted");
        // The API server remembers for some seconds that the token is valid.
        plane.until(|| plugin.get(&pod).is_err_and(|refused| refused.code == 401));
    });
}

#[test]
fn without_credentials_the_plugin_works_while_an_agent_runs() {
    let objects = chart(&["cni.credentials=false"]);
    let plane = cluster_with(&objects);
    let pod = meshed_pod(&plane.admin(), "web-0");
    on_a_node(&plane, &objects, |node| {
        let (first, second) = (Pod::new(), Pod::new());
        let start = || {
            let agent = node.start_agent("a");
            agent.wait_for_logs(&["watching pods", "watching namespaces", SETTLED]);
            agent
        };
        let agent = start();
        assert!(node.files().iter().all(|file| !file.contains("kubeconfig")), "{:?}", node.files());
        node.call("ADD", &first, &pod).expect("the agent answers");
        assert!(first.redirects() && agent.ended().0.success());
        let failed = node.call("ADD", &second, &pod).expect_err("no agent");
        let msg = failed["msg"].as_str().expect("text");
        assert!(
            failed["code"] == 11 && msg.contains("no facts from the agent; check that the agent's pod"),
            "{failed}"
        );
        assert!(!second.redirects());
        node.call("DEL", &first, &pod).expect("DEL needs no facts");
        let _agent = start();
        node.call("ADD", &second, &pod).expect("the agent answers again");
        assert!(second.redirects());
    });
    let account = json!({
        "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": NAMESPACE, "name": "detour-plugin"},
    });
    assert_eq!(plane.admin().get(&account).expect_err("not created").code, 404);
}

#[test]
fn while_the_api_server_is_down_the_token_on_the_node_stays() {
    let plane = cluster();
    let admin = plane.admin();
    let pod = meshed_pod(&admin, "web-0");
    on_a_node(&plane, &base("kubernetes"), |node| {
        let agent = node.settled_agent("a");
        let token = node.plugin_token();
        plane.kill_api();
        drop(agent);

        // An agent that starts now reuses the token.
        let started = node.start_agent("b");
        let serving = started.wait_for_log("serving /healthz");
        // The request runs in the background.
        let subject = "ServiceAccount kube-system/detour-plugin: POST https://127.0.0.1:";
        let logged = started.wait_for_logs(&["the plugin keeps the token that it has", SETTLED]);
        assert!(logged.iter().any(|line| line.contains(subject)), "{logged:?}");
        assert_eq!(node.plugin_token(), token);
        let (_, port) = serving.rsplit_once(':').expect("an address");
        let metrics = get(&format!("[::1]:{}", port.trim()), "/metrics").1;
        assert!(metrics.contains("\ndetour_plugin_token_renewal_failed 1\n"), "{metrics}");
        let sandbox = Pod::new();
        let refused = node.call("ADD", &sandbox, &pod).expect_err("neither agent nor API server answers");
        assert_eq!(refused["code"], 11, "{refused}");

        plane.start_api();
        node.call("ADD", &sandbox, &pod).expect("added");
        assert!(sandbox.redirects());
    });
}
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
fn with_an_expired_token_only_pods_with_a_sidecar_wait_for_the_agent_and_the_api_server() {
    let plane = cluster();
    let admin = plane.admin();
    let pod = meshed_pod(&admin, "web-0");
    on_a_node(&plane, &base("kubernetes"), |node| {
        assert!(node.settled_agent("a").ended().0.success());
        let expired = expire_token(node);
        only_the_pod_with_a_sidecar_waits(node, &pod, 101, "401");

        plane.kill_api();
        let second = node.start_agent("b");
        let serving = second.wait_for_log("serving /healthz");
        second.wait_for_log("missing: a valid token of the plugin, whose token expired at 2001-09-09");
        assert_eq!(readiness(&serving), "503");
        only_the_pod_with_a_sidecar_waits(node, &pod, 11, "no usable answer");
        assert_eq!(node.plugin_token(), expired);

        plane.start_api();
        // The agent renews the token with its own one, before the node is ready.
        second.wait_for_log(SETTLED);
        assert_ne!(node.plugin_token(), expired);
        second.wait_for_log("the plugin is ready on this node");
        assert!(readiness(&serving) == "200");
        let sandbox = Pod::new();
        node.call_with("ADD", &sandbox, &pod, &annotations(&pod)).expect("added");
        assert!(sandbox.redirects());
        node.call("DEL", &sandbox, &pod).expect("deleted");
    });
}

#[test]
fn a_resource_type_that_is_created_later_is_watched() {
    let plane = ControlPlane::start();
    let admin = plane.admin();
    let (namespaces, types) = (namespaces(), types());
    let objects = chart(&["primaryPlugin.enabled=true"]);
    apply(&admin, &namespaces);
    apply(&admin, &objects);
    on_a_node(&plane, &objects, |node| {
        let agent = node.start_agent("a");
        agent.wait_for_log(SETTLED);
        apply(&admin, &types);
        established(&admin, &types);
        let definition = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"namespace": "default", "name": "blue"}, "spec": {"config": "{}"},
        });
        admin.apply(&definition).expect("accepted");
        agent.wait_for_log("watching network attachment definitions");
        let object = ObjectRef { namespace: "default".into(), name: "blue".into() };
        let found = node.source().definitions(&[DefinitionQuery { object, awaited: false }]).expect("an answer");
        assert!(matches!(&found[..], [Lookup::Found(definition)] if definition.config == "{}"), "{found:?}");
        let plugin = format!("system:serviceaccount:{NAMESPACE}:detour-plugin");
        assert!(plane.audit().iter().all(|event| event["user"]["username"] != plugin.as_str()), "the agent answers");
    });
}
