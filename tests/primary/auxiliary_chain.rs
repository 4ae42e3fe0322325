//! Multus's auxiliary chain (`auxiliaryCNIChainName`), with the file that OpenShift's Multus daemon writes.

use crate::node::{Node, made};
use crate::recorders::{Recorders, add_prints};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

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

impl Drop for OpenShift {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all("/run/multus");
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
