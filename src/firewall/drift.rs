//! Drift: how live rules differ from desired ones, in words, for both rule formats; and the rules of other tools in
//! the built-in chains.

use super::live::{LiveRule, LiveRuleset};
use super::native::live::{NativeLiveChain, NativeLiveTables, are_equal};
use super::native::rule::{NativeChain, NativeTable, NativeTables};
use super::plan::{CreatedTables, check_steps};
use super::rule::{Family, Hook, Name, Ruleset, Table};
use super::step::Step;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;

/// One difference between live and desired rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drift {
    /// The table with its family: `ip nat`, `inet detour-nat`.
    pub place: String,
    /// The difference.
    pub what: Difference,
}

/// The kinds of difference. A rule is written with its chain, as the tool of its rule format prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// A desired chain is missing.
    MissingChain(String),
    /// A chain of detour exists that is not desired.
    ExtraChain(String),
    /// A chain is attached to another hook or priority than desired.
    OtherHook(String),
    /// A desired rule is missing.
    Missing(String),
    /// A rule exists that is not desired.
    Extra(String),
    /// A desired rule exists in another place.
    Moved(String),
    /// A chain of another tool can redirect excluded traffic first.
    NotFirst(String),
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = &self.place;
        match &self.what {
            Difference::MissingChain(chain) => write!(f, "missing: {place} chain {chain}"),
            Difference::ExtraChain(chain) => write!(f, "extra: {place} chain {chain}"),
            Difference::OtherHook(chain) => write!(f, "wrong hook or priority: {place} chain {chain}"),
            Difference::Missing(rule) => write!(f, "missing: {place} {rule}"),
            Difference::Extra(rule) => write!(f, "extra: {place} {rule}"),
            Difference::Moved(rule) => write!(f, "moved: {place} {rule}"),
            Difference::NotFirst(chain) => {
                write!(f, "not first: {place}: {chain} runs first and can redirect excluded traffic")
            }
        }
    }
}

/// Lists the rules in the built-in chains that are not detour's, one line each.
#[must_use]
pub fn foreign_rules(live: &LiveRuleset, desired: &Ruleset) -> Vec<String> {
    let mut found = Vec::new();
    for (family, table, name, chain) in live.chains().filter(|(_, _, _, chain)| chain.built_in) {
        let ours = desired.tables.get(&(family, table));
        let hook = Hook::of_chain(name);
        let is_ours = |rule: &LiveRule| {
            ours.is_some_and(|ours| {
                let enters_ours = rule.jump_target().is_some_and(|to| ours.chains.iter().any(|(chain, _)| chain == to));
                let desired = hook.and_then(|hook| ours.hooks.get(&hook));
                enters_ours || desired.is_some_and(|rules| rule.rule.as_ref().is_ok_and(|r| rules.contains(r)))
            })
        };
        let foreign = chain.rules.iter().filter(|rule| !is_ours(rule));
        found.extend(foreign.map(|rule| format!("{} {} -A {name} {rule}", family.name(), table.name())));
    }
    found
}

/// Returns how the tables of iptables differ from `desired`. In detour's chains, every rule and its place counts; in
/// the built-in chains, only detour's rules and their order count. Foreign rules between them are allowed.
#[must_use]
pub(super) fn drift(live: &LiveRuleset, desired: &Ruleset) -> Vec<Drift> {
    let mut found = Vec::new();
    for ((family, table), steps) in check_steps(live, desired, &CreatedTables::default()) {
        let differences = differences(live, family, table, steps);
        let place = format!("{} {}", family.name(), table.name());
        found.extend(differences.into_iter().map(|what| Drift { place: place.clone(), what }));
    }
    found
}

