//! Live policy: a running pod gets the rules of its changed policy, and its connections continue.

mod failures;
mod inputs;
mod tightened;
mod traffic;

use crate::configuration::{chain, exclude_1337, story};
use crate::dialect::Dialect;
use crate::expectations::*;
use crate::istio::Dns;
use crate::pod::{self, APP_PROCESS, PROXY, VAULT_INIT};
use crate::support::new_netns::tool_in;
use crate::world::*;
use detour_cni::cluster;
use detour_cni::cni::{CniCommand, Error, NetConf};
use detour_cni::plugin::running::{Repeated, RepeatedAdd};
use detour_cni::pod::{Facts, PodRef};
use serde_json::json;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Instant;
use traffic::Traffic;

/// Where the node's file system is mounted.
const NODE: &str = "/";
const SWITCHES: usize = 20;
const CHANGES: usize = 100;

/// The annotations of a pod that excludes the server, the application's port and the resolver.
fn excluding() -> [(&'static str, String); 3] {
    let both = |host: Host, lengths: [u8; 2]| {
        format!("{}/{},{}/{}", host.ip(Family::V4), lengths[0], host.ip(Family::V6), lengths[1])
    };
    [
        ("traffic.sidecar.istio.io/excludeOutboundIPRanges", both(SERVER, [32, 128])),
        ("traffic.sidecar.istio.io/excludeInboundPorts", APP.to_string()),
        ("detour.io/exclude-dns", both(RESOLVER, [32, 128])),
    ]
}

/// The annotations in the states between which tests switch.
fn annotations(excludes: bool) -> Vec<(&'static str, String)> {
    if excludes { excluding().to_vec() } else { Vec::new() }
}

fn written(world: &World, dns: Dns, annotations: &[(&'static str, String)]) -> PathBuf {
    let annotations: Vec<(&str, &str)> = annotations.iter().map(|(key, value)| (*key, value.as_str())).collect();
    story(world, dns, &annotations)
}

/// Reads the facts of the example pod from manifests.
fn facts(manifests: &Path) -> Facts {
    let text = chain(manifests, json!([])).to_string();
    let conf = NetConf::parse(text.as_bytes(), CniCommand::Add, "").expect("valid");
    let pod = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: Some(pod::UID.into()) };
    cluster::source(&conf.kubernetes).expect("manifests").facts(&pod, true).expect("readable")
}

/// Repeats the ADD of the pod with what its manifests say now and these installed configurations.
fn repeat(world: &World, facts: &Facts, installed: &[&NetConf]) -> Result<Repeated, Error> {
    RepeatedAdd { root: Path::new(NODE), facts: Some(facts), installed, restores: true, found: None }.run(&world.name)
}

/// The same with the configuration of its ADD.
fn follow(world: &World, manifests: &Path) -> Result<Repeated, Error> {
    repeat(world, &facts(manifests), &[])
}

/// Asserts that connections and queries which begin now follow the policy.
#[track_caller]
fn new_traffic_follows(world: &World, excludes: bool) {
    if !excludes {
        tcp_is_captured(world, APP_PROCESS);
        dns_is_captured(world, APP_PROCESS, RESOLVER);
        inbound_is_captured(world);
        return;
    }
    tcp_is_direct(world, APP_PROCESS);
    dns_is_direct(world, APP_PROCESS, RESOLVER);
    for &family in world.families() {
        let to = POD.at(family, APP);
        assert_eq!(world.outside_sends(Protocol::Tcp, to), Arrival::direct(to, GATEWAY.ip(family)));
    }
}

fn of_pod(world: &World, process: Process, to: SocketAddr) -> Traffic {
    Traffic::connection(world.netns(), process, to)
}

/// Starts the long connections of each family: outbound, inbound, and to the resolver.
fn long_connections(world: &World) -> Vec<Traffic> {
    let of_family = |family: &Family| {
        [
            of_pod(world, APP_PROCESS, SERVER.at(*family, HTTPS)),
            of_pod(world, APP_PROCESS, RESOLVER.at(*family, DNS)),
            Traffic::connection(world.outside_netns(), ROOT, POD.at(*family, APP)),
        ]
    };
    world.families().iter().flat_map(of_family).collect()
}

/// The old tables mark a packet, the change takes effect, and the same packet passes the new tables. In the tables of
/// iptables, a change replaces rules, and a packet passes each chain once.
#[test]
fn a_connection_survives_a_switch_between_two_tables_under_tproxy() {
    let world = World::new(Families::Both);
    let mut all = annotations(true);
    all.push(("sidecar.istio.io/interceptionMode", "TPROXY".to_owned()));
    let all: Vec<(&str, &str)> = all.iter().map(|(key, value)| (*key, value.as_str())).collect();
    let proxy = Process { uid: 0, gid: 1337 };
    let facts = world.manifests(&[pod::NAMESPACE, &pod::manifest(false, proxy, &all)]);
    world.add(&Dialect::Nftables.of(exclude_1337(&facts)));
    let connections = long_connections(&world);
    let old = "add table inet old
        add chain inet old prerouting { type filter hook prerouting priority -151; }
        add rule inet old prerouting iifname != lo meta l4proto tcp ct state established meta mark set 1337";
    tool_in(&world.netns(), "nft", &["-f", "-"], old);
    connections.iter().for_each(|connection| connection.wait_for(3));
    for connection in connections {
        connection.stop();
    }
}

in_both_dialects! {
    /// Each packet passes either the old or the new rules: never both, and never neither.
    fn a_flood_during_changes_is_delivered_as_before_and_after(dialect) {
        let world = World::new(Families::V4);
        let states = ["4000", "4001"].map(|id| {
            let keys = ["traffic.sidecar.istio.io/excludeOutboundPorts", "detour.io/exclude-uids"];
            written(&world, Dns::Captured, &keys.map(|key| (key, id.to_owned())))
        });
        world.add(&dialect.of(exclude_1337(&states[0])));
        let (server, resolver) = (SERVER.at(Family::V4, HTTPS), RESOLVER.at(Family::V4, DNS));
        let direct = |to| Arrival::direct(to, POD.ip(Family::V4));
        let floods = [
            (Traffic::connections(world.netns(), APP_PROCESS, server), Arrival::captured(OUTBOUND, server)),
            (Traffic::queries(world.netns(), APP_PROCESS, resolver), Arrival::captured_datagram(DNS_PROXY)),
            (Traffic::connections(world.netns(), VAULT_INIT, server), direct(server)),
            (Traffic::queries(world.netns(), VAULT_INIT, resolver), direct(resolver)),
        ];
        for change in 1..=CHANGES {
            follow(&world, &states[change % 2]).expect("applied");
        }
        for (flood, expected) in floods {
            assert_eq!(flood.stop().0, [expected]);
        }
    }

    fn long_connections_survive_each_switch_and_new_ones_follow_the_new_policy(dialect) {
        let world = World::new(Families::Both);
        let states = [false, true].map(|excludes| written(&world, Dns::Captured, &annotations(excludes)));
        world.add(&dialect.of(exclude_1337(&states[0])));
        let mut connections = long_connections(&world);
        follow(&world, &states[1]).expect("applied");
        connections.extend(long_connections(&world));
        let mut times = Vec::new();
        for switch in 0..SWITCHES {
            connections.iter().for_each(|connection| connection.wait_for(1));
            let start = Instant::now();
            follow(&world, &states[switch % 2]).expect("applied");
            times.push(start.elapsed());
            connections.iter().for_each(|connection| connection.wait_for(1));
            if switch < 4 {
                new_traffic_follows(&world, switch % 2 == 1);
            }
        }
        times.sort();
        println!("apply: median {:?}, max {:?}", times[SWITCHES / 2], times[SWITCHES - 1]);
        for connection in connections {
            let (arrivals, messages) = connection.stop();
            assert!(arrivals.len() == 1 && messages > 2 * SWITCHES, "{arrivals:?} after {messages} messages");
        }
        world.call("CHECK", &dialect.of(exclude_1337(&states[1]))).run().done();
    }

    fn each_query_of_one_socket_is_answered(dialect) {
        let world = World::new(Families::Both);
        let states = [false, true].map(|excludes| written(&world, Dns::Captured, &annotations(excludes)));
        world.add(&dialect.of(exclude_1337(&states[0])));
        let sockets: Vec<(Traffic, SocketAddr)> = world
            .families()
            .iter()
            .map(|family| RESOLVER.at(*family, DNS))
            .map(|to| (Traffic::queries(world.netns(), APP_PROCESS, to), to))
            .collect();
        for switch in 1..=SWITCHES {
            follow(&world, &states[switch % 2]).expect("applied");
            sockets.iter().for_each(|(socket, _)| socket.wait_for(3));
        }
        for (socket, to) in sockets {
            let (arrivals, _) = socket.stop();
            let direct = |arrival: &Arrival| matches!(arrival, Arrival::Direct { at, .. } if *at == to);
            let captured = |arrival: &Arrival| *arrival == Arrival::captured_datagram(DNS_PROXY);
            assert!(arrivals.iter().any(direct) && arrivals.iter().any(captured), "{arrivals:?}");
            assert!(arrivals.iter().all(|arrival| direct(arrival) || captured(arrival)), "{arrivals:?}");
        }
    }
}
