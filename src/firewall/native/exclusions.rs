//! The rules of the table `detour-exclusions`: excluded traffic bypasses every redirection, detour's or another tool's,
//! whatever its rule format is, and whether it was added before or after.
//!
//! * The netfilter chains run before those of all redirections. They do not accept excluded packets: an `accept` ends
//!   one base chain only. Instead, a NAT to the destination that a connection already has fixes it, because the kernel
//!   translates a connection's destination only once (net/netfilter/nf_nat_core.c, `nf_nat_inet_fn`).
//! * If the redirection captures DNS, the answers of resolvers are in the conntrack zone of the proxy's own queries.
//!   Therefore, excluded queries over UDP are put into this zone. Over lo, answers are in the default zone. A query must
//!   be put into it, too: the first zone that a rule sets is final (`nft_ct_set_zone_eval`, `xt_ct_target`).
//! * In Istio's ambient mesh, ztunnel sends from sockets in the pod's network namespace, with a UID that a container may
//!   also have. Its packets have a mark (istio/ztunnel, `PACKET_MARK`), with which they match no exclusion.
//! * Traffic over lo is excluded only if it is DNS that the redirection would capture there.
//! * The rules look up the sender's control group at every level, because the level of a container's control group
//!   depends on the node. A level that does not exist does not match. A control group below the container's also matches.

use super::rule::{BaseHook, NativeChain};
use super::translate::condense;
use crate::firewall::istio::{DNS_PORT, PROXY_ZONE, ZTUNNEL_MARK};
use crate::firewall::rule::{Condition, Family, Hook, InCgroup, Key, Name, Rule, Table, Target};
use crate::firewall::ruleset::ExcludedTraffic;
use crate::firewall::set::{Span, Spans};
use crate::policy::{ContainerScope, DnsCapture, Exclusion, PortRange, Protocol, TrafficOwner};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// The base chains.
const RAW: &str = "RAW_OUTPUT";
const NAT: &str = "NAT_OUTPUT";
/// The chain with one rule for each exclusion.
pub(crate) const EXCLUSIONS: &str = "DETOUR_OUTPUT";
/// The chain that fixes the destination of a connection.
const DIRECT: &str = "DETOUR_DIRECT";
/// The chain with the exclusions of queries that would be captured, and the chain that sets their zone.
const QUERIES: &str = "DETOUR_QUERIES";
const ZONE: &str = "DETOUR_ZONE";
/// The default zone.
const NO_ZONE: u16 = 0;
/// The levels of control groups. A container's has level 3 to 5 on usual nodes, deeper if the node is itself a
/// container.
const LEVELS: RangeInclusive<u8> = 1..=12;
/// The protocols of rules that check ports, such as those for DNS.
const PROTOCOLS_WITH_PORTS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

/// Returns the chains of the table of exclusions by name.
pub(super) fn chains(excluded: &ExcludedTraffic) -> BTreeMap<Name, NativeChain> {
    let base = |like, rules| NativeChain { hook: Some(BaseHook { like, hook: Hook::Output }), rules };
    let plain = |rules| NativeChain { hook: None, rules };
    let fix = |family| Rule { family: Some(family), ..Rule::new(Target::KeepDestination) };
    let mut chains = BTreeMap::from([
        (NAT.into(), base(Table::Nat, excludable(excluded))),
        (EXCLUSIONS.into(), plain(exclusions(excluded, DIRECT))),
        (DIRECT.into(), plain(Family::ALL.map(fix).into())),
    ]);
    let queries = queries(excluded);
    if excluded.capture != DnsCapture::Off && !queries.is_empty() {
        let zone = |zone| Rule::new(Target::Zone(zone));
        chains.insert(RAW.into(), base(Table::Raw, captured_queries(excluded)));
        chains.insert(QUERIES.into(), plain(queries));
        chains.insert(ZONE.into(), plain(vec![zone(NO_ZONE).with([over_lo(true)]), zone(PROXY_ZONE)]));
    }
    chains
}

/// Returns the rules for the traffic to which exclusions apply.
fn excludable(ExcludedTraffic { capture, ambient, .. }: &ExcludedTraffic) -> Vec<Rule> {
    let rule = |is_lo| goto(EXCLUSIONS).with(not_of_ztunnel(*ambient)).with([over_lo(is_lo)]);
    let mut rules = vec![rule(false)];
    rules.extend((*capture != DnsCapture::Off).then(|| rule(true).with(dns(&PROTOCOLS_WITH_PORTS))));
    rules
}

/// Returns the rules that send the traffic of all exclusions to `chain`. Containers come last: their rules are the most
/// expensive ones.
pub(super) fn exclusions(
    ExcludedTraffic { exclusions, scopes, .. }: &ExcludedTraffic,
    chain: &'static str,
) -> Vec<Rule> {
    let mut rules = condense(exclusions.iter().map(|one| exclusion(one, chain)));
    for scope in scopes {
        rules.extend(by_level(*scope, chain).map(|rule| match scope {
            ContainerScope::All => rule,
            ContainerScope::Dns => rule.with(dns(&PROTOCOLS_WITH_PORTS)),
        }));
    }
    rules
}

