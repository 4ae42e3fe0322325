//! Nat chains of other tools that see connections before detour's do: a packet goes where they send it, and each report
//! names them.

use crate::configuration::{chain, story};
use crate::dialect::Dialect;
use crate::istio::Dns;
use crate::pod::{APP_PROCESS, VAULT_INIT};
use crate::world::*;
use detour_cni::firewall::{Destination, Sender};
use detour_cni::inspect::{LiveRules, Trace, trace};
use detour_cni::{policy, state};
use serde_json::{Value, json};

/// The priorities of nat chains from that of iptables' table mangle to that of its table nat.
const PRIORITIES: [i32; 4] = [-150, -102, -101, -100];
const OTHER_PORT: u16 = 9999;

fn configuration(world: &World, dialect: Dialect, excludes: bool) -> Value {
    let exclusions =
        json!({ "type": "uid-exclude", "uids": if excludes { json!([VAULT_INIT.uid]) } else { json!([]) } });
    dialect.of(chain(&story(world, Dns::Left, &[]), json!([{ "type": "istio-redirect" }, exclusions])))
}

fn traced(world: &World, from: Sender, to: std::net::SocketAddr) -> Trace {
    let rules = LiveRules::read(&world.netns(), &state::Store::new(state::ROOT)).expect("readable");
    let to = Destination { address: to, protocol: policy::Protocol::Tcp };
    trace(&rules.view(), from, to, &rules.addresses, "eth0")
}

/// Returns whether the other chain took the connection.
fn is_taken(arrival: &Arrival) -> bool {
    match arrival {
        Arrival::Sidecar { port, .. } => *port == OTHER_PORT,
        Arrival::Direct { .. } => false,
        // Nothing listens on the other port.
        Arrival::Lost(_) => true,
    }
}

in_both_dialects! {
    fn a_nat_chain_that_runs_first_is_named_by_every_report(dialect) {
        for excludes in [false, true] {
            for hook in ["output", "prerouting"] {
                for priority in PRIORITIES {
                    one(dialect, excludes, hook, priority);
                }
            }
        }
    }
}

fn one(dialect: Dialect, excludes: bool, hook: &str, priority: i32) {
    let context = format!("{dialect:?}, exclusions {excludes}, {hook} {priority}");
    let world = World::new(Families::V4);
    let configuration = configuration(&world, dialect, excludes);
    world.add(&configuration);
    let out = hook == "output";
    let port = if out { HTTPS } else { APP };
    world.nft(&format!(
        "table ip vpn {{ chain take {{ type nat hook {hook} priority {priority}; tcp dport {port} redirect to :{OTHER_PORT}; }}; }}"
    ));
    let (arrival, trace) = if out {
        let to = SERVER.at(Family::V4, HTTPS);
        let from = Sender::Process { uid: APP_PROCESS.uid, gid: Some(APP_PROCESS.gid), set: None };
        (world.pod_sends(APP_PROCESS, Protocol::Tcp, to), traced(&world, from, to))
    } else {
        let to = POD.at(Family::V4, APP);
        (world.outside_sends(Protocol::Tcp, to), traced(&world, Sender::Inbound(Some(GATEWAY.ip(Family::V4))), to))
    };
    let place = format!("chain take of table ip vpn with priority {priority}");
    if is_taken(&arrival) {
        assert!(trace.caveats.iter().any(|caveat| caveat.starts_with(&place)), "{context}: {trace:#?}");
        let report = LiveRules::read(&world.netns(), &state::Store::new(state::ROOT)).expect("readable");
        let report = report.report(&world.netns());
        assert_eq!(report.as_asked, Some(false), "{context}");
        assert!(report.rules.iter().any(|line| line.chain == place), "{context}: {:#?}", report.rules);
        let output = world.call("CHECK", &configuration).run();
        assert_eq!(output.refused().0, 103, "{context}");
        assert!(output.stdout["details"].as_str().is_some_and(|text| text.contains(&place)), "{}", output.stdout);
    } else {
        assert_eq!(trace.arrives_at, if out { "sidecar:15001" } else { "sidecar:15006" }, "{context}");
    }
}

/// A chain that translates no destination is another tool's own matter, as that of a container which masquerades.
#[test]
fn a_nat_chain_without_a_translation_is_no_finding() {
    let world = World::new(Families::V4);
    let configuration = configuration(&world, Dialect::Iptables, true);
    world.add(&configuration);
    world.nft("table ip quiet { chain out { type nat hook output priority -150; tcp dport 443 accept; }; chain x { tcp dport 443 redirect to :9; }; }");
    world.call("CHECK", &configuration).run().done();
    let from = Sender::Process { uid: APP_PROCESS.uid, gid: Some(APP_PROCESS.gid), set: None };
    let trace = traced(&world, from, SERVER.at(Family::V4, HTTPS));
    assert_eq!((trace.arrives_at.as_str(), trace.caveats), ("sidecar:15001", Vec::new()));
}

