//! All rules of one pod as a value: what [`super::istio`] and [`super::detour`] write a policy as.

use super::rule::{Family, Hook, Rule, Table};
use super::{exclusions, istio};
use crate::policy::Policy;
use std::collections::{BTreeMap, HashSet};

/// The rules in one table of one family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableRules {
    /// Chains of our own, in the order in which they are made.
    pub chains: Vec<(String, Vec<Rule>)>,
    /// Our rules in the built-in chains.
    pub hooks: BTreeMap<Hook, Vec<Rule>>,
}

impl TableRules {
    /// Adds a rule to a chain of our own.
    pub fn append(&mut self, chain: &str, rule: Rule) {
        self.rules_of(chain).push(rule);
    }

    /// A chain of our own, made where it isn't there yet.
    pub fn rules_of(&mut self, chain: &str) -> &mut Vec<Rule> {
        let index = self.chains.iter().position(|(name, _)| name == chain).unwrap_or_else(|| {
            self.chains.push((chain.to_owned(), Vec::new()));
            self.chains.len() - 1
        });
        &mut self.chains[index].1
    }

    /// Adds a rule to a built-in chain.
    pub fn hook(&mut self, hook: Hook, rule: Rule) {
        self.hooks.entry(hook).or_default().push(rule);
    }
}

/// All rules of one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ruleset {
    /// By family and table; one that needs nothing is absent.
    pub tables: BTreeMap<(Family, Table), TableRules>,
}

impl Ruleset {
    /// The rules that `policy` needs in `families`.
    #[must_use]
    pub fn of(policy: &Policy, families: &[Family]) -> Self {
        let mut ruleset = Self::default();
        if !policy.is_empty() {
            let exclusions = policy.exclusions_in_effect();
            for &family in families {
                if let Some(redirect) = policy.redirect() {
                    istio::write(redirect, family, &mut ruleset);
                }
                exclusions::write(policy, &exclusions, family, &mut ruleset);
            }
        }
        ruleset.rules_mut().for_each(Rule::drop_empty_conditions);
        ruleset
    }

    fn rules_mut(&mut self) -> impl Iterator<Item = &mut Rule> {
        self.tables.values_mut().flat_map(|table| {
            let chains = table.chains.iter_mut().map(|(_, rules)| rules);
            chains.chain(table.hooks.values_mut()).flatten()
        })
    }

    /// Adds the chains and built-in rules of `other`, to know them as ours by; the rules of a
    /// chain that both have stay those of `self`.
    pub fn know_also(&mut self, other: &Self) {
        for (key, theirs) in &other.tables {
            let ours = self.tables.entry(*key).or_default();
            for (chain, rules) in &theirs.chains {
                if !ours.chains.iter().any(|(name, _)| name == chain) {
                    ours.chains.push((chain.clone(), rules.clone()));
                }
            }
            for (hook, rules) in &theirs.hooks {
                let known = ours.hooks.entry(*hook).or_default();
                let there: HashSet<&Rule> = known.iter().collect();
                let new: Vec<Rule> = rules.iter().filter(|rule| !there.contains(rule)).cloned().collect();
                known.extend(new);
            }
        }
    }

    /// A table's rules, made where they aren't there yet.
    pub fn table(&mut self, family: Family, table: Table) -> &mut TableRules {
        self.tables.entry((family, table)).or_default()
    }

    /// Whether a chain of this name is among them.
    #[must_use]
    pub fn has_chain(&self, family: Family, table: Table, chain: &str) -> bool {
        self.tables.get(&(family, table)).is_some_and(|t| t.chains.iter().any(|(name, _)| name == chain))
    }

    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }
}
