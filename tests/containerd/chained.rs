//! In the list of the cluster's network, after its plugin.

use crate::node::Node;
use crate::pod::Pod;
use crate::{chained, network};
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

#[test]
fn a_pod_that_is_refused_leaves_nothing() {
    let node = Node::with("refused", &[("10-net.conflist", &network(&[chained()]))]);
    node.has_plugin();
    let (old, new) = (Pod::meshed("web"), Pod::meshed("web"));
    node.knows(&old.manifest());
    let error = node.start(&new).expect_err("it is not the pod that is known");
    assert!([&old.uid, &new.uid, "shop/web"].iter().all(|part| error.contains(*part)), "{error}");
    assert_eq!(node.left(), Vec::<String>::new());
}
