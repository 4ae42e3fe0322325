//! The networks of a pod, and the input of their plugins.

use crate::node::{Node, annotations};
use serde_json::{Value, json};

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
fn interfaces_are_named_by_position_including_in_process_attachments() {
    let node = Node::new();
    node.pod_selects("istio-cni, one, one@x");
    node.definition("shop", "istio-cni", &crate::node::istio_cni());
    node.definition("shop", "one", &json!({"cniVersion": "1.0.0", "type": "a"}));
    node.done("ADD", &node.recording(&json!({})));
    let names: Vec<_> = node.recorders.seen().iter().map(|seen| seen.environment["CNI_IFNAME"].clone()).collect();
    assert_eq!(names, ["eth0", "net2", "x"]);
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

#[test]
fn the_result_is_in_the_configurations_version() {
    let node = Node::new();
    node.pod_selects("");
    for (version, wanted) in [
        ("0.2.0", json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.2/24"}, "dns": {}})),
        (
            "0.3.1",
            json!({
                "cniVersion": "0.3.1", "interfaces": [{"name": "eth0", "sandbox": "/run/netns/x"}],
                "ips": [{"version": "4", "interface": 0, "address": "10.0.0.2/24"}], "dns": {},
            }),
        ),
    ] {
        let conf = node.recording(&json!({"cniVersion": version}));
        assert_eq!(node.done("ADD", &conf), wanted);
        node.done("DEL", &conf);
    }
}

#[test]
fn an_in_process_type_can_not_be_the_default_network() {
    let node = Node::new();
    node.pod_selects("");
    let (code, text) = node.refused("ADD", &node.conf(&crate::node::istio_cni(), &json!({})));
    assert!(code == 7 && text.contains("creates no interface"), "{text}");
}
