//! Attacks by the author of a definition on a node with this primary plugin: the node's keys apply in this process and
//! in plugins that it starts.

use crate::node::{Node, istio_cni, made};
use crate::recorders::add_prints;
use nix::unistd::{Uid, chown};
use serde_json::{Value, json};
use std::fs;

/// Returns a node with `namespaceIsolation` on which the executable `detour` is a recorder.
fn node() -> Node {
    let mut node = Node::new();
    let recorders = std::mem::replace(&mut node.recorders, crate::recorders::Recorders::new());
    node.recorders = recorders.with("detour", &add_prints(&made("net1", "10.1.0.2/24"))).with("evil", "");
    node
}

fn conf(node: &Node, more: &Value) -> Value {
    let mut conf = node.recording(&json!({"namespaceIsolation": true, "delegate_timeout_seconds": 50}));
    conf.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    conf
}

/// Returns the node's keys as an attacker would set them.
fn evil() -> Value {
    json!({
        "cni_bin_dir": "/home/evil", "kubeconfig": "/home/evil/kubeconfig", "agent_socket": "/home/evil/socket",
        "exclude_namespaces": ["shop"], "timeout_seconds": 300,
    })
}

#[test]
fn blocks_of_this_plugin_in_a_list_get_the_nodes_keys() {
    let node = node();
    node.pod_selects("list");
    let own = json!({
        "type": "detour", "kubernetes": evil(), "log_file": "/root/.ssh/authorized_keys", "cni_agent_run_dir": "/home/evil",
        "chain": [{"type": "uid-exclude", "pod_overrides": true}, {"type": "detour", "kubernetes": evil()}],
    });
    let list = json!({"cniVersion": "1.0.0", "name": "list", "plugins": [{"type": "a", "kubernetes": 1}, own]});
    node.definition("shop", "list", &list);
    let chain = json!([{"type": "uid-exclude", "pod_overrides": false}]);
    let conf = conf(&node, &json!({"chain": chain}));
    let log = node.call("ADD", &conf).stderr;
    let ignored = "network shop/list: ignored keys: kubernetes.exclude_namespaces, kubernetes.cni_bin_dir, \
        kubernetes.kubeconfig, kubernetes.agent_socket, kubernetes.timeout_seconds, log_file, cni_agent_run_dir: only the \
        node can set them, in the runtime's configuration";
    assert!(log.contains(ignored), "{log}");
    let seen = node.recorders.seen();
    assert_eq!(node.recorders.order(), ["ADD default", "ADD a", "ADD detour"]);
    assert_eq!(seen[1].stdin["kubernetes"], 1, "another's plugin has what its author wrote");
    let kubernetes = json!({
        "manifests_dir": node.dir.join("manifests"), "cni_bin_dir": node.recorders.bin(), "timeout_seconds": 10,
        "agent_pod_prefixes": ["detour-agent-", "istio-cni-node-"], "exclude_namespaces": [],
    });
    let child = &seen[2].stdin;
    let equal = |found: &Value| found.as_object() == kubernetes.as_object();
    assert!(equal(&child["kubernetes"]) && equal(&child["chain"][1]["kubernetes"]), "{child:#}");
    assert_eq!((child.get("log_file"), child.get("cni_agent_run_dir")), (None, None));
    assert_eq!((&child["delegate_timeout_seconds"], &child["chain"][0]["pod_overrides"]), (&json!(50), &json!(false)));
    node.done("DEL", &conf);
    let deleted = node.recorders.seen();
    assert!(deleted[3].kind == "detour" && equal(&deleted[3].stdin["kubernetes"]), "{:?}", deleted[3]);
}

#[test]
fn a_definition_does_not_make_this_a_primary_plugin() {
    let node = node();
    node.pod_selects("mesh");
    let own = json!({"type": "detour", "delegates": [{"name": "x", "type": "evil"}], "binDir": "/home/evil"});
    for config in [own.clone(), json!({"name": "mesh", "plugins": [{"type": "a"}, own]})] {
        node.definition("shop", "mesh", &config);
        for more in [json!({}), json!({"in_process_types": []})] {
            let (code, msg) = node.refused("ADD", &conf(&node, &more));
            let wanted =
                "network shop/mesh: clusterNetwork, delegates: only the runtime's configuration can set these keys";
            assert!(code == 7 && msg.starts_with(wanted), "{msg}");
        }
    }
    assert_eq!(node.recorders.order(), [""; 0]);
}

#[test]
fn a_definition_does_not_weaken_the_nodes_chain() {
    let has = |node: &Node, uid: &str| node.pod.rules().iter().any(|rule| rule.contains(&format!("meta skuid {uid} ")));
    for (pinned, heard) in [(false, true), (true, false)] {
        let node = node();
        let mut pod = crate::node::pod_object("mesh");
        pod["metadata"]["annotations"]["detour.io/exclude-uids"] = "4321".into();
        node.manifest("pod", &pod);
        let block = json!({"type": "uid-exclude", "uids": [7], "pod_overrides": true});
        node.definition("shop", "mesh", &json!({"type": "detour", "chain": [block]}));
        let chain = json!([{"type": "uid-exclude", "uids": [9], "pod_overrides": !pinned}]);
        node.done("ADD", &conf(&node, &json!({"chain": chain})));
        assert!(has(&node, "9"), "the node's: {:?}", node.pod.rules());
        assert_eq!((has(&node, "7"), has(&node, "4321")), (heard, heard), "{pinned}: {:?}", node.pod.rules());
    }
}

