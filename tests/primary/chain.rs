//! Sub-plugins of the node and of attachments, and executables on the default network's result.

use crate::node::{Node, istio_cni, made};
use crate::recorders::add_prints;
use serde_json::{Value, json};

fn node() -> Node {
    let mut prev = made("eth0", "10.0.0.3/24");
    prev["dns"] = json!({"nameservers": ["10.0.0.10"]});
    let mut node = Node::new();
    let recorders = std::mem::replace(&mut node.recorders, crate::recorders::Recorders::new());
    node.recorders = recorders.with("home-made", &add_prints(&prev)).with("silent", "");
    node
}

#[test]
fn chain_members_work_on_the_default_networks_result() {
    let node = node();
    node.pod_selects("own,istio-cni,one");
    node.definition("shop", "istio-cni", &istio_cni());
    node.definition("shop", "own", &json!({"cniVersion": "0.4.0", "type": "home-made"}));
    node.definition("shop", "one", &json!({"cniVersion": "1.0.0", "type": "a"}));
    let chain = json!([{"type": "silent", "x": 1}, {"type": "uid-exclude", "uids": [4321]}]);
    let conf = node.recording(&json!({"chain": chain, "chain_types": ["home-made"]}));
    let result = node.done("ADD", &conf);
    assert_eq!(node.recorders.order(), ["ADD default", "ADD a", "ADD home-made", "ADD silent"]);
    let seen = node.recorders.seen();
    let own = &seen[2];
    assert_eq!(own.environment["CNI_IFNAME"], "eth0");
    assert_eq!((&own.stdin["prevResult"]["cniVersion"], &own.stdin["name"]), (&json!("0.4.0"), &json!("own")));
    assert_eq!(own.stdin["prevResult"]["ips"][0]["address"], "10.0.0.2/24");
    assert_eq!((&seen[3].stdin["x"], &seen[3].stdin["name"]), (&json!(1), &json!("primary")));
    assert_eq!(seen[3].stdin["prevResult"]["ips"][0]["address"], "10.0.0.3/24");
    assert_eq!(result["ips"][0]["address"], "10.0.0.3/24");
    assert_eq!(result["dns"], json!({"nameservers": ["10.0.0.10"]}));
    let names: Vec<_> = result["interfaces"].as_array().expect("a list").iter().map(|i| &i["name"]).collect();
    assert_eq!(names, ["eth0", "net1"]);
    let rules = node.pod.rules().join("\n");
    assert!(rules.contains("ISTIO_REDIRECT") && rules.contains("4321"), "{rules}");
    node.done("CHECK", &conf);
    node.done("DEL", &conf);
    let order = node.recorders.order();
    assert_eq!(
        order[4..],
        [
            "CHECK default",
            "CHECK a",
            "CHECK home-made",
            "CHECK silent",
            "DEL silent",
            "DEL home-made",
            "DEL a",
            "DEL default"
        ]
    );
    assert_eq!(node.pod.rules(), [""; 0]);
}

#[test]
fn the_nodes_chain_is_for_every_pod() {
    let node = node();
    node.pod_selects("");
    let conf = node.recording(&json!({"chain": [{"type": "istio-redirect"}, {"type": "uid-exclude", "uids": [4321]}]}));
    node.done("ADD", &conf);
    assert!(node.pod.rules().iter().any(|rule| rule.contains("4321")));
    node.done("DEL", &conf);
}

#[test]
fn an_attachments_keys_lie_over_the_nodes() {
    let node = node();
    node.pod_selects("mesh");
    let own = json!({"type": "istio-redirect", "proxy_port": 16001});
    node.definition("shop", "mesh", &json!({"cniVersion": "1.0.0", "type": "istio-cni", "chain": [own]}));
    let chain = json!([{"type": "istio-redirect", "proxy_port": 17001, "inbound_capture_port": 17006}]);
    node.done("ADD", &node.recording(&json!({"chain": chain})));
    let rules = node.pod.rules().join("\n");
    assert!(rules.contains("16001") && rules.contains("17006") && !rules.contains("17001"), "{rules}");
}

#[test]
fn an_excluded_namespace_has_its_networks_and_no_rules() {
    let node = node();
    node.pod_selects("istio-cni,one");
    node.definition("shop", "istio-cni", &istio_cni());
    node.definition("shop", "one", &json!({"cniVersion": "1.0.0", "type": "a"}));
    let conf = node.recording(&json!({"exclude_namespaces": ["shop"], "chain": [{"type": "silent"}]}));
    node.done("ADD", &conf);
    assert_eq!(node.recorders.order(), ["ADD default", "ADD a", "ADD silent"]);
    assert_eq!(node.pod.rules(), [""; 0]);
    node.done("CHECK", &conf);
    assert_eq!(node.done("DEL", &conf), Value::Null);
}
