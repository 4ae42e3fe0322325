//! Nat chains of other tools that see connections before detour's do: a packet goes where they send it, and each report
//! names them.

use crate::dialect::Dialect;
use crate::example::*;
use crate::world::*;
use detour_cni::firewall::Sender;
use detour_cni::inspect::Trace;
use serde_json::{Value, json};

/// The priorities of nat chains from that of iptables' table mangle to that of its table nat.
const PRIORITIES: [i32; 4] = [-150, -102, -101, -100];
const OTHER_PORT: u16 = 9999;

fn configuration(world: &World, dialect: Dialect, excludes: bool) -> Value {
    let exclusions =
        json!({ "type": "uid-exclude", "uids": if excludes { json!([VAULT_INIT.uid]) } else { json!([]) } });
    dialect.of(chain(&story(world, Dns::Left, &[]), json!([{ "type": "istio-redirect" }, exclusions])))
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
        (world.pod_sends(APP_PROCESS, Protocol::Tcp, to), world.traced(APP_PROCESS, Protocol::Tcp, to))
    } else {
        let (to, from) = (POD.at(Family::V4, APP), Sender::Inbound(Some(GATEWAY.ip(Family::V4))));
        (world.outside_sends(Protocol::Tcp, to), world.traced(from, Protocol::Tcp, to))
    };
    let place = format!("chain take of table ip vpn with priority {priority}");
    if is_taken(&arrival) {
        assert!(names(&trace, &place), "{context}: {trace:#?}");
        let report = world.live_rules().report();
        assert!(report.rules.iter().any(|line| line.chain == place), "{context}: {:#?}", report.rules);
        is_drift(&world, &configuration, &place);
        let output = world.call("ADD", &configuration).run().done();
        assert!(output.stderr.contains(&place), "{context}: {}", output.stderr);
    } else {
        assert_eq!(trace.arrives_at, if out { "sidecar:15001" } else { "sidecar:15006" }, "{context}");
    }
}

fn names(report: &Trace, place: &str) -> bool {
    report.caveats.iter().any(|caveat| caveat.starts_with(place))
}

/// Asserts that CHECK and the report about the rules name the place.
#[track_caller]
fn is_drift(world: &World, configuration: &Value, place: &str) {
    assert_eq!(world.live_rules().report().as_asked, Some(false), "{place}");
    let output = world.call("CHECK", configuration).run();
    assert_eq!(output.refused().0, 103, "{place}");
    assert!(output.stdout["details"].as_str().is_some_and(|text| text.contains(place)), "{}", output.stdout);
}

/// Tables of other tools, the beginning of the caveat about each, and where the traces say that the connection arrives.
/// The name of a table is no evidence that it is Istio's. A packet that is not tracked passes no nat chain. TPROXY assigns
/// a listener in any chain of prerouting.
const DRIFT: [(&str, &str); 5] = [
    (
        "table ip istio-proxy-x { chain o { type nat hook output priority -150; tcp dport 443 redirect to :9999; }; }",
        "chain o of table ip istio-proxy-x with priority -150",
    ),
    (
        "table inet istio-proxy-x { chain o { type nat hook output priority -150; tcp dport 443 redirect to :9999; }; }",
        "chain o of table inet istio-proxy-x with priority -150",
    ),
    (
        "table inet istio-ambient-x { chain o { type nat hook output priority -150; tcp dport 443 redirect to :9999; }; }",
        "chain o of table inet istio-ambient-x with priority -150",
    ),
    (
        "table inet vpn { chain o { type filter hook output priority -300; tcp dport 443 notrack; }; \
         chain p { type filter hook prerouting priority -300; tcp sport 443 notrack; }; }",
        "chain o of table inet vpn with priority -300 can end the tracking of outbound connections",
    ),
    (
        "table ip vpn { chain p { type filter hook prerouting priority -160; tcp dport 8080 tproxy to :9999 accept; }; }",
        "chain p of table ip vpn with priority -160 can redirect inbound",
    ),
];

in_both_dialects! {
    fn a_chain_that_takes_packets_is_named_by_every_report(dialect) {
        for (table, place) in DRIFT {
            let world = World::new(Families::V4);
            let configuration = configuration(&world, dialect, false);
            world.add(&configuration);
            world.nft(table);
            let to = SERVER.at(Family::V4, HTTPS);
            let trace = if place.starts_with("chain p") {
                world.traced(Sender::Inbound(Some(GATEWAY.ip(Family::V4))), Protocol::Tcp, POD.at(Family::V4, APP))
            } else {
                let arrival = world.pod_sends(APP_PROCESS, Protocol::Tcp, to);
                let is_untracked = place.contains("tracking") && matches!(arrival, Arrival::Direct { .. });
                assert!(is_taken(&arrival) || is_untracked, "{place}: {arrival:?}");
                world.traced(APP_PROCESS, Protocol::Tcp, to)
            };
            assert!(names(&trace, place), "{place}: {trace:#?}");
            is_drift(&world, &configuration, place.split(" with ").next().expect("a place"));
        }
    }
}

/// A chain that translates no destination, or drops packets, is another tool's own matter, as that of a container which
/// masquerades. A trace says that packets may be dropped.
#[test]
fn a_chain_that_takes_no_packets_is_no_drift() {
    for (chain, drops) in [
        (
            "chain out { type nat hook output priority -150; tcp dport 443 accept; }; \
             chain x { tcp dport 443 redirect to :9; }",
            false,
        ),
        ("chain x { type filter hook output priority -400; tcp dport 443 drop; }", true),
        (
            "chain x { type filter hook output priority 50; policy drop; tcp dport 15001 accept; udp dport 53 accept; }",
            true,
        ),
        ("chain x { type filter hook output priority 50; oifname lo reject; }", true),
    ] {
        let world = World::new(Families::V4);
        let configuration = configuration(&world, Dialect::Iptables, true);
        world.add(&configuration);
        world.nft(&format!("table ip vpn {{ {chain}; }}"));
        let trace = world.traced(APP_PROCESS, Protocol::Tcp, SERVER.at(Family::V4, HTTPS));
        let names_it = |caveat: &String| {
            caveat.starts_with("chain x of table ip vpn") && caveat.contains("can drop outbound connections")
        };
        assert_eq!(trace.caveats.iter().any(names_it), drops, "{chain}: {trace:#?}");
        if !drops {
            assert_eq!((trace.arrives_at.as_str(), trace.caveats), ("sidecar:15001", Vec::new()));
        }
        world.call("CHECK", &configuration).run().done();
    }
}
