//! The rules for a policy's exclusions: in `nat`, a chain before the redirection that accepts excluded traffic, and,
//! if DNS is captured, a chain in `raw` that sets the zones of excluded queries.
//!
//! The chain must accept: after a `RETURN`, the packet would continue to `ISTIO_OUTPUT`.

use super::istio::{DNS_PORT, PROXY_ZONE};
use super::rule::{Family, Hook, MULTIPORT_SLOTS, Match, Rule, Ruleset, Table, Target, is, not};
use crate::policy::{DnsCapture, Exclusion, Policy, PortRange, Protocol, TrafficOwner};
use ipnet::IpNet;
use std::collections::BTreeSet;

/// The chain of the exclusions, in nat and in raw.
pub(super) const OUTPUT: &str = "DETOUR_OUTPUT";

/// Adds the rules for `exclusions`, those of `policy` that are in effect, for one family.
pub(super) fn write(policy: &Policy, exclusions: &BTreeSet<Exclusion>, family: Family, ruleset: &mut Ruleset) {
    let capture = captured(policy);
    let exclusions = || exclusions.iter().filter(|e| e.destination.is_none_or(|net| family.has(&net)));
    let accepts: Vec<Rule> = exclusions().flat_map(|e| accept_rules(e, &capture)).collect();
    // All ACCEPT rules first: the native format merges neighbors with the same target.
    let (mut zones, set_zone): (Vec<Rule>, Vec<Rule>) =
        exclusions().flat_map(|e| zone_rules(e, family, &capture)).partition(|rule| rule.target == Target::Accept);
    zones.extend(set_zone);
    for (table, rules) in [(Table::Nat, accepts), (Table::Raw, zones)] {
        if !rules.is_empty() {
            let table = ruleset.table(family, table);
            table.rules_of(OUTPUT).extend(rules);
            let output = table.hooks.entry(Hook::Output).or_default();
            let redirection = output.iter().position(Rule::enters_redirection);
            output.insert(redirection.unwrap_or(output.len()), Rule::jump(OUTPUT));
        }
    }
}

/// Returns which DNS queries the pod's redirection captures, which may be another tool's. If that is unknown,
/// assumes all: istio-init runs after every attachment, and only captured queries are ever excluded.
pub(super) fn captured(policy: &Policy) -> DnsCapture {
    match (policy.redirect(), policy.dns_captured_elsewhere) {
        (Some(redirect), _) => redirect.dns.clone(),
        (None, Some(false)) => DnsCapture::Off,
        (None, Some(true) | None) => DnsCapture::All,
    }
}

/// Returns the rules that accept traffic leaving the pod. Traffic over lo is accepted only if it is DNS that would
/// be captured there.
fn accept_rules(exclusion: &Exclusion, capture: &DnsCapture) -> Vec<Rule> {
    let mut rules = Vec::new();
    for rule in with_ports(exclusion) {
        rules.push(to_destination(exclusion, rule).out_interface(not("lo")));
    }
    if *capture != DnsCapture::Off && covers_dns_port(exclusion) {
        for protocol in protocols(exclusion) {
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
pub(super) fn protocols(exclusion: &Exclusion) -> Vec<Protocol> {
    exclusion.protocol.map_or_else(|| vec![Protocol::Udp, Protocol::Tcp], |p| vec![p])
}

/// Returns one rule for each protocol and `multiport`; one rule for everything if the exclusion names no port.
fn with_ports(exclusion: &Exclusion) -> Vec<Rule> {
    let accept = || Rule::new(Target::Accept);
    if exclusion.ports.is_empty() {
        let rule = Rule { protocol: exclusion.protocol, ..accept() };
        return vec![with_owner(exclusion, rule)];
    }
    let mut rules = Vec::new();
    for protocol in protocols(exclusion) {
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