/// Returns the trace of a connection of the application, and where it arrives.
fn sent(world: &World) -> (Trace, Arrival) {
    let to = SERVER.at(Family::V4, HTTPS);
    let from = Sender::Process { uid: APP_PROCESS.uid, gid: Some(APP_PROCESS.gid), set: None };
    (traced(world, from, to), world.pod_sends(APP_PROCESS, Protocol::Tcp, to))
}

fn names(report: &Trace, place: &str) -> bool {
    report.caveats.iter().any(|caveat| caveat.starts_with(place))
}

/// The name of a table is no evidence that it is Istio's.
#[test]
fn a_redirection_to_another_port_in_a_table_with_istios_name_is_named_by_every_report() {
    for table in ["ip istio-proxy-x", "inet istio-proxy-x", "inet istio-ambient-x"] {
        let world = World::new(Families::V4);
        let configuration = configuration(&world, Dialect::Iptables, false);
        world.add(&configuration);
        world.nft(&format!(
            "table {table} {{ chain o {{ type nat hook output priority -150; tcp dport 443 redirect to :9999; }}; }}"
        ));
        let place = format!("chain o of table {table} with priority -150");
        let (trace, arrival) = sent(&world);
        assert!(is_taken(&arrival) && names(&trace, &place), "{table}: {trace:#?}");
        assert_eq!(trace.arrives_at, "sidecar:15001", "{table}");
        assert_eq!(world.call("CHECK", &configuration).run().refused().0, 103, "{table}");
    }
}

in_both_dialects! {
    /// A packet that is not tracked passes no nat chain.
    fn a_chain_that_ends_connection_tracking_is_named_by_every_report(dialect) {
        let world = World::new(Families::V4);
        let configuration = configuration(&world, dialect, false);
        world.add(&configuration);
        world.nft(
            "table inet vpn { chain o { type filter hook output priority -300; tcp dport 443 notrack; }; \
             chain p { type filter hook prerouting priority -300; tcp sport 443 notrack; }; }",
        );
        let place = "chain o of table inet vpn with priority -300 can end the tracking of outbound connections";
        let (trace, arrival) = sent(&world);
        assert!(matches!(arrival, Arrival::Direct { .. }), "{arrival:?}");
        assert!(names(&trace, place), "{trace:#?}");
        let report = LiveRules::read(&world.netns(), &state::Store::new(state::ROOT)).expect("readable");
        assert_eq!(report.report(&world.netns()).as_asked, Some(false));
        let output = world.call("CHECK", &configuration).run();
        assert_eq!(output.refused().0, 103);
        assert!(output.stdout["details"].as_str().is_some_and(|text| text.contains("chain o of table inet vpn")));
    }

    /// TPROXY assigns a listener in any chain of prerouting.
    fn a_chain_that_assigns_a_listener_is_named_by_every_report(dialect) {
        let world = World::new(Families::V4);
        let configuration = configuration(&world, dialect, false);
        world.add(&configuration);
        world.nft(&format!(
            "table ip vpn {{ chain p {{ type filter hook prerouting priority -160; tcp dport {APP} tproxy to :9999 accept; }}; }}"
        ));
        let trace = traced(&world, Sender::Inbound(Some(GATEWAY.ip(Family::V4))), POD.at(Family::V4, APP));
        assert!(names(&trace, "chain p of table ip vpn with priority -160 can redirect inbound"), "{trace:#?}");
        assert_eq!(world.call("CHECK", &configuration).run().refused().0, 103);
    }
}

/// A chain that drops packets is another tool's own matter, but a trace says that they may not arrive.
#[test]
fn a_chain_that_drops_packets_is_a_caveat_and_no_drift() {
    let drops = [
        "chain x { type filter hook output priority -400; tcp dport 443 drop; }",
        "chain x { type filter hook output priority 50; policy drop; tcp dport 15001 accept; udp dport 53 accept; }",
        "chain x { type filter hook output priority 50; oifname lo reject; }",
    ];
    for chain in drops {
        let world = World::new(Families::V4);
        let configuration = configuration(&world, Dialect::Iptables, false);
        world.add(&configuration);
        world.nft(&format!("table ip vpn {{ {chain}; }}"));
        let to = SERVER.at(Family::V4, HTTPS);
        let from = Sender::Process { uid: APP_PROCESS.uid, gid: Some(APP_PROCESS.gid), set: None };
        let trace = traced(&world, from, to);
        let names_it = |caveat: &String| {
            caveat.starts_with("chain x of table ip vpn") && caveat.contains("can drop outbound connections")
        };
        assert!(trace.caveats.iter().any(names_it), "{chain}: {trace:#?}");
        world.call("CHECK", &configuration).run().done();
    }
}
