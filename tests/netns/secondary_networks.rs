//! `capture_secondary_networks`: whether the sidecar captures traffic over interfaces other than the cluster
//! network's.

use crate::example::*;
use crate::world::*;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::process::Command;

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
fn existing_and_selected_secondary_interfaces_are_excluded() {
    let rules = rules_beside("data0", false);
    for rule in ["-i data0 -j RETURN", "-o data0 -j RETURN", "-o net1 -j RETURN"] {
        assert!(rules.contains(rule), "{rule}: {rules}");
    }
    assert!(!rules.contains("eth0"), "{rules}");
}

/// As OVN-Kubernetes reports it for a pod with a primary user-defined network.
const UDN_STATUS: &str =
    r#"[{\"interface\": \"eth0\"}, {\"interface\": \"ovn-udn1\", \"ips\": [\"10.90.0.2\"], \"default\": true}]"#;

/// Adds `ovn-udn1`, which gets the default routes, as OVN-Kubernetes does; `eth0` keeps only its own subnet.
fn add_primary_user_defined_network(world: &World) {
    let netns = world.outside_netns();
    let outside = netns.file_name().expect("a name").to_str().expect("text");
    world.ip(&["link", "add", "ovn-udn1", "type", "veth", "peer", "name", "udn0", "netns", outside]);
    let commands = ["addr add 10.90.0.1/24 dev udn0", "addr add fd90::1/64 dev udn0 nodad", "link set udn0 up"];
    for command in commands.map(|command| format!("-n {outside} {command}")) {
        world.ip(&command.split(' ').collect::<Vec<_>>());
    }
    world.ips(&[
        "addr add 10.90.0.2/24 dev ovn-udn1",
        "addr add fd90::2/64 dev ovn-udn1 nodad",
        "link set ovn-udn1 up",
        "route replace default via 10.90.0.1 dev ovn-udn1",
        "-6 route replace default via fd90::1 dev ovn-udn1",
    ]);
    assert!(!world.ip(&["-6", "route", "show", "default"]).contains("eth0"));
}

#[test]
fn traffic_over_a_primary_user_defined_network_is_captured_and_probes_over_eth0_arrive() {
    let world = World::new(Families::Both);
    add_primary_user_defined_network(&world);
    let own = |family| if family == Family::V4 { "10.90.0.2" } else { "fd90::2" }.parse().expect("an address");
    let manifests = story(&world, Dns::Captured, &[("k8s.v1.cni.cncf.io/network-status", UDN_STATUS)]);
    for (dialect, captured) in [("iptables", true), ("iptables", false), ("nftables", true), ("nftables", false)] {
        let redirect = json!({ "type": "istio-redirect", "capture_secondary_networks": captured });
        let mut configuration = chain(&manifests, json!([redirect]));
        configuration["dialect"] = dialect.into();
        world.add(&configuration);
        for &family in world.families() {
            let server = SERVER.at(family, HTTPS);
            let context = format!("{dialect} {captured} {family:?}");
            // Over ovn-udn1.
            let sent = world.pod_sends(APP_PROCESS, Protocol::Tcp, server);
            assert_eq!(sent, Arrival::captured(OUTBOUND, server), "{context}");
            let sent = world.pod_sends(PROXY, Protocol::Tcp, server);
            assert_eq!(sent, Arrival::direct(server, own(family)), "{context}: the sidecar's own traffic");
            let app = SocketAddr::new(own(family), APP);
            assert_eq!(world.outside_sends(Protocol::Tcp, app), Arrival::captured(INBOUND, app), "{context}");
            // The kubelet's probes over eth0: those that the injector rewrote to the sidecar, and one of the application's
            // port.
            for port in STATUS {
                let (probe, kubelet) = (POD.at(family, port), GATEWAY.ip(family));
                assert_eq!(world.outside_sends(Protocol::Tcp, probe), Arrival::direct(probe, kubelet), "{context}");
            }
            let probe = POD.at(family, APP);
            assert_eq!(world.outside_sends(Protocol::Tcp, probe), Arrival::captured(INBOUND, probe), "{context}");
        }
        assert_eq!(traced(&world, "uid=1000650000", SERVER.at(Family::V4, HTTPS)), ["ovn-udn1", "sidecar:15001"]);
        assert_eq!(traced(&world, "uid=1000650000", SERVER.at(Family::V6, HTTPS)), ["ovn-udn1", "sidecar:15001"]);
        assert_eq!(traced(&world, "inbound:10.88.0.1", POD.at(Family::V4, STATUS[0])), ["eth0", "direct"]);
        world.call("CHECK", &configuration).run().done();
        world.call("DEL", &configuration).run().done();
    }
}

