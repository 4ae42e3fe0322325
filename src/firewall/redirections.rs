//! What other tools do with the pod's traffic, from live rules alone. A redirection of the pod is a rule, reachable from the
//! nat chains for outbound packets, that sends TCP to a port: to one of Istio's (its lists may be narrow), or all TCP to any
//! port. A rule for some packets, such as those of a resolver, is none. Names, empty chains and the lists of /proc are no
//! evidence.
//!
//! istio-cni's rules for a pod in Istio's ambient mesh, which redirect its traffic to ztunnel (istio/istio,
//! `cni/pkg/iptables` and `cni/pkg/nftables`), are recognized, and not evaluated one by one.

use super::foreign::{AttachedAt, CONNTRACK_PRIORITY, Effect, ForeignTable, LiveRule, Outline};
use super::istio::DNS_PROXY_PORT;
use super::live::LiveRuleset;
use super::native::rule::{EXCLUSIONS_NAT_PRIORITY, NativeTable};
use super::packet::Packet;
use super::rule::{Family, Hook, NFPROTO_INET, Table};
use super::ruleset::Ruleset;
use crate::cni::RuleFormat;
use crate::policy::Protocol;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, Ipv6Addr};

/// The prefixes of the native tables of Istio's tools, for pods with a sidecar (istio/istio, `tools/istio-nftables`) and
/// in the ambient mesh (`cni/pkg/nftables`).
const ISTIO_SIDECAR: &str = "istio-proxy-";
const ISTIO_AMBIENT: &str = "istio-ambient-";
/// The ports of the sidecar and of ztunnel for outbound and for inbound connections.
pub(super) const OUTBOUND_PORT: u16 = 15001;
pub(super) const INBOUND_PORT: u16 = 15006;

/// Another tool's redirection of the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForeignRedirection {
    /// Whether it captures DNS: it sets connection tracking zones, which only that needs.
    pub captures_dns: bool,
}

/// A native redirection of Istio's own tools.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NativeIstio {
    /// Whether it redirects to ztunnel.
    pub ambient: bool,
    /// Whether it captures DNS.
    pub captures_dns: bool,
    /// Whether it captures inbound connections.
    pub captures_inbound: bool,
}

/// The rules that packets can reach from a base chain.
struct Reached<'a> {
    family: u8,
    table: &'a str,
    chain: &'a str,
    at: AttachedAt,
    effects: Effects,
}

impl Reached<'_> {
    fn has(&self, wanted: impl Fn(Effect) -> bool) -> bool {
        self.effects.iter().any(|(effect, _)| wanted(*effect))
    }

    fn translates(&self) -> bool {
        self.has(Effect::translates)
    }

    /// Reports whether outbound TCP is redirected.
    fn captures(&self) -> bool {
        let is_redirection = |(effect, is_narrow): &(Effect, bool)| match effect {
            Effect::ToPort(port) => !is_narrow || [OUTBOUND_PORT, INBOUND_PORT].contains(port),
            _ => false,
        };
        self.is_outbound_nat() && self.effects.iter().any(is_redirection)
    }

    /// Reports whether outbound TCP in general is redirected to ztunnel.
    fn captures_for_ztunnel(&self) -> bool {
        self.is_outbound_nat() && self.effects.contains(&(Effect::ToPort(OUTBOUND_PORT), false))
    }

    fn is_outbound_nat(&self) -> bool {
        self.at.is_nat && self.at.hook == Hook::Output
    }

    /// Reports whether the chain is one of Istio's own tools: by its table, its priority, and the ports to which it
    /// redirects.
    fn is_istios(&self, prefix: &str) -> bool {
        let elsewhere = |effect: Effect| match effect {
            Effect::ToPort(port) => ![OUTBOUND_PORT, INBOUND_PORT, DNS_PROXY_PORT].contains(&port),
            effect => matches!(effect, Effect::ToAddress | Effect::NoTrack),
        };
        let is_named = self.family == NFPROTO_INET && self.table.starts_with(prefix);
        is_named && !self.has(elsewhere) && !(self.at.is_nat && self.at.priority <= EXCLUSIONS_NAT_PRIORITY)
    }

    /// Returns how the chain can divert packets from detour's rules.
    fn diversions(&self) -> Vec<Diversion> {
        let is_tproxy = !self.at.is_nat && self.at.hook == Hook::Prerouting && self.translates();
        let redirects = is_tproxy || (self.at.is_nat && self.translates());
        let untracks = self.at.priority < CONNTRACK_PRIORITY && self.has(|effect| effect == Effect::NoTrack);
        let drops = self.at.drops || self.has(|effect| effect == Effect::Drop);
        let all = [(Diversion::Redirects, redirects), (Diversion::Untracks, untracks), (Diversion::Drops, drops)];
        all.into_iter().filter_map(|(diversion, applies)| applies.then_some(diversion)).collect()
    }
}

