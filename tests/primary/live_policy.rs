//! Live policy of a pod whose attachments run in this process, together with the node's own sub-plugins.

use crate::node::{Node, istio_cni, pod_object};
use detour_cni::cluster;
use detour_cni::cni::{CniCommand, NetConf};
use detour_cni::plugin::running::{Repeated, RepeatedAdd};
use detour_cni::pod::PodRef;
use serde_json::{Value, json};
use std::path::Path;

/// Repeats the ADD of the pod whose annotation has this value.
fn repeat(node: &Node, conf: &Value, uids: Option<&str>) -> Repeated {
    let mut pod = pod_object("default/istio-cni,default/excludedns");
    if let Some(uids) = uids {
        pod["metadata"]["annotations"]["detour.io/exclude-uids"] = uids.into();
    }
    node.manifest("pod", &pod);
    let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").expect("valid");
    let wanted = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: Some("uid-1".into()) };
    let facts = cluster::source(&conf.kubernetes).expect("manifests").facts(&wanted, true).expect("readable");
    // The configuration of a primary plugin does not contain what the pod selects.
    let add =
        RepeatedAdd { root: Path::new("/"), facts: Some(&facts), installed: &[&conf], restores: true, found: None };
    add.run(&node.pod.name).expect("applied")
}

#[test]
fn the_united_policy_of_a_primary_plugin_follows_the_pod() {
    let node = Node::new();
    node.pod_selects("default/istio-cni,default/excludedns");
    node.definition("default", "istio-cni", &istio_cni());
    node.definition("default", "excludedns", &json!({"name": "excludedns", "type": "excludedns"}));
    let conf = node.recording(&json!({"chain": [{"type": "uid-exclude", "uids": [4242]}]}));
    node.done("ADD", &conf);
    let before = node.pod.rules();
    for uid in ["4242", "1337"] {
        assert!(before.iter().any(|rule| rule.contains(&format!("meta skuid {uid}"))), "{before:#?}");
    }
    assert!(!repeat(&node, &conf, None).has_committed, "an ADD leaves a current policy");

    let repeated = repeat(&node, &conf, Some("77"));
    assert_eq!(repeated.change, "excluded: UID 77");
    let rules = node.pod.rules();
    assert!(rules.iter().any(|rule| rule.contains("meta skuid 77 ")), "{rules:#?}");
    assert!(before.iter().all(|rule| rules.contains(rule)), "{rules:#?}");
    node.done("CHECK", &conf);

    repeat(&node, &conf, None);
    assert_eq!(node.pod.rules(), before);
    node.done("DEL", &conf);
    assert_eq!(node.pod.rules(), [""; 0]);
}
