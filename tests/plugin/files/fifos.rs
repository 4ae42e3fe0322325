//! FIFOs in place of files are an error at once: an ordinary open would wait for a writer forever.

use crate::files::node::{Node, call, complaint, detour, printed, refusal, succeeds};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

const FIFO: &str = "expected a regular file, got a FIFO";

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

#[test]
fn the_plugin_does_not_wait_for_fifos() {
    let node = Node::new();
    let fifo = node.fifo("fifo");
    let by_user = |user: Value| {
        let file = node.kubeconfig("kubeconfig", "http://192.0.2.1", json!({}), &user);
        json!({"kubernetes": {"kubeconfig": file}})
    };
    node.fifo("manifests/pod.yaml");
    node.fifo("net.d/net.conf");
    let primary = |network: Value| json!({"clusterNetwork": network, "confDir": node.path("net.d"), "cniDir": node.path("state")});
    for (conf, wanted) in [
        (json!({"kubernetes": {"kubeconfig": fifo}}), 5),
        (by_user(json!({"tokenFile": fifo})), 7),
        (by_user(json!({"client-certificate": fifo, "client-key": fifo})), 7),
        (json!({"kubernetes": {"manifests_dir": node.path("manifests")}}), 7),
        (primary(json!(node.path("net.d/net.conf"))), 5),
        (primary("net".into()), 7),
    ] {
        let (code, message) = refusal(&call("ADD", &conf));
        assert_eq!(code, wanted, "{message}");
        assert!(message.contains(FIFO), "{message}");
    }
    let file = node.kubeconfig("kubeconfig", "https://192.0.2.1", json!({"certificate-authority": fifo}), &json!({}));
    let (code, message) = refusal(&call("ADD", &json!({"kubernetes": {"kubeconfig": file}})));
    assert!(code == 7 && message.contains("certificate-authority") && message.contains(FIFO), "{message}");
}

#[test]
fn saved_state_is_not_read_from_fifos() {
    let node = Node::new();
    node.fifo("state/files-test/n@net1.json");
    let conf = json!({"clusterNetwork": "net", "confDir": node.path("net.d"), "cniDir": node.path("state")});
    let message = printed(&call("DEL", &conf));
    assert!(message.contains("n@net1.json") && message.contains(FIFO), "{message}");
}

#[test]
fn install_does_not_wait_for_fifos() {
    const STATE: &str = "host/var/lib/cni/detour";
    for name in ["install.json", "install.lock"] {
        let node = Node::new();
        node.fifo(&format!("{STATE}/{name}"));
        let message = complaint(&node.install(&["--platform=openshift"]));
        assert!(message.contains(name) && message.contains(FIFO), "{message}");
    }
    for name in ["sa/token", "sa/ca.crt"] {
        let node = Node::new();
        node.fifo(name);
        let message = complaint(&node.install(&[]));
        assert!(message.contains(name) && message.contains(FIFO), "{message}");
    }
    let node = Node::new();
    let config = format!("--config={}", node.fifo("config").display());
    let message = complaint(&node.install(&[&config]));
    assert!(message.contains("--config") && message.contains(FIFO), "{message}");
    // Runtimes and the installation skip entries that are not regular files.
    let node = Node::new();
    node.fifo("host/etc/cni/net.d/00-fifo.conflist");
    node.file("host/etc/cni/net.d/10-net.conflist", r#"{"name":"n","plugins":[{"type":"a"}]}"#);
    succeeds(&node.install(&["--chained=true"]));
    assert!(std::fs::read_to_string(node.path("host/etc/cni/net.d/10-net.conflist")).expect("read").contains("detour"));
}

#[test]
fn doctor_does_not_wait_for_fifos() {
    let node = Node::new();
    for within in
        ["etc/cni/net.d/00-a.conf", "var/lib/cni/detour/install.json", "var/lib/cni/results/r", "etc/hostname"]
    {
        node.fifo(&format!("host/{within}"));
    }
    node.fifo("host/run/detour/attachments/c/n@net1.json");
    let output = detour(&["doctor", "--root", text(&node.path("host")), "--conf=/etc/cni/net.d"]);
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.code() == Some(1) && report.contains(FIFO), "{output:?}");
}

/// Only here a pipe can be intended.
#[test]
fn explain_reads_a_pipe_that_is_an_argument() {
    let node = Node::new();
    let pod = node.file("pod.yaml", "kind: Pod\nmetadata: {name: web-0, namespace: shop}\nspec: {containers: []}\n");
    let script = format!("\"$0\" explain -f <(cat {})", text(&pod));
    let output = Command::new("bash").args(["-c", &script, env!("CARGO_BIN_EXE_detour")]).output().expect("bash");
    succeeds(&output);
    assert!(String::from_utf8_lossy(&output.stdout).contains("shop/web-0"), "{output:?}");
}
