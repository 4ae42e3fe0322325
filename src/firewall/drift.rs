//! How the kernel differs from what it should hold, in words; and what is there besides.

use super::live::{LiveRule, LiveRuleset};
use super::plan::{CreatedTables, Step, check_steps};
use super::rule::Ruleset;
use super::rule::{Family, Hook, Table};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;

/// One difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drift {
    /// In which table, with its family: `ip nat`, `inet detour-nat`.
    pub place: String,
    /// What differs.
    pub what: Difference,
}

/// What differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// There is no such chain.
    NoChain(String),
    /// A chain of ours that nobody asked for.
    ExtraChain(String),
    /// A chain is not entered from where it should be.
    OtherHook(String),
    /// A rule, with its chain and as its dialect's tool writes it, is not there.
    Missing(String),
    /// A rule is there that nobody asked for.
    Extra(String),
    /// A rule is there, but not in its place.
    Moved(String),
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = &self.place;
        match &self.what {
            Difference::NoChain(chain) => write!(f, "missing: {place} chain {chain}"),
            Difference::ExtraChain(chain) => write!(f, "extra: {place} chain {chain}"),
            Difference::OtherHook(chain) => write!(f, "other hook or priority: {place} chain {chain}"),
            Difference::Missing(rule) => write!(f, "missing: {place} {rule}"),
            Difference::Extra(rule) => write!(f, "extra: {place} {rule}"),
            Difference::Moved(rule) => write!(f, "moved: {place} {rule}"),
        }
    }
}

/// How `live` differs from `desired`: in our chains in every rule and its place, in the built-in
/// chains in our rules and the order among them. Foreign rules between them are no difference.
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

fn differences(live: &LiveRuleset, family: Family, table: Table, steps: Vec<Step>) -> Vec<Difference> {
    let (mut missing, mut deleted, mut found) = (Vec::new(), BTreeSet::new(), Vec::new());
    let mut chains = BTreeSet::new();
    for step in steps {
        match step {
            Step::Chain(name) => found.push(Difference::NoChain(name)),
            Step::DeleteChain(name) => found.push(Difference::ExtraChain(name)),
            Step::Rule { chain, rule, .. } => missing.push(format!("-A {chain} {rule}")),
            Step::DeleteRule { chain, handle } => {
                deleted.insert(handle);
                chains.insert(chain);
            }
            Step::Flush(chain) => {
                deleted.extend(live.rules(family, table, &chain).iter().map(|rule| rule.handle));
                chains.insert(chain);
            }
            Step::Table | Step::Hook(_) | Step::DeleteTable => {}
        }
    }
    let mut extra = Vec::new();
    for chain in &chains {
        let rules = live.rules(family, table, chain).iter().filter(|rule| deleted.contains(&rule.handle));
        extra.extend(rules.map(|rule| format!("-A {chain} {rule}")));
    }
    let (paired, extra) = pair(missing, extra);
    let difference = |(rule, is_there)| if is_there { Difference::Moved(rule) } else { Difference::Missing(rule) };
    found.extend(paired.into_iter().map(difference));
    found.extend(extra.into_iter().map(Difference::Extra));
    found
}

/// Each of `wanted` with whether it is among `there`, and what else is there. Of equal rules, each counts
/// once.
pub(super) fn pair(wanted: Vec<String>, there: Vec<String>) -> (Vec<(String, bool)>, Vec<String>) {
    let mut places: HashMap<&str, VecDeque<usize>> = HashMap::new();
    for (at, rule) in there.iter().enumerate() {
        places.entry(rule).or_default().push_back(at);
    }
    let mut is_extra = vec![true; there.len()];
    let mut is_there = |rule: &str| {
        let at = places.get_mut(rule).and_then(VecDeque::pop_front);
        at.inspect(|at| is_extra[*at] = false).is_some()
    };
    let paired = wanted.into_iter().map(|rule| (is_there(&rule), rule)).map(|(is_there, rule)| (rule, is_there));
    let paired = paired.collect();
    let extra = there.into_iter().zip(is_extra).filter_map(|(rule, is_extra)| is_extra.then_some(rule));
    (paired, extra.collect())
}

/// Rules in the built-in chains that are none of ours, one line each.
#[must_use]
pub fn foreign_rules(live: &LiveRuleset, desired: &Ruleset) -> Vec<String> {
    let mut found = Vec::new();
    for (family, table, name, chain) in live.chains().filter(|(_, _, _, chain)| chain.built_in) {
        let ours = desired.tables.get(&(family, table));
        let hook = Hook::ALL.into_iter().find(|hook| hook.chain() == name);
        let is_ours = |rule: &LiveRule| {
            ours.is_some_and(|ours| {
                let into_ours = rule.goes_to().is_some_and(|to| ours.chains.iter().any(|(chain, _)| chain == to));
                let asked_for = hook.and_then(|hook| ours.hooks.get(&hook));
                into_ours || asked_for.is_some_and(|rules| rule.rule.as_ref().is_ok_and(|r| rules.contains(r)))
            })
        };
        let foreign = chain.rules.iter().filter(|rule| !is_ours(rule));
        found.extend(foreign.map(|rule| format!("{} {} -A {name} {rule}", family.name(), table.name())));
    }
    found
}
