//! Live policy: a running pod gets the rules of its changed policy, and its connections continue.

use crate::dialect::Dialect;
use crate::example::*;
use crate::expectations::*;
use crate::support::new_netns::tool_in;
use crate::world::*;
use detour_cni::cluster;
use detour_cni::cni::{CniCommand, Code, Error, NetConf};
use detour_cni::plugin::running::{Repeated, RepeatedAdd};
use detour_cni::pod::{Facts, PodRef};
use serde_json::json;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use traffic::Traffic;

mod traffic;

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
    let pod = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: Some(UID.into()) };
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
    let facts = world.manifests(&[NAMESPACE, &manifest(false, proxy, &all)]);
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
        let resolvers: Vec<_> = world.families().iter().map(|family| RESOLVER.at(*family, DNS)).collect();
        let queries = |to: &SocketAddr| (Traffic::queries(world.netns(), APP_PROCESS, *to), *to);
        let sockets: Vec<_> = resolvers.iter().map(queries).collect();
        follow(&world, &states[1]).expect("applied");
        connections.extend(long_connections(&world));
        for switch in 0..SWITCHES {
            connections.iter().for_each(|connection| connection.wait_for(1));
            follow(&world, &states[switch % 2]).expect("applied");
            connections.iter().for_each(|connection| connection.wait_for(1));
            sockets.iter().for_each(|(socket, _)| socket.wait_for(3));
            if switch < 4 {
                new_traffic_follows(&world, switch % 2 == 1);
            }
        }
        for connection in connections {
            let (arrivals, messages) = connection.stop();
            assert!(arrivals.len() == 1 && messages > 2 * SWITCHES, "{arrivals:?} after {messages} messages");
        }
        // Each query of one socket is answered, by the resolver or by the sidecar.
        for (socket, to) in sockets {
            let (arrivals, _) = socket.stop();
            let direct = |arrival: &Arrival| matches!(arrival, Arrival::Direct { at, .. } if *at == to);
            let captured = |arrival: &Arrival| *arrival == Arrival::captured_datagram(DNS_PROXY);
            assert!(arrivals.iter().any(direct) && arrivals.iter().any(captured), "{arrivals:?}");
            assert!(arrivals.iter().all(|arrival| direct(arrival) || captured(arrival)), "{arrivals:?}");
        }
        world.call("CHECK", &dialect.of(exclude_1337(&states[1]))).run().done();
    }
}

const STATE: &str = "/run/detour/attachments";

/// The pod's rules and its saved state.
#[derive(Debug, PartialEq)]
struct Snapshot {
    rules: (Vec<Ruleset>, Vec<String>),
    records: BTreeMap<PathBuf, Vec<u8>>,
}

fn live_rules(world: &World) -> (Vec<Ruleset>, Vec<String>) {
    (world.families().iter().map(|family| world.iptables_save(*family)).collect(), world.native_tables())
}

fn snapshot(world: &World) -> Snapshot {
    let directory = Path::new(STATE).join(&world.name);
    let paths = std::fs::read_dir(directory).expect("saved state").map(|entry| entry.expect("readable").path());
    // A temporary file that can't be removed is ignored, and removed with the last record.
    let is_record = |path: &PathBuf| path.extension().is_some() && !path.to_string_lossy().contains("/.");
    let records = paths.filter(is_record).map(|path| (path.clone(), std::fs::read(path).expect("readable"))).collect();
    Snapshot { rules: live_rules(world), records }
}

/// Returns the path of the record of an attachment.
fn record_path(world: &World) -> PathBuf {
    Path::new(STATE).join(&world.name).join("istio-cni@net1.json")
}

#[test]
fn a_deleted_pod_gets_neither_rules_nor_saved_state_again() {
    let world = World::new(Families::Both);
    let states = [false, true].map(|excludes| written(&world, Dns::Left, &annotations(excludes)));
    let configuration = exclude_1337(&states[0]);
    world.add(&configuration);
    world.call("DEL", &configuration).run().done();
    let before = live_rules(&world);
    let error = follow(&world, &states[1]).expect_err("the pod is gone");
    assert_eq!(error.code, Code::NoAdd, "{error}");
    assert!(!Path::new(STATE).join(&world.name).exists());
    assert_eq!(live_rules(&world), before);
}

#[test]
fn the_network_namespace_of_another_pod_is_not_changed() {
    let world = World::new(Families::Both);
    let states = [false, true].map(|excludes| written(&world, Dns::Left, &annotations(excludes)));
    world.add(&exclude_1337(&states[0]));
    let text = std::fs::read_to_string(record_path(&world)).expect("readable");
    let mut changed: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    changed["netns_id"]["inode"] = json!(changed["netns_id"]["inode"].as_u64().expect("a number") + 1);
    std::fs::write(record_path(&world), changed.to_string()).expect("writable");
    let before = snapshot(&world);
    let error = follow(&world, &states[1]).expect_err("another network namespace");
    assert!(error.code == Code::InvalidNetns && error.msg.contains("replaced"), "{error}");
    assert_eq!(snapshot(&world), before);
    std::fs::write(record_path(&world), text).expect("writable");
    follow(&world, &states[1]).expect("applied");
    new_traffic_follows(&world, true);
}

