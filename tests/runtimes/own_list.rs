//! What the plugin's own list relies on in the runtimes: the pod's annotations, STATUS, and a change of the list while
//! pods run.

use crate::cluster::{Agent, Cluster, detour};
use crate::kubelet::{Kind, expected};
use crate::node::{Node, Runtime, until};
use crate::pod::{Class, Pod};
use crate::result;
use crate::support::program::write_executable;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;

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

    /// The addresses that host-local has given to pods, and the saved results of libcni.
    fn leases(&self) -> Vec<String> {
        let names = |directory: &str| {
            let files = fs::read_dir(self.path(directory)).into_iter().flatten().flatten();
            files.map(|file| file.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        let mut leases = names("var/lib/cni/networks/net");
        leases.retain(|name| name != "lock" && !name.starts_with("last_reserved_ip"));
        leases.extend(names("var/lib/cni/results"));
        leases
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

/// Uninstalls detour on the node. Returns whether nothing is left, and the notes.
fn uninstall(node: &Node) -> (bool, String) {
    let output = Command::new("nsenter")
        .args(["--target", &node.first_process().to_string(), "--mount", "--pid", "--"])
        .arg(detour())
        .arg("uninstall")
        .output()
        .expect("nsenter starts");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The own list replaces the edited list, and is uninstalled, while pods run.
fn uninstalled(runtime: Runtime) {
    let node = Node::start(runtime, |_| ());
    let cluster = Cluster::new(&node);
    let entrance = cluster.open(&node);
    cluster.answer(&entrance);
    let start = |name: &str| {
        let pod = Pod::new(name, Class::Burstable, "");
        cluster.has(&pod);
        pod.start(&node).expect("it starts")
    };
    let agent = Agent::start_on_node(&node, &cluster, &[]);
    until("the agent is ready", || agent.is_ready(&node));
    node.wait_for_plugin();
    let expected = expected(&node, &cluster);
    assert_eq!(node.leases(), Vec::<String>::new(), "all pods are removed");
    let with_edit = start("with-edit");
    drop(agent);

    let mut agent = Agent::start_on_node(&node, &cluster, &["--own-list=true"]);
    until("the own list is installed", || node.path(OWN_LIST).exists() && agent.is_ready(&node));
    let original = fs::read_to_string(node.path("net.d/10-net.conflist")).expect("it is there");
    assert!(!original.contains("detour"), "the edit is reverted: {original}");
    let with_list = start("with-list");
    assert_eq!(with_list.rules(), expected[&Kind::Meshed]);
    agent.end("-TERM");

    // CRI-O deletes a pod with the list with which the pod started, which libcni has saved (ocicni). containerd saves
    // the lists in the same directory, and deletes a pod with its current list.
    let (succeeded, notes) = uninstall(&node);
    let keeps = runtime == Runtime::CriO;
    assert!(succeeded && notes.contains("needs it to delete pods") == keeps, "{notes}");
    assert_eq!(notes.contains("(pods: 2)"), keeps, "{notes}");
    assert!(!node.path(OWN_LIST).exists() && node.path("bin/detour").exists() == keeps);
    let mut number = 0;
    until("the runtime uses the original list", || {
        number += 1;
        let pod = Pod::new(&format!("after-{number}"), Class::Burstable, "");
        cluster.has(&pod);
        // containerd may not have read it yet, and the program is gone.
        let Ok(sandbox) = pod.start(&node) else { return false };
        let rules = sandbox.rules();
        sandbox.remove();
        rules == expected[&Kind::Plain]
    });
    for sandbox in [with_edit, with_list] {
        assert_eq!(sandbox.rules(), expected[&Kind::Meshed], "a running pod keeps its rules");
        node.ask(json!({"op": "drop", "sandbox": sandbox.id})).expect("the pod is deleted");
    }
    let (succeeded, notes) = uninstall(&node);
    assert!(succeeded && !node.path("bin/detour").exists(), "{notes}");
    assert_eq!(node.leases(), Vec::<String>::new(), "all addresses and results are released");
    let text = "new pods use the original list, old pods are deleted, all addresses are released";
    result(runtime, "own list uninstalled while pods run", text);
}

#[test]
fn the_network_of_containerd_is_not_ready_without_the_list_of_the_cluster_cni() {
    status(Runtime::Containerd);
}

#[test]
fn the_network_of_cri_o_is_not_ready_without_the_list_of_the_cluster_cni() {
    status(Runtime::CriO);
}

#[test]
fn pods_are_deleted_cleanly_after_the_own_list_was_uninstalled_under_containerd() {
    uninstalled(Runtime::Containerd);
}

#[test]
fn pods_are_deleted_cleanly_after_the_own_list_was_uninstalled_under_cri_o() {
    uninstalled(Runtime::CriO);
}
