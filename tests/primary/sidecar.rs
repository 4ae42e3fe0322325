//! One pod with a bridge as the cluster network and an Istio attachment, with real packets; its live policy; a failed ADD is
//! undone in reverse order; the node agent's own pod starts without facts, because it provides them.

use crate::node::{Node, istio_cni, made, pod_object};
use crate::pod::{call, with};
use crate::recorders::{Recorders, add_prints, fails};
use crate::server::{Answer, Server};
use crate::support::api::kubeconfig_of;
use crate::support::called::Called;
use detour_cni::cluster;
use detour_cni::cni::{CniCommand, NetConf};
use detour_cni::plugin::running::{Repeated, RepeatedAdd};
use detour_cni::pod::PodRef;
use serde_json::{Value, json};
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns what answers a connection from the pod to the node: the sidecar, or the node itself.
fn answers(node: &Node) -> &'static str {
    let at_node = TcpListener::bind((node.subnet("1"), 0)).expect("the bridge has the address");
    let to = at_node.local_addr().expect("bound");
    let (sidecar, mut client) = node.pod.inside(|| {
        let sidecar = TcpListener::bind(("0.0.0.0", 15001)).expect("bound in the pod");
        (sidecar, TcpStream::connect_timeout(&to, TIMEOUT).expect("a connection"))
    });
    client.set_read_timeout(Some(TIMEOUT)).expect("set");
    let greet = |listener: &TcpListener, who: &'static str| {
        listener.set_nonblocking(true).expect("set");
        match listener.accept() {
            Ok((mut stream, _)) => stream.write_all(who.as_bytes()).map(|()| true).expect("written"),
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) => panic!("{error}"),
        }
    };
    assert!(greet(&sidecar, "sidecar") != greet(&at_node, "node"), "one of them");
    let mut text = [0; 16];
    match client.read(&mut text) {
        Ok(7) => "sidecar",
        Ok(_) => "node",
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_pod_on_a_bridge_is_redirected_until_del() {
    let node = Node::new();
    node.pod_selects("default/istio-cni");
    node.definition("default", "istio-cni", &istio_cni());
    let conf = node.conf(&node.bridge(), &json!({}));
    let result = node.done("ADD", &conf);
    let address = result["ips"][0]["address"].as_str().expect("an address").trim_end_matches("/24").to_owned();
    assert_eq!(address, node.subnet("2"));
    assert_eq!((&result["cniVersion"], &result["interfaces"][2]["name"]), (&json!("1.1.0"), &json!("eth0")));
    assert_eq!(result["routes"], json!([{"dst": "0.0.0.0/0", "gw": node.subnet("1")}]));
    assert_eq!(answers(&node), "sidecar");
    node.done("CHECK", &conf);

    node.pod.run(&["iptables", "-t", "nat", "-F", "ISTIO_OUTPUT"]);
    assert_eq!(answers(&node), "node");
    assert_eq!(node.refused("CHECK", &conf).0, 103);
    node.pod.run(&["ip", "address", "flush", "dev", "eth0"]);
    let (_, text) = node.refused("CHECK", &conf);
    assert!(text.contains("network cluster (eth0)"), "{text}");

    let leases = node.dir.join("ipam/cluster");
    assert!(leases.join(&address).exists());
    assert_eq!(node.done("DEL", &conf), Value::Null);
    assert!(!leases.join(&address).exists() && !node.has_saved_state());
    assert!(!node.pod.run(&["ip", "link"]).contains("eth0"));
    assert_eq!(node.pod.rules(), [""; 0]);
}

#[test]
fn a_misspelled_annotation_is_logged_once_for_all_attachments() {
    let node = Node::new();
    let mut pod = pod_object("default/istio-cni,default/more");
    pod["metadata"]["annotations"]["detour.io/exclude-uid"] = "7".into();
    node.manifest("pod", &pod);
    node.definition("default", "istio-cni", &istio_cni());
    node.definition("default", "more", &json!({"cniVersion": "0.3.1", "name": "more", "type": "excludedns"}));
    let log = node.call("ADD", &node.conf(&node.bridge(), &json!({}))).stderr;
    assert_eq!(log.matches(r#"did you mean \"detour.io/exclude-uids\"?"#).count(), 1, "{log}");
}

/// Repeats the ADD of the pod whose annotation has this value.
fn repeat(node: &Node, conf: &Value, uids: Option<&str>) -> Repeated {
    let mut pod = pod_object("default/istio-cni,default/excludedns");
    if let Some(uids) = uids {
        pod["metadata"]["annotations"]["detour.io/exclude-uids"] = uids.into();
    }
    node.manifest("pod", &pod);
    let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").expect("valid");
    let wanted = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: Some("uid-1".into()) };
    let facts = cluster::source(&conf.kubernetes).expect("manifests").facts(&wanted, true).expect("readable");
    // The configuration of a primary plugin does not contain what the pod selects.
    let add =
        RepeatedAdd { root: Path::new("/"), facts: Some(&facts), installed: &[&conf], restores: true, found: None };
    add.run(&node.pod.name).expect("applied")
}

#[test]
fn the_united_policy_of_a_primary_plugin_follows_the_pod() {
    let node = Node::new();
    node.pod_selects("default/istio-cni,default/excludedns");
    node.definition("default", "istio-cni", &istio_cni());
    node.definition("default", "excludedns", &json!({"name": "excludedns", "type": "excludedns"}));
    let conf = node.recording(&json!({"chain": [{"type": "uid-exclude", "uids": [4242]}]}));
    node.done("ADD", &conf);
    let before = node.pod.rules();
    for uid in ["4242", "1337"] {
        assert!(before.iter().any(|rule| rule.contains(&format!("meta skuid {uid}"))), "{before:#?}");
    }
    assert!(!repeat(&node, &conf, None).has_committed, "an ADD leaves a current policy");

    let repeated = repeat(&node, &conf, Some("77"));
    assert_eq!(repeated.change, "excluded: UID 77");
    let rules = node.pod.rules();
    assert!(rules.iter().any(|rule| rule.contains("meta skuid 77 ")), "{rules:#?}");
    assert!(before.iter().all(|rule| rules.contains(rule)), "{rules:#?}");
    node.done("CHECK", &conf);

    repeat(&node, &conf, None);
    assert_eq!(node.pod.rules(), before);
    node.done("DEL", &conf);
    assert_eq!(node.pod.rules(), [""; 0]);
}

fn failing() -> String {
    fails("ADD", &json!({"code": 42, "msg": "no carrier", "details": "port 7"}))
}

fn node(recorders: Recorders) -> Node {
    let node = Node::with(recorders.with("default", &add_prints(&made("eth0", "10.0.0.2/24"))));
    node.definition("default", "istio-cni", &istio_cni());
    node.definition("shop", "one", &json!({"cniVersion": "1.0.0", "type": "a"}));
    node.definition("shop", "two", &json!({"cniVersion": "1.0.0", "type": "b"}));
    node
}

#[test]
fn a_network_that_fails_undoes_those_before_it() {
    let node = node(Recorders::new().with("a", &add_prints(&made("net1", "10.1.0.2/24"))).with("b", &failing()));
    node.pod_selects("one,two,default/istio-cni");
    let (code, text) = node.refused("ADD", &node.recording(&json!({})));
    assert_eq!((code, &*text), (42, r#"network shop/two (net2): plugin type="b" failed (add): no carrier: port 7"#));
    assert_eq!(node.recorders.order(), ["ADD default", "ADD a", "ADD b", "DEL b", "DEL a", "DEL default"]);
    let seen = node.recorders.seen();
    assert_eq!(seen[4].stdin["prevResult"]["ips"][0]["address"], "10.1.0.2/24");
    assert!(!node.has_saved_state());
    assert_eq!(node.pod.rules(), [""; 0]);
}

#[test]
fn a_chained_plugin_that_fails_undoes_the_rules() {
    let node = node(Recorders::new().with("a", &failing()).with("b", &add_prints(&made("net2", "10.2.0.2/24"))));
    node.pod_selects("one,two,default/istio-cni");
    let (code, text) = node.refused("ADD", &node.recording(&json!({"chain_types": ["a"]})));
    assert!(code == 42 && text.starts_with("chained plugin shop/one (eth0): "), "{text}");
    assert_eq!(node.recorders.order(), ["ADD default", "ADD b", "ADD a", "DEL a", "DEL b", "DEL default"]);
    assert!(!node.has_saved_state());
    assert_eq!(node.pod.rules(), [""; 0]);
}

#[test]
fn contradicting_attachments_are_both_named() {
    let node = node(Recorders::new());
    let redirect = |port| json!({"name": "m", "cniVersion": "1.0.0", "type": "istio-cni", "chain": [{"type": "istio-redirect", "proxy_port": port}]});
    node.definition("shop", "m1", &redirect(15001));
    node.definition("shop", "m2", &redirect(16001));
    node.pod_selects("m1,m2");
    let (code, text) = node.refused("ADD", &node.recording(&json!({})));
    assert!(
        code == 7
            && text
                .contains("network shop/m1, chain[0] and network shop/m2, chain[0] contradict each other: proxy_port"),
        "{text}"
    );
    assert_eq!(node.recorders.order(), ["ADD default", "DEL default"]);
    assert!(!node.has_saved_state());
}

/// Runs ADD and DEL for the agent's pod.
fn agent(node: &Node, conf: &Value) -> Called {
    let mut environment = node.environment("ADD");
    environment.insert("CNI_ARGS".into(), "K8S_POD_NAMESPACE=mesh;K8S_POD_NAME=detour-agent-x".into());
    let added = call(&environment, conf);
    if added.success {
        environment.insert("CNI_COMMAND".into(), "DEL".into());
        let deleted = call(&environment, conf);
        assert!(deleted.success, "{deleted:?}");
    }
    added
}

/// Returns a configuration whose default network is a file in confDir, with a kubeconfig that does not exist yet.
fn conf(node: &Node, more: &Value) -> Value {
    let conf_dir = node.dir.join("net.d");
    fs::create_dir_all(&conf_dir).expect("made");
    fs::write(conf_dir.join("cluster.conf"), r#"{"cniVersion":"1.0.0","name":"cluster","type":"default"}"#)
        .expect("written");
    let conf = json!({
        "cniVersion": "1.1.0", "name": "primary", "type": "detour", "clusterNetwork": "cluster", "confDir": conf_dir,
        "cniDir": node.dir.join("state"), "binDir": node.recorders.bin(), "defaultNetworks": ["audit"],
        "chain": [{"type": "istio-redirect"}],
        "kubernetes": {"agent_namespace": "mesh", "kubeconfig": node.dir.join("absent"), "timeout_seconds": 1},
    });
    with(conf, more)
}

#[test]
fn the_agents_pod_gets_only_the_cluster_network_and_needs_no_kubeconfig() {
    let node = Node::new();
    let told = json!({"io.kubernetes.cri.pod-annotations": {"k8s.v1.cni.cncf.io/networks": "one"}});
    for runtime_config in [json!({}), told] {
        let added = agent(&node, &conf(&node, &json!({"runtimeConfig": runtime_config})));
        assert!(added.success, "{added:?}");
    }
    assert_eq!(node.recorders.order(), ["ADD default", "DEL default"].repeat(2));
    let (code, _) = node.refused("ADD", &conf(&node, &json!({})));
    assert_eq!(code, 11, "any other pod waits for the kubeconfig");

    // It does not wait for an unresponsive API server.
    let server = Server::plain(|_| Answer::Hang);
    let kubeconfig = kubeconfig_of(&json!({"server": server.http()}), &json!({}));
    fs::write(node.dir.join("absent"), kubeconfig).expect("writable");
    let added = agent(&node, &conf(&node, &json!({})));
    assert!(added.success, "{added:?}");
    assert_eq!(server.lines(), [""; 0]);
}

#[test]
fn the_agents_pod_gets_a_cluster_network_that_is_a_definition() {
    let node = Node::new();
    node.definition("kube-system", "ovn", &json!({"cniVersion": "1.0.0", "type": "default"}));
    let kubernetes = json!({"agent_namespace": "mesh", "manifests_dir": node.dir.join("manifests")});
    let added = agent(&node, &conf(&node, &json!({"clusterNetwork": "ovn", "kubernetes": kubernetes})));
    assert!(added.success, "{added:?}");
    assert_eq!(node.recorders.order(), ["ADD default", "DEL default"]);
}
