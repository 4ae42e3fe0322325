//! A failed ADD is undone in reverse order, and its saved state is removed.

use crate::node::{Node, istio_cni, made};
use crate::recorders::{Recorders, add_prints, fails};
use serde_json::json;

fn failing() -> String {
    fails("ADD", &json!({"code": 42, "msg": "no carrier", "details": "port 7"}))
}

fn node(recorders: Recorders) -> Node {
    let node = Node::with(recorders.with("default", &add_prints(&made("eth0", "10.0.0.2/24"))));
    node.definition("default", "istio-cni", &istio_cni());
    node.definition("shop", "one", &json!({"cniVersion": "1.0.0", "type": "a"}));
    node.definition("shop", "two", &json!({"cniVersion": "1.0.0", "type": "b"}));
    node
}

#[test]
fn a_network_that_fails_undoes_those_before_it() {
    let node = node(Recorders::new().with("a", &add_prints(&made("net1", "10.1.0.2/24"))).with("b", &failing()));
    node.pod_selects("one,two,default/istio-cni");
    let (code, text) = node.refused("ADD", &node.recording(&json!({})));
    assert_eq!((code, &*text), (42, r#"network shop/two (net2): plugin type="b" failed (add): no carrier | port 7"#));
    assert_eq!(node.recorders.order(), ["ADD default", "ADD a", "ADD b", "DEL b", "DEL a", "DEL default"]);
    let seen = node.recorders.seen();
    assert_eq!(seen[4].stdin["prevResult"]["ips"][0]["address"], "10.1.0.2/24");
    assert!(!node.has_saved_state());
    assert_eq!(node.pod.rules(), [""; 0]);
}

#[test]
fn a_chained_plugin_that_fails_undoes_the_rules() {
    let node = node(Recorders::new().with("a", &failing()).with("b", &add_prints(&made("net2", "10.2.0.2/24"))));
    node.pod_selects("one,two,default/istio-cni");
    let (code, text) = node.refused("ADD", &node.recording(&json!({"chain_types": ["a"]})));
    assert!(code == 42 && text.starts_with("chained plugin shop/one (eth0): "), "{text}");
    assert_eq!(node.recorders.order(), ["ADD default", "ADD b", "ADD a", "DEL a", "DEL b", "DEL default"]);
    assert!(!node.has_saved_state());
    assert_eq!(node.pod.rules(), [""; 0]);
}

#[test]
fn contradicting_attachments_are_both_named() {
    let node = node(Recorders::new());
    let redirect = |port| json!({"name": "m", "cniVersion": "1.0.0", "type": "istio-cni", "chain": [{"type": "istio-redirect", "proxy_port": port}]});
    node.definition("shop", "m1", &redirect(15001));
    node.definition("shop", "m2", &redirect(16001));
    node.pod_selects("m1,m2");
    let (code, text) = node.refused("ADD", &node.recording(&json!({})));
    assert!(
        code == 7
            && text
                .contains("network shop/m1, chain[0] and network shop/m2, chain[0] contradict each other: proxy_port"),
        "{text}"
    );
    assert_eq!(node.recorders.order(), ["ADD default", "DEL default"]);
    assert!(!node.has_saved_state());
}
