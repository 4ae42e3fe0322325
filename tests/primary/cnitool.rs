//! The reference library, driven by cnitool v1.3.0, with this plugin as the only one.

use crate::node::{Node, istio_cni};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn cnitool() -> PathBuf {
    let home = std::env::var("HOME").unwrap_or_default();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut directories: Vec<PathBuf> = std::env::split_paths(&path).collect();
    directories.push(Path::new(&home).join("go/bin"));
    let found = directories.into_iter().map(|dir| dir.join("cnitool")).find(|file| file.exists());
    found.expect("cnitool is in PATH or ~/go/bin: hack/test.sh installs it")
}

#[track_caller]
fn run(node: &Node, command: &str) -> String {
    let output = Command::new(cnitool())
        .args([command, "primary", &node.pod.netns().display().to_string()])
        .env("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0")
        .env("CNI_PATH", format!("{}:/usr/lib/cni", node.recorders.bin().display()))
        .env("NETCONFPATH", node.dir.join("net.d"))
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{command}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn all_commands_work_through_the_reference_library() {
    let node = Node::new();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_detour"), node.recorders.bin().join("detour")).expect("linked");
    node.pod_selects("default/istio-cni");
    node.definition("default", "istio-cni", &istio_cni());
    fs::create_dir(node.dir.join("net.d")).expect("a directory");
    let conf = node.conf(&node.bridge(), &json!({}));
    let list = json!({"cniVersion": "1.1.0", "name": "primary", "plugins": [conf]});
    fs::write(node.dir.join("net.d/10-primary.conflist"), list.to_string()).expect("writable");

    run(&node, "status");
    let result: Value = serde_json::from_str(&run(&node, "add")).expect("a result");
    assert_eq!(result["ips"][0]["gateway"], node.subnet("1"));
    assert!(!node.pod.rules().is_empty());
    run(&node, "check");
    run(&node, "del");
    assert_eq!(node.pod.rules(), [""; 0]);
    run(&node, "add");
    // It passes an empty list of valid attachments, so GC removes all.
    run(&node, "gc");
    assert_eq!(node.pod.rules(), [""; 0]);
    assert!(!node.pod.run(&["ip", "link"]).contains("eth0"));
    run(&node, "del");
}
