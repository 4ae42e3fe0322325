//! Sub-plugins of the node and of attachments, plugins chained to the default network's result, and Multus's auxiliary
//! chain (`auxiliaryCNIChainName`) with the file that OpenShift's Multus daemon writes.

use crate::node::{Node, istio_cni, made, pod_object};
use crate::recorders::{Recorders, add_prints};
use crate::support::private_node::make_private;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

fn node() -> Node {
    let mut prev = made("eth0", "10.0.0.3/24");
    prev["dns"] = json!({"nameservers": ["10.0.0.10"]});
    let mut node = Node::new();
    let recorders = std::mem::replace(&mut node.recorders, Recorders::new());
    node.recorders = recorders.with("home-made", &add_prints(&prev)).with("silent", "");
    node
}

#[test]
fn chained_plugins_get_the_default_networks_result() {
    let node = node();
    node.pod_selects("own,istio-cni,one");
    node.definition("shop", "istio-cni", &istio_cni());
    node.definition("shop", "own", &json!({"cniVersion": "0.4.0", "type": "home-made"}));
    node.definition("shop", "one", &json!({"cniVersion": "1.0.0", "type": "a"}));
    let chain = json!([{"type": "silent", "x": 1}, {"type": "uid-exclude", "uids": [4321]}]);
    let conf = node.recording(&json!({"chain": chain, "chain_types": ["home-made"]}));
    let result = node.done("ADD", &conf);
    assert_eq!(node.recorders.order(), ["ADD default", "ADD a", "ADD home-made", "ADD silent"]);
    let seen = node.recorders.seen();
    let own = &seen[2];
    // The two others are net1 and net2.
    assert_eq!(seen[1].environment["CNI_IFNAME"], "net3");
    assert_eq!(own.environment["CNI_IFNAME"], "eth0");
    assert_eq!((&own.stdin["prevResult"]["cniVersion"], &own.stdin["name"]), (&json!("0.4.0"), &json!("own")));
    assert_eq!(own.stdin["prevResult"]["ips"][0]["address"], "10.0.0.2/24");
    assert_eq!((&seen[3].stdin["x"], &seen[3].stdin["name"]), (&json!(1), &json!("primary")));
    assert_eq!(seen[3].stdin["prevResult"]["ips"][0]["address"], "10.0.0.3/24");
    assert_eq!(result["ips"][0]["address"], "10.0.0.3/24");
    assert_eq!(result["dns"], json!({"nameservers": ["10.0.0.10"]}));
    let names: Vec<_> = result["interfaces"].as_array().expect("a list").iter().map(|i| &i["name"]).collect();
    assert_eq!(names, ["eth0", "net1"]);
    let rules = node.pod.rules().join("\n");
    assert!(rules.contains("ISTIO_REDIRECT") && rules.contains("4321"), "{rules}");
    node.done("CHECK", &conf);
    node.done("DEL", &conf);
    let order = node.recorders.order();
    assert_eq!(
        order[4..],
        [
            "CHECK default",
            "CHECK a",
            "CHECK home-made",
            "CHECK silent",
            "DEL silent",
            "DEL home-made",
            "DEL a",
            "DEL default"
        ]
    );
    assert_eq!(node.pod.rules(), [""; 0]);
}

#[test]
fn an_attachments_keys_override_the_nodes() {
    let node = node();
    node.pod_selects("mesh");
    let own = json!({"type": "istio-redirect", "proxy_port": 16001});
    node.definition("shop", "mesh", &json!({"cniVersion": "1.0.0", "type": "istio-cni", "chain": [own]}));
    let chain = json!([{"type": "istio-redirect", "proxy_port": 17001, "inbound_capture_port": 17006}]);
    node.done("ADD", &node.recording(&json!({"chain": chain})));
    let rules = node.pod.rules().join("\n");
    assert!(rules.contains("16001") && rules.contains("17006") && !rules.contains("17001"), "{rules}");
}

