//! `trace` predicts what real packets do, for any policy; and `rules` shows the rules that they pass.

use crate::dialect::Dialect;
use crate::example::*;
use crate::support::cgroup::Cgroup;
use crate::world::*;
use detour_cni::firewall::{
    ContainerElement, ContainerLabel, Destination, LiveRuleset, RuleFormat, RulesetView, Sender,
};
use detour_cni::inspect::{
    ContainerSender, ManifestTexts, Mark, PodManifest, PodSelector, RulesReport, Trace, configuration, explain, trace,
};
use detour_cni::policy;
use detour_cni::policy::ContainerScope;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Map, Value, json};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

/// The number of policies; each has its own world and is tested with about seventy packets.
const POLICIES: usize = 20;

const OTHER: Process = Process { uid: 5, gid: 7 };

/// A policy as an administrator and a pod's author configure it.
#[derive(Debug, Clone)]
struct ConfiguredPolicy {
    dns: bool,
    tproxy: bool,
    native: bool,
    chain: Value,
    /// Whether the pod's init container is excluded, and in which scope.
    container: Option<ContainerScope>,
}

/// The container that policies exclude.
const CONTAINER: &str = "vault-agent-init";

/// One of `values`, or an absent key.
fn maybe(key: &'static str, values: &'static [&'static str]) -> impl Strategy<Value = Option<(String, Value)>> {
    prop::option::weighted(
        0.2,
        prop::sample::select(values).prop_map(move |value| (key.to_owned(), Value::from(value))),
    )
}

fn block(kind: &'static str, keys: Vec<BoxedStrategy<Option<(String, Value)>>>) -> impl Strategy<Value = Value> {
    keys.prop_map(move |keys| {
        let kind = [("type".to_owned(), Value::from(kind))];
        Value::Object(kind.into_iter().chain(keys.into_iter().flatten()).collect::<Map<_, _>>())
    })
}

fn configured_policy() -> impl Strategy<Value = ConfiguredPolicy> {
    let redirect = block(
        "istio-redirect",
        vec![
            maybe("inbound_ports_include", &["*", "8080,15090", ""]).boxed(),
            maybe("inbound_ports_exclude", &["8080", "*", "15000-15030"]).boxed(),
            maybe("outbound_ports_include", &["443", "53"]).boxed(),
            maybe("outbound_ports_exclude", &["443", "53", "15020", "500-600"]).boxed(),
            maybe("outbound_ip_ranges_include", &["198.51.100.0/24,2001:db8:20::/60", ""]).boxed(),
            maybe("outbound_ip_ranges_exclude", &[EXCLUDED_RANGES, "10.96.0.10,fd96::/64"]).boxed(),
            maybe("owner_groups_include", &["7", "1000650000,1000659999"]).boxed(),
            maybe("owner_groups_exclude", &["7"]).boxed(),
            maybe("exclude_interfaces", &["eth0", "net1"]).boxed(),
            maybe("dns_servers_v4", &["10.96.0.10"]).boxed(),
        ],
    );
    let uids = block(
        "uid-exclude",
        vec![
            maybe("uids", &["1337", "0-9", "container:web"]).boxed(),
            maybe("gids", &["7"]).boxed(),
            maybe("rules", &["tcp:443:5", "udp:53:1000650000", "22,53,443:*"]).boxed(),
        ],
    );
    let dns = block(
        "dns-exclude",
        vec![
            maybe("uids", &["1337", "5"]).boxed(),
            maybe("resolvers", &["10.96.0.10,fd96::a", "excluded-ranges", "all"]).boxed(),
            maybe("protocols", &["udp", "tcp"]).boxed(),
        ],
    );
    let container = prop::option::of(prop::sample::select(&[ContainerScope::All, ContainerScope::Dns][..]));
    let switches = (prop::bool::weighted(0.7), prop::bool::weighted(0.3), any::<bool>(), container);
    (switches, redirect, uids, dns).prop_map(|((dns, tproxy, native, container), redirect, uid, exclude)| {
        let mut chain = vec![redirect, uid, exclude];
        chain.extend(
            container.map(|scope| json!({"type": "container-exclude", "containers": [CONTAINER], "scope": scope})),
        );
        ConfiguredPolicy { dns, tproxy, native, chain: Value::from(chain), container }
    })
}

/// Protocol, destination and sender of a packet; `None` is a sender outside.
fn packets(family: Family) -> Vec<(Option<Process>, Protocol, SocketAddr)> {
    let mut packets = Vec::new();
    for process in [APP_PROCESS, PROXY, VAULT_INIT, OTHER] {
        for (protocol, host, port) in [
            (Protocol::Tcp, SERVER, HTTPS),
            (Protocol::Tcp, VAULT, HTTPS),
            (Protocol::Tcp, SERVER, STATUS[0]),
            (Protocol::Udp, SERVER, SYSLOG),
            (Protocol::Udp, RESOLVER, DNS),
            (Protocol::Tcp, RESOLVER, DNS),
            (Protocol::Udp, OTHER_RESOLVER, DNS),
            (Protocol::Udp, VAULT, DNS),
            (Protocol::Tcp, POD, APP),
        ] {
            packets.push((Some(process), protocol, host.at(family, port)));
        }
    }
    for port in [APP, TUNNEL].into_iter().chain(STATUS) {
        packets.push((None, Protocol::Tcp, POD.at(family, port)));
    }
    packets
}

/// Returns the name that `trace` uses for an arrival.
fn named(arrival: &Arrival) -> String {
    match arrival {
        Arrival::Sidecar { port, .. } => format!("sidecar:{port}"),
        Arrival::Direct { .. } => "direct".to_owned(),
        Arrival::Lost(why) => format!("lost: {why}"),
    }
}

fn own_addresses(world: &World) -> Vec<IpAddr> {
    world.families().iter().map(|family| POD.ip(*family)).collect()
}

fn report(world: &World) -> RulesReport {
    world.live_rules().report()
}

fn configured(world: &World, pod: &str, sub_plugins: Value) -> Value {
    chain(&world.manifests(&[NAMESPACE, pod]), sub_plugins)
}

fn policy_of(text: &Value, pod: &str) -> policy::Policy {
    let conf = configuration(Path::new("conf"), text.to_string().as_bytes()).expect("a configuration");
    let namespace = Some(("ns".into(), NAMESPACE.to_owned()));
    let texts = ManifestTexts { pods: ("pod".into(), pod.to_owned()), namespace, definitions: Vec::new() };
    let found = PodManifest::read(&texts, &PodSelector::default()).expect("a pod");
    let subject = found.subject(&found.pods[0], &[conf.into()]).expect("a subject");
    explain(&subject).expect("explained").policy
}

#[test]
fn trace_predicts_where_packets_arrive() {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let strategy = configured_policy();
    let mut seen = std::collections::BTreeMap::<(String, bool), usize>::new();
    for _ in 0..POLICIES {
        let policy = strategy.new_tree(&mut runner).expect("a policy").current();
        let mode = [("sidecar.istio.io/interceptionMode", "TPROXY")];
        let pod = manifest(policy.dns, PROXY, if policy.tproxy { &mode } else { &[] });
        let world = World::new(Families::Both);
        let dialect = if policy.native { Dialect::Nftables } else { Dialect::Iptables };
        let configuration = dialect.of(configured(&world, &pod, policy.chain.clone()));
        world.add(&configuration);
        let excluded = policy.container.map(|scope| {
            let cgroup = Cgroup::new();
            world.change_containers(&[], &[ContainerElement::new(scope, cgroup.id(), CONTAINER, "0123456789abcdef")]);
            cgroup
        });
        let evaluated = policy_of(&configuration, &pod);
        let asked =
            RulesetView::of_policy(&evaluated, if policy.native { RuleFormat::Nftables } else { RuleFormat::Iptables });
        let found = world.live_rules();
        let held = found.view();
        assert_eq!(found.addresses.len(), 2, "{:?}", found.addresses);
        let check = |family,
                     (process, protocol, to): (Option<Process>, Protocol, SocketAddr),
                     cgroup: Option<&Cgroup>| {
            let from = match process {
                Some(process) => process.into(),
                None => Sender::Inbound(Some(GATEWAY.ip(family))),
            };
            let destination = Destination { address: to, protocol: protocol.into() };
            let container = cgroup.map(|_| ContainerSender::planned(CONTAINER, &evaluated));
            let running = cgroup.map(|_| ContainerSender::live(CONTAINER, &found));
            let predicted = trace(&asked, (from, container), destination, &own_addresses(&world), "eth0");
            let predicted_live = trace(&held, (from, running), destination, &found.addresses, "eth0");
            let in_short = |trace: &Trace| (trace.arrives_at.clone(), trace.zone, trace.container.clone());
            assert_eq!(
                in_short(&predicted),
                in_short(&predicted_live),
                "{policy:#?}\n{predicted:#?}\n{predicted_live:#?}"
            );
            if !policy.native {
                assert_eq!(predicted, predicted_live);
            }
            let send = || match process {
                Some(process) => world.pod_sends(process, protocol, to),
                None => world.outside_sends(protocol, to),
            };
            let arrival = match cgroup {
                Some(cgroup) => world.within(cgroup, send),
                None => send(),
            };
            assert_eq!(named(&arrival), predicted.arrives_at, "{policy:#?}\n{from:?} {destination:?}\n{predicted:#?}");
            predicted.arrives_at
        };
        for &family in world.families() {
            for packet in packets(family) {
                *seen.entry((check(family, packet, None), false)).or_default() += 1;
                let is_container = |process: &Process| [APP_PROCESS, VAULT_INIT].contains(process);
                if let Some(cgroup) = excluded.as_ref().filter(|_| packet.0.as_ref().is_some_and(is_container)) {
                    *seen.entry((check(family, packet, Some(cgroup)), true)).or_default() += 1;
                }
            }
        }
    }
    let places = ["direct", "sidecar:15001", "sidecar:15006", "sidecar:15053"].map(|place| (place, false));
    for (place, by_container) in places.into_iter().chain([("direct", true), ("sidecar:15001", true)]) {
        let seen_there = seen.get(&(place.to_owned(), by_container));
        assert!(seen_there.is_some_and(|count| *count > 10), "{seen:?}");
    }
}

/// A pod whose init container bypasses the sidecar until the proxy is ready.
const EXCLUDING: &str =
    r#"[{"type": "istio-redirect"}, {"type": "container-exclude", "containers": ["vault-agent-init"]}]"#;

#[test]
fn a_container_is_traced_as_long_as_its_bypass_lasts_and_afterwards() {
    for dialect in [Dialect::Iptables, Dialect::Nftables] {
        let world = World::new(Families::V4);
        let pod = manifest(true, PROXY, &[]);
        let chain = serde_json::from_str(EXCLUDING).expect("JSON");
        let configuration = dialect.of(configured(&world, &pod, chain));
        world.add(&configuration);
        let policy = policy_of(&configuration, &pod);
        let to = SERVER.at(Family::V4, HTTPS);
        let destination = Destination { address: to, protocol: policy::Protocol::Tcp };
        let from = Sender::from(APP_PROCESS);
        let planned = |name: Option<&str>| {
            let book = RulesetView::of_policy(&policy, RuleFormat::Iptables);
            let container = name.map(|name| ContainerSender::planned(name, &policy));
            trace(&book, (from, container), destination, &[], "eth0")
        };
        let live = |name: Option<&str>| {
            let rules = world.live_rules();
            let container = name.map(|name| ContainerSender::live(name, &rules));
            trace(&rules.view(), (from, container), destination, &rules.addresses, "eth0")
        };
        let found = planned(Some(CONTAINER));
        let container = found.container.as_ref().expect("named");
        assert_eq!(
            (found.arrives_at.as_str(), found.decided_by.as_ref().expect("a rule").chain.as_str()),
            ("direct", "DETOUR_OUTPUT")
        );
        assert_eq!(container.bypasses, Some(ContainerScope::All));
        assert_eq!(planned(None).arrives_at, "sidecar:15001");

        // It does not run.
        let found = live(Some(CONTAINER));
        let container = found.container.as_ref().expect("named");
        assert_eq!((found.arrives_at.as_str(), container.bypasses, container.excluded), ("sidecar:15001", None, true));

        let outer = Cgroup::new();
        let cgroup = outer.child("container");
        let element = ContainerElement::new(ContainerScope::All, cgroup.id(), CONTAINER, "0123456789abcdef");
        world.change_containers(&[], std::slice::from_ref(&element));
        let found = live(Some(CONTAINER));
        assert_eq!(
            (
                found.arrives_at.as_str(),
                world.within(&cgroup, || named(&world.pod_sends(APP_PROCESS, Protocol::Tcp, to)))
            ),
            ("direct", "direct".to_owned())
        );
        assert_eq!(live(None).arrives_at, "sidecar:15001", "a sender outside of the container");
        let other = live(Some("web"));
        assert_eq!((other.arrives_at.as_str(), other.caveats.len()), ("sidecar:15001", 0));

        world.nft("add table inet detour-exclusions { flags dormant; }");
        let off = live(Some(CONTAINER));
        assert_eq!(off.arrives_at, "sidecar:15001", "its rules don't apply");
        assert!(off.caveats[0].contains("inet detour-exclusions is switched off"), "{:?}", off.caveats);
        world.add(&configuration);

        // An element that no policy requests lets traffic bypass the sidecar as well.
        let odd = ContainerElement { container: Some(ContainerLabel::new("web", "f")), ..element };
        world.change_containers(&[], &[odd]);
        let found = live(Some("web"));
        let container = found.container.expect("named");
        assert_eq!((found.arrives_at.as_str(), container.excluded), ("direct", false));
    }
}

#[test]
fn rules_shows_live_rules_with_counters() {
    let world = World::new(Families::Both);
    let pod = manifest(true, PROXY, &[]);
    let configuration = configured(&world, &pod, json!([{"type": "istio-redirect"}]));
    assert_eq!(report(&world).as_asked, None);
    world.add(&configuration);
    let before = report(&world);
    assert_eq!((before.as_asked, before.attachments.len()), (Some(true), 1));
    assert!(before.rules.iter().all(|rule| rule.mark == Mark::Fine), "{before:#?}");
    world.pod_sends(APP_PROCESS, Protocol::Tcp, SERVER.at(Family::V4, HTTPS));
    let counted = |report: &RulesReport, table: &str| {
        let rule = report.rules.iter().find(|rule| rule.table == table && rule.rule.ends_with("--to-ports 15001"));
        rule.expect("a rule").packets
    };
    let after = report(&world);
    let (ip, ip6) = ("ip nat", "ip6 nat");
    assert_eq!((counted(&before, ip), counted(&after, ip), counted(&after, ip6)), (Some(0), Some(1), Some(0)));
    let read: LiveRuleset = world.live_rules().live;
    assert_eq!(read, world.live_rules().live);
}

#[test]
fn rules_marks_missing_extra_and_foreign_rules() {
    let world = World::new(Families::V4);
    let pod = manifest(false, PROXY, &[]);
    world.add(&configured(&world, &pod, json!([{"type": "istio-redirect"}])));
    for change in [
        &["-t", "nat", "-D", "ISTIO_OUTPUT", "-d", "127.0.0.1/32", "-j", "RETURN"][..],
        &["-t", "nat", "-A", "ISTIO_INBOUND", "-p", "tcp", "--dport", "1", "-j", "RETURN"],
        &["-t", "nat", "-I", "OUTPUT", "-p", "tcp", "--dport", "2", "-j", "RETURN"],
    ] {
        let (success, printed) = world.iptables(Family::V4, change);
        assert!(success, "{printed}");
    }
    let report = report(&world);
    assert_eq!(report.as_asked, Some(false));
    let marked: Vec<_> = report
        .rules
        .iter()
        .filter(|r| r.mark != Mark::Fine)
        .map(|r| (r.mark, r.chain.as_str(), r.rule.as_str()))
        .collect();
    let expected = [
        (Mark::Extra, "ISTIO_INBOUND", "-p tcp -m tcp --dport 1 -j RETURN"),
        (Mark::Missing, "ISTIO_OUTPUT", "-d 127.0.0.1/32 -j RETURN"),
        (Mark::Foreign, "OUTPUT", "-p tcp -m tcp --dport 2 -j RETURN"),
    ];
    assert_eq!(marked, expected);
    let printed = |more: &[&str]| {
        let program = std::process::Command::new(env!("CARGO_BIN_EXE_detour"))
            .args(["rules", &world.netns().display().to_string()])
            .args(more)
            .env_clear()
            .env("COLUMNS", "10000")
            .output()
            .expect("run detour");
        assert_eq!(program.status.code(), Some(1), "{program:?}");
        String::from_utf8_lossy(&program.stdout).into_owned()
    };
    let (short, all) = (printed(&[]), printed(&["--all"]));
    let signs = |text: &str| {
        let lines = text.lines().filter_map(|line| line.split_whitespace().next());
        lines.filter(|sign| ["missing", "extra", "foreign"].contains(sign)).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(signs(&short), ["extra", "missing", "foreign"], "{short}");
    assert!(short.contains("\nDifferences in ip nat\n") && !short.contains("--to-ports 15001"), "{short}");
    let others = format!("{} other rules are as desired; to list them, use --all\n", report.rules.len() - 3);
    let difference = short.strip_suffix(&others).expect("the rest is counted").trim_end();
    let rest = all.strip_prefix(difference).expect("the difference comes first");
    assert!(rest.contains("\nip nat\n") && rest.contains("--to-ports 15001"), "{all}");
    assert_eq!(signs(rest).len(), 3, "{all}");
}

#[test]
fn rules_shows_missing_routes() {
    let world = World::new(Families::V4);
    let pod = manifest(false, PROXY, &[("sidecar.istio.io/interceptionMode", "TPROXY")]);
    world.add(&configured(&world, &pod, json!([{"type": "istio-redirect"}])));
    assert_eq!((report(&world).as_asked, report(&world).absent), (Some(true), Vec::new()));
    world.ip(&["route", "flush", "table", "133"]);
    let report = report(&world);
    assert!(report.rules.iter().all(|rule| rule.mark == Mark::Fine), "{report:#?}");
    assert_eq!((report.as_asked, report.absent.len()), (Some(false), 1), "{report:#?}");
    assert!(report.absent[0].contains("133"), "{report:#?}");
}

#[test]
fn native_rules_are_shown_and_marked_alike() {
    let world = World::new(Families::V4);
    let pod = manifest(false, PROXY, &[]);
    world.add(&Dialect::Nftables.of(configured(&world, &pod, json!([{"type": "istio-redirect"}]))));
    world.pod_sends(APP_PROCESS, Protocol::Tcp, SERVER.at(Family::V4, HTTPS));
    let fine = report(&world);
    assert_eq!((fine.as_asked, fine.dialect), (Some(true), Some("nftables")));
    let redirect = fine.rules.iter().find(|rule| rule.rule.ends_with("redirect to :15001")).expect("a rule");
    assert_eq!((redirect.table.as_str(), redirect.packets), ("inet detour-nat", Some(1)));
    world.nft("flush chain inet detour-nat ISTIO_REDIRECT");
    world.nft("add rule inet detour-nat ISTIO_INBOUND tcp dport 1 counter return");
    let report = report(&world);
    let marked = report.rules.iter().filter(|rule| rule.mark != Mark::Fine);
    let marked: Vec<_> = marked.map(|rule| (rule.mark, rule.chain.as_str(), rule.packets)).collect();
    assert_eq!(marked, [(Mark::Extra, "ISTIO_INBOUND", Some(0)), (Mark::Missing, "ISTIO_REDIRECT", None)]);
}