const UIDS: &str = "detour.io/exclude-uids";

fn app_uid() -> (&'static str, String) {
    (UIDS, APP_PROCESS.uid.to_string())
}

/// Returns the saved record of the first attachment.
fn record(world: &World) -> String {
    std::fs::read_to_string(record_path(world)).expect("readable")
}

/// Asserts that the pod's policy is current with these manifests: another ADD changes neither rules nor records.
#[track_caller]
fn is_current(world: &World, manifests: &Path) {
    let before = record(world);
    let repeated = follow(world, manifests).expect("repeated");
    assert!(!repeated.has_committed && repeated.change.is_empty(), "{repeated:?}");
    assert_eq!(record(world), before);
}

in_both_dialects! {
    fn an_adaptation_to_another_redirection_is_no_change_and_remains(dialect) {
        let world = redirected_world(Dns::Captured);
        let state = written(&world, Dns::Left, &[]);
        world.add(&dialect.of(exclude_1337(&state)));
        is_current(&world, &state);
        let changed = written(&world, Dns::Left, &[app_uid()]);
        follow(&world, &changed).expect("applied");
        is_current(&world, &changed);
        tcp_is_direct(&world, APP_PROCESS);
        a_query_leaves_one_replied_entry(&world, APP_PROCESS, RESOLVER);
        follow(&world, &state).expect("applied");
        tcp_is_captured(&world, APP_PROCESS);
    }

    fn interfaces_of_secondary_networks_are_no_change(dialect) {
        let world = World::new(Families::V4);
        world.ip(&["link", "add", "data0", "type", "veth", "peer", "name", "far"]);
        let state = written(&world, Dns::Left, &[]);
        let sub_plugins =
            json!([{"type": "istio-redirect", "capture_secondary_networks": false}, {"type": "uid-exclude"}]);
        world.add(&dialect.of(chain(&state, sub_plugins)));
        is_current(&world, &state);
        let changed = written(&world, Dns::Left, &[app_uid()]);
        follow(&world, &changed).expect("applied");
        is_current(&world, &changed);
        assert!(record(&world).contains("data0"));
    }

    fn exclusions_are_added_to_a_pod_that_only_another_tool_redirects(dialect) {
        let world = World::new(Families::Both);
        let state = written(&world, Dns::Left, &[]);
        let configuration = dialect.of(chain(&state, json!([{"type": "uid-exclude"}, {"type": "dns-exclude"}])));
        world.add(&configuration);
        assert!(!follow(&world, &state).expect("repeated").has_rules);
        is_current(&world, &state);
        for &family in world.families() {
            world.iptables_restore(family, &rules(family, Dns::Left, PROXY.uid));
        }
        tcp_is_captured(&world, APP_PROCESS);
        let changed = written(&world, Dns::Left, &[app_uid()]);
        follow(&world, &changed).expect("applied");
        is_current(&world, &changed);
        tcp_is_direct(&world, APP_PROCESS);
        world.call("CHECK", &configuration).run().done();
        assert_eq!(world.native_redirection(), [""; 0]);
    }
}

#[test]
fn an_installed_configuration_replaces_the_recorded_one() {
    let world = World::new(Families::Both);
    let state = written(&world, Dns::Left, &[]);
    world.add(&exclude_1337(&state));
    let facts = facts(&state);
    let chain = json!([{"type": "istio-redirect"}, {"type": "uid-exclude", "uids": [APP_PROCESS.uid]}]);
    let installed = json!({"cniVersion": "1.0.0", "name": "istio-cni", "type": "detour", "chain": chain}).to_string();
    let repeat_with = |installed: &str| {
        let conf = NetConf::parse(installed.as_bytes(), CniCommand::Add, "").expect("valid");
        repeat(&world, &facts, &[&conf]).expect("applied")
    };
    assert!(repeat_with(&installed).change.contains(&format!("excluded: UID {}", APP_PROCESS.uid)));
    tcp_is_direct(&world, APP_PROCESS);
    // Another network's configuration does not apply.
    let change = repeat_with(&installed.replace("\"istio-cni\"", "\"other\"")).change;
    assert!(change.contains("no longer excluded"), "{change}");
    tcp_is_captured(&world, APP_PROCESS);
    // Its exclusions end in a namespace that is excluded now, and the redirection stays.
    let excluded = installed.replace("\"type\":\"detour\"", "\"type\":\"detour\",\"exclude_namespaces\":[\"shop\"]");
    repeat_with(&excluded);
    tcp_is_captured(&world, APP_PROCESS);
    tcp_is_captured(&world, VAULT_INIT);
}

