//! Drift: how live rules differ from desired ones, in words, for both rule formats; and the rules of other tools in
//! the built-in chains.

use super::foreign::{AttachedAt, LiveRule};
use super::live::LiveRuleset;
use super::native::live::{NativeLiveChain, NativeLiveTables, are_equal};
use super::native::rule::{EXCLUSIONS_NAT_PRIORITY, NativeChain, NativeTable, NativeTables, TableId};
use super::plan::MAX_COMPARED_PAIRS;
use super::redirections::Diversion;
use super::rule::{Family, Hook, Name, Rule, Table};
use super::ruleset::{Ruleset, common_subsequence};
use super::step::priority_of;
use crate::cni::RuleFormat;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

/// A rule or, if the text of the rule is empty, a chain.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RuleAt {
    /// The table.
    pub table: TableId,
    /// The chain.
    pub chain: String,
    /// The rule as `iptables-save` or `nft` prints it, without the chain.
    pub rule: String,
}

impl fmt::Display for RuleAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { table, chain, rule } = self;
        match rule.as_str() {
            "" => write!(f, "{} chain {chain}", table.place()),
            rule => f.write_str(&table.rule_text(chain, rule)),
        }
    }
}

/// One difference between live and desired rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drift {
    /// The rule or the chain.
    pub at: RuleAt,
    /// The difference.
    pub kind: DriftKind,
}

/// The kinds of difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriftKind {
    /// It is desired, but does not exist.
    Missing,
    /// It exists, but is not desired: a rule in a chain of detour, or a chain of detour.
    Extra,
    /// A desired rule exists in another place.
    Moved,
    /// A chain is attached to another hook or priority than desired.
    OtherHook,
    /// A chain of another tool, in words, can divert excluded or captured traffic first.
    NotFirst(Diversion),
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = &self.at;
        match self.kind {
            DriftKind::Missing => write!(f, "missing: {at}"),
            DriftKind::Extra => write!(f, "extra: {at}"),
            DriftKind::Moved => write!(f, "moved: {at}"),
            DriftKind::OtherHook => write!(f, "wrong hook or priority: {at}"),
            DriftKind::NotFirst(diversion) => {
                let place = at.table.place();
                let which = if at.table == TableId::Native(NativeTable::Exclusions) { "excluded" } else { "captured" };
                write!(f, "not first: {place}: {} runs first and can {} {which} traffic", at.chain, diversion.verb())
            }
        }
    }
}

/// The differences of one table.
struct TableDrift {
    table: TableId,
    found: Vec<Drift>,
}

impl TableDrift {
    const fn of(table: TableId) -> Self {
        Self { table, found: Vec::new() }
    }

    fn chain(&mut self, kind: DriftKind, chain: &str) {
        self.rule(kind, chain, String::new());
    }

    fn rule(&mut self, kind: DriftKind, chain: &str, rule: String) {
        self.found.push(Drift { at: RuleAt { table: self.table, chain: chain.to_owned(), rule }, kind });
    }

    /// Adds the differences of a chain: of the rules that the two lists don't have in common and in the same order, those
    /// in both are moved.
    fn rules<'a>(&mut self, chain: &str, live: impl IntoIterator<Item = &'a LiveRule>, desired: &[Rule]) {
        let live: Vec<&LiveRule> = live.into_iter().collect();
        let is_common = |a: usize, b: usize| live[a].rule.as_ref() == Ok(&desired[b]);
        let common = common_subsequence(live.len(), desired.len(), MAX_COMPARED_PAIRS, is_common);
        let (in_live, in_desired): (HashSet<usize>, HashSet<usize>) = common.into_iter().unzip();
        let others = (0..live.len()).filter(|at| !in_live.contains(at));
        let others: Vec<String> = others.map(|at| live[at].text(self.table)).collect();
        let mut unpaired: HashMap<&str, usize> = HashMap::new();
        others.iter().for_each(|rule| *unpaired.entry(rule).or_default() += 1);
        for at in (0..desired.len()).filter(|at| !in_desired.contains(at)) {
            let rule = self.table.text_of(&desired[at]);
            let is_present = take(&mut unpaired, &rule);
            self.rule(if is_present { DriftKind::Moved } else { DriftKind::Missing }, chain, rule);
        }
        let extra = others.iter().filter(|rule| take(&mut unpaired, rule));
        extra.for_each(|rule| self.rule(DriftKind::Extra, chain, rule.clone()));
    }
}

/// Takes one of the rules with this text; reports whether there was one.
fn take(rules: &mut HashMap<&str, usize>, text: &str) -> bool {
    let Some(count) = rules.get_mut(text).filter(|count| **count > 0) else { return false };
    *count -= 1;
    true
}