/// How a chain of another tool can divert packets from detour's rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Diversion {
    /// It sends them to another port or address.
    Redirects,
    /// It ends their connection tracking, so that no nat chain sees them.
    Untracks,
    /// It drops or rejects them.
    Drops,
}

impl Diversion {
    /// Returns what the chain can do with connections, as a verb.
    #[must_use]
    pub const fn verb(self) -> &'static str {
        match self {
            Self::Redirects => "redirect",
            Self::Untracks => "end the tracking of",
            Self::Drops => "drop",
        }
    }
}

/// A chain of another tool that can divert packets, and that detour's rules do not contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DivertingChain {
    /// Where it is attached.
    pub at: AttachedAt,
    /// What it can do.
    pub diversion: Diversion,
    /// Its name with that of its table and its priority.
    pub text: String,
}

impl LiveRuleset {
    /// Returns the redirection of another tool. Chains of `known`, the recorded rules, are detour's.
    #[must_use]
    pub fn foreign_redirection(&self, known: &Ruleset) -> Option<ForeignRedirection> {
        let reached = self.reached(known);
        let captures_dns = reached.iter().any(|one| one.has(|effect| effect == Effect::Zone));
        reached.iter().any(Reached::captures).then_some(ForeignRedirection { captures_dns })
    }

    /// Returns the native redirection of Istio's own tools. The names of the tables only tell which tool made it.
    #[must_use]
    pub fn native_istio(&self) -> Option<NativeIstio> {
        let reached = self.reached(&Ruleset::default());
        let of = |ambient: bool| {
            let prefix = if ambient { ISTIO_AMBIENT } else { ISTIO_SIDECAR };
            let istios: Vec<_> = reached.iter().filter(|one| one.is_istios(prefix)).collect();
            let captures = |one: &&Reached<'_>| if ambient { one.captures_for_ztunnel() } else { one.captures() };
            istios.iter().any(captures).then(|| NativeIstio {
                ambient,
                captures_dns: istios.iter().any(|one| one.has(|effect| effect == Effect::Zone)),
                captures_inbound: istios.iter().any(|one| one.at.hook == Hook::Prerouting && one.translates()),
            })
        };
        of(true).or_else(|| of(false))
    }

    /// Reports whether the tables of iptables redirect outbound TCP to ztunnel's port.
    pub(super) fn captures_for_ztunnel_in_iptables(&self) -> bool {
        let reached = self.reached(&Ruleset::default());
        reached.iter().any(|one| self.is_of_iptables(one) && one.captures_for_ztunnel())
    }

    fn is_of_iptables(&self, one: &Reached<'_>) -> bool {
        !self.others.contains_key(&(one.family, one.table.to_owned()))
    }

    /// Returns the chains of other tools that can divert connections, except those of Istio's own tools and iptables'
    /// built-in ones, whose rules are read like detour's.
    #[must_use]
    pub fn diverting_chains(&self) -> Vec<DivertingChain> {
        let is_listed = |one: &Reached<'_>| {
            let is_istios = [ISTIO_SIDECAR, ISTIO_AMBIENT].iter().any(|prefix| one.is_istios(prefix));
            let is_built_in = Hook::of_chain(one.chain).is_some() && self.is_of_iptables(one);
            !is_istios && !is_built_in
        };
        let mut listed = Vec::new();
        for one in self.reached(&Ruleset::default()).into_iter().filter(is_listed) {
            let family = Family::ALL.into_iter().find(|own| own.number() == one.family).map_or("inet", Family::name);
            let priority = one.at.priority;
            let text = format!("chain {} of table {family} {} with priority {priority}", one.chain, one.table);
            let diverting = |diversion| DivertingChain { at: one.at, diversion, text: text.clone() };
            listed.extend(one.diversions().into_iter().map(diverting));
        }
        listed
    }

    /// Returns the tables of other tools that have more rules than are read.
    #[must_use]
    pub fn unread_tables(&self) -> Vec<&str> {
        self.others.iter().filter(|(_, table)| table.is_partial).map(|((_, name), _)| name.as_str()).collect()
    }

    /// Reports whether detour's native tables redirect traffic.
    #[must_use]
    pub fn redirects_natively(&self) -> bool {
        self.native.iter().filter(|(table, _)| matches!(table, NativeTable::Of(_))).any(|(_, chains)| {
            let graph: Graph<'_> =
                chains.iter().map(|(name, chain)| (name.as_str(), outlines(&chain.rules).collect())).collect();
            let mut bases = chains.iter().filter(|(_, chain)| matches!(chain.hook, Ok(Some(_))));
            bases.any(|(name, _)| effects(&graph, name).iter().any(|(effect, _)| effect.translates()))
        })
    }

    /// Returns what packets can reach in the tables of iptables, without the chains of `known`, and in those of other
    /// tools.
    fn reached(&self, known: &Ruleset) -> Vec<Reached<'_>> {
        let mut all = Vec::new();
        for ((family, table), chains) in &self.tables {
            let others = chains.iter().filter(|(name, _)| !known.has_chain(*family, *table, name));
            let rules = others.map(|(name, chain)| (name.as_str(), (chain.at, outlines(&chain.rules).collect())));
            all.extend(reached(family.number(), table.name(), rules.collect()));
        }
        for ((family, table), ForeignTable { chains, .. }) in &self.others {
            let rules = chains
                .iter()
                .map(|(name, chain)| (name.as_str(), (chain.at, chain.rules.iter().map(Cow::Borrowed).collect())));
            all.extend(reached(*family, table, rules.collect()));
        }
        all
    }
}

