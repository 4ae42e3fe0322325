//! Installed while the runtime runs, and taken away again.

use crate::network;
use crate::node::Node;
use crate::pod::Pod;
use serde_json::json;
use std::fs;

#[test]
fn pods_get_the_plugin_as_long_as_it_is_installed() {
    let node = Node::with("installed", &[("10-net.conflist", &network(&[]))]);
    let pods = ["before", "meanwhile", "after"].map(Pod::meshed);
    pods.iter().for_each(|pod| node.knows(&pod.manifest()));
    let path = |within: &str| node.path(within).display().to_string();
    let configuration = json!({"kubernetes": {"manifests_dir": path("manifests")}});
    fs::write(node.path("config.json"), configuration.to_string()).expect("written");
    let kubeconfig = json!({
        "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    });
    fs::write(node.path("kubeconfig"), kubeconfig.to_string()).expect("written");
    let places = [format!("--bin-dir={}", path("bin")), format!("--conf-dir={}", path("net.d"))];
    let more = [format!("--config={}", path("config.json")), format!("--kubeconfig={}", path("kubeconfig"))];
    let install =
        [env!("CARGO_BIN_EXE_detour"), "install", "--chained=true", &places[0], &places[1], &more[0], &more[1]];
    let redirected = |node: &Node, sandbox: &str| node.rules(sandbox).map(|rules| !rules.is_empty());

    let before = node.start(&pods[0]).expect("it starts");
    node.ok(&install);
    node.until("the runtime has the new list", |node| node.plugins() == ["loopback", "bridge", "detour"]);
    let meanwhile = node.start(&pods[1]).expect("it starts");
    assert_eq!((redirected(&node, &before), redirected(&node, &meanwhile)), ([false; 2], [true; 2]));
    // It gets a DEL that no ADD went before.
    node.remove(&before);

    node.ok(&[env!("CARGO_BIN_EXE_detour"), "uninstall"]);
    node.until("the runtime has the old list", |node| node.plugins() == ["loopback", "bridge"]);
    let after = node.start(&pods[2]).expect("it starts");
    assert_eq!((redirected(&node, &meanwhile), redirected(&node, &after)), ([true; 2], [false; 2]));
    node.remove(&meanwhile);
    node.remove(&after);
}
