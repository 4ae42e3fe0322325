//! The rules of the table `detour-containers`: excluded containers bypass every redirection, detour's or another
//! tool's, in both rule formats. The rules work like those of `exclusions`, as `translate` writes them. They fix the
//! destination of a connection before any other netfilter chain can change it. They put a query that would be captured
//! into the zone of the proxy's own queries, or over lo into no zone.
//!
//! The rules look up the sender's control group in each set at every level, because the level of a container's control
//! group depends on the node. A level that does not exist does not match. A control group below the container's also
//! matches.

use super::rule::{
    BaseHook, Condition, InCgroup, Key, NativeAction, NativeChain, NativeRule, NativeTable, NativeTables,
};
use super::set::{Span, Spans};
use crate::firewall::istio::{DNS_PORT, PROXY_ZONE};
use crate::firewall::rule::{ContainerRules, Family, Hook, Name, Ruleset, Table, protocol_number};
use crate::policy::{ContainerScope, DnsCapture, Protocol};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

/// The chain that fixes the destination of a connection.
pub(super) const DIRECT: &str = "DETOUR_DIRECT";
/// The base chains.
const RAW: &str = "RAW_OUTPUT";
const NAT: &str = "NAT_OUTPUT";
/// The chain of queries that would be captured, and the chain that sets their zone.
const QUERIES: &str = "DETOUR_QUERIES";
const ZONE: &str = "DETOUR_ZONE";
/// The default zone.
pub(super) const NO_ZONE: u16 = 0;
/// The levels of control groups. A container's has level 3 to 5 on usual nodes, deeper if the node is itself a
/// container.
const LEVELS: RangeInclusive<u8> = 1..=12;

/// Returns the table of excluded containers; no table if `ruleset` has no such rules.
#[must_use]
pub fn table(ruleset: &Ruleset) -> NativeTables {
    let mut tables = NativeTables::new();
    if let Some(containers) = &ruleset.containers {
        tables.insert(NativeTable::Containers, chains(containers).into_iter().collect());
    }
    tables
}

/// Returns the chain that fixes the destination of a connection.
pub(super) fn direct() -> NativeChain {
    let rule = |family| NativeRule { family: Some(family), ..NativeRule::new(NativeAction::KeepDestination) };
    NativeChain { hook: None, rules: Family::ALL.map(rule).into() }
}

/// Returns the chain that fixes the destinations of a scope's connections.
const fn destinations(scope: ContainerScope) -> &'static str {
    match scope {
        ContainerScope::Dns => "DETOUR_DNS",
        ContainerScope::All => "DETOUR_ALL",
    }
}

fn chains(containers: &ContainerRules) -> Vec<(Name, NativeChain)> {
    // A pod with rules for one family only admits no packet of the other one.
    let only = match containers.families.as_slice() {
        [family] => Some(*family),
        _ => None,
    };
    let base = |like, rules: Vec<NativeRule>| {
        let rules = rules.into_iter().map(|rule| NativeRule { family: rule.family.or(only), ..rule });
        NativeChain { hook: Some(BaseHook { like, hook: Hook::Output }), rules: rules.collect() }
    };
    let plain = |rules| NativeChain { hook: None, rules };
    // The wider scope first: most excluded containers have it.
    let scopes = || containers.scopes.iter().rev().copied();
    let mut chains = vec![
        (NAT.into(), base(Table::Nat, scopes().flat_map(|scope| by_level(scope, destinations(scope))).collect())),
        (DIRECT.into(), direct()),
    ];
    chains.extend(scopes().map(|scope| (destinations(scope).into(), plain(bypass(scope, &containers.capture)))));
    let queries = captured_queries(containers);
    if !queries.is_empty() {
        let zone = |zone| NativeRule::new(NativeAction::Zone(zone));
        chains.push((RAW.into(), base(Table::Raw, queries)));
        chains.push((QUERIES.into(), plain(scopes().flat_map(|scope| by_level(scope, ZONE)).collect())));
        chains.push((ZONE.into(), plain(vec![with(zone(NO_ZONE), [over_lo(true)]), zone(PROXY_ZONE)])));
    }
    chains
}

