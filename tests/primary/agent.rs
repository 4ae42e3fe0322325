//! The node agent's own pod, which must start without facts because it provides them.

use crate::node::Node;
use crate::pod::call;
use crate::server::{Answer, Server};
use crate::support::called::Called;
use serde_json::{Value, json};
use std::fs;

/// Runs ADD and DEL for the agent's pod.
fn agent(node: &Node, conf: &Value) -> Called {
    let mut environment = node.environment("ADD");
    environment.insert("CNI_ARGS".into(), "K8S_POD_NAMESPACE=mesh;K8S_POD_NAME=detour-agent-x".into());
    let added = call(&environment, conf);
    if added.success {
        environment.insert("CNI_COMMAND".into(), "DEL".into());
        let deleted = call(&environment, conf);
        assert!(deleted.success, "{deleted:?}");
    }
    added
}

/// Returns a configuration whose default network is a file in confDir, with a kubeconfig that does not exist yet.
fn conf(node: &Node, more: &Value) -> Value {
    let conf_dir = node.dir.join("net.d");
    fs::create_dir_all(&conf_dir).expect("made");
    fs::write(conf_dir.join("cluster.conf"), r#"{"cniVersion":"1.0.0","name":"cluster","type":"default"}"#)
        .expect("written");
    let mut conf = json!({
        "cniVersion": "1.1.0", "name": "primary", "type": "detour", "clusterNetwork": "cluster", "confDir": conf_dir,
        "cniDir": node.dir.join("state"), "binDir": node.recorders.bin(), "defaultNetworks": ["audit"],
        "chain": [{"type": "istio-redirect"}],
        "kubernetes": {"agent_namespace": "mesh", "kubeconfig": node.dir.join("absent"), "timeout_seconds": 1},
    });
    conf.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    conf
}

#[test]
fn the_agents_pod_gets_only_the_cluster_network_and_needs_no_kubeconfig() {
    let node = Node::new();
    let told = json!({"io.kubernetes.cri.pod-annotations": {"k8s.v1.cni.cncf.io/networks": "one"}});
    for runtime_config in [json!({}), told] {
        let added = agent(&node, &conf(&node, &json!({"runtimeConfig": runtime_config})));
        assert!(added.success, "{added:?}");
    }
    assert_eq!(node.recorders.order(), ["ADD default", "DEL default"].repeat(2));
    let (code, _) = node.refused("ADD", &conf(&node, &json!({})));
    assert_eq!(code, 11, "any other pod waits for the kubeconfig");
}

#[test]
fn the_agents_pod_does_not_wait_for_an_unresponsive_api() {
    let (node, server) = (Node::new(), Server::plain(|_| Answer::Hang));
    let kubeconfig = node.dir.join("absent");
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": ""}}],
        "clusters": [{"name": "k", "cluster": {"server": server.http()}}],
    });
    fs::write(kubeconfig, text.to_string()).expect("writable");
    let added = agent(&node, &conf(&node, &json!({})));
    assert!(added.success, "{added:?}");
    assert_eq!(server.lines(), [""; 0]);
}

#[test]
fn the_agents_pod_gets_a_cluster_network_that_is_a_definition() {
    let node = Node::new();
    node.definition("kube-system", "ovn", &json!({"cniVersion": "1.0.0", "type": "default"}));
    let kubernetes = json!({"agent_namespace": "mesh", "manifests_dir": node.dir.join("manifests")});
    let added = agent(&node, &conf(&node, &json!({"clusterNetwork": "ovn", "kubernetes": kubernetes})));
    assert!(added.success, "{added:?}");
    assert_eq!(node.recorders.order(), ["ADD default", "DEL default"]);
}