#[test]
fn exclusions_of_node_and_attachments_apply_together() {
    let node = node();
    let own = json!([{"type": "uid-exclude", "uids": [4323]}, {"type": "dns-exclude", "uids": [4324]}]);
    for (name, chain) in [("m1", own), ("m2", json!([{"type": "istio-redirect"}]))] {
        node.definition("shop", name, &json!({"name": name, "cniVersion": "1.0.0", "type": "detour", "chain": chain}));
    }
    node.pod_selects("m1,m2");
    let chain =
        json!([{"type": "uid-exclude", "uids": [4321]}, {"type": "dns-exclude", "uids": [4322], "ports": [5353]}]);
    let conf = node.recording(&json!({"chain": chain}));
    node.done("ADD", &conf);
    node.done("CHECK", &conf);
    let rules = node.pod.rules().join("\n");
    for uid in ["4321", "4322", "4323", "4324"] {
        assert!(rules.contains(&format!("meta skuid {uid} ")), "{uid}: {rules}");
    }
    let of = |uid: &str| rules.lines().filter(|rule| rule.contains(&format!("meta skuid {uid} "))).collect::<String>();
    assert!(of("4322").contains("5353") && !of("4324").contains("5353"), "{rules}");
}

#[test]
fn redirect_arguments_of_two_selections_must_agree() {
    let node = node();
    let mesh = |name: &str, port: u16| json!({"name": name, "cni-args": {"istio-redirect": {"proxy_port": port}}});
    for name in ["m1", "m2"] {
        node.definition("shop", name, &istio_cni());
    }
    let conf = node.recording(&json!({}));
    node.pod_selects(&json!([mesh("m1", 16001), mesh("m2", 16002)]).to_string());
    let (code, text) = node.refused("ADD", &conf);
    let wanted =
        "networks shop/m1 and shop/m2 contradict each other: args.cni.istio-redirect.proxy_port is 16001 in one";
    assert!(code == 7 && text.contains(wanted), "{text}");
    assert!(node.recorders.seen().is_empty());
    node.pod_selects(&json!([mesh("m1", 16001), {"name": "m2"}]).to_string());
    node.done("ADD", &conf);
    assert!(node.pod.rules().join("\n").contains("16001"));
}

#[test]
fn pods_in_an_excluded_namespace_get_networks_and_no_rules() {
    let node = node();
    node.pod_selects("istio-cni,one");
    node.definition("shop", "istio-cni", &istio_cni());
    node.definition("shop", "one", &json!({"cniVersion": "1.0.0", "type": "a"}));
    let conf = node.recording(&json!({"exclude_namespaces": ["shop"], "chain": [{"type": "silent"}]}));
    node.done("ADD", &conf);
    assert_eq!(node.recorders.order(), ["ADD default", "ADD a", "ADD silent"]);
    assert_eq!(node.pod.rules(), [""; 0]);
    node.done("CHECK", &conf);
    assert_eq!(node.done("DEL", &conf), Value::Null);
}

/// Returns name, scope and end of the excluded containers in the pod's saved state.
fn saved_containers(node: &Node) -> Vec<String> {
    let directory = Path::new("/run/detour/attachments").join(&node.pod.name);
    let mut found = Vec::new();
    for file in fs::read_dir(directory).expect("saved state") {
        let record = fs::read(file.expect("a file").path()).expect("readable");
        let record: Value = serde_json::from_slice(&record).expect("JSON");
        let containers = record["policy"]["containers"].as_array().cloned().unwrap_or_default();
        let text = |one: &Value, key: &str| one[key].as_str().expect(key).to_owned();
        found.extend(containers.iter().map(|one| ["name", "scope"].map(|key| text(one, key)).join(" ")));
    }
    found.sort();
    found
}

#[test]
fn excluded_containers_of_node_attachments_and_pod_are_united_in_any_order() {
    let excludes = |containers: &str, scope: &str| {
        let chain = json!([{"type": "container-exclude", "containers": containers, "scope": scope}]);
        json!({"cniVersion": "1.0.0", "name": "m", "type": "detour", "chain": chain})
    };
    let chain = |pinned: bool| json!([{"type": "istio-redirect"}, {"type": "container-exclude", "containers": "log", "pod_overrides": !pinned}]);
    for (networks, pinned, expected) in [
        ("m1,m2", false, vec!["app all", "app dns", "init all", "log all"]),
        ("m2,m1", false, vec!["app all", "app dns", "init all", "log all"]),
        ("m1", true, vec!["log all"]),
        ("", false, vec!["init all", "log all"]),
    ] {
        let node = node();
        node.definition("shop", "m1", &excludes("app", "dns"));
        node.definition("shop", "m2", &excludes("app,missing", "all"));
        let mut pod = pod_object(networks);
        pod["metadata"]["annotations"]["detour.io/exclude-containers"] = "init".into();
        pod["spec"]["initContainers"] = json!([{"name": "init"}]);
        pod["spec"]["containers"].as_array_mut().expect("a list").push(json!({"name": "log"}));
        node.manifest("pod", &pod);
        let conf = node.recording(&json!({"chain": chain(pinned)}));
        let output = node.call("ADD", &conf);
        assert!(output.success, "{output:?}");
        let has_names = "missing\\\": pod shop/web-0 has no such container; it has init, app, istio-proxy, log";
        assert_eq!(output.stderr.matches(has_names).count(), usize::from(networks.contains("m2")), "{output:?}");
        assert_eq!(saved_containers(&node), expected, "{networks:?}");
        let table = node.pod.run(&["nft", "list", "table", "inet", "detour-exclusions"]);
        let has_dns = expected.iter().any(|line| line.ends_with(" dns"));
        assert!(table.contains("set excluded-all {") && table.contains("set excluded-dns {") == has_dns, "{table}");
        node.done("CHECK", &conf);
        node.done("DEL", &conf);
        assert!(!node.pod.run(&["nft", "list", "tables"]).contains("detour"));
    }
}

