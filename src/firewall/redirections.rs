//! What other tools do with the pod's traffic, from live rules alone: a redirection is a rule, reachable from a hook, that
//! sends traffic to a port. Names, empty chains and the lists of /proc are no evidence.

use super::foreign::{AttachedAt, ForeignTable};
use super::live::{LiveRule, LiveRuleset};
use super::native::live::NativeLiveChain;
use super::native::rule::NativeTable;
use super::outline::{Effect, Outline};
use super::rule::{Family, Hook, NFPROTO_INET, Ruleset};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// The prefixes of the native tables of Istio's tools, for pods with a sidecar (istio/istio, `tools/istio-nftables`) and
/// in the ambient mesh (`cni/pkg/nftables`).
const ISTIO_SIDECAR: &str = "istio-proxy-";
const ISTIO_AMBIENT: &str = "istio-ambient-";

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
    effects: BTreeSet<Effect>,
}

impl Reached<'_> {
    fn translates(&self) -> bool {
        self.effects.contains(&Effect::ToPort) || self.effects.contains(&Effect::ToAddress)
    }
}

/// A chain of another tool that can redirect connections, and that detour's rules do not contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedirectingChain {
    /// Where it is attached.
    pub at: AttachedAt,
    /// Its name with that of its table and its priority.
    pub text: String,
}

impl LiveRuleset {
    /// Returns the redirection of another tool. Chains of `known`, the recorded rules, are detour's.
    #[must_use]
    pub fn foreign_redirection(&self, known: &Ruleset) -> Option<ForeignRedirection> {
        let reached = self.reached(known);
        let has = |effect: Effect| reached.iter().any(|one| one.effects.contains(&effect));
        has(Effect::ToPort).then(|| ForeignRedirection { captures_dns: has(Effect::Zone) })
    }

    /// Returns the native redirection of Istio's own tools. The names of the tables only tell which tool made it.
    #[must_use]
    pub fn native_istio(&self) -> Option<NativeIstio> {
        let reached = self.reached(&Ruleset::default());
        let of = |prefix: &'static str| {
            let of_istio = |one: &&Reached<'_>| one.family == NFPROTO_INET && one.table.starts_with(prefix);
            let has = |effect: Effect, hook: Option<Hook>| {
                let mut all = reached.iter().filter(of_istio);
                all.any(|one| one.effects.contains(&effect) && hook.is_none_or(|hook| one.at.hook == hook))
            };
            has(Effect::ToPort, None).then(|| NativeIstio {
                ambient: prefix == ISTIO_AMBIENT,
                captures_dns: has(Effect::Zone, None),
                captures_inbound: has(Effect::ToPort, Some(Hook::Prerouting)),
            })
        };
        of(ISTIO_AMBIENT).or_else(|| of(ISTIO_SIDECAR))
    }

    /// Returns the redirection to a port from a hook in the tables of iptables.
    pub(super) fn redirects_in_iptables(&self, hook: Hook) -> bool {
        let is_iptables = |one: &Reached<'_>| !self.others.contains_key(&(one.family, one.table.to_owned()));
        let reached = self.reached(&Ruleset::default());
        reached.iter().any(|one| one.at.hook == hook && is_iptables(one) && one.effects.contains(&Effect::ToPort))
    }

    /// Returns the chains of other tools that can redirect connections, except iptables' built-in ones, whose rules are
    /// read like detour's, and those of Istio's own tools.
    #[must_use]
    pub fn redirecting_chains(&self) -> Vec<RedirectingChain> {
        let is_listed = |one: &Reached<'_>| {
            let is_istios = [ISTIO_SIDECAR, ISTIO_AMBIENT].iter().any(|prefix| one.table.starts_with(prefix));
            let is_built_in =
                Hook::of_chain(one.chain).is_some() && !self.others.contains_key(&(one.family, one.table.to_owned()));
            one.at.is_nat && one.translates() && !is_istios && !is_built_in
        };
        let listed = self.reached(&Ruleset::default()).into_iter().filter(is_listed);
        let chain = |one: Reached<'_>| {
            let family = Family::ALL.into_iter().find(|own| own.number() == one.family).map_or("inet", Family::name);
            let priority = one.at.priority;
            let text = format!("chain {} of table {family} {} with priority {priority}", one.chain, one.table);
            RedirectingChain { at: one.at, text }
        };
        listed.map(chain).collect()
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
            let outlines = |chain: &NativeLiveChain| {
                chain.rules.iter().flatten().map(|rule| Cow::Owned(Outline::of(&rule.target))).collect()
            };
            let graph: Graph<'_> = chains.iter().map(|(name, chain)| (name.as_str(), outlines(chain))).collect();
            let mut bases = chains.iter().filter(|(_, chain)| matches!(chain.hook, Ok(Some(_))));
            bases.any(|(name, _)| effects(&graph, name).contains(&Effect::ToPort))
        })
    }

    /// Returns what packets can reach in the tables of iptables, without the chains of `known`, and in those of other
    /// tools.
    fn reached(&self, known: &Ruleset) -> Vec<Reached<'_>> {
        let mut all = Vec::new();
        for ((family, table), chains) in &self.tables {
            let others = chains.iter().filter(|(name, _)| !known.has_chain(*family, *table, name));
            let rules = others
                .map(|(name, chain)| (name.as_str(), (chain.at, chain.rules.iter().map(LiveRule::outline).collect())));
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

/// Returns the effects of the rules that packets can reach from a chain, whatever the rules' conditions are.
fn effects<'g>(graph: &'g Graph<'_>, start: &'g str) -> BTreeSet<Effect> {
    let (mut found, mut seen, mut left) = (BTreeSet::new(), BTreeSet::from([start]), vec![start]);
    while let Some(chain) = left.pop() {
        for rule in graph.get(chain).into_iter().flatten() {
            found.insert(rule.effect);
            let targets: Vec<&'g str> = match &rule.chain {
                // The chains of a verdict map are not read.
                _ if rule.uses_map => graph.keys().copied().collect(),
                Some(chain) => vec![chain],
                None => continue,
            };
            left.extend(targets.into_iter().filter(|name| seen.insert(name)));
        }
    }
    found
}
