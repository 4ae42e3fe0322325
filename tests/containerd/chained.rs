//! In the list of the cluster's network after its plugin, as the primary plugin, and as `detour install` installs it.

use crate::node::Node;
use crate::pod::Pod;
use crate::{bridge, chained, network};
use serde_json::{Value, json};
use std::fs;

#[test]
fn a_pod_is_redirected_from_its_start_and_leaves_nothing() {
    let node = Node::with("chained", &[("10-net.conflist", &network(&[chained()]))]);
    node.has_plugin();
    let pod = Pod::meshed("web");
    node.knows(&pod.manifest());
    let sandbox = node.start(&pod).expect("it starts");
    for rules in node.rules(&sandbox) {
        for wanted in [
            "-A OUTPUT -j ISTIO_OUTPUT",
            "-A PREROUTING -p tcp -j ISTIO_INBOUND",
            "-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001",
        ] {
            assert!(rules.iter().any(|rule| rule == wanted), "{wanted} is not in {rules:#?}");
        }
    }
    let container = node.start_container(&sandbox, &pod);
    for id in [&sandbox, &container, &container[..13], &format!("containerd://{container}")] {
        let rules = node.ok(&[env!("CARGO_BIN_EXE_detour"), "rules", "--container", id, "-o", "json"]);
        let rules: Value = serde_json::from_str(&rules).expect("JSON");
        let attachment = format!("attachment net/eth0 of pod sandbox {sandbox}");
        assert_eq!((&rules["attachments"], &rules["as_asked"]), (&json!([attachment]), &json!(true)), "{id}");
    }
    node.remove(&sandbox);
    assert_eq!(node.left(), Vec::<String>::new());
}

#[test]
fn a_pod_that_is_refused_leaves_nothing() {
    let node = Node::with("refused", &[("10-net.conflist", &network(&[chained()]))]);
    node.has_plugin();
    let (old, new) = (Pod::meshed("web"), Pod::meshed("web"));
    node.knows(&old.manifest());
    let error = node.start(&new).expect_err("it is not the pod that is known");
    assert!([&old.uid, &new.uid, "shop/web"].iter().all(|part| error.contains(*part)), "{error}");
    assert_eq!(node.left(), Vec::<String>::new());
}

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

fn primary() -> Value {
    json!({
        "cniVersion": "1.0.0", "name": "detour", "type": "detour",
        "capabilities": {"io.kubernetes.cri.pod-annotations": true},
        "confDir": "NODE/net.d", "binDir": "NODE/bin", "clusterNetwork": "net",
        "kubernetes": {"manifests_dir": "NODE/manifests"},
    })
}

fn definition(namespace: &str, name: &str, config: &Value) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": name, "namespace": namespace}, "spec": {"config": config.to_string()},
    })
}

fn node(name: &str) -> Node {
    let node = Node::with(name, &[("00-detour.conf", &primary()), ("10-net.conflist", &network(&[]))]);
    node.has_plugin();
    node
}

#[test]
fn a_pod_gets_the_networks_that_it_selects_and_outlives_the_runtime() {
    let mut node = node("primary");
    let mesh = json!({"cniVersion": "1.0.0", "name": "istio-cni", "type": "istio-cni"});
    node.knows(&definition("default", "istio-cni", &mesh));
    let mut second = bridge("second0", &["10.86.0.0/24"]);
    second["cniVersion"] = "1.0.0".into();
    second["name"] = "second".into();
    node.knows(&definition("shop", "second", &second));
    let pod = Pod::meshed("web").select("default/istio-cni, second@data0");
    node.knows(&pod.manifest());
    let sandbox = node.start(&pod).expect("it starts");
    let links: Value = serde_json::from_str(&node.ok_in(&sandbox, &["ip", "-json", "addr"])).expect("JSON");
    let links = links.as_array().expect("links").iter();
    assert_eq!(links.filter_map(|link| link["ifname"].as_str()).collect::<Vec<_>>(), ["lo", "eth0", "data0"]);
    let reported = node.inspect(&sandbox)["status"]["network"].clone();
    assert_eq!(reported, json!({"ip": "10.85.0.2", "additionalIps": [{"ip": "fd00:85::2"}]}));
    for rules in node.rules(&sandbox) {
        assert!(rules.contains(&"-A OUTPUT -j ISTIO_OUTPUT".to_owned()), "{rules:#?}");
    }
    node.restart_containerd();
    assert_eq!(node.inspect(&sandbox)["status"]["state"], "SANDBOX_READY");
    node.remove(&sandbox);
    assert_eq!(node.left(), Vec::<String>::new());
}

#[test]
fn nothing_is_asked_for_a_pod_whose_annotations_say_it_all() {
    let node = node("plain");
    let plain = Pod::new("plain", json!({"kubernetes.io/config.source": "api"}));
    let sandbox = node.start(&plain).expect("it starts without facts");
    assert_eq!(node.rules(&sandbox), [Vec::<String>::new(), Vec::new()]);
    node.remove(&sandbox);
    assert_eq!(node.left(), Vec::<String>::new());
}
