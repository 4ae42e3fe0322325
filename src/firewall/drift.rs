//! How the kernel differs from what it should hold, in words; and what is there besides.

use super::live::{Live, LiveRule};
use super::plan::{Made, Step, check_steps};
use super::rule::{Family, Hook, Table};
use super::ruleset::Ruleset;
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
pub(super) fn drift(live: &Live, desired: &Ruleset) -> Vec<Drift> {
    let mut found = Vec::new();
    for ((family, table), steps) in check_steps(live, desired, &Made::default()) {
        let differences = differences(live, family, table, steps);
        let place = format!("{} {}", family.name(), table.name());
        found.extend(differences.into_iter().map(|what| Drift { place: place.clone(), what }));
    }
    found
}

fn differences(live: &Live, family: Family, table: Table, steps: Vec<Step>) -> Vec<Difference> {
    let (mut missing, mut extra, mut chains) = (Vec::new(), Vec::new(), Vec::new());
    for step in steps {
        match step {
            Step::Chain(name) => chains.push(Difference::NoChain(name)),
            Step::DeleteChain(name) => chains.push(Difference::ExtraChain(name)),
            Step::Rule { chain, rule, .. } => missing.push(format!("-A {chain} {rule}")),
            Step::DeleteRule { chain, handle } => {
                let rule = live.rules(family, table, &chain).iter().find(|rule| rule.handle == handle);
                extra.push(format!("-A {chain} {}", rule.map(LiveRule::to_string).unwrap_or_default()));
            }
            Step::Table | Step::Hook(_) | Step::DeleteTable => {}
        }
    }
    for rule in missing {
        match extra.iter().position(|other| *other == rule) {
            Some(at) => chains.push(Difference::Moved(extra.remove(at))),
            None => chains.push(Difference::Missing(rule)),
        }
    }
    chains.extend(extra.into_iter().map(Difference::Extra));
    chains
}

/// Rules in the built-in chains that are none of ours, one line each.
#[must_use]
pub fn foreign_rules(live: &Live, desired: &Ruleset) -> Vec<String> {
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
