//! Tests of the node configuration.

use super::*;
use crate::cni::OutsideBounds;

fn node(text: &Value) -> NodeConf {
    let (node, warnings) = NodeConf::parse("/node.json", text.to_string().as_bytes()).expect("accepted");
    assert_eq!(warnings, [""; 0]);
    node
}

/// Returns an attachment's configuration with the node's keys, and the warning.
fn governed(node: &NodeConf, conf: &Value) -> (Value, Option<String>) {
    let mut keys = conf.as_object().expect("an object").clone();
    let ignored = node.govern(&mut keys, None, "detour");
    (Value::Object(keys), ignored)
}

fn ignored(keys: &str) -> Option<String> {
    Some(format!("ignored keys: {keys}: only the node can set them, in /node.json"))
}

/// Returns a node configuration that sets all keys.
fn all_keys() -> Value {
    json!({
        "log_file": "/var/log/detour.log",
        "delegate_timeout_seconds": 60,
        "auto_dialect": "nftables",
        "kubernetes": {
            "kubeconfig": "/var/lib/cni/detour/kubeconfig", "agent_socket": "/run/detour/agent.sock",
            "manifests_dir": "/m", "cni_bin_dir": "/opt/cni/bin", "timeout_seconds": 10,
            "agent_namespace": "istio-system", "agent_pod_prefixes": ["detour-agent-"],
            "exclude_namespaces": ["kube-system"], "cluster_dns": ["10.96.0.10"],
        },
        "chain": [{"type": "istio-redirect", "proxy_port": 15001}, {"type": "uid-exclude", "uids": ["1337"]}],
        "allow": {"uids": 8}, "outside_bounds": "ignore",
        "pinned": ["istio-redirect"], "attachments_may_exclude_namespaces": false, "primary": false,
    })
}

#[test]
fn the_keys_of_a_configuration_can_be_written_and_read_back() {
    let chain = json!([{"type": "uid-exclude", "pod_overrides": false}, {"type": "istio-redirect"},
        {"type": "dns-exclude", "allow": {"resolvers": "all"}}]);
    let conf = json!({
        "name": "n", "type": "detour", "log_file": "/var/log/d.log", "exclude_namespaces": ["a"],
        "attachments_may_exclude_namespaces": true, "clusterNetwork": "ovn", "binDir": "/b", "kubeconfig": "/k",
        "chain": chain, "allow": [{"uids": 7}], "outside_bounds": "ignore",
    });
    let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").expect("accepted");
    let own = NodeConf::from_configuration(&conf);
    let wanted = json!({
        "log_file": "/var/log/d.log", "delegate_timeout_seconds": 60,
        "kubernetes": {
            "kubeconfig": "/k", "cni_bin_dir": "/b", "timeout_seconds": 10,
            "agent_pod_prefixes": ["detour-agent-", "istio-cni-node-"], "exclude_namespaces": ["a"],
        },
        "allow": [{"uids": 7}], "outside_bounds": "ignore", "chain": chain,
        "pinned": ["uid-exclude"], "attachments_may_exclude_namespaces": true, "primary": true,
    });
    assert_eq!(serde_json::from_str::<Value>(&own.text()).expect("JSON"), wanted);
    assert_eq!(node(&wanted).text(), own.text());
    assert_eq!(json!(node(&all_keys())), all_keys());
    assert!(!node(&wanted).is_attached() && node(&json!({"primary": false})).is_attached());
    assert_eq!(node(&json!({})).with_primary(Some(false)).primary, Some(false));
    assert_eq!(own.with_primary(Some(false)).primary, Some(true), "by the configuration itself");
}

