//! The rules for a policy's exclusions: in `nat`, a chain before the redirection that accepts excluded traffic, and,
//! if DNS is captured, a chain in `raw` that sets the zones of excluded queries. Queries to given destinations have a
//! chain of their own with one short rule for each destination, because lists of destinations can be long.
//!
//! The chain must accept: after a `RETURN`, the packet would continue to `ISTIO_OUTPUT`.

use super::istio::{DNS_PORT, PROXY_ZONE};
use super::rule::{Family, Hook, MULTIPORT_SLOTS, Match, Rule, Ruleset, Table, Target, is, not};
use crate::policy::{DnsCapture, Exclusion, Policy, PortRange, Protocol, TrafficOwner};
use ipnet::IpNet;
use std::collections::BTreeSet;

/// The chain of the exclusions, in nat and in raw.
pub(super) const OUTPUT: &str = "DETOUR_OUTPUT";
/// The chain of excluded queries to given destinations, in nat and in raw.
pub(crate) const QUERIES: &str = "DETOUR_QUERIES";
/// The chain in raw that sets the zone of a query in [`QUERIES`].
pub(super) const ZONE: &str = "DETOUR_ZONE";

/// Reports whether this is a chain of the exclusions.
pub(super) fn has_chain(name: &str) -> bool {
    [OUTPUT, QUERIES, ZONE].contains(&name)
}

/// Adds the rules for `exclusions`, those of `policy` that are in effect, for one family.
pub(super) fn write(policy: &Policy, exclusions: &BTreeSet<Exclusion>, family: Family, ruleset: &mut Ruleset) {
    let capture = captured(policy);
    let exclusions = exclusions.iter().filter(|e| e.destination.is_none_or(|net| family.has(&net)));
    let (queries, others) = split_off_queries(&exclusions.collect::<Vec<_>>());
    add_chains(ruleset, (family, Table::Nat), chains_of_nat(&queries, &others, capture));
    add_chains(ruleset, (family, Table::Raw), chains_of_raw(&queries, &others, family, capture));
}

type Chain = (&'static str, Vec<Rule>);

/// Adds the chains that have rules, and the jump to them.
fn add_chains<const N: usize>(ruleset: &mut Ruleset, (family, table): (Family, Table), chains: [Chain; N]) {
    if chains.iter().all(|(_, rules)| rules.is_empty()) {
        return;
    }
    let table = ruleset.table(family, table);
    for (chain, rules) in chains.into_iter().filter(|(_, rules)| !rules.is_empty()) {
        table.chains.push((chain.into(), rules));
    }
    let output = table.hooks.entry(Hook::Output).or_default();
    let redirection = output.iter().position(Rule::enters_redirection);
    output.insert(redirection.unwrap_or(output.len()), Rule::jump(OUTPUT));
}

fn chains_of_nat(queries: &[&Exclusion], others: &[&Exclusion], capture: &DnsCapture) -> [Chain; 2] {
    let mut output: Vec<Rule> = others.iter().flat_map(|e| accept_rules(e, capture)).collect();
    if !queries.is_empty() {
        output.extend([Protocol::Udp, Protocol::Tcp].map(|protocol| to_queries(protocol, capture)));
    }
    let accepts = queries.iter().map(|e| query(e, Target::Accept, e.destination));
    [(OUTPUT, output), (QUERIES, accepts.collect())]
}

fn chains_of_raw(queries: &[&Exclusion], others: &[&Exclusion], family: Family, capture: &DnsCapture) -> [Chain; 3] {
    // All ACCEPT rules first: the native format merges neighbors with the same target.
    let (mut output, set_zone): (Vec<Rule>, Vec<Rule>) =
        others.iter().flat_map(|e| zone_rules(e, family, capture)).partition(|rule| rule.target == Target::Accept);
    output.extend(set_zone);
    let captured =
        queries.iter().flat_map(|e| captured_destinations(e, family, capture).into_iter().map(move |to| (e, to)));
    let queries: Vec<Rule> = captured.map(|(e, to)| query(e, Target::Jump(ZONE.into()), to)).collect();
    let mut zone = Vec::new();
    if !queries.is_empty() {
        output.push(to_queries(Protocol::Udp, capture));
        zone = vec![Rule::new(Target::Accept).out_interface(is("lo")), Rule::new(Target::Zone(PROXY_ZONE))];
    }
    [(OUTPUT, output), (QUERIES, queries), (ZONE, zone)]
}

/// Returns which DNS queries the pod's redirection captures, which may be another tool's. If that is unknown,
/// assumes all: istio-init runs after every attachment, and only captured queries are ever excluded.
pub(super) fn captured(policy: &Policy) -> &DnsCapture {
    match (policy.redirect(), policy.dns_captured_elsewhere) {
        (Some(redirect), _) => &redirect.dns,
        (None, Some(false)) => &DnsCapture::Off,
        (None, Some(true) | None) => &DnsCapture::All,
    }
}

/// Separates the excluded queries to given destinations, over UDP and TCP, from all other exclusions. Returns one
/// exclusion for each owner and destination of such queries, regardless of its protocol. `exclusions` are sorted.
fn split_off_queries<'a>(exclusions: &[&'a Exclusion]) -> (Vec<&'a Exclusion>, Vec<&'a Exclusion>) {
    let (mut queries, mut others) = (Vec::new(), Vec::new());
    let is_query = |e: &Exclusion| e.ports == [DNS_PORT];
    for group in exclusions.chunk_by(|a, b| (a.owner, a.destination) == (b.owner, b.destination)) {
        let has = |protocol| group.iter().any(|e| is_query(e) && e.protocol == protocol);
        let is_complete = has(None) || (has(Some(Protocol::Udp)) && has(Some(Protocol::Tcp)));
        match group.iter().find(|e| is_query(e) && e.destination.is_some() && is_complete) {
            Some(query) => {
                queries.push(*query);
                others.extend(group.iter().filter(|e| !is_query(e)));
            }
            None => others.extend(group),
        }
    }
    (queries, others)
}

