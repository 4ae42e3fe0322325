//! All rules of a pod, by table and chain; and what two lists of rules have in common.

use super::rule::{Family, Hook, Name, Rule, Table};
use crate::policy::{AmbientGuard, ContainerScope, DnsCapture, Exclusion, Redirect};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// The rules of a pod in one table of one family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableRules {
    /// Detour's chains, in the order in which they are created.
    pub chains: Vec<(Name, Vec<Rule>)>,
    /// Detour's rules in the built-in chains.
    pub hooks: BTreeMap<Hook, Vec<Rule>>,
}

impl TableRules {
    /// Returns a table without rules.
    #[must_use]
    pub const fn new() -> Self {
        Self { chains: Vec::new(), hooks: BTreeMap::new() }
    }

    /// Reports whether the table has neither chains nor rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty() && self.hooks.is_empty()
    }

    /// Reports whether one of detour's chains has this name.
    #[must_use]
    pub fn has_chain(&self, chain: &str) -> bool {
        self.chains.iter().any(|(name, _)| name == chain)
    }

    /// Appends a rule to one of detour's chains.
    pub fn append(&mut self, chain: impl Into<Name>, rule: Rule) {
        self.rules_of(chain).push(rule);
    }

    /// Returns the rules of one of detour's chains; adds the chain if it is missing.
    pub fn rules_of(&mut self, chain: impl Into<Name>) -> &mut Vec<Rule> {
        let chain = chain.into();
        let index = self.chains.iter().position(|(name, _)| *name == chain).unwrap_or_else(|| {
            self.chains.push((chain, Vec::new()));
            self.chains.len() - 1
        });
        &mut self.chains[index].1
    }

    /// Appends a rule to a built-in chain.
    pub fn hook(&mut self, hook: Hook, rule: Rule) {
        self.hooks.entry(hook).or_default().push(rule);
    }
}

/// The excluded traffic of a pod: the input of the native rules in the table of exclusions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExcludedTraffic {
    /// The excluded traffic by its properties; no exclusion covers another one.
    pub exclusions: BTreeSet<Exclusion>,
    /// The sets of excluded containers, the narrower scope first.
    pub scopes: Vec<ContainerScope>,
    /// The DNS queries that the pod's redirection captures.
    pub capture: DnsCapture,
    /// Whether it captures them over IPv6, too.
    pub captures_ip6: bool,
    /// Whether the pod is in Istio's ambient mesh: ztunnel's own packets are not excluded.
    pub ambient: bool,
}

/// All rules of a pod. [`Ruleset::of`] builds it from a policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ruleset {
    /// The redirection by family and table, in the vocabulary of iptables; tables without rules are absent.
    pub tables: BTreeMap<(Family, Table), TableRules>,
    /// The excluded traffic, whose rules don't depend on the rule format; `None` if the policy excludes nothing.
    pub excluded: Option<ExcludedTraffic>,
    /// The traffic that the guard rejects; `None` without a guard.
    pub guarded: Option<GuardedTraffic>,
}

/// The traffic that the guard rejects, unless it is redirected or excluded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuardedTraffic {
    /// What the rules of a redirection to the sidecar capture.
    Sidecar {
        /// These rules, for each family in which the pod's traffic is captured.
        rules: BTreeMap<(Family, Table), TableRules>,
        /// The settings of the redirection.
        redirect: Box<Redirect>,
    },
    /// What istio-cni's rules for the ambient mesh capture.
    Ambient(AmbientGuard),
}

impl Ruleset {
    /// Adds the chains and built-in rules of the redirection of `other`, so that they count as detour's. If both have a
    /// chain, its rules are those of `self`.
    pub fn add_owned(&mut self, other: &Self) {
        for (key, theirs) in &other.tables {
            let ours = self.tables.entry(*key).or_default();
            for (chain, rules) in &theirs.chains {
                if !ours.has_chain(chain) {
                    ours.chains.push((chain.clone(), rules.clone()));
                }
            }
            for (hook, rules) in &theirs.hooks {
                let own = ours.hooks.entry(*hook).or_default();
                let present: HashSet<&Rule> = own.iter().collect();
                let new: Vec<Rule> = rules.iter().filter(|rule| !present.contains(rule)).cloned().collect();
                own.extend(new);
            }
        }
    }

    /// Returns the rules of a table; adds the table if it is missing.
    pub fn table(&mut self, family: Family, table: Table) -> &mut TableRules {
        self.tables.entry((family, table)).or_default()
    }

    /// Reports whether the table has a chain of this name.
    #[must_use]
    pub fn has_chain(&self, family: Family, table: Table, chain: &str) -> bool {
        self.tables.get(&(family, table)).is_some_and(|rules| rules.has_chain(chain))
    }

    /// Reports whether there are no rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.excluded.is_none()
    }
}

/// Returns the longest common subsequence of lists of `a` and `b` elements, as pairs of indexes. If more than
/// `max_compared` pairs would have to be compared, returns only the common beginning and end.
pub(super) fn common_subsequence(
    a: usize,
    b: usize,
    max_compared: usize,
    same: impl Fn(usize, usize) -> bool,
) -> Vec<(usize, usize)> {
    let shorter = a.min(b);
    let head = (0..shorter).take_while(|i| same(*i, *i)).count();
    let tail = (1..=shorter - head).take_while(|i| same(a - i, b - i)).count();
    let (rows, columns) = (a - head - tail, b - head - tail);
    let mut pairs: Vec<(usize, usize)> = (0..head).map(|i| (i, i)).collect();
    if (1..=max_compared).contains(&rows.saturating_mul(columns)) {
        let middle = by_lengths(rows, columns, |row, column| same(head + row, head + column));
        pairs.extend(middle.into_iter().map(|(row, column)| (head + row, head + column)));
    }
    pairs.extend((1..=tail).rev().map(|i| (a - i, b - i)));
    pairs
}

/// Returns the longest common subsequence by the lengths of those of all remainders.
fn by_lengths(rows: usize, columns: usize, same: impl Fn(usize, usize) -> bool) -> Vec<(usize, usize)> {
    let at = |row: usize, column: usize| row * (columns + 1) + column;
    let mut lengths = vec![0_u32; at(rows, columns) + 1];
    for row in (0..rows).rev() {
        for column in (0..columns).rev() {
            lengths[at(row, column)] = if same(row, column) {
                lengths[at(row + 1, column + 1)] + 1
            } else {
                lengths[at(row + 1, column)].max(lengths[at(row, column + 1)])
            };
        }
    }
    let mut pairs = Vec::new();
    let (mut row, mut column) = (0, 0);
    while row < rows && column < columns {
        if same(row, column) {
            pairs.push((row, column));
            (row, column) = (row + 1, column + 1);
        } else if lengths[at(row + 1, column)] >= lengths[at(row, column + 1)] {
            row += 1;
        } else {
            column += 1;
        }
    }
    pairs
}