/// The tables of the redirection in format nftables.
fn is_native(node: &Node) -> bool {
    node.pod.run(&["nft", "list", "tables"]).contains("detour-nat")
}

#[test]
fn new_pods_get_the_nodes_rule_format_unless_an_executable_needs_iptables() {
    let node = node();
    node.pod_selects("");
    let chain = |more: &[Value]| Value::from([&[json!({"type": "istio-redirect"})], more].concat());
    let executable = [json!({"type": "silent"})];
    let conf = |keys: Value| node.recording(&keys);
    let native = conf(json!({"auto_dialect": "nftables", "chain": chain(&[])}));
    for (conf, expected) in [
        (conf(json!({"chain": chain(&[])})), false),
        (native.clone(), true),
        (conf(json!({"auto_dialect": "nftables", "dialect": "iptables", "chain": chain(&[])})), false),
        (conf(json!({"auto_dialect": "nftables", "chain": chain(&executable)})), false),
    ] {
        let log = node.call("ADD", &conf).stderr;
        assert_eq!(is_native(&node), expected, "{conf}");
        assert!(!log.contains("can't exclude traffic"), "{log}");
        // An existing redirection keeps its format, and CHECK agrees.
        node.done("ADD", &native);
        assert_eq!(is_native(&node), expected, "{conf}");
        node.done("CHECK", &native);
        node.done("DEL", &native);
    }
    let log = node.call("ADD", &conf(json!({"dialect": "nftables", "chain": chain(&executable)}))).stderr;
    assert!(is_native(&node) && log.contains("iptables rules of silent can't exclude traffic"), "{log}");
}

/// The file as the daemon of OpenShift 4.22 writes it: `StdinData` in the errors of its client.
const OPENSHIFT: &str = include_str!("../golden/openshift/00-multus.conf");
/// The directory of the cluster network's file in it, on the node.
const CONF_DIR: &str = "/run/multus/cni/net.d";

/// A node of OpenShift with plugins of two vendors in the directory `vendor-cni-chain`.
struct OpenShift {
    node: Node,
    conf: Value,
}

impl OpenShift {
    fn new() -> Self {
        let ovn = add_prints(&json!({
            "cniVersion": "0.3.1", "interfaces": [{"name": "eth0", "sandbox": "/run/netns/x"}],
            "ips": [{"version": "4", "interface": 0, "address": "10.128.0.9/23"}],
        }));
        let passed = r#"case $CNI_COMMAND in ADD) /usr/bin/jq -c .prevResult "$to/stdin";; esac"#;
        let recorders = Recorders::new()
            .with("ovn-k8s-cni-overlay", &ovn)
            .with("a", &add_prints(&made("net1", "10.1.0.2/24")))
            .with("first", passed)
            .with("second", passed);
        let node = Node::with(recorders);
        let mut conf: Value = serde_json::from_str(OPENSHIFT).expect("JSON");
        conf["type"] = "detour".into();
        conf["cniDir"] = json!(node.dir.join("state"));
        conf["kubernetes"] = json!({"manifests_dir": node.dir.join("manifests"), "cni_bin_dir": node.recorders.bin()});
        make_private("/run/multus", "mode=755");
        fs::create_dir_all(chain("")).expect("a directory");
        let ovn = json!({"cniVersion": "0.4.0", "name": "ovn-kubernetes", "type": "ovn-k8s-cni-overlay"});
        fs::write(Path::new(CONF_DIR).join("10-ovn-kubernetes.conf"), ovn.to_string()).expect("a file");
        let second = json!({"name": "x", "type": "second", "key": {"b": 1}, "capabilities": {"mac": true}});
        fs::write(chain("20.conf"), second.to_string()).expect("a file");
        fs::write(chain("10.conf"), json!({"cniVersion": "1.0.0", "type": "first"}).to_string()).expect("a file");
        fs::write(chain("30.json"), "{").expect("a file that is not in the chain");
        Self { node, conf }
    }
}