/// Returns the rule for an exclusion.
fn exclusion(exclusion: &Exclusion, chain: &'static str) -> Rule {
    let protocols: &[Protocol] = match exclusion.protocol {
        Some(Protocol::Tcp) => &[Protocol::Tcp],
        Some(Protocol::Udp) => &[Protocol::Udp],
        None if exclusion.ports.is_empty() => &[],
        None => &PROTOCOLS_WITH_PORTS,
    };
    let protocol = (!protocols.is_empty()).then(|| Condition::protocols(protocols));
    let ports = (!exclusion.ports.is_empty()).then(|| {
        let ports: Spans = exclusion.ports.iter().map(|range| Span::from(*range)).collect();
        Condition::is(Key::DestinationPort, ports)
    });
    selects(exclusion, chain).with(protocol).with(ports)
}

/// Returns the rules that select excluded queries over UDP among all such queries.
fn queries(ExcludedTraffic { exclusions, scopes, .. }: &ExcludedTraffic) -> Vec<Rule> {
    let has_dns_port = |p: &PortRange| p.first <= DNS_PORT.first && DNS_PORT.last <= p.last;
    let is_query = |exclusion: &&Exclusion| {
        exclusion.protocol != Some(Protocol::Tcp)
            && (exclusion.ports.is_empty() || exclusion.ports.iter().any(has_dns_port))
    };
    let mut rules = condense(exclusions.iter().filter(is_query).map(|exclusion| selects(exclusion, ZONE)));
    rules.extend(scopes.iter().flat_map(|scope| by_level(*scope, ZONE)));
    rules
}

/// Returns the rules for queries over UDP that the redirection captures.
fn captured_queries(ExcludedTraffic { capture, captures_ip6, ambient, .. }: &ExcludedTraffic) -> Vec<Rule> {
    let conditions = || dns(&[Protocol::Udp]).into_iter().chain(not_of_ztunnel(*ambient));
    let query = |family| Rule { family, ..Rule::jump(QUERIES).with(conditions()) };
    let (v4, v6): (Spans, Spans) = match capture {
        DnsCapture::Off => return Vec::new(),
        DnsCapture::All => return vec![query((!captures_ip6).then_some(Family::Ip))],
        DnsCapture::Servers { v4, v6 } => (
            v4.iter().map(|address| Span::one(u32::from(*address).into())).collect(),
            v6.iter().filter(|_| *captures_ip6).map(|address| Span::one((*address).into())).collect(),
        ),
    };
    let servers = [(Family::Ip, v4), (Family::Ip6, v6)].into_iter().filter(|(_, all)| !all.as_slice().is_empty());
    let to = |(family, servers)| query(Some(family)).with([Condition::is(Key::Destination(family), servers)]);
    servers.map(to).collect()
}

/// Returns a rule that sends the packets with an exclusion's owner and destination to `chain`.
fn selects(exclusion: &Exclusion, chain: &'static str) -> Rule {
    let family = exclusion.destination.as_ref().map(Family::of);
    let rule = Rule { family, ..goto(chain) }.on_all(exclusion.destination.map(Condition::to));
    rule.with(match exclusion.owner {
        TrafficOwner::Any => None,
        TrafficOwner::Uid(ids) => Some(Condition::is(Key::Uid, ids)),
        TrafficOwner::Gid(ids) => Some(Condition::is(Key::Gid, ids)),
    })
}

/// Returns one rule per level that sends the packets of a set's containers to `chain`.
fn by_level(set: ContainerScope, chain: &'static str) -> impl Iterator<Item = Rule> {
    LEVELS.map(move |level| Rule { cgroup: Some(InCgroup { level, set }), ..goto(chain) })
}

pub(super) fn goto(chain: &'static str) -> Rule {
    Rule::new(Target::Goto(chain.into()))
}

/// Returns the condition that a packet leaves through lo, or through another interface.
fn over_lo(is_lo: bool) -> Condition {
    let over_lo = Condition::interface(Key::OutInterface, "lo");
    if is_lo { over_lo } else { !over_lo }
}

/// Returns the condition that a packet is not ztunnel's own, for a pod in the ambient mesh.
pub(super) fn not_of_ztunnel(ambient: bool) -> Option<Condition> {
    ambient.then(|| !Condition::is(Key::Mark, Spans::one(ZTUNNEL_MARK)))
}

