//! The exclusions in the `iptables` dialect: one chain that stands before the redirection and
//! accepts what must leave untouched, and, where DNS is captured, one before the zones.
//!
//! `RETURN` in a chain of our own would not do: the packet would go on to `ISTIO_OUTPUT`.

use super::istio::{DNS_PORT, PROXY_ZONE};
use super::rule::Ruleset;
use super::rule::{Family, Hook, Match, Rule, Table, Target, is, not};
use crate::policy::{DnsCapture, Exclusion, Policy, PortRange, Protocol, TrafficOwner};
use ipnet::IpNet;
use std::collections::BTreeSet;

/// The chain that accepts what is exempt, in nat and in raw.
pub(super) const OUTPUT: &str = "DETOUR_OUTPUT";
/// `-m multiport` has this many places (linux/netfilter/xt_multiport.h, `XT_MULTI_PORTS`).
const MULTIPORT_PLACES: usize = 15;

/// Writes `exclusions`, those of `policy` that are in effect, for one family.
pub(super) fn write(policy: &Policy, exclusions: &BTreeSet<Exclusion>, family: Family, ruleset: &mut Ruleset) {
    let capture = captured(policy);
    let exclusions = || exclusions.iter().filter(|e| e.destination.is_none_or(|net| family.has(&net)));
    let leaves: Vec<Rule> = exclusions().flat_map(|e| leaves_untouched(e, &capture)).collect();
    // What goes over lo first: so each of the two kinds is one run.
    let (mut zones, behind): (Vec<Rule>, Vec<Rule>) =
        exclusions().flat_map(|e| zone_of_queries(e, family, &capture)).partition(|rule| rule.target == Target::Accept);
    zones.extend(behind);
    for (table, rules) in [(Table::Nat, leaves), (Table::Raw, zones)] {
        if !rules.is_empty() {
            let table = ruleset.table(family, table);
            table.rules_of(OUTPUT).extend(rules);
            let output = table.hooks.entry(Hook::Output).or_default();
            let redirection = output.iter().position(Rule::enters_redirection);
            output.insert(redirection.unwrap_or(output.len()), Rule::jump(OUTPUT));
        }
    }
}

/// Which queries whoever redirects this pod captures. Nobody asks to exempt queries where none are
/// captured, so where nothing tells, all are: istio-init comes only after every attachment.
pub(super) fn captured(policy: &Policy) -> DnsCapture {
    match (policy.redirect(), policy.dns_captured_elsewhere) {
        (Some(redirect), _) => redirect.dns.clone(),
        (None, Some(false)) => DnsCapture::Off,
        (None, Some(true) | None) => DnsCapture::All,
    }
}

/// What goes out of the pod; over lo only DNS, and only where it would be captured there.
fn leaves_untouched(exclusion: &Exclusion, capture: &DnsCapture) -> Vec<Rule> {
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

/// Where queries are captured, an exempt one stands in the zone of the proxy's own, as the answer
/// will; over lo the answer meets no zone, so the query must not either.
fn zone_of_queries(exclusion: &Exclusion, family: Family, capture: &DnsCapture) -> Vec<Rule> {
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

/// Where an exempt query that would be captured can go to.
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

/// Whether it exempts queries.
pub(super) fn covers_dns_port(exclusion: &Exclusion) -> bool {
    let within = |p: &PortRange| p.first <= DNS_PORT.first && DNS_PORT.last <= p.last;
    exclusion.ports.is_empty() || exclusion.ports.iter().any(within)
}

/// The protocols that it exempts.
pub(super) fn protocols(exclusion: &Exclusion) -> Vec<Protocol> {
    exclusion.protocol.map_or_else(|| vec![Protocol::Udp, Protocol::Tcp], |p| vec![p])
}

/// One rule for each protocol and each 15 ports; one for everything where no port is named.
fn with_ports(exclusion: &Exclusion) -> Vec<Rule> {
    let accept = || Rule::new(Target::Accept);
    if exclusion.ports.is_empty() {
        let rule = Rule { protocol: exclusion.protocol, ..accept() };
        return vec![with_owner(exclusion, rule)];
    }
    let mut rules = Vec::new();
    for protocol in protocols(exclusion) {
        for ports in places(&exclusion.ports) {
            let condition = match ports.as_slice() {
                [one] => Match::DestinationPort(is(*one)),
                _ => Match::DestinationPorts(is(ports)),
            };
            rules.push(with_owner(exclusion, accept().protocol(protocol).matching(condition)));
        }
    }
    rules
}

/// Ports in groups that fit one `multiport`.
fn places(ports: &[PortRange]) -> Vec<Vec<PortRange>> {
    let mut groups: Vec<Vec<PortRange>> = Vec::new();
    let mut free = 0;
    for &port in ports {
        let needed = if port.first == port.last { 1 } else { 2 };
        if needed > free {
            groups.push(Vec::new());
            free = MULTIPORT_PLACES;
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