/// Returns the rules in the built-in chains that are not detour's.
#[must_use]
pub fn foreign_rules(live: &LiveRuleset, desired: &Ruleset) -> Vec<RuleAt> {
    let mut found = Vec::new();
    for (family, table, name, chain) in live.chains().filter(|(_, _, _, chain)| chain.built_in) {
        let ours = desired.tables.get(&(family, table));
        let hook = Hook::of_chain(name);
        let is_ours = |rule: &LiveRule| ours.is_some_and(|ours| rule.is_of(ours, hook));
        let foreign = chain.rules.iter().filter(|rule| !is_ours(rule));
        let table = TableId::Iptables(family, table);
        found.extend(foreign.map(|rule| RuleAt { table, chain: name.to_owned(), rule: rule.text(table) }));
    }
    found
}

/// Returns how the tables of iptables differ from `desired`. In detour's chains, every rule and its place counts; in
/// the built-in chains, only detour's rules and their order count. Foreign rules between them are allowed.
#[must_use]
pub(super) fn iptables_drift(live: &LiveRuleset, desired: &Ruleset) -> Vec<Drift> {
    let mut found = Vec::new();
    for ((family, table), desired) in &desired.tables {
        let mut drift = TableDrift::of(TableId::Iptables(*family, *table));
        let exists = |chain: &str| live.tables.get(&(*family, *table)).is_some_and(|chains| chains.contains_key(chain));
        let missing = desired.chains.iter().filter(|(chain, _)| !exists(chain));
        missing.for_each(|(chain, _)| drift.chain(DriftKind::Missing, chain));
        for hook in Hook::ALL {
            let live = live.rules(*family, *table, hook.chain()).iter();
            let rules = desired.hooks.get(&hook).map_or(&[][..], Vec::as_slice);
            drift.rules(hook.chain(), live.filter(|rule| rule.is_of(desired, Some(hook))), rules);
        }
        for (chain, rules) in &desired.chains {
            drift.rules(chain, live.rules(*family, *table, chain), rules);
        }
        found.extend(drift.found);
    }
    found
}

/// Returns the chains of other tools that can divert a connection from detour's rules. Of two nat chains with the same
/// priority, the newer one is first (net/netfilter/core.c, `nf_hook_entries_grow`). A listener that TPROXY assigns and the
/// end of connection tracking take effect at every priority.
#[must_use]
pub(super) fn earlier_drift(live: &LiveRuleset, desired: &Ruleset, format: RuleFormat) -> Vec<Drift> {
    let mut found = Vec::new();
    let redirection = match format {
        RuleFormat::Iptables => TableId::Iptables(Family::Ip, Table::Nat),
        RuleFormat::Nftables => TableId::Native(NativeTable::Of(Table::Nat)),
    };
    for chain in live.diverting_chains() {
        let AttachedAt { hook, is_nat, priority, .. } = chain.at;
        let excludes = desired.excluded.is_some() && hook == Hook::Output && is_nat;
        let is_first = !is_nat || priority <= priority_of(redirection, Table::Nat);
        let table = if chain.diversion == Diversion::Drops {
            continue;
        } else if excludes && priority <= EXCLUSIONS_NAT_PRIORITY {
            TableId::Native(NativeTable::Exclusions)
        } else if !desired.tables.is_empty() && is_first {
            redirection
        } else {
            continue;
        };
        let mut drift = TableDrift::of(table);
        drift.chain(DriftKind::NotFirst(chain.diversion), &chain.text);
        found.extend(drift.found);
    }
    found
}

/// Returns how detour's native tables differ from `desired`. All their chains and rules are detour's, so every
/// difference is drift. Elements of the sets of excluded containers are not part of the desired state.
#[must_use]
pub(super) fn native_drift(live: &NativeLiveTables, desired: &NativeTables) -> Vec<Drift> {
    let (no_live, no_desired) = (BTreeMap::new(), BTreeMap::new());
    let mut found = Vec::new();
    for table in NativeTable::ALL {
        let (live, desired) = (live.get(&table).unwrap_or(&no_live), desired.get(&table).unwrap_or(&no_desired));
        // Rules with sets can be long as text.
        if !are_equal(live, desired) {
            found.extend(native_differences(TableId::Native(table), live, desired));
        }
    }
    found
}

fn native_differences(
    table: TableId,
    live: &BTreeMap<String, NativeLiveChain>,
    desired: &BTreeMap<Name, NativeChain>,
) -> Vec<Drift> {
    let mut drift = TableDrift::of(table);
    for (name, chain) in desired {
        let Some(live) = live.get(name.as_ref()) else {
            drift.chain(DriftKind::Missing, name);
            continue;
        };
        if live.hook != Ok(chain.hook) {
            drift.chain(DriftKind::OtherHook, name);
        }
        drift.rules(name, &live.rules, &chain.rules);
    }
    let is_extra = |name: &&String| !desired.contains_key(name.as_str());
    live.keys().filter(is_extra).for_each(|name| drift.chain(DriftKind::Extra, name));
    drift.found
}
