//! The networks of a pod, the input of their plugins, and attacks by the author of a definition on a node with this primary
//! plugin: the node's keys apply in this process and in plugins that it starts.

use crate::node::{Node, annotations, istio_cni, made};
use crate::pod::with;
use crate::recorders::add_prints;
use nix::unistd::{Uid, chown};
use serde_json::{Value, json};
use std::fs;

#[test]
fn a_selection_is_passed_to_plugins_with_the_capability() {
    let node = Node::new();
    let selection = json!([{
        "name": "one", "namespace": "other", "interface": "data0", "ips": ["10.1.0.9/24"], "mac": "02:00:00:00:00:09",
        "cni-args": {"k": "v"}, "bandwidth": {"ingressRate": 1},
    }]);
    node.pod_selects(&selection.to_string());
    let text = json!({
        "cniVersion": "1.0.0",
        "plugins": [{"type": "a", "capabilities": {"ips": true, "mac": true}, "args": {"cni": {"own": 1}}}, {"type": "b"}],
    });
    node.definition("other", "one", &text);
    let result = node.done("ADD", &node.recording(&json!({"runtimeConfig": {"portMappings": []}})));
    let names: Vec<_> = result["interfaces"].as_array().expect("a list").iter().map(|i| &i["name"]).collect();
    assert_eq!(names, ["eth0", "net2"], "what the last plugin of the list said");
    assert_eq!(result["ips"], json!([{"interface": 0, "address": "10.0.0.2/24"}]));

    let seen = node.recorders.seen();
    assert_eq!(node.recorders.order(), ["ADD default", "ADD a", "ADD b"]);
    let runtime = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=uid-1";
    assert_eq!(seen[0].environment["CNI_ARGS"], runtime);
    assert_eq!(seen[1].environment["CNI_ARGS"], format!("{runtime};MAC=02:00:00:00:00:09;IP=10.1.0.9/24"));
    assert_eq!((&*seen[0].environment["CNI_IFNAME"], &*seen[1].environment["CNI_IFNAME"]), ("eth0", "data0"));
    let wanted = json!({
        "type": "a", "args": {"cni": {"own": 1, "k": "v"}}, "name": "one", "cniVersion": "1.0.0",
        "runtimeConfig": {"ips": ["10.1.0.9/24"], "mac": "02:00:00:00:00:09"},
    });
    assert_eq!(seen[1].stdin, wanted);
    assert!(seen[2].stdin.get("runtimeConfig").is_none() && seen[2].stdin["prevResult"]["ips"].is_array());
    assert_ne!(seen[0].netns, seen[0].environment["CNI_NETNS"], "plugins run outside");
}

#[test]
fn secondary_networks_get_the_runtime_config_that_multus_passes() {
    let node = Node::new();
    let selection = json!([{"name": "one", "mac": "02:00:00:00:00:09", "deviceID": "0000:01:00.0"}]);
    node.pod_selects(&selection.to_string());
    let offered = json!({
        "portMappings": [{"hostPort": 80}], "bandwidth": {"ingressRate": 1}, "ips": ["10.1.0.9/24"], "mac": "02::1",
        "infinibandGUID": "11:22:33:44:55:66:77:88", "dns": {"servers": ["10.0.0.10"]}, "cgroupPath": "/x",
    });
    let mut capabilities = json!({"deviceID": true, "CNIDeviceInfoFile": true});
    for key in offered.as_object().expect("an object").keys() {
        capabilities[key] = true.into();
    }
    node.definition("shop", "one", &json!({"cniVersion": "1.0.0", "type": "a", "capabilities": capabilities}));
    let mut conf = node.recording(&json!({"runtimeConfig": offered}));
    conf["delegates"][0]["capabilities"] = capabilities;
    node.done("ADD", &conf);
    let seen = node.recorders.seen();
    assert_eq!(seen[0].stdin["runtimeConfig"], offered, "the default network has all keys and no selection");
    let file = format!("/var/run/k8s.cni.cncf.io/devinfo/cni/shop-one-{}_net1", node.pod.name);
    let wanted = json!({
        "portMappings": [{"hostPort": 80}], "bandwidth": {"ingressRate": 1}, "ips": ["10.1.0.9/24"],
        "mac": "02:00:00:00:00:09", "infinibandGUID": "11:22:33:44:55:66:77:88",
        "deviceID": "0000:01:00.0", "CNIDeviceInfoFile": file,
    });
    assert_eq!(seen[1].stdin["runtimeConfig"].as_object(), wanted.as_object());
    node.done("DEL", &conf);
    assert_eq!(node.recorders.seen()[2].stdin["runtimeConfig"].as_object(), wanted.as_object(), "DEL gets the same");
}

#[test]
fn errors_are_detected_before_anything_runs() {
    let node = Node::new();
    node.definition("other", "one", &json!({"type": "a"}));
    node.definition("shop", "gone", &json!({"type": "not-installed"}));
    node.definition("shop", "broken", &json!({"type": "../a"}));
    for (networks, more, wanted) in [
        ("one", json!({}), "create it, or write NAMESPACE/one for one of another namespace"),
        ("other/one@eth0", json!({}), "interface name \"eth0\" (as requested) is already"),
        ("a,,b", json!({}), "element 2 at character 3"),
        ("other/one", json!({"namespaceIsolation": true}), "namespaceIsolation"),
        ("gone", json!({}), "failed to find plugin \"not-installed\""),
        ("broken", json!({}), "without /"),
        ("", json!({"delegates": [istio_cni()]}), "creates no interface"),
    ] {
        node.pod_selects(networks);
        let (code, text) = node.refused("ADD", &node.recording(&more));
        assert_eq!(code, 7, "{text}");
        assert!(text.contains(wanted), "{networks}: {text}");
        assert!(node.recorders.seen().is_empty() && !node.has_saved_state());
    }
}

#[test]
fn an_unknown_pod_or_another_pod_of_the_same_name_is_refused() {
    let node = Node::new();
    let conf = node.recording(&json!({}));
    assert_eq!(node.refused("ADD", &conf).0, 100);
    node.pod_selects("");
    let mut environment = node.environment("ADD");
    environment.insert("CNI_ARGS".into(), "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=other".into());
    let output = crate::pod::call(&environment, &conf);
    assert_eq!(output.stdout["code"], 100, "{output:?}");
    assert!(node.recorders.seen().is_empty());
}

#[test]
fn without_a_source_the_pod_gets_the_configured_networks() {
    let node = Node::new();
    let mut conf = node.recording(&json!({"kubernetes": {}}));
    conf["delegates"].as_array_mut().expect("a list").push(json!({"name": "more", "type": "a"}));
    let told = json!({"io.kubernetes.cri.pod-annotations": annotations("")});
    for runtime_config in [Value::Null, told] {
        conf["runtimeConfig"] = runtime_config;
        node.done("ADD", &conf);
        node.done("DEL", &conf);
    }
    let once = ["ADD default", "ADD a", "DEL a", "DEL default"];
    assert_eq!(node.recorders.order(), [once, once].concat());
}

/// Returns a node with `namespaceIsolation` on which the executable `detour` is a recorder.
fn node() -> Node {
    let mut node = Node::new();
    let recorders = std::mem::replace(&mut node.recorders, crate::recorders::Recorders::new());
    node.recorders = recorders.with("detour", &add_prints(&made("net1", "10.1.0.2/24"))).with("evil", "");
    node
}

fn conf(node: &Node, more: &Value) -> Value {
    with(node.recording(&json!({"namespaceIsolation": true, "delegate_timeout_seconds": 50})), more)
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
        let block = with(json!({"type": "istio-redirect"}), &evil);
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
