//! As the plugin that the runtime calls, which runs the others.

use crate::node::Node;
use crate::pod::Pod;
use crate::{bridge, network};
use serde_json::{Value, json};

fn primary() -> Value {
    json!({
        "cniVersion": "1.0.0", "name": "detour", "type": "detour",
        "capabilities": {"io.kubernetes.cri.pod-annotations": true},
        "confDir": "NODE/net.d", "binDir": "NODE/bin", "clusterNetwork": "net",
        "kubernetes": {"manifests_dir": "NODE/manifests"},
    })
}

fn definition(namespace: &str, name: &str, config: &Value) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": name, "namespace": namespace}, "spec": {"config": config.to_string()},
    })
}

fn node(name: &str) -> Node {
    let node = Node::with(name, &[("00-detour.conf", &primary()), ("10-net.conflist", &network(&[]))]);
    node.has_plugin();
    node
}

#[test]
fn a_pod_gets_the_networks_that_it_selects_and_outlives_the_runtime() {
    let mut node = node("primary");
    let mesh = json!({"cniVersion": "1.0.0", "name": "istio-cni", "type": "istio-cni"});
    node.knows(&definition("default", "istio-cni", &mesh));
    let mut second = bridge("second0", &["10.86.0.0/24"]);
    second["cniVersion"] = "1.0.0".into();
    second["name"] = "second".into();
    node.knows(&definition("shop", "second", &second));
    let pod = Pod::meshed("web").select("default/istio-cni, second@data0");
    node.knows(&pod.manifest());
    let sandbox = node.start(&pod).expect("it starts");
    let links: Value = serde_json::from_str(&node.ok_in(&sandbox, &["ip", "-json", "addr"])).expect("JSON");
    let links = links.as_array().expect("links").iter();
    assert_eq!(links.filter_map(|link| link["ifname"].as_str()).collect::<Vec<_>>(), ["lo", "eth0", "data0"]);
    let reported = node.inspect(&sandbox)["status"]["network"].clone();
    assert_eq!(reported, json!({"ip": "10.85.0.2", "additionalIps": [{"ip": "fd00:85::2"}]}));
    for rules in node.rules(&sandbox) {
        assert!(rules.contains(&"-A OUTPUT -j ISTIO_OUTPUT".to_owned()), "{rules:#?}");
    }
    node.restart_containerd();
    assert_eq!(node.inspect(&sandbox)["status"]["state"], "SANDBOX_READY");
    node.remove(&sandbox);
    assert_eq!(node.left(), Vec::<String>::new());
}

#[test]
fn nothing_is_asked_for_a_pod_whose_annotations_say_it_all() {
    let node = node("plain");
    let plain = Pod::new("plain", json!({"kubernetes.io/config.source": "api"}));
    let sandbox = node.start(&plain).expect("it starts without facts");
    assert_eq!(node.rules(&sandbox), [Vec::<String>::new(), Vec::new()]);
    node.remove(&sandbox);
    assert_eq!(node.left(), Vec::<String>::new());
}