/// With pins and bounds, the author of a definition can't turn off the redirection or exclude what a pod can't.
#[test]
fn pins_and_bounds_apply_to_definitions() {
    let redirect = json!({"type": "istio-redirect", "pod_overrides": false, "proxy_uid": [1337]});
    let chain = json!([redirect, {"type": "uid-exclude"}, {"type": "destination-exclude"}]);
    let node = node();
    node.pod_selects("mesh");
    let conf = conf(&node, &json!({"chain": chain, "allow": []}));
    node.definition("shop", "mesh", &json!({"type": "detour", "chain": [{"type": "uid-exclude"}]}));
    node.done("ADD", &conf);
    let expected = node.pod.rules();
    assert!(expected.iter().any(|rule| rule.contains("ISTIO_REDIRECT")), "{expected:?}");
    node.done("DEL", &conf);
    for evil in [
        json!({"inbound_interception_mode": "NONE"}),
        json!({"outbound_ip_ranges_exclude": "*"}),
        json!({"proxy_uid": [0, 1000]}),
    ] {
        let block = crate::pod::with(json!({"type": "istio-redirect"}), &evil);
        node.definition("shop", "mesh", &json!({"type": "detour", "chain": [block]}));
        let log = node.call("ADD", &conf).stderr;
        assert!(log.contains("ignored keys: chain[0] (istio-redirect is pinned)"), "{log}");
        assert_eq!(node.pod.rules(), expected, "{evil}");
        node.done("DEL", &conf);
    }
    for (evil, item) in [
        (json!({"type": "uid-exclude", "uids": "*"}), "\"*\""),
        (json!({"type": "uid-exclude", "uids": [1]}), "\"1\""),
        (json!({"type": "destination-exclude", "ports": [443]}), "\"443\""),
    ] {
        node.definition("shop", "mesh", &json!({"type": "detour", "chain": [evil]}));
        let (code, msg) = node.refused("ADD", &conf);
        let outside = format!(
            "network shop/mesh, chain[0].{}: {item} is outside the bounds",
            evil.as_object().expect("keys").keys().nth(1).expect("two")
        );
        assert!(code == 7 && msg.contains(&outside), "{msg}");
        assert_eq!(node.pod.rules(), [""; 0]);
    }
}

#[test]
fn a_definition_excludes_namespaces_only_if_the_node_allows_it_or_wrote_it() {
    let excluding = json!({"exclude_namespaces": ["shop"]});
    let mut attachment = istio_cni();
    attachment.as_object_mut().expect("an object").extend(excluding.as_object().expect("an object").clone());
    let redirected = |node: &Node| node.pod.rules().iter().any(|rule| rule.contains("ISTIO_REDIRECT"));
    for (allowed, is_file, wanted) in [(false, false, true), (true, false, false), (false, true, false)] {
        let node = node();
        node.pod_selects("istio-cni");
        let conf_dir = node.dir.join("net.d");
        fs::create_dir(&conf_dir).expect("made");
        fs::write(conf_dir.join("istio-cni.conf"), attachment.to_string()).expect("written");
        node.definition("shop", "istio-cni", if is_file { &Value::Null } else { &attachment });
        let conf = conf(&node, &json!({"attachments_may_exclude_namespaces": allowed, "confDir": conf_dir}));
        node.done("ADD", &conf);
        assert_eq!(redirected(&node), wanted, "allowed: {allowed}, of the node's file: {is_file}");
        if is_file {
            node.done("DEL", &conf);
            chown(&conf_dir.join("istio-cni.conf"), Some(Uid::from_raw(12345)), None).expect("root");
            node.done("ADD", &conf);
            assert!(redirected(&node), "a file of another user is as good as a definition");
        }
    }
}

#[test]
fn a_state_directory_that_another_user_can_change_is_refused() {
    let node = node();
    node.pod_selects("");
    let directory = node.dir.join("of-another");
    fs::create_dir(&directory).expect("made");
    chown(&directory, Some(Uid::from_raw(12345)), None).expect("root");
    for cni_dir in [directory.clone(), directory.join("not/there")] {
        let (code, msg) = node.refused("ADD", &conf(&node, &json!({"cniDir": cni_dir})));
        assert!(code == 7 && msg.starts_with("cniDir is not used: ") && msg.contains("UID 12345"), "{code} {msg}");
    }
    assert_eq!(fs::read_dir(&directory).expect("readable").count(), 0);
    assert_eq!(node.recorders.order(), [""; 0]);
}