/// Returns the jump to [`QUERIES`]. Queries over lo are excluded only if they would be captured there.
fn to_queries(protocol: Protocol, capture: &DnsCapture) -> Rule {
    let jump = Rule::jump(QUERIES).protocol(protocol).to_port(DNS_PORT);
    if *capture == DnsCapture::Off { jump.out_interface(not("lo")) } else { jump }
}

/// Returns the rule of [`QUERIES`] for one destination.
fn query(exclusion: &Exclusion, target: Target, destination: Option<IpNet>) -> Rule {
    with_owner(exclusion, Rule { destination: destination.map(is), ..Rule::new(target) })
}

/// Returns the rules that accept traffic leaving the pod. Traffic over lo is accepted only if it is DNS that would
/// be captured there.
fn accept_rules(exclusion: &Exclusion, capture: &DnsCapture) -> Vec<Rule> {
    let mut rules = Vec::new();
    for rule in with_ports(exclusion) {
        rules.push(to_destination(exclusion, rule).out_interface(not("lo")));
    }
    if *capture != DnsCapture::Off && covers_dns_port(exclusion) {
        for &protocol in protocols(exclusion) {
            let rule = with_owner(exclusion, Rule::new(Target::Accept).protocol(protocol).to_port(DNS_PORT));
            rules.push(to_destination(exclusion, rule).out_interface(is("lo")));
        }
    }
    rules
}

/// Returns the rules that put excluded queries into the zone of the proxy's own queries, to which the resolver's
/// answer will belong. Over lo, the answer is in no zone, so the query must not be in one either.
fn zone_rules(exclusion: &Exclusion, family: Family, capture: &DnsCapture) -> Vec<Rule> {
    if !covers_dns_port(exclusion) || !protocols(exclusion).contains(&Protocol::Udp) {
        return Vec::new();
    }
    let query = |target: Target, destination: Option<IpNet>| {
        let mut rule = Rule::new(target).udp().to_port(DNS_PORT);
        rule.destination = destination.map(is);
        with_owner(exclusion, rule)
    };
    let mut rules = Vec::new();
    for destination in captured_destinations(exclusion, family, capture) {
        rules.push(query(Target::Accept, destination).out_interface(is("lo")));
        rules.push(query(Target::Zone(PROXY_ZONE), destination));
    }
    rules
}

