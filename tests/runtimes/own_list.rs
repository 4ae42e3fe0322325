//! What the plugin's own list relies on in the runtimes: STATUS, and pods that start with the last copy.

use crate::cluster::{Agent, Cluster};
use crate::kubelet::{Kind, expected};
use crate::node::{Node, Runtime, until};
use crate::pod::{Class, Pod};
use crate::result;
use crate::support::program::write_executable;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const OWN_LIST: &str = "net.d/00-detour.conflist";

/// Writes an executable of the node's CNI directory.
fn write_plugin(directory: &Path, name: &str, script: &str) {
    let path = directory.join("bin").join(name);
    fs::create_dir_all(directory.join("bin")).expect("made");
    write_executable(&path, script);
}

/// The configuration list of a bridge, with a version and one more plugin.
fn write_list(directory: &Path, version: &str, bridge: &str, more: Option<Value>) {
    let ipam = json!({"type": "host-local", "ranges": [[{"subnet": "10.85.0.0/16"}], [{"subnet": "fd00:85::/64"}]]});
    let bridge = json!({"type": bridge, "bridge": "cni0", "isGateway": true, "ipam": ipam});
    let plugins: Vec<_> = [bridge].into_iter().chain(more).collect();
    fs::create_dir_all(directory.join("net.d")).expect("made");
    let list = json!({"cniVersion": version, "name": "net", "plugins": plugins});
    fs::write(directory.join("net.d/10-net.conflist"), list.to_string()).expect("written");
}

impl Node {
    /// The runtime's condition NetworkReady, and its message.
    fn network_condition(&self) -> (bool, String) {
        let info: Value = serde_json::from_str(&self.ok(&["crictl", "info"])).expect("JSON");
        let conditions = info["status"]["conditions"].as_array().expect("conditions");
        let network = conditions.iter().find(|condition| condition["type"] == "NetworkReady").expect("it has one");
        (network["status"] == true, network["message"].as_str().unwrap_or_default().to_owned())
    }
}

/// STATUS, which runtimes call for lists of version 1.1.0. Debian's bridge has 1.0.0.
fn status(runtime: Runtime) {
    let node = Node::start(runtime, |directory| {
        let script = r#"#!/bin/bash
set -eo pipefail
case $CNI_COMMAND in
    VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}' ;;
    STATUS | GC) ;;
    *) sed 's/"cniVersion": *"1.1.0"/"cniVersion":"1.0.0"/g' | /opt/cni/bin/bridge |
        sed 's/"cniVersion": *"1.0.0"/"cniVersion":"1.1.0"/g' ;;
esac
"#;
        write_plugin(directory, "bridge-1.1", script);
        write_list(directory, "1.1.0", "bridge-1.1", None);
    });
    let cluster = Cluster::new(&node);
    let entrance = cluster.open(&node);
    cluster.answer(&entrance);
    let agent = Agent::start_on_node(&node, &cluster, &["--own-list=true"]);
    until("the agent is ready", || agent.is_ready(&node));
    until("the network is ready", || node.network_condition().0);
    let expected = expected(&node, &cluster);

    let list = node.path("net.d/10-net.conflist");
    let withdrawn = node.path("10-net.conflist");
    fs::rename(&list, &withdrawn).expect("renamed");
    if runtime == Runtime::CriO {
        // It calls STATUS from its start until the first success, and then never again (internal/config/cnimgr).
        node.restart_runtime();
    }
    until("the network is not ready", || !node.network_condition().0);
    println!("The condition NetworkReady: {}", node.network_condition().1);
    until("the agent is not ready", || !agent.is_ready(&node));
    assert!(node.path(OWN_LIST).exists(), "the copy stays");
    if runtime == Runtime::Containerd {
        let pod = Pod::new("late", Class::Burstable, "");
        cluster.has(&pod);
        let sandbox = pod.start(&node).expect("it starts with the copy");
        assert_eq!(sandbox.rules(), expected[&Kind::Meshed]);
        sandbox.remove();
    }
    fs::rename(&withdrawn, &list).expect("renamed");
    until("the network is ready again", || node.network_condition().0);
    until("the agent is ready again", || agent.is_ready(&node));
    result(runtime, "list of the cluster CNI removed (1.1.0)", "NetworkReady is false until it is back");
}

#[test]
fn the_network_of_containerd_is_not_ready_without_the_list_of_the_cluster_cni() {
    status(Runtime::Containerd);
}

#[test]
fn the_network_of_cri_o_is_not_ready_without_the_list_of_the_cluster_cni() {
    status(Runtime::CriO);
}