/// Returns the interface that `detour trace` of the live rules uses, and where the packet arrives.
fn traced(world: &World, from: &str, to: SocketAddr) -> [String; 2] {
    let (netns, to) = (world.netns(), format!("{to}/tcp"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_detour"));
    command.arg("trace").arg("--netns").arg(netns).args(["--from", from, "--to", &to, "-o", "json"]);
    let output = command.output().expect("it runs");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    ["interface", "arrives_at"].map(|key| report[key].as_str().expect("text").to_owned())
}

/// Only an explicit setting excludes the interface with the default route.
#[test]
fn an_interface_that_a_setting_names_is_excluded_even_with_the_default_route() {
    let world = World::new(Families::Both);
    add_primary_user_defined_network(&world);
    let manifests = story(&world, Dns::Left, &[]);
    for dialect in ["iptables", "nftables"] {
        let redirect = json!({ "type": "istio-redirect", "exclude_interfaces": "ovn-udn1" });
        let mut configuration = chain(&manifests, json!([redirect]));
        configuration["dialect"] = dialect.into();
        world.add(&configuration);
        let server = SERVER.at(Family::V4, HTTPS);
        let sent = world.pod_sends(APP_PROCESS, Protocol::Tcp, server);
        assert_eq!(sent, Arrival::direct(server, "10.90.0.2".parse().expect("an address")), "{dialect}");
        assert_eq!(traced(&world, "uid=1000650000", server), ["ovn-udn1", "direct"]);
        world.call("DEL", &configuration).run().done();
    }
}

/// A default route in parts, or behind a policy rule, is the pod's default route, too.
#[test]
fn the_interface_through_which_public_traffic_leaves_is_captured() {
    let halves: &[&str] =
        &["route add 0.0.0.0/1 dev net1", "route add 128.0.0.0/1 dev net1", "-6 route add 2000::/3 dev net1"];
    let by_rule: &[&str] = &[
        "route add default dev net1 table 77",
        "rule add from all lookup 77 priority 100",
        "-6 route add default dev net1 table 77",
        "-6 rule add from all lookup 77 priority 100",
    ];
    let parts: &[&str] = &["route add 64.0.0.0/4 dev net1"];
    let subnet: &[&str] = &["addr add 93.184.216.34/4 dev net1"];
    let by_uid: &[&str] =
        &["route add default dev net1 table 77", "rule add uidrange 1000-1000 lookup 77 priority 100"];
    let by_protocol: &[&str] = &["route add default dev net1 table 77", "rule add ipproto tcp lookup 77 priority 100"];
    for (name, commands) in [
        ("halves", halves),
        ("policy rule", by_rule),
        ("parts", parts),
        ("subnet", subnet),
        ("UID", by_uid),
        ("protocol", by_protocol),
    ] {
        for dialect in ["iptables", "nftables"] {
            let world = World::new(Families::Both);
            world.ips(&[
                "link add net1 type veth peer name far",
                "addr add 10.99.0.2/24 dev net1",
                "link set net1 up",
                "link set far up",
            ]);
            let mut configuration = chain(
                &story(&world, Dns::Left, &[]),
                json!([{ "type": "istio-redirect", "capture_secondary_networks": false }]),
            );
            configuration["dialect"] = dialect.into();
            let excludes = || {
                let rules = [format!("{:?}", world.iptables_save(Family::V4)), world.native_tables().join("")].concat();
                rules.contains("net1")
            };
            let add = || {
                world.add(&configuration);
                excludes()
            };
            assert!(add(), "{name} {dialect}: a secondary network");
            world.call("CHECK", &configuration).run().done();
            world.ips(commands);
            let output = world.call("CHECK", &configuration).run();
            assert_eq!(output.refused().0, 103, "{name} {dialect}");
            assert!(
                output.stdout["details"].as_str().is_some_and(|text| text.contains("\"net1\"")),
                "{}",
                output.stdout
            );
            assert!(!add(), "{name} {dialect}: the default route");
            world.call("CHECK", &configuration).run().done();
            world.call("DEL", &configuration).run().done();
        }
    }
}

/// Routes to private networks, the network's own subnet, and the table of sockets that choose the network's address (as
/// the CNI plugin `sbr` adds it) make no default route.
#[test]
fn an_interface_with_routes_of_its_own_network_is_a_secondary_one() {
    let world = World::new(Families::V4);
    world.ips(&[
        "link add net1 type veth peer name far",
        "link set far up",
        "addr add 93.184.216.34/24 dev net1",
        "link set net1 up",
        "route add 10.0.0.0/8 dev net1",
        "route add 224.0.0.0/4 dev net1",
        "route add default dev net1 table 77",
        "rule add from 93.184.216.34 lookup 77 priority 100",
    ]);
    let redirect = json!([{ "type": "istio-redirect", "capture_secondary_networks": false }]);
    let configuration = chain(&story(&world, Dns::Left, &[]), redirect);
    world.add(&configuration);
    assert!(format!("{:?}", world.iptables_save(Family::V4)).contains("-o net1 -j RETURN"));
    world.call("CHECK", &configuration).run().done();
}

/// The sender's UID or the protocol can select another routing table, and an inbound packet arrives at the interface with its destination.
#[test]
fn trace_uses_the_interface_of_the_sender_and_of_the_destination() {
    let world = World::new(Families::V4);
    world.ips(&[
        "link add net1 type veth peer name far",
        "link set far up",
        "addr add 10.99.0.2/24 dev net1",
        "link set net1 up",
        "route add default dev net1 table 77",
        "rule add uidrange 4000-4000 lookup 77 priority 100",
        "rule add ipproto tcp dport 8443 lookup 77 priority 101",
    ]);
    let server = SERVER.at(Family::V4, HTTPS);
    assert_eq!(traced(&world, "uid=4001", SERVER.at(Family::V4, 8443))[0], "net1");
    assert_eq!(traced(&world, "uid=4000", server)[0], "net1");
    assert_eq!(traced(&world, "uid=4001", server)[0], "eth0");
    assert_eq!(traced(&world, "inbound", "10.99.0.2:80".parse().expect("an address"))[0], "net1");
    assert_eq!(traced(&world, "inbound", POD.at(Family::V4, APP))[0], "eth0");
}