fn chain(name: &str) -> PathBuf {
    Path::new(CONF_DIR).join("vendor-cni-chain").join(name)
}

#[test]
fn the_chain_of_openshift_runs_last_for_each_pod() {
    let OpenShift { node, conf } = &OpenShift::new();
    node.pod_selects("one");
    node.definition("shop", "one", &json!({"cniVersion": "0.3.1", "type": "a"}));
    let exclude = json!({"type": "detour", "chain": [{"type": "uid-exclude", "uids": [4242]}]});
    fs::write(chain("00-detour.conf"), exclude.to_string()).expect("a file");

    let result = node.done("ADD", conf);
    assert_eq!(node.recorders.order(), ["ADD ovn-k8s-cni-overlay", "ADD a", "ADD first", "ADD second"]);
    let seen = node.recorders.seen();
    let names: Vec<_> = seen.iter().map(|seen| seen.environment["CNI_IFNAME"].as_str()).collect();
    assert_eq!(names, ["eth0", "net1", "net2", "net2"]);
    let empty = json!({"cniVersion": "0.3.1", "dns": {}});
    let own = json!({"type": "first", "name": "vendor-cni-chain", "cniVersion": "0.3.1", "prevResult": empty});
    assert_eq!(seen[2].stdin, own);
    let second = json!({
        "type": "second", "name": "vendor-cni-chain", "cniVersion": "0.3.1", "key": {"b": 1}, "prevResult": empty,
    });
    assert_eq!(seen[3].stdin, second);
    let interfaces: Vec<_> = result["interfaces"].as_array().expect("a list").iter().map(|one| &one["name"]).collect();
    assert_eq!(interfaces, ["eth0", "net1"]);
    // In the configuration's version.
    assert_eq!((&result["cniVersion"], &result["ips"][0]["version"]), (&json!("0.3.1"), &json!("4")));
    let rules = || node.pod.run(&["nft", "list", "ruleset"]);
    assert!(rules().contains("4242"), "the file of type detour runs in this process: {}", rules());

    // As in Multus, DEL uses the saved chain.
    fs::remove_dir_all(chain("")).expect("removed");
    node.done("DEL", conf);
    let deleted: Vec<_> = node.recorders.order().split_off(4);
    assert_eq!(deleted, ["DEL second", "DEL first", "DEL a", "DEL ovn-k8s-cni-overlay"]);
    assert_eq!(node.recorders.seen()[4].stdin["key"], json!({"b": 1}));
    assert!(!rules().contains("4242") && !node.has_saved_state());

    // Without the directory, there is no chain.
    node.done("ADD", conf);
    assert_eq!(node.recorders.order().split_off(8), ["ADD ovn-k8s-cni-overlay", "ADD a"]);
    node.done("DEL", conf);

    // Multus would start the pod without all plugins of the chain.
    fs::create_dir_all(chain("")).expect("a directory");
    fs::write(chain("10.conf"), json!({"type": "first"}).to_string()).expect("a file");
    let before = node.recorders.seen().len();
    for (text, wanted) in [
        ("{", "50.conf: invalid JSON"),
        ("7", "50.conf: expected a JSON object with type"),
        (r#"{"plugins":[{"type":"first"}]}"#, "50.conf: expected a JSON object with type"),
        (r#"{"type":"../first"}"#, "50.conf.type: invalid value"),
        (r#"{"type":"gone"}"#, "failed to find plugin \"gone\""),
    ] {
        fs::write(chain("50.conf"), text).expect("a file");
        let (code, text) = node.refused("ADD", conf);
        assert!(code == 7 && text.contains(wanted), "{text}");
    }
    assert_eq!(node.recorders.seen().len(), before, "nothing ran");
    assert!(!node.has_saved_state());
    // A DEL without saved state releases the address of the cluster network nevertheless.
    node.done("DEL", conf);
    assert_eq!(node.recorders.order().split_off(before), ["DEL ovn-k8s-cni-overlay"]);
    let newer = {
        let mut conf = conf.clone();
        conf["cniVersion"] = "1.1.0".into();
        conf
    };
    let (code, text) = node.refused("STATUS", &newer);
    assert!(code == 50 && text.contains("failed to find plugin \"gone\""), "{code} {text}");
}