/// Returns the destinations of excluded queries that would be captured; `None` stands for every destination.
fn captured_destinations(exclusion: &Exclusion, family: Family, capture: &DnsCapture) -> Vec<Option<IpNet>> {
    let servers: Vec<IpNet> = match capture {
        DnsCapture::Off => return Vec::new(),
        DnsCapture::All => return vec![exclusion.destination],
        DnsCapture::Servers { v4, .. } if family == Family::Ip => {
            v4.iter().map(|a| IpNet::from(std::net::IpAddr::from(*a))).collect()
        }
        DnsCapture::Servers { v6, .. } => v6.iter().map(|a| IpNet::from(std::net::IpAddr::from(*a))).collect(),
    };
    servers.into_iter().filter(|s| exclusion.destination.is_none_or(|net| net.contains(s))).map(Some).collect()
}

/// Reports whether the exclusion applies to DNS queries.
pub(super) fn covers_dns_port(exclusion: &Exclusion) -> bool {
    let within = |p: &PortRange| p.first <= DNS_PORT.first && DNS_PORT.last <= p.last;
    exclusion.ports.is_empty() || exclusion.ports.iter().any(within)
}

/// Returns the protocols that the exclusion applies to.
pub(super) const fn protocols(exclusion: &Exclusion) -> &'static [Protocol] {
    match exclusion.protocol {
        None => &[Protocol::Udp, Protocol::Tcp],
        Some(Protocol::Udp) => &[Protocol::Udp],
        Some(Protocol::Tcp) => &[Protocol::Tcp],
    }
}

/// Returns one rule for each protocol and `multiport`; one rule for everything if the exclusion names no port.
fn with_ports(exclusion: &Exclusion) -> Vec<Rule> {
    let accept = || Rule::new(Target::Accept);
    if exclusion.ports.is_empty() {
        let rule = Rule { protocol: exclusion.protocol, ..accept() };
        return vec![with_owner(exclusion, rule)];
    }
    let mut rules = Vec::new();
    for &protocol in protocols(exclusion) {
        for ports in multiports(&exclusion.ports) {
            let condition = match ports.as_slice() {
                [one] => Match::DestinationPort(is(*one)),
                _ => Match::DestinationPorts(is(ports)),
            };
            rules.push(with_owner(exclusion, accept().protocol(protocol).matching(condition)));
        }
    }
    rules
}

/// Groups ports so that each group fits into one `multiport`.
fn multiports(ports: &[PortRange]) -> Vec<Vec<PortRange>> {
    let mut groups: Vec<Vec<PortRange>> = Vec::new();
    let mut free = 0;
    for &port in ports {
        let needed = if port.first == port.last { 1 } else { 2 };
        if needed > free {
            groups.push(Vec::new());
            free = MULTIPORT_SLOTS;
        }
        if let Some(group) = groups.last_mut() {
            group.push(port);
            free -= needed;
        }
    }
    groups
}

fn with_owner(exclusion: &Exclusion, rule: Rule) -> Rule {
    match exclusion.owner {
        TrafficOwner::Any => rule,
        TrafficOwner::Uid(ids) => rule.matching(Match::Uid(is(ids))),
        TrafficOwner::Gid(ids) => rule.matching(Match::Gid(is(ids))),
    }
}