pub(super) fn dns(protocols: &[Protocol]) -> [Condition; 2] {
    [Condition::protocols(protocols), Condition::is(Key::DestinationPort, DNS_PORT)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::IdRange;

    /// Returns an exclusion of DNS queries over one protocol.
    fn query(destination: &str, owner: TrafficOwner, protocol: Protocol) -> Exclusion {
        let destination = (!destination.is_empty()).then(|| destination.parse().expect("a network"));
        Exclusion { owner, destination, protocol: Some(protocol), ports: vec![DNS_PORT] }
    }

    fn chain(capture: DnsCapture, exclusions: &[Exclusion], name: &str) -> Option<Vec<String>> {
        texts(capture, exclusions, name, false)
    }

    fn texts(capture: DnsCapture, exclusions: &[Exclusion], name: &str, ambient: bool) -> Option<Vec<String>> {
        let (exclusions, scopes) = (exclusions.iter().cloned().collect(), Vec::new());
        let chains = chains(&ExcludedTraffic { exclusions, scopes, capture, captures_ip6: true, ambient });
        chains.get(name).map(|chain| chain.rules.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn packets_of_ztunnel_match_no_exclusion_in_the_ambient_mesh() {
        let queries = [query("", TrafficOwner::Uid(IdRange::one(0)), Protocol::Udp)];
        let mark = "meta mark != 0x539";
        assert_eq!(
            texts(DnsCapture::All, &queries, NAT, true).expect("a chain"),
            [
                format!("oifname != \"lo\" {mark} counter goto DETOUR_OUTPUT"),
                format!("oifname \"lo\" meta l4proto {{ tcp, udp }} th dport 53 {mark} counter goto DETOUR_OUTPUT"),
            ]
        );
        let raw = texts(DnsCapture::All, &queries, RAW, true).expect("a chain");
        assert_eq!(raw, [format!("udp dport 53 {mark} counter jump DETOUR_QUERIES")]);
    }

    #[test]
    fn destinations_of_excluded_queries_are_one_rule_for_each_owner_and_family() {
        let proxy = TrafficOwner::Uid(IdRange::one(1337));
        let destinations = [("10.0.0.1/32", TrafficOwner::Any), ("10.0.0.9/32", TrafficOwner::Any)];
        let others = [("10.1.0.0/16", proxy), ("fd00::1/128", TrafficOwner::Any), ("::/0", proxy)];
        let both = |(net, owner)| PROTOCOLS_WITH_PORTS.map(|protocol| query(net, owner, protocol));
        let exclusions: Vec<Exclusion> = destinations.into_iter().chain(others).flat_map(both).collect();
        assert_eq!(
            chain(DnsCapture::All, &exclusions, EXCLUSIONS).expect("a chain"),
            [
                "ip daddr { 10.0.0.1, 10.0.0.9 } meta l4proto { tcp, udp } th dport 53 counter goto DETOUR_DIRECT",
                "ip6 daddr fd00::1 meta l4proto { tcp, udp } th dport 53 counter goto DETOUR_DIRECT",
                "ip daddr 10.1.0.0/16 meta l4proto { tcp, udp } th dport 53 meta skuid 1337 counter goto DETOUR_DIRECT",
                "meta nfproto ipv6 meta l4proto { tcp, udp } th dport 53 meta skuid 1337 counter goto DETOUR_DIRECT",
            ]
        );
        assert_eq!(
            chain(DnsCapture::All, &exclusions, QUERIES).expect("a chain"),
            [
                "ip daddr { 10.0.0.1, 10.0.0.9 } counter goto DETOUR_ZONE",
                "ip6 daddr fd00::1 counter goto DETOUR_ZONE",
                "ip daddr 10.1.0.0/16 meta skuid 1337 counter goto DETOUR_ZONE",
                "meta nfproto ipv6 meta skuid 1337 counter goto DETOUR_ZONE",
            ]
        );
    }

    #[test]
    fn traffic_over_lo_is_excluded_only_if_it_is_captured_dns() {
        let exclusions = [query("", TrafficOwner::Any, Protocol::Udp)];
        let off = chain(DnsCapture::Off, &exclusions, NAT).expect("a chain");
        assert_eq!(off, ["oifname != \"lo\" counter goto DETOUR_OUTPUT"]);
        let all = chain(DnsCapture::All, &exclusions, NAT).expect("a chain");
        let dns = "oifname \"lo\" meta l4proto { tcp, udp } th dport 53 counter goto DETOUR_OUTPUT";
        assert_eq!(all[1..], [dns]);
    }

    #[test]
    fn only_captured_queries_over_udp_are_put_into_a_zone() {
        let [tcp, udp] = PROTOCOLS_WITH_PORTS.map(|protocol| query("", TrafficOwner::Any, protocol));
        let other_port = Exclusion { ports: vec![PortRange::one(443)], protocol: None, ..udp.clone() };
        assert_eq!(chain(DnsCapture::Off, std::slice::from_ref(&udp), RAW), None);
        assert_eq!(chain(DnsCapture::All, &[tcp, other_port], RAW), None);
        let servers = ["10.0.0.1", "10.0.0.9"].map(|address| address.parse().expect("an address"));
        let capture = DnsCapture::Servers { v4: servers.into(), v6: Vec::new() };
        let raw = chain(capture, &[udp], RAW).expect("a chain");
        assert_eq!(raw, ["ip daddr { 10.0.0.1, 10.0.0.9 } udp dport 53 counter jump DETOUR_QUERIES"]);
    }
}
