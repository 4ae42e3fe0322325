//! Files that exceed their maximum size.

use crate::files::node::{Node, call, printed, refusal};
use serde_json::json;
use std::fs::File;

/// Returns the path of a sparse file of this size.
fn large(node: &Node, within: &str, bytes: u64) -> std::path::PathBuf {
    let path = node.file(within, "");
    File::options().write(true).open(&path).expect("opened").set_len(bytes).expect("grown");
    path
}

#[test]
fn the_error_for_a_file_that_is_too_large_has_the_limit() {
    let node = Node::new();
    let file = large(&node, "kubeconfig", (1 << 20) + 1);
    let (code, message) = refusal(&call("ADD", &json!({"kubernetes": {"kubeconfig": file}})));
    assert!(code == 5 && message.contains("expected at most 1048576 bytes, got more"), "{message}");

    let token = large(&node, "token", (64 << 10) + 1);
    let file = node.kubeconfig("kubeconfig", "http://192.0.2.1", json!({}), &json!({"tokenFile": token}));
    let (code, message) = refusal(&call("ADD", &json!({"kubernetes": {"kubeconfig": file}})));
    assert!(code == 7 && message.contains("expected at most 65536 bytes, got more"), "{message}");

    large(&node, "manifests/pod.yaml", (4 << 20) + 1);
    let (code, message) = refusal(&call("ADD", &json!({"kubernetes": {"manifests_dir": node.path("manifests")}})));
    assert!(code == 7 && message.contains("expected at most 4194304 bytes, got more"), "{message}");

    large(&node, "state/files-test/n@net1.json", (16 << 20) + 1);
    let conf = json!({"clusterNetwork": "net", "confDir": node.path("net.d"), "cniDir": node.path("state")});
    let message = printed(&call("DEL", &conf));
    assert!(message.contains("expected at most 16777216 bytes, got more"), "{message}");
}
