//! One pod with a bridge as the cluster network and an Istio attachment, with real packets.

use crate::node::{Node, istio_cni, pod_object};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(10);

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

    let leases = node.dir.join("ipam/cluster");
    assert!(leases.join(&address).exists());
    assert_eq!(node.done("DEL", &conf), Value::Null);
    assert!(!leases.join(&address).exists() && !node.has_saved_state());
    assert!(!node.pod.run(&["ip", "link"]).contains("eth0"));
    assert_eq!(node.pod.rules(), [""; 0]);
}

#[test]
fn check_detects_a_bridge_without_its_address() {
    let node = Node::new();
    node.pod_selects("");
    let conf = node.conf(&node.bridge(), &json!({}));
    node.done("ADD", &conf);
    assert_eq!(node.pod.rules(), [""; 0], "no attachment redirects");
    node.done("CHECK", &conf);
    node.pod.run(&["ip", "address", "flush", "dev", "eth0"]);
    let (_, text) = node.refused("CHECK", &conf);
    assert!(text.contains("network cluster (eth0)"), "{text}");
    node.done("DEL", &conf);
}

#[test]
fn a_selection_moves_the_default_route() {
    let node = Node::new();
    let gateway = node.subnet("129");
    let mesh = json!({"name": "istio-cni", "namespace": "default"});
    node.pod_selects(&json!([{"name": "second", "default-route": [gateway]}, mesh]).to_string());
    node.definition("default", "istio-cni", &istio_cni());
    let mut second = node.bridge();
    second["name"] = json!("second");
    second["isDefaultGateway"] = json!(false);
    second["isGateway"] = json!(false);
    second["ipam"]["subnet"] = json!(node.subnet("128/25"));
    let mut first = node.bridge();
    first["ipam"]["subnet"] = json!(node.subnet("0/25"));
    node.definition("shop", "second", &second);
    let conf = node.conf(&first, &json!({"merge_addresses": true}));
    let result = node.done("ADD", &conf);
    let routes = node.pod.run(&["ip", "route", "show", "default"]);
    assert_eq!(routes.trim_end(), format!("default via {gateway} dev net1 proto static"));
    assert_eq!(result["routes"], Value::Null, "the default network's has gone");
    let addresses: Vec<_> = result["ips"].as_array().expect("a list").iter().map(|ip| &ip["interface"]).collect();
    assert_eq!(addresses, [2, 5], "each points to its own interface");
    assert_eq!(result["interfaces"][5]["name"], "net1");
    assert!(!node.pod.rules().is_empty());
    node.done("CHECK", &conf);
    node.done("DEL", &conf);
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