#[test]
fn an_invalid_file_is_an_error_with_its_path_and_an_unknown_key_is_a_warning() {
    for (text, wanted) in [
        ("{", "/node.json: invalid JSON: EOF"),
        ("[]", "/node.json: node configuration: invalid value []; expected an object"),
        (r#"{"kubernetes": 1}"#, "/node.json: kubernetes: invalid value 1"),
        (r#"{"kubernetes": {"cni_bin_dir": "b"}}"#, "/node.json: kubernetes.cni_bin_dir: invalid value \"b\""),
        (r#"{"log_file": "b"}"#, "/node.json: log_file: invalid value \"b\"; expected an absolute path"),
        (r#"{"delegate_timeout_seconds": 0}"#, "/node.json: delegate_timeout_seconds: invalid value 0"),
        (r#"{"pinned": {}}"#, "/node.json: pinned: invalid value {}"),
        (
            r#"{"outside_bounds": "x"}"#,
            "/node.json: outside_bounds: invalid value \"x\"; expected one of reject, ignore",
        ),
        (r#"{"chain": {}}"#, "/node.json: chain: invalid value {}"),
        (r#"{"primary": "yes"}"#, "/node.json: primary: invalid value \"yes\"; expected true or false"),
        (r#"{"networks": []}"#, "/node.json: networks: invalid value []"),
        (r#"{"networks": {"b": 1}}"#, "/node.json: networks.b: invalid value 1"),
        (r#"{"networks": {"b": {"exclude_namespaces": {}}}}"#, "/node.json: networks.b.exclude_namespaces: "),
        (r#"{"networks": {"b": {"chain": [1]}}}"#, "/node.json: networks.b.chain[0]: invalid value 1"),
    ] {
        let error = NodeConf::parse("/node.json", text.as_bytes()).expect_err(text);
        assert!(error.code == Code::InvalidConfig && error.msg.starts_with(wanted), "{error}");
    }
    let text = br#"{"pined": 1, "kubernetes": {"other": "n"}, "pinned": "istio-redirct", "networks": {"b": {"x": 1}}}"#;
    let (_, warnings) = NodeConf::parse("/node.json", text).expect("accepted");
    let wanted = [
        "/node.json: pined: unknown key, ignored",
        "/node.json: kubernetes.other: unknown key, ignored",
        "/node.json: networks.b.x: unknown key, ignored",
    ];
    assert_eq!(warnings[..3], wanted);
    assert!(warnings[3].starts_with("/node.json: pinned: invalid value \"istio-redirct\", ignored"), "{warnings:?}");
}

#[test]
fn further_networks_add_their_pinned_sub_plugins_and_keys_of_their_own() {
    let first = all_keys();
    assert_eq!(node(&first).with_networks([]).text(), node(&first).text());
    let chain = json!([{"type": "dns-exclude"}]);
    let second = json!({"kubernetes": {"exclude_namespaces": ["two"]}, "pinned": ["dns-exclude"], "chain": chain});
    let all = node(&first).with_networks([("b".to_owned(), node(&second)), ("c".to_owned(), node(&first))]);
    let mut expected = first;
    expected["networks"] = json!({"b": {"exclude_namespaces": ["two"], "chain": chain}});
    expected["pinned"] = json!(["istio-redirect", "dns-exclude"]);
    assert_eq!(json!(all), expected);
    assert_eq!(node(&expected), all);
    // Without its own bounds, the second network has the default ones.
    assert!(!all.bounds("b").is_set());
    assert_eq!(all.bounds("other").allow, Some(json!({"uids": 8})));
    for (name, expected) in [("a", json!(["kube-system"])), ("b", json!(["two"]))] {
        let (own, _) = governed(&all, &json!({"name": name, "type": "detour"}));
        assert_eq!(own["kubernetes"]["exclude_namespaces"], expected);
        let list = json!({"name": name, "plugins": [{"type": "x"}, {"type": "detour"}]});
        let (list, _) = all.govern_all(&list, &["detour"]).expect("accepted").expect("governed");
        assert_eq!(list["plugins"][1]["kubernetes"]["exclude_namespaces"], expected, "in a configuration list");
    }
}

#[test]
fn an_attachment_sets_only_the_keys_of_the_allow_list() {
    let attempt = json!({
        "name": "n", "type": "istio-cni", "cniVersion": "1.0.0", "dialect": "auto", "log_level": "debug", "args": {"cni": {}},
        "prevResult": {}, "runtimeConfig": {}, "other": [1], "log_file": "/root/.ssh/authorized_keys",
        "delegate_timeout_seconds": 300, "auto_dialect": "iptables", "binDir": "/b", "allow": {}, "chain_types": "x",
        "cni_agent_run_dir": "/home/a", "pod_namespace": "shop", "exclude_namespaces": "shop", "node_bounds": {},
        "attachments_may_exclude_namespaces": true,
        "kubernetes": {
            "kubeconfig": "/home/a/kubeconfig", "agent_socket": "/home/a/socket", "manifests_dir": "/home/a",
            "cni_bin_dir": "/home/a/bin", "timeout_seconds": 300, "agent_namespace": "shop", "agent_pod_prefixes": "web-",
            "cluster_dns": "10.0.0.1", "node_name": "n",
        },
    });
    let (own, warning) = governed(&node(&all_keys()), &attempt);
    for key in ["name", "type", "cniVersion", "dialect", "log_level", "args", "prevResult", "runtimeConfig", "other"] {
        assert_eq!(own[key], attempt[key], "{key}");
    }
    for key in ["log_file", "delegate_timeout_seconds", "auto_dialect", "kubernetes"] {
        assert_eq!(own[key], all_keys()[key], "{key}");
    }
    for key in ["binDir", "allow", "chain_types", "cni_agent_run_dir", "pod_namespace", "exclude_namespaces"] {
        assert_eq!(own.get(key), None, "{key}");
    }
    assert_eq!(own["node_bounds"]["allow"], json!({"uids": 8}));
    let wanted = "exclude_namespaces, log_file, delegate_timeout_seconds, auto_dialect, binDir, allow, chain_types, \
        cni_agent_run_dir, pod_namespace, attachments_may_exclude_namespaces, kubernetes.kubeconfig, \
        kubernetes.agent_socket, kubernetes.manifests_dir, kubernetes.cni_bin_dir, kubernetes.timeout_seconds, \
        kubernetes.agent_namespace, kubernetes.agent_pod_prefixes, kubernetes.cluster_dns, kubernetes.node_name";
    assert_eq!(warning, ignored(wanted));
    // A key that the node does not set has its default.
    let (own, _) = governed(&node(&json!({})), &attempt);
    assert_eq!((own.get("log_file"), &own["kubernetes"]["timeout_seconds"]), (None, &json!(10)));
    assert_eq!(governed(&node(&json!({})), &json!({"kubernetes": []})).1, ignored("kubernetes"));
}

#[test]
fn an_equivalent_value_causes_no_warning() {
    let conf = json!({
        "exclude_namespaces": "kube-system", "log_file": "", "auto_dialect": "nftables", "allow": {"uids": 8},
        "chain": all_keys()["chain"],
        "kubernetes": {"timeout_seconds": "10", "agent_pod_prefixes": "detour-agent-", "exclude_namespaces": null},
    });
    assert_eq!(governed(&node(&all_keys()), &conf).1, None);
}

#[test]
fn attachments_exclude_namespaces_only_if_the_node_allows_it() {
    let conf = json!({"exclude_namespaces": ["shop", "kube-system", "shop"], "kubernetes": {"exclude_namespaces": "*"}, "chain": []});
    let mut text = all_keys();
    let (own, warning) = governed(&node(&text), &conf);
    assert_eq!(own["kubernetes"]["exclude_namespaces"], json!(["kube-system"]));
    assert_eq!(warning, ignored("kubernetes.exclude_namespaces, exclude_namespaces"));
    text["attachments_may_exclude_namespaces"] = json!(true);
    let conf = json!({"exclude_namespaces": ["shop", "kube-system", "shop"], "chain": []});
    let (own, warning) = governed(&node(&text), &conf);
    assert_eq!((&own["kubernetes"]["exclude_namespaces"], warning), (&json!(["kube-system", "shop"]), None));
    let all = node(&json!({"kubernetes": {"exclude_namespaces": "*"}}));
    assert_eq!(governed(&all, &conf).1, None, "all are excluded already");
}

#[test]
fn the_installed_configuration_is_the_nodes() {
    let chain = &all_keys()["chain"];
    let pinned = json!([{"type": "istio-redirect", "proxy_port": 15001, "pod_overrides": false}, chain[1]]);
    for name in ["n", "any-other"] {
        let (own, warning) = governed(&node(&all_keys()), &json!({"name": name, "type": "detour", "chain": chain}));
        assert_eq!((&own["chain"], warning), (&pinned, None));
    }
}

#[test]
fn blocks_that_the_node_did_not_install_are_replaced_if_pinned_and_otherwise_requests() {
    let written = json!([
        {"type": "istio-redirect", "inbound_interception_mode": "NONE", "pod_overrides": true},
        {"type": "istio-redirect", "proxy_uid": [7]}, {"type": "uid-exclude", "uids": "*", "is_request": false}, {"type": "own", "x": 1},
    ]);
    let (own, warning) = governed(&node(&all_keys()), &json!({"chain": written}));
    let wanted = json!([
        {"type": "istio-redirect", "proxy_port": 15001, "pod_overrides": false},
        {"type": "uid-exclude", "uids": "*", "is_request": true}, {"type": "own", "x": 1},
    ]);
    assert_eq!(own["chain"], wanted);
    assert_eq!(warning, ignored("chain[0] (istio-redirect is pinned), chain[1] (istio-redirect is pinned)"));
    // A node that installed no block has one with the defaults.
    let (own, warning) =
        governed(&node(&json!({"pinned": ["istio-redirect", "uid-exclude"]})), &json!({"type": "istio-cni"}));
    assert_eq!((&own["chain"], warning), (&json!([{"type": "istio-redirect", "pod_overrides": false}]), None));
    let (own, _) = governed(&node(&json!({})), &json!({"type": "excludedns"}));
    assert!(
        own["chain"].as_array().is_some_and(|chain| chain.iter().all(|block| block["is_request"] == true)),
        "{own}"
    );
    for left in [json!({"type": "excludedns", "chain": []}), json!({"type": "bridge"}), json!({"chain": {}})] {
        assert_eq!(governed(&node(&all_keys()), &left).0.get("chain"), left.get("chain"), "refused or empty");
    }
}

#[test]
fn every_sub_plugin_can_be_pinned() {
    for kind in SUB_PLUGINS {
        let node = node(&json!({"pinned": [kind]}));
        let (own, _) = governed(&node, &json!({"chain": SUB_PLUGINS.map(|kind| json!({"type": kind}))}));
        let is_pinned = |block: &&Value| block["pod_overrides"] == false && block.get("is_request").is_none();
        let pinned = own["chain"].as_array().expect("a chain").iter().filter(is_pinned);
        assert_eq!(pinned.map(|block| &block["type"]).collect::<Vec<_>>(), [kind]);
    }
}

#[test]
fn the_nodes_bounds_replace_those_of_attachments() {
    let bounds = |node: &NodeConf, conf: &Value| {
        let (own, _) = governed(node, conf);
        NetConf::parse(own.to_string().as_bytes(), CniCommand::Add, "").expect("accepted").bounds
    };
    let conf = json!({
        "name": "n", "type": "detour", "allow": {}, "outside_bounds": "ignore",
        "chain": [{"type": "dns-exclude", "allow": {}}, {"type": "own", "allow": 1}],
    });
    let bounded = node(&json!({"allow": {"uids": 8}, "chain": [{"type": "uid-exclude", "allow": {"uids": 7}}]}));
    let of_node = bounds(&bounded, &conf);
    assert_eq!(&of_node, bounded.bounds("n"));
    assert_eq!(
        (of_node.allow, of_node.set_by.as_str()),
        (Some(json!({"uids": 8})), "the node configuration /node.json")
    );
    assert_eq!((of_node.blocks.len(), of_node.outside), (1, OutsideBounds::Reject));
    assert!(!bounds(&node(&json!({})), &conf).is_set(), "the default bounds");
}

#[test]
fn configuration_lists_and_nested_chains_are_governed() {
    let node = node(&json!({"kubernetes": {"cni_bin_dir": "/opt/cni/bin"}}));
    let own = ["detour"];
    let malicious = || json!({"type": "detour", "kubernetes": {"cni_bin_dir": "/malicious"}});
    let list = json!({"name": "n", "plugins": [{"type": "bridge", "kubernetes": {"cni_bin_dir": "/b"}}, malicious()]});
    let (list, warnings) = node.govern_all(&list, &own).expect("accepted").expect("changed");
    assert_eq!((&list["plugins"][1]["kubernetes"]["cni_bin_dir"], warnings.len()), (&json!("/opt/cni/bin"), 1));
    assert_eq!(list["plugins"][0]["kubernetes"]["cni_bin_dir"], "/b", "a plugin of another type");
    let nested = json!({"type": "other", "chain": [{"type": "y"}, {"type": "detour", "chain": [malicious()]}]});
    let (nested, _) = node.govern_all(&nested, &own).expect("accepted").expect("changed");
    assert_eq!(nested["chain"][1]["chain"][0]["kubernetes"]["cni_bin_dir"], "/opt/cni/bin");
    for none in [json!({"type": "bridge"}), json!({"plugins": 1}), json!({"plugins": [1, {"chain": [2]}]}), json!(3)] {
        assert_eq!(node.govern_all(&none, &own), Ok(None));
    }
    for key in ["delegates", "clusterNetwork"] {
        let list = json!({"plugins": [{"type": "bridge"}, {"type": "detour", key: "x"}]});
        assert_eq!(node.govern_all(&list, &own), Err(primary_in_attachment()));
    }
}