/// Returns what packets can reach in a table from its base chains, given where each chain is attached and its rules.
fn reached<'a>(
    family: u8,
    table: &'a str,
    chains: BTreeMap<&'a str, (Option<AttachedAt>, Vec<Cow<'a, Outline>>)>,
) -> Vec<Reached<'a>> {
    let bases: Vec<_> = chains.iter().filter_map(|(name, (at, _))| Some((*name, (*at)?))).collect();
    let graph: Graph<'a> = chains.into_iter().map(|(name, (_, rules))| (name, rules)).collect();
    let of = |(chain, at)| Reached { family, table, chain, at, effects: effects(&graph, chain) };
    bases.into_iter().map(of).collect()
}

/// The rules of a table by chain.
type Graph<'a> = BTreeMap<&'a str, Vec<Cow<'a, Outline>>>;

fn outlines(rules: &[LiveRule]) -> impl Iterator<Item = Cow<'_, Outline>> {
    rules.iter().map(LiveRule::outline)
}

/// What rules do with packets, and whether only with those that a condition selects.
type Effects = BTreeSet<(Effect, bool)>;

/// Returns the effects of the rules that packets can reach from a chain. Of the rules' conditions, only whether they
/// select packets counts.
fn effects<'g>(graph: &'g Graph<'_>, start: &'g str) -> Effects {
    let (mut found, mut seen, mut left) = (BTreeSet::new(), BTreeSet::from([(start, false)]), vec![(start, false)]);
    while let Some((chain, is_narrow)) = left.pop() {
        for rule in graph.get(chain).into_iter().flatten() {
            let is_narrow = is_narrow || rule.is_narrow;
            found.insert((rule.effect, is_narrow));
            let targets: Vec<(&'g str, bool)> = match &rule.chain {
                // The chains of a verdict map are not read.
                _ if rule.uses_map => graph.keys().map(|name| (*name, is_narrow)).collect(),
                Some(chain) => vec![(chain, is_narrow)],
                None => continue,
            };
            left.extend(targets.into_iter().filter(|target| seen.insert(*target)));
        }
    }
    found
}

/// The chain that only these rules have, in the tables of iptables.
pub(super) const AMBIENT_PREROUTING: &str = "ISTIO_PRERT";
/// What a trace shows in place of the rules.
pub(super) const CAPTURED_BY_ISTIO_CNI: &str = "captured by istio-cni's rules (ztunnel)";
const TUNNEL: u16 = 15008;
const DNS: u16 = 53;

/// A redirection to ztunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AmbientRedirection {
    /// The format of istio-cni's rules.
    pub format: RuleFormat,
    /// Whether it captures DNS.
    pub captures_dns: bool,
    /// Whether it captures inbound connections.
    pub captures_inbound: bool,
}

impl AmbientRedirection {
    /// Finds the redirection in the kernel.
    #[must_use]
    pub fn of(live: &LiveRuleset) -> Option<Self> {
        if let Some(istio) = live.native_istio().filter(|istio| istio.ambient) {
            let NativeIstio { captures_dns, captures_inbound, .. } = istio;
            return Some(Self { format: RuleFormat::Nftables, captures_dns, captures_inbound });
        }
        let has_chain = |wanted: Table, has_rules: bool| {
            let mut chains =
                live.chains().filter(|(_, table, name, _)| *table == wanted && *name == AMBIENT_PREROUTING);
            chains.any(|(.., chain)| !has_rules || !chain.rules.is_empty())
        };
        // The name only tells which tool made the redirection.
        (has_chain(Table::Nat, false) && live.captures_for_ztunnel_in_iptables()).then(|| Self {
            format: RuleFormat::Iptables,
            captures_dns: has_chain(Table::Raw, true),
            captures_inbound: has_chain(Table::Nat, true),
        })
    }

