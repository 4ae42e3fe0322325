//! Drift: how live rules differ from desired ones, in words, for both rule formats; and the rules of other tools in
//! the built-in chains.

use super::foreign::AttachedAt;
use super::live::{LiveRule, LiveRuleset};
use super::native::live::{NativeLiveChain, NativeLiveTables, are_equal};
use super::native::rule::{EXCLUSIONS_NAT_PRIORITY, NativeChain, NativeTable, NativeTables};
use super::plan::{CreatedTables, check_steps};
use super::redirections::Diversion;
use super::rule::{Family, Hook, Name, Ruleset, Table};
use super::step::{Step, priority_of};
use super::view::TableId;
use crate::cni::RuleFormat;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
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
        match (rule.is_empty(), table) {
            (true, _) => write!(f, "{} chain {chain}", table.place()),
            (false, TableId::Iptables(..)) => write!(f, "{} -A {chain} {rule}", table.place()),
            (false, TableId::Native(_)) => write!(f, "{} {chain} {rule}", table.place()),
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
        self.rule(kind, (chain.to_owned(), String::new()));
    }

    fn rule(&mut self, kind: DriftKind, (chain, rule): (String, String)) {
        self.found.push(Drift { at: RuleAt { table: self.table, chain, rule }, kind });
    }
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
        found.extend(foreign.map(|rule| RuleAt { table, chain: name.to_owned(), rule: rule.to_string() }));
    }
    found
}

/// Returns how the tables of iptables differ from `desired`. In detour's chains, every rule and its place counts; in
/// the built-in chains, only detour's rules and their order count. Foreign rules between them are allowed.
#[must_use]
pub(super) fn drift(live: &LiveRuleset, desired: &Ruleset) -> Vec<Drift> {
    let mut found = Vec::new();
    for ((family, table), steps) in check_steps(live, desired, &CreatedTables::default()) {
        found.extend(iptables_differences(live, family, table, steps));
    }
    found
}

fn iptables_differences(live: &LiveRuleset, family: Family, table: Table, steps: Vec<Step<'_>>) -> Vec<Drift> {
    let mut drift = TableDrift::of(TableId::Iptables(family, table));
    let (mut missing, mut deleted, mut chains) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    for step in steps {
        match step {
            Step::Chain { name, hook: None } => drift.chain(DriftKind::Missing, &name),
            Step::DeleteChain(name) => drift.chain(DriftKind::Extra, &name),
            Step::Rule { chain, rule, .. } => missing.push((chain.into_owned(), rule.to_string())),
            Step::DeleteRule { chain, handle } => {
                deleted.insert(handle);
                chains.insert(chain);
            }
            Step::Flush(chain) => {
                deleted.extend(live.rules(family, table, &chain).iter().map(|rule| rule.handle));
                chains.insert(chain);
            }
            _ => {}
        }
    }
    let mut extra = Vec::new();
    for chain in chains {
        let rules = live.rules(family, table, &chain).iter().filter(|rule| deleted.contains(&rule.handle));
        extra.extend(rules.map(|rule| (chain.to_string(), rule.to_string())));
    }
    let (paired, extra) = pair(missing, extra);
    for (rule, is_present) in paired {
        drift.rule(if is_present { DriftKind::Moved } else { DriftKind::Missing }, rule);
    }
    extra.into_iter().for_each(|rule| drift.rule(DriftKind::Extra, rule));
    drift.found
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
        match live.get(name.as_ref()) {
            Some(live) => differences_of_chain(&mut drift, name, live, chain),
            None => drift.chain(DriftKind::Missing, name),
        }
    }
    let is_extra = |name: &&String| !desired.contains_key(name.as_str());
    live.keys().filter(is_extra).for_each(|name| drift.chain(DriftKind::Extra, name));
    drift.found
}

fn differences_of_chain(drift: &mut TableDrift, name: &str, live: &NativeLiveChain, desired: &NativeChain) {
    let before = drift.found.len();
    if live.hook != Ok(desired.hook) {
        drift.chain(DriftKind::OtherHook, name);
    }
    let text = |rule: &dyn ToString| (name.to_owned(), rule.to_string());
    let present =
        live.rules.iter().map(|rule| rule.as_ref().map_or_else(|| text(&"(a foreign rule)"), |rule| text(rule)));
    let desired = desired.rules.iter().map(|rule| text(rule));
    let (paired, extra) = pair(desired.collect(), present.collect());
    let (present, missing): (Vec<_>, Vec<_>) = paired.into_iter().partition(|(_, is_present)| *is_present);
    missing.into_iter().for_each(|(rule, _)| drift.rule(DriftKind::Missing, rule));
    extra.into_iter().for_each(|rule| drift.rule(DriftKind::Extra, rule));
    if drift.found.len() > before {
        return;
    }
    let order = live.rules.iter().flatten().map(|rule| text(rule));
    let moved = order.zip(present).filter(|(live, (desired, _))| live != desired);
    moved.for_each(|(_, (rule, _))| drift.rule(DriftKind::Moved, rule));
}

/// A chain and a rule as text.
type RuleText = (String, String);

/// Pairs each of `desired` with whether it is among `present`, and returns the rest of `present`. Equal rules count
/// as often as they occur.
fn pair(desired: Vec<RuleText>, present: Vec<RuleText>) -> (Vec<(RuleText, bool)>, Vec<RuleText>) {
    let mut indexes: HashMap<&RuleText, VecDeque<usize>> = HashMap::new();
    for (index, rule) in present.iter().enumerate() {
        indexes.entry(rule).or_default().push_back(index);
    }
    let mut is_extra = vec![true; present.len()];
    let mut paired = Vec::with_capacity(desired.len());
    for rule in desired {
        let index = indexes.get_mut(&rule).and_then(VecDeque::pop_front);
        index.iter().for_each(|index| is_extra[*index] = false);
        paired.push((rule, index.is_some()));
    }
    let extra = present.into_iter().zip(is_extra).filter_map(|(rule, is_extra)| is_extra.then_some(rule));
    (paired, extra.collect())
}