fn differences(live: &LiveRuleset, family: Family, table: Table, steps: Vec<Step<'_>>) -> Vec<Difference> {
    let (mut missing, mut deleted, mut found) = (Vec::new(), BTreeSet::new(), Vec::new());
    let mut chains = BTreeSet::new();
    for step in steps {
        match step {
            Step::Chain { name, hook: None } => found.push(Difference::MissingChain(name.into_owned())),
            Step::DeleteChain(name) => found.push(Difference::ExtraChain(name.into_owned())),
            Step::Rule { chain, rule, .. } => missing.push(format!("-A {chain} {rule}")),
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
    for chain in &chains {
        let rules = live.rules(family, table, chain).iter().filter(|rule| deleted.contains(&rule.handle));
        extra.extend(rules.map(|rule| format!("-A {chain} {rule}")));
    }
    let (paired, extra) = pair(missing, extra);
    let difference = |(rule, is_present)| if is_present { Difference::Moved(rule) } else { Difference::Missing(rule) };
    found.extend(paired.into_iter().map(difference));
    found.extend(extra.into_iter().map(Difference::Extra));
    found
}

/// Returns the chains of other tools that run before the exclusions, if anything is excluded.
#[must_use]
pub(super) fn earlier_drift(live: &LiveRuleset, desired: &Ruleset) -> Vec<Drift> {
    let place = format!("inet {}", NativeTable::Exclusions.name());
    let earlier = live.before_exclusions.iter().filter(|_| desired.excluded.is_some());
    earlier.map(|chain| Drift { place: place.clone(), what: Difference::NotFirst(chain.clone()) }).collect()
}

/// Returns how detour's native tables differ from `desired`. All their chains and rules are detour's, so every
/// difference is drift. Elements of the sets of excluded containers are not part of the desired state.
#[must_use]
pub(super) fn native_drift(live: &NativeLiveTables, desired: &NativeTables) -> Vec<Drift> {
    let (no_live, no_desired) = (BTreeMap::new(), BTreeMap::new());
    let mut found = Vec::new();
    for table in NativeTable::ALL {
        let (live, desired) = (live.get(&table).unwrap_or(&no_live), desired.get(&table).unwrap_or(&no_desired));
        let place = format!("inet {}", table.name());
        found.extend(native_differences(live, desired).into_iter().map(|what| Drift { place: place.clone(), what }));
    }
    found
}

fn native_differences(
    live: &BTreeMap<String, NativeLiveChain>,
    desired: &BTreeMap<Name, NativeChain>,
) -> Vec<Difference> {
    let mut found = Vec::new();
    // Rules with sets can be long as text.
    if are_equal(live, desired) {
        return found;
    }
    for (name, chain) in desired {
        match live.get(name.as_ref()) {
            Some(live) => found.extend(differences_of_chain(name, live, chain)),
            None => found.push(Difference::MissingChain(name.to_string())),
        }
    }
    found.extend(live.keys().filter(|name| !desired.contains_key(name.as_str())).cloned().map(Difference::ExtraChain));
    found
}

fn differences_of_chain(name: &str, live: &NativeLiveChain, desired: &NativeChain) -> Vec<Difference> {
    let mut found = Vec::new();
    if live.hook != Ok(desired.hook) {
        found.push(Difference::OtherHook(name.to_owned()));
    }
    let text = |rule: &dyn ToString| format!("{name} {}", rule.to_string());
    let rules = live.rules.iter();
    let present = rules.map(|rule| rule.as_ref().map_or_else(|| format!("{name} (a foreign rule)"), |rule| text(rule)));
    let desired = desired.rules.iter().map(|rule| text(rule));
    let (paired, extra) = pair(desired.collect(), present.collect());
    let (present, missing): (Vec<_>, Vec<_>) = paired.into_iter().partition(|(_, is_present)| *is_present);
    let present: Vec<String> = present.into_iter().map(|(rule, _)| rule).collect();
    found.extend(missing.into_iter().map(|(rule, _)| Difference::Missing(rule)));
    let live_order: Vec<String> = live.rules.iter().flatten().map(|rule| text(rule)).collect();
    let is_out_of_order = found.is_empty() && extra.is_empty() && live_order != present;
    found.extend(extra.into_iter().map(Difference::Extra));
    if is_out_of_order {
        let moved = live_order.into_iter().zip(present).filter(|(live, desired)| live != desired);
        found.extend(moved.map(|(_, desired)| Difference::Moved(desired)));
    }
    found
}

/// Pairs each of `desired` with whether it is among `present`, and returns the rest of `present`. Equal rules count
/// as often as they occur.
fn pair(desired: Vec<String>, present: Vec<String>) -> (Vec<(String, bool)>, Vec<String>) {
    let mut indexes: HashMap<&str, VecDeque<usize>> = HashMap::new();
    for (index, rule) in present.iter().enumerate() {
        indexes.entry(rule).or_default().push_back(index);
    }
    let mut is_extra = vec![true; present.len()];
    let mut take = |rule: &str| {
        let index = indexes.get_mut(rule).and_then(VecDeque::pop_front);
        index.inspect(|index| is_extra[*index] = false).is_some()
    };
    let paired = desired.into_iter().map(|rule| (take(&rule), rule)).map(|(is_present, rule)| (rule, is_present));
    let paired = paired.collect();
    let extra = present.into_iter().zip(is_extra).filter_map(|(rule, is_extra)| is_extra.then_some(rule));
    (paired, extra.collect())
}