fn to_destination(exclusion: &Exclusion, rule: Rule) -> Rule {
    Rule { destination: exclusion.destination.map(is), ..rule }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{IdRange, Interception, Redirect};

    /// Returns the exclusions of `dns-exclude` for one destination.
    fn query_to(destination: &str, owner: TrafficOwner) -> [Exclusion; 2] {
        let destination = Some(destination.parse().expect("a network"));
        let of = |protocol| Exclusion { owner, destination, protocol: Some(protocol), ports: vec![DNS_PORT] };
        [of(Protocol::Udp), of(Protocol::Tcp)]
    }

    /// Returns the rules of the exclusions' chains in one table, as `iptables-save` prints them.
    fn rules(dns: DnsCapture, exclusions: &[Exclusion], family: Family, table: Table) -> Vec<String> {
        let interception = Interception::On(Box::new(Redirect { dns, ..Redirect::default() }));
        let exclusions = exclusions.iter().cloned().collect();
        let ruleset = Ruleset::of(&Policy { interception, exclusions, ..Policy::default() }, &[family]);
        let chains = ruleset.tables[&(family, table)].chains.iter().filter(|(name, _)| has_chain(name));
        chains.flat_map(|(name, rules)| rules.iter().map(move |rule| format!("{name} {rule}"))).collect()
    }

    #[test]
    fn each_destination_of_excluded_queries_has_one_rule_in_each_table() {
        let proxy = TrafficOwner::Uid(IdRange::one(1337));
        let exclusions = [
            query_to("10.0.0.1/32", TrafficOwner::Any),
            query_to("10.1.0.0/16", proxy),
            query_to("fd00::1/128", TrafficOwner::Any),
        ]
        .concat();
        let in_table = |table| rules(DnsCapture::All, &exclusions, Family::Ip, table);
        assert_eq!(
            in_table(Table::Nat),
            [
                "DETOUR_OUTPUT -p udp -m udp --dport 53 -j DETOUR_QUERIES",
                "DETOUR_OUTPUT -p tcp -m tcp --dport 53 -j DETOUR_QUERIES",
                "DETOUR_QUERIES -d 10.0.0.1/32 -j ACCEPT",
                "DETOUR_QUERIES -d 10.1.0.0/16 -m owner --uid-owner 1337 -j ACCEPT",
            ]
        );
        assert_eq!(
            in_table(Table::Raw),
            [
                "DETOUR_OUTPUT -p udp -m udp --dport 53 -j DETOUR_QUERIES",
                "DETOUR_QUERIES -d 10.0.0.1/32 -j DETOUR_ZONE",
                "DETOUR_QUERIES -d 10.1.0.0/16 -m owner --uid-owner 1337 -j DETOUR_ZONE",
                "DETOUR_ZONE -o lo -j ACCEPT",
                "DETOUR_ZONE -j CT --zone 1",
            ]
        );
        let of_ip6 = rules(DnsCapture::All, &exclusions, Family::Ip6, Table::Nat);
        assert_eq!(of_ip6.last().map(String::as_str), Some("DETOUR_QUERIES -d fd00::1/128 -j ACCEPT"));
    }

    #[test]
    fn queries_over_one_protocol_to_a_destination_keep_their_own_rules() {
        let [udp, _] = query_to("10.0.0.1/32", TrafficOwner::Any);
        let nat = rules(DnsCapture::All, &[udp], Family::Ip, Table::Nat);
        assert_eq!(
            nat,
            [
                "DETOUR_OUTPUT -d 10.0.0.1/32 ! -o lo -p udp -m udp --dport 53 -j ACCEPT",
                "DETOUR_OUTPUT -d 10.0.0.1/32 -o lo -p udp -m udp --dport 53 -j ACCEPT",
            ]
        );
    }

    #[test]
    fn queries_over_lo_are_excluded_only_if_they_are_captured() {
        let exclusions = query_to("10.0.0.1/32", TrafficOwner::Any);
        assert_eq!(
            rules(DnsCapture::Off, &exclusions, Family::Ip, Table::Nat),
            [
                "DETOUR_OUTPUT ! -o lo -p udp -m udp --dport 53 -j DETOUR_QUERIES",
                "DETOUR_OUTPUT ! -o lo -p tcp -m tcp --dport 53 -j DETOUR_QUERIES",
                "DETOUR_QUERIES -d 10.0.0.1/32 -j ACCEPT",
            ]
        );
    }

    #[test]
    fn zones_are_set_for_the_captured_resolvers_of_a_range() {
        let servers = ["10.0.0.1", "10.0.0.2", "192.0.2.1"].map(|address| address.parse().expect("an address"));
        let capture = DnsCapture::Servers { v4: servers.into(), v6: Default::default() };
        let exclusions =
            [query_to("10.0.0.0/24", TrafficOwner::Any), query_to("198.51.100.0/24", TrafficOwner::Any)].concat();
        let raw = rules(capture, &exclusions, Family::Ip, Table::Raw);
        assert_eq!(
            raw[1..3],
            ["DETOUR_QUERIES -d 10.0.0.1/32 -j DETOUR_ZONE", "DETOUR_QUERIES -d 10.0.0.2/32 -j DETOUR_ZONE"]
        );
        assert_eq!(raw.len(), 5, "{raw:?}");
    }
}
