//! Live policy of a pod whose attachments run in this process, together with the node's own sub-plugins.

use crate::node::{Node, istio_cni, pod_object};
use detour_cni::cluster;
use detour_cni::cni::{CniCommand, NetConf};
use detour_cni::plugin::running::live_policy::running_container;
use detour_cni::pod::PodRef;
use detour_cni::policy::{LivePolicyScope, Policy};
use detour_cni::state::Attachment;
use serde_json::{Value, json};
use std::path::Path;

const ROOT: &str = "/";

/// Returns what the pod gets if the annotation has this value, and whether that is applied.
fn following(node: &Node, conf: &Value, uids: Option<&str>) -> (Vec<(Attachment, Policy)>, bool) {
    let mut pod = pod_object("default/istio-cni,default/excludedns");
    if let Some(uids) = uids {
        pod["metadata"]["annotations"]["detour.io/exclude-uids"] = uids.into();
    }
    node.manifest("pod", &pod);
    let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").expect("valid");
    let wanted = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: Some("uid-1".into()) };
    let facts = cluster::source(&conf.kubernetes).expect("manifests").facts(&wanted, true).expect("readable");
    let running = running_container(&node.pod.name).expect("readable").expect("saved state");
    assert_eq!(running.pod, Some(wanted));
    // The configuration of a primary plugin does not contain what the pod selects.
    let desired = running.desired(Path::new(ROOT), &facts, &[&conf]).expect("valid").policies;
    let policies = running.following(&facts, &desired, LivePolicyScope::Exclusions);
    let is_applied = running.has_applied(&policies);
    (policies, is_applied)
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
    assert!(following(&node, &conf, None).1, "an ADD leaves a current policy");

    let (policies, is_applied) = following(&node, &conf, Some("77"));
    assert!(!is_applied && policies.len() == 1, "{policies:?}");
    let apply = |policies: &[(Attachment, Policy)]| {
        let running = running_container(&node.pod.name).expect("readable").expect("saved state");
        running.apply(Path::new(ROOT), policies).expect("applied");
    };
    apply(&policies);
    let rules = node.pod.rules();
    assert!(rules.iter().any(|rule| rule.contains("meta skuid 77 ")), "{rules:#?}");
    assert!(before.iter().all(|rule| rules.contains(rule)), "{rules:#?}");
    node.done("CHECK", &conf);

    apply(&following(&node, &conf, None).0);
    assert_eq!(node.pod.rules(), before);
    node.done("DEL", &conf);
    assert_eq!(node.pod.rules(), [""; 0]);
}