#[test]
fn the_facts_of_another_pod_are_refused() {
    let world = World::new(Families::V4);
    let state = written(&world, Dns::Left, &[]);
    world.add(&exclude_1337(&state));
    let mut facts = facts(&state);
    facts.pod.uid = Some("another".to_owned());
    let error = repeat(&world, &facts, &[]).expect_err("another pod");
    assert!(error.msg.contains("the pod was replaced"), "{error}");
}

const REDIRECTED: &str = "    sidecar.istio.io/status: '{\"revision\":\"default\"}'\n";

/// What the author of the pod writes, or does in it, before the configuration is tightened.
struct Variant {
    name: &'static str,
    annotations: Vec<(&'static str, String)>,
    label: &'static str,
    has_status: bool,
    rules: &'static str,
    /// A part of the reason that an Event names.
    absent: &'static str,
}

fn variants() -> Vec<Variant> {
    let usual =
        |name, absent| Variant { name, annotations: Vec::new(), label: "", has_status: true, rules: "", absent };
    let annotated = |name, key, value: &str| Variant { annotations: vec![(key, value.to_owned())], ..usual(name, "") };
    let many: Vec<String> = (0..8280).map(|number| (10_000 + 2 * number).to_string()).collect();
    let ports: Vec<String> = (0..1000).map(|number| (20_000 + 2 * number).to_string()).collect();
    let empty_chains = "add table ip nat\nadd chain ip nat ISTIO_X\nadd table inet istio-proxy-x\n";
    vec![
        usual("nothing", "outside the bounds"),
        annotated("annotation inject", "sidecar.istio.io/inject", "false"),
        Variant { label: "sidecar.istio.io/inject: \"false\"", ..usual("label inject", "") },
        annotated("mode NONE", "sidecar.istio.io/interceptionMode", "NONE"),
        Variant { has_status: false, ..usual("no status", "") },
        Variant { has_status: false, label: "istio.io/dataplane-mode: ambient", ..usual("ambient", "") },
        Variant { absent: "abc", ..annotated("invalid annotation", "detour.io/exclude-dns", "abc") },
        Variant {
            absent: "invalid value \"x\"",
            ..annotated("invalid ports", "traffic.sidecar.istio.io/excludeOutboundPorts", "80,x")
        },
        annotated(
            "too many exclusions",
            "detour.io/exclude-outbound-ports-for-uids",
            &format!("tcp:81:{}", many.join(",")),
        ),
        Variant {
            absent: "bytes of saved policies",
            ..annotated(
                "too much saved state",
                "detour.io/exclude-outbound-ports-for-uids",
                &format!("tcp:{}:{}", ports.join(","), many[..68].join(",")),
            )
        },
        Variant { rules: empty_chains, ..usual("names of another tool", "") },
    ]
}

in_both_dialects! {
    fn a_bypass_that_is_no_longer_permitted_ends(dialect) {
        let world = World::new(Families::Both);
        let state = |annotations: &[(&str, &str)], label: &str, has_status: bool| {
            let mut text = manifest(false, PROXY, annotations);
            if !has_status {
                assert!(text.contains(REDIRECTED));
                text = text.replace(REDIRECTED, "");
            }
            let labels = format!("  labels: {{ {label} }}\n  annotations:");
            world.manifests(&[NAMESPACE, &text.replace("  annotations:", &labels)])
        };
        let uid = APP_PROCESS.uid.to_string();
        let usual = state(&[(UIDS, &uid)], "", true);
        let sub_plugins = json!([{"type": "istio-redirect"}, {"type": "uid-exclude"}, {"type": "dns-exclude"}]);
        world.add(&dialect.of(chain(&usual, sub_plugins.clone())));
        let installed = |allow: serde_json::Value| {
            let mut conf = chain(&usual, sub_plugins.clone());
            conf["allow"] = allow;
            NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").expect("valid")
        };
        let (wide, tight) = (installed(json!({})), installed(json!({"uids": "10000-60000"})));
        for variant in variants() {
            repeat(&world, &facts(&usual), &[&wide]).expect(variant.name);
            tcp_is_direct(&world, APP_PROCESS);
            tool_in(&world.netns(), "nft", &["-f", "-"], variant.rules);
            let mut annotations = vec![(UIDS, uid.as_str())];
            annotations.extend(variant.annotations.iter().map(|(key, value)| (*key, value.as_str())));
            let changed = facts(&state(&annotations, variant.label, variant.has_status));
            let repeated = repeat(&world, &changed, &[&tight]).expect(variant.name);
            tcp_is_captured(&world, APP_PROCESS);
            let absent: Vec<&str> = repeated.absent.iter().map(|error| error.msg.as_str()).collect();
            for part in ["outside the bounds", variant.absent] {
                assert!(absent.iter().any(|msg| msg.contains(part)), "{}: {absent:?}", variant.name);
            }
        }
        world.call("DEL", &dialect.of(chain(&usual, sub_plugins))).run().done();
    }
}