    /// Returns where the redirection is, for messages.
    #[must_use]
    pub const fn place(self) -> &'static str {
        match self.format {
            RuleFormat::Iptables => "chains ISTIO_PRERT and ISTIO_OUTPUT of iptables",
            RuleFormat::Nftables => "tables inet istio-ambient-*",
        }
    }

    /// Returns the table and the chain that capture packets at a hook.
    pub(super) const fn chain(self, hook: Hook) -> (&'static str, &'static str) {
        match (self.format, hook) {
            (RuleFormat::Iptables, Hook::Prerouting) => ("nat", AMBIENT_PREROUTING),
            (RuleFormat::Iptables, _) => ("nat", "ISTIO_OUTPUT"),
            (RuleFormat::Nftables, Hook::Prerouting) => ("istio-ambient-nat", "istio-prerouting"),
            (RuleFormat::Nftables, _) => ("istio-ambient-nat", "istio-output"),
        }
    }

    /// Returns the port of ztunnel to which a packet goes that no rule before has accepted; `None` if it is not captured.
    pub(super) fn captures(self, packet: &Packet, hook: Hook) -> Option<u16> {
        let Packet { destination, protocol, .. } = packet;
        let is_loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()].contains(&destination.ip());
        let is_query = destination.port() == DNS && self.captures_dns;
        match (hook, protocol) {
            (Hook::Prerouting, Protocol::Tcp) => {
                (self.captures_inbound && !is_loopback && destination.port() != TUNNEL).then_some(INBOUND_PORT)
            }
            (Hook::Output, Protocol::Tcp) if is_loopback => None,
            (Hook::Output, Protocol::Tcp) if is_query => Some(DNS_PROXY_PORT),
            (Hook::Output, Protocol::Tcp) => (!packet.is_over_lo()).then_some(OUTBOUND_PORT),
            (Hook::Output, Protocol::Udp) => (is_query && !packet.is_over_lo()).then_some(DNS_PROXY_PORT),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::packet::{Destination, Packet, Sender};
    use crate::firewall::rule::Family;
    use crate::firewall::ruleset::Ruleset;
    use crate::firewall::view::RulesetView;
    use crate::policy::Policy;
    use crate::policy::{Exclusion, IdRange, Protocol, TrafficOwner};

    fn arrives(policy: &Policy, format: RuleFormat, captures_dns: bool, from: Sender, to: &str) -> String {
        let (address, protocol) = to.split_once('/').expect(to);
        let protocol = if protocol == "udp" { Protocol::Udp } else { Protocol::Tcp };
        let to = Destination { address: address.parse().expect(to), protocol };
        let view = RulesetView::desired(&Ruleset::of(policy, &Family::ALL), RuleFormat::Iptables);
        let view = view.with_ambient(AmbientRedirection { format, captures_dns, captures_inbound: true });
        view.evaluate(Packet::first(from, to, &[], "eth0")).arrival.to_string()
    }

    #[test]
    fn captured_traffic_arrives_at_ztunnel_and_excluded_traffic_at_its_destination() {
        let owner = TrafficOwner::Uid(IdRange::one(7));
        let exclusion = Exclusion { owner, destination: None, protocol: None, ports: Vec::new() };
        let policy = Policy { exclusions: [exclusion].into(), ambient: true, ..Policy::default() };
        let process = |uid| Sender::Process { uid, gid: Some(0), set: None };
        for format in [RuleFormat::Iptables, RuleFormat::Nftables] {
            let arrives = |from, to: &str| arrives(&policy, format, true, from, to);
            for (server, resolver) in [("192.0.2.1:80", "10.96.0.10:53"), ("[2001:db8::1]:80", "[fd96::a]:53")] {
                assert_eq!(arrives(process(1000), &format!("{server}/tcp")), "ztunnel:15001", "{format:?}");
                assert_eq!(arrives(process(1000), &format!("{resolver}/udp")), "ztunnel:15053", "{format:?}");
                assert_eq!(arrives(process(1000), &format!("{resolver}/tcp")), "ztunnel:15053", "{format:?}");
                assert_eq!(arrives(process(7), &format!("{server}/tcp")), "direct", "{format:?}");
                assert_eq!(arrives(process(7), &format!("{resolver}/udp")), "direct", "{format:?}");
                assert_eq!(arrives(Sender::Inbound(None), &format!("{server}/tcp")), "ztunnel:15006", "{format:?}");
            }
            assert_eq!(arrives(Sender::Inbound(None), "10.88.0.2:15008/tcp"), "direct");
            assert_eq!(arrives(process(1000), "127.0.0.1:80/tcp"), "direct");
            assert_eq!(arrives(process(1000), "192.0.2.1:514/udp"), "direct");
        }
        assert_eq!(arrives(&policy, RuleFormat::Iptables, false, process(1000), "10.96.0.10:53/udp"), "direct");
    }
}
