//! In the list of the cluster's network after its plugin, and as the primary plugin.

use crate::node::Node;
use crate::pod::Pod;
use crate::{bridge, chained, network};
use serde_json::{Value, json};

#[test]
fn a_pod_is_redirected_from_its_start_and_leaves_nothing() {
    let node = Node::with("chained", &[("10-net.conflist", &network(&[chained()]))]);
    node.has_plugin();
    let pod = Pod::meshed("web");
    node.knows(&pod.manifest());
    let sandbox = node.start(&pod).expect("it starts");
    for rules in node.rules(&sandbox) {
        for wanted in [
            "-A OUTPUT -j ISTIO_OUTPUT",
            "-A PREROUTING -p tcp -j ISTIO_INBOUND",
            "-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001",
        ] {
            assert!(rules.iter().any(|rule| rule == wanted), "{wanted} is not in {rules:#?}");
        }
    }
    let container = node.start_container(&sandbox, &pod);
    for id in [&sandbox, &container, &container[..13], &format!("containerd://{container}")] {
        let rules = node.ok(&[env!("CARGO_BIN_EXE_detour"), "rules", "--container", id, "-o", "json"]);
        let rules: Value = serde_json::from_str(&rules).expect("JSON");
        let attachment = format!("attachment net/eth0 of pod sandbox {sandbox}");
        assert_eq!((&rules["attachments"], &rules["as_asked"]), (&json!([attachment]), &json!(true)), "{id}");
    }
    node.remove(&sandbox);
    assert_eq!(node.left(), Vec::<String>::new());
}

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

#[test]
fn a_pod_gets_the_networks_that_it_selects_and_outlives_the_runtime() {
    let mut node = Node::with("primary", &[("00-detour.conf", &primary()), ("10-net.conflist", &network(&[]))]);
    node.has_plugin();
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
    // containerd passes annotations, and those of this pod show that it has no sidecar: the plugin needs no facts.
    let plain = Pod::new("plain", json!({"kubernetes.io/config.source": "api"}));
    let other = node.start(&plain).expect("it starts without facts");
    assert_eq!(node.rules(&other), [Vec::<String>::new(), Vec::new()]);
    node.remove(&other);
    node.restart_containerd();
    assert_eq!(node.inspect(&sandbox)["status"]["state"], "SANDBOX_READY");
    node.remove(&sandbox);
    assert_eq!(node.left(), Vec::<String>::new());
}