/// Returns one rule per level that sends the packets of a set's containers to `chain`.
fn by_level(set: ContainerScope, chain: &'static str) -> impl Iterator<Item = NativeRule> {
    LEVELS.map(move |level| {
        let cgroup = Some(InCgroup { level, set });
        NativeRule { cgroup, ..NativeRule::new(NativeAction::Goto(chain.into())) }
    })
}

/// Returns the rules for the connections of a scope's containers. Over lo, only DNS that would be captured is fixed.
fn bypass(scope: ContainerScope, capture: &DnsCapture) -> Vec<NativeRule> {
    let direct = || NativeRule::new(NativeAction::Goto(DIRECT.into()));
    let is_captured = *capture != DnsCapture::Off;
    match (scope, is_captured) {
        (ContainerScope::All, false) => vec![with(direct(), [over_lo(false)])],
        (ContainerScope::All, true) => {
            vec![with(direct(), [over_lo(false)]), with(direct(), [vec![over_lo(true)], dns(&DNS)].concat())]
        }
        (ContainerScope::Dns, false) => vec![with(direct(), [vec![over_lo(false)], dns(&DNS)].concat())],
        (ContainerScope::Dns, true) => vec![with(direct(), dns(&DNS))],
    }
}

const DNS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

/// Returns the rules for queries over UDP that the redirection would capture.
fn captured_queries(ContainerRules { capture, families, .. }: &ContainerRules) -> Vec<NativeRule> {
    let query = || with(NativeRule::new(NativeAction::Jump(QUERIES.into())), dns(&[Protocol::Udp]));
    let to_servers = |family: Family, servers: Spans| {
        let is_used = families.contains(&family) && !servers.as_slice().is_empty();
        let destination = Condition { key: Key::Destination(family), not: false, values: servers };
        is_used.then(|| NativeRule { family: Some(family), ..with(query(), [destination]) })
    };
    match capture {
        DnsCapture::Off => Vec::new(),
        DnsCapture::All => vec![query()],
        DnsCapture::Servers { v4, v6 } => {
            let v4 = v4.iter().map(|address: &Ipv4Addr| Span::one(u32::from(*address).into())).collect();
            let v6 = v6.iter().map(|address: &Ipv6Addr| Span::one((*address).into())).collect();
            [to_servers(Family::Ip, v4), to_servers(Family::Ip6, v6)].into_iter().flatten().collect()
        }
    }
}

fn with(mut rule: NativeRule, conditions: impl IntoIterator<Item = Condition>) -> NativeRule {
    rule.conditions.extend(conditions);
    Condition::sort(&mut rule.conditions);
    rule
}

/// Returns the condition that a packet leaves through lo, or through another interface.
fn over_lo(is_lo: bool) -> Condition {
    Condition { key: Key::OutInterface, not: !is_lo, values: interface("lo") }
}

fn dns(protocols: &[Protocol]) -> Vec<Condition> {
    let numbers = protocols.iter().map(|protocol| Span::one(protocol_number(*protocol).into()));
    vec![
        Condition { key: Key::Protocol, not: false, values: numbers.collect() },
        Condition { key: Key::DestinationPort, not: false, values: Spans::of(DNS_PORT.first, DNS_PORT.last) },
    ]
}

/// Returns the span of an interface name; a name that ends in `+` is a prefix.
pub(super) fn interface(name: &str) -> Spans {
    let padded = |text: &str, with: u8| {
        let mut bytes = [with; 16];
        bytes.iter_mut().zip(text.bytes()).for_each(|(padding, byte)| *padding = byte);
        u128::from_be_bytes(bytes)
    };
    match name.strip_suffix('+') {
        Some(prefix) => Spans::of(padded(prefix, 0), padded(prefix, u8::MAX)),
        None => Spans::one(padded(name, 0)),
    }
}
