//! `capture_secondary_networks`: whether the sidecar captures traffic over interfaces other than the cluster
//! network's.

use crate::configuration::{chain, story};
use crate::istio::Dns;
use crate::pod::{APP_PROCESS, NAMESPACE, PROXY, manifest};
use crate::world::*;
use serde_json::json;

fn rules_beside(interface: &str, captured: bool) -> String {
    let world = World::new(Families::V4);
    world.ip(&["link", "add", interface, "type", "veth", "peer", "name", "far"]);
    let manifests = story(&world, Dns::Left, &[]);
    let configuration =
        chain(&manifests, json!([{ "type": "istio-redirect", "capture_secondary_networks": captured }]));
    world.add(&configuration);
    world.call("CHECK", &configuration).run().done();
    let rules = format!("{:?}", world.iptables_save(Family::V4));
    // An interface added later is no drift.
    world.ip(&["link", "add", "later0", "type", "veth", "peer", "name", "later1"]);
    world.call("CHECK", &configuration).run().done();
    rules
}

#[test]
fn secondary_networks_are_captured_by_default() {
    assert!(!rules_beside("data0", true).contains("data0"));
}

#[test]
fn existing_and_selected_secondary_interfaces_are_excluded() {
    let rules = rules_beside("data0", false);
    for rule in ["-i data0 -j RETURN", "-o data0 -j RETURN", "-o net1 -j RETURN"] {
        assert!(rules.contains(rule), "{rule}: {rules}");
    }
    assert!(!rules.contains("eth0"), "{rules}");
}

/// A primary user-defined network of OVN-Kubernetes: `eth0` carries only probes, and the pod's default route is on
/// another interface.
#[test]
fn an_interface_with_the_default_route_is_captured() {
    let world = World::new(Families::Both);
    for (interface, peer) in [("ovn-udn1", "far0"), ("net2", "far1"), ("data0", "far2"), ("shown0", "far3")] {
        world.ip(&["link", "add", interface, "type", "veth", "peer", "name", peer]);
        world.ip(&["link", "set", interface, "up"]);
    }
    world.ip(&["route", "del", "default"]);
    world.ip(&["route", "add", "default", "dev", "ovn-udn1"]);
    world.ip(&["-6", "route", "del", "default"]);
    world.ip(&["-6", "route", "add", "default", "dev", "net2"]);
    let status = [("k8s.v1.cni.cncf.io/network-status", r#"[{\"interface\": \"shown0\", \"default\": true}]"#)];
    let pod = manifest(false, PROXY, &status).replace("default/istio-cni", "default/istio-cni, a, b");
    for dialect in ["iptables", "nftables"] {
        let manifests = world.manifests(&[NAMESPACE, &pod]);
        let mut configuration = chain(
            &manifests,
            json!([{ "type": "istio-redirect", "capture_secondary_networks": false, "exclude_interfaces": "data0" }]),
        );
        configuration["dialect"] = dialect.into();
        world.add(&configuration);
        let rules = format!(
            "{:?}{:?}{:?}",
            world.iptables_save(Family::V4),
            world.iptables_save(Family::V6),
            world.native_tables()
        );
        for captured in ["ovn-udn1", "net2", "shown0"] {
            assert!(!rules.contains(captured), "{captured} is excluded: {rules}");
        }
        for excluded in ["data0", "net1", "net3"] {
            assert!(rules.contains(excluded), "{excluded} is captured: {rules}");
        }
        world.call("CHECK", &configuration).run().done();
        world.call("DEL", &configuration).run().done();
    }
}

#[test]
fn traffic_over_a_primary_user_defined_network_is_captured() {
    let world = World::new(Families::V4);
    let route = world.ip(&["route", "show", "default"]);
    for command in ["link set eth0 down", "link set eth0 name ovn-udn1", "link set ovn-udn1 up"] {
        world.ip(&command.split(' ').collect::<Vec<_>>());
    }
    let route = format!("route add {}", route.trim().replace("eth0", "ovn-udn1"));
    world.ip(&route.split_whitespace().collect::<Vec<_>>());
    world.ip(&["link", "add", "eth0", "type", "veth", "peer", "name", "probes"]);
    let manifests = story(&world, Dns::Left, &[]);
    for dialect in ["iptables", "nftables"] {
        let mut configuration =
            chain(&manifests, json!([{ "type": "istio-redirect", "capture_secondary_networks": false }]));
        configuration["dialect"] = dialect.into();
        world.add(&configuration);
        let server = SERVER.at(Family::V4, HTTPS);
        let arrival = world.pod_sends(APP_PROCESS, Protocol::Tcp, server);
        assert_eq!(arrival, Arrival::captured(OUTBOUND, server), "{dialect}");
        world.call("DEL", &configuration).run().done();
    }
}

/// An alias is a label of an address, and iptables takes a name that ends in `+` for a prefix: a rule for it would
/// exclude all traffic.
#[test]
fn aliases_and_prefixes_are_not_interfaces() {
    let world = World::new(Families::V4);
    world.ip(&["addr", "add", "10.88.0.7/24", "dev", "eth0", "label", "eth0:7"]);
    world.ip(&["link", "add", "eth+", "type", "veth", "peer", "name", "+"]);
    let pod = manifest(false, PROXY, &[]).replace("default/istio-cni", "default/istio-cni, default/storage@et+");
    for dialect in ["iptables", "nftables"] {
        let manifests = world.manifests(&[NAMESPACE, &pod]);
        let mut configuration =
            chain(&manifests, json!([{ "type": "istio-redirect", "capture_secondary_networks": false }]));
        configuration["dialect"] = dialect.into();
        world.add(&configuration);
        let server = SERVER.at(Family::V4, HTTPS);
        let arrival = world.pod_sends(APP_PROCESS, Protocol::Tcp, server);
        assert_eq!(arrival, Arrival::captured(OUTBOUND, server), "{dialect}");
        let rules = format!("{:?}{:?}", world.iptables_save(Family::V4), world.native_tables());
        assert!(!rules.contains("eth0:7"), "{rules}");
        world.call("DEL", &configuration).run().done();
    }
}

#[test]
fn an_alias_in_a_list_is_refused_with_pod_and_key() {
    let world = World::new(Families::V4);
    for annotation in ["excludeInterfaces", "kubevirtInterfaces"].map(|name| format!("traffic.sidecar.istio.io/{name}"))
    {
        let manifests = story(&world, Dns::Left, &[(&annotation, "eth0:7")]);
        let output = world.call("ADD", &chain(&manifests, json!([{ "type": "istio-redirect" }]))).run();
        assert_eq!(output.refused().0, 7);
        let msg = output.stdout["msg"].as_str().expect("text");
        for part in ["shop/web-0", &annotation, "\"eth0:7\"", "no alias such as eth0:7"] {
            assert!(msg.contains(part), "{part}: {msg}");
        }
    }
    for key in ["exclude_interfaces", "reroute_virtual_interfaces"] {
        let chained = json!([{ "type": "istio-redirect", key: ["eth0:7"] }]);
        let output = world.call("ADD", &chain(&story(&world, Dns::Left, &[]), chained)).run();
        assert_eq!(output.refused().0, 7);
        assert!(output.stdout["msg"].as_str().expect("text").contains(key), "{}", output.stdout);
    }
}
