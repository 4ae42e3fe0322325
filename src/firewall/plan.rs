//! The smallest changes that lead from live to desired rules in the tables of iptables: correct rules stay, missing
//! ones are inserted in their place, and only detour's are deleted.

use super::foreign::LiveRule;
use super::live::{LiveRuleset, LiveTable};
use super::native::rule::TableId;
use super::rule::{Family, Hook, Rule, Table};
use super::ruleset::{Ruleset, TableRules, common_subsequence};
use super::step::{PlannedStep, Step};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The maximum number of rules of one chain that are deleted one by one: for each, the kernel walks the chain until it
/// finds the handle (net/netfilter/nf_tables_api.c, `nft_rule_lookup`).
pub(super) const MAX_DELETIONS: usize = 256;
/// The maximum number of pairs of rules that are compared to find the longest common subsequence of two chains.
pub(super) const MAX_COMPARED_PAIRS: usize = 1 << 20;

/// The tables and built-in chains that detour created, and deletes when it removes its rules.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CreatedTables {
    /// The created tables.
    pub tables: BTreeSet<(Family, Table)>,
    /// The created built-in chains.
    pub hooks: BTreeSet<(Family, Table, Hook)>,
}

impl CreatedTables {
    /// Returns the tables and built-in chains of `desired` that are not in `live`, so that detour will create them.
    #[must_use]
    pub fn missing_in(desired: &Ruleset, live: &LiveRuleset) -> Self {
        let mut made = Self::default();
        for (key @ (family, table), rules) in &desired.tables {
            let live = live.tables.get(key);
            if live.is_none() {
                made.tables.insert(*key);
            }
            let missing = rules.hooks.keys().filter(|hook| live.is_none_or(|t| !t.contains_key(hook.chain())));
            made.hooks.extend(missing.map(|hook| (*family, *table, *hook)));
        }
        made
    }

    /// Returns whether nothing was created.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.hooks.is_empty()
    }

    /// Adds the tables and chains of `other`.
    pub fn add(&mut self, other: &Self) {
        self.tables.extend(&other.tables);
        self.hooks.extend(&other.hooks);
    }

    /// Drops the tables and chains that no longer exist in `live`: another tool may create them again.
    pub fn drop_missing(&mut self, live: &LiveRuleset) {
        self.tables.retain(|table| live.tables.contains_key(table));
        self.hooks.retain(|(family, table, hook)| {
            live.tables.get(&(*family, *table)).is_some_and(|chains| chains.contains_key(hook.chain()))
        });
    }
}

/// Returns the changes that lead from `live` to `desired`. `previous` are the rules desired before. A live chain or
/// rule is detour's if it is in either of the two.
#[must_use]
pub(super) fn changes<'a>(
    live: &'a LiveRuleset,
    previous: &Ruleset,
    desired: &'a Ruleset,
    made: &CreatedTables,
) -> Vec<PlannedStep<'a>> {
    let plans = plans(live, previous, desired, made);
    plans
        .flat_map(|plan| {
            let table = TableId::Iptables(plan.key.0, plan.key.1);
            plan.steps().into_iter().map(move |step| (table, step))
        })
        .collect()
}

fn plans<'a, 'b>(
    live: &'a LiveRuleset,
    previous: &'b Ruleset,
    desired: &'a Ruleset,
    made: &'b CreatedTables,
) -> impl Iterator<Item = TablePlan<'a, 'b>> {
    static NO_RULES: TableRules = TableRules::new();
    static NO_TABLE: LiveTable = LiveTable::new();
    let keys = Family::ALL.into_iter().flat_map(|family| Table::ALL.map(|table| (family, table)));
    keys.map(move |key| TablePlan {
        key,
        exists: live.tables.contains_key(&key),
        live: live.tables.get(&key).unwrap_or(&NO_TABLE),
        previous: previous.tables.get(&key).unwrap_or(&NO_RULES),
        desired: desired.tables.get(&key).unwrap_or(&NO_RULES),
        made,
    })
}

/// The inputs of one table's changes. The steps borrow from the live and the desired rules only.
struct TablePlan<'a, 'b> {
    key: (Family, Table),
    exists: bool,
    live: &'a LiveTable,
    previous: &'b TableRules,
    desired: &'a TableRules,
    made: &'b CreatedTables,
}

impl<'a> TablePlan<'a, '_> {
    /// Returns the steps; flushes a chain of detour instead of deleting more than [`MAX_DELETIONS`] of its rules.
    fn steps(&self) -> Vec<Step<'a>> {
        if self.can_delete_table() {
            return vec![Step::DeleteTable];
        }
        let (mut deletions, mut rules) = (Vec::new(), Vec::new());
        for hook in Hook::ALL {
            self.edit_hook(hook, &mut deletions, &mut rules);
        }
        let mut creations = Vec::new();
        if !self.exists && !self.desired.is_empty() {
            creations.push(Step::Table);
        }
        creations.extend(self.missing_hooks().map(|hook| Step::built_in(self.key.1, hook)));
        for (name, desired) in &self.desired.chains {
            let live = self.live.get(name.as_ref());
            if live.is_none() {
                creations.push(Step::Chain { name: name.as_ref().into(), hook: None });
            }
            let live: Vec<&LiveRule> = live.iter().flat_map(|chain| &chain.rules).collect();
            let desired: Vec<&Rule> = desired.iter().collect();
            let mut edit = Edit::between(&live, &desired, |_| true);
            if edit.deleted.len() > MAX_DELETIONS {
                deletions.push(Step::Flush(name.as_ref().into()));
                edit = Edit::between(&[], &desired, |_| true);
            }
            edit.write(name, &mut deletions, &mut rules);
        }
        let obsolete: Vec<&str> = self
            .live
            .keys()
            .map(String::as_str)
            .filter(|name| self.is_ours(name) && !self.desired.has_chain(name))
            .collect();
        let nonempty = obsolete.iter().filter(|name| !self.live[**name].rules.is_empty());
        deletions.extend(nonempty.map(|name| Step::Flush((*name).into())));
        // The kernel does not delete a chain to which a foreign rule jumps.
        let used = if obsolete.is_empty() { BTreeSet::new() } else { self.used_by_others() };
        let unused = obsolete.into_iter().filter(|name| !used.contains(name));
        deletions.extend(unused.map(|name| Step::DeleteChain(name.into())));
        deletions.extend(self.obsolete_hooks().map(|hook| Step::DeleteChain(hook.chain().into())));
        deletions.into_iter().chain(creations).chain(rules).collect()
    }

    fn is_ours(&self, chain: &str) -> bool {
        self.desired.has_chain(chain) || self.previous.has_chain(chain)
    }

    /// Reports whether a rule in a built-in chain is detour's: it jumps to one of detour's chains, or was desired.
    fn is_our_rule(&self, hook: Hook, live: &LiveRule) -> bool {
        live.is_of(self.previous, Some(hook)) || live.is_of(self.desired, Some(hook))
    }

    /// Returns the targets of jumps in foreign chains.
    fn used_by_others(&self) -> BTreeSet<&str> {
        let is_cleared = |name: &str| self.is_ours(name) || Hook::of_chain(name).is_some();
        let others = self.live.iter().filter(|(name, _)| !is_cleared(name));
        others.flat_map(|(_, other)| other.rules.iter().filter_map(LiveRule::jump_target)).collect()
    }

    fn has_foreign_rules(&self, hook: Hook) -> bool {
        let chain = self.live.get(hook.chain());
        chain.is_some_and(|chain| chain.rules.iter().any(|rule| !self.is_our_rule(hook, rule)))
    }

    /// Reports whether detour created the table, and it contains nothing foreign and nothing desired.
    fn can_delete_table(&self) -> bool {
        let is_foreign = |name: &String| match Hook::of_chain(name) {
            Some(hook) => self.has_foreign_rules(hook),
            None if self.live[name].built_in => !self.live[name].rules.is_empty(),
            None => !self.is_ours(name),
        };
        self.exists
            && self.desired.is_empty()
            && self.made.tables.contains(&self.key)
            && !self.live.keys().any(is_foreign)
    }

    fn missing_hooks(&self) -> impl Iterator<Item = Hook> {
        self.desired.hooks.keys().copied().filter(|hook| !self.live.contains_key(hook.chain()))
    }

    fn obsolete_hooks(&self) -> impl Iterator<Item = Hook> {
        Hook::ALL.into_iter().filter(|hook| {
            self.made.hooks.contains(&(self.key.0, self.key.1, *hook))
                && self.live.contains_key(hook.chain())
                && !self.desired.hooks.contains_key(hook)
                && !self.has_foreign_rules(*hook)
        })
    }

    /// Edits a built-in chain, in which detour's rules keep their places among foreign ones.
    fn edit_hook(&self, hook: Hook, deletions: &mut Vec<Step<'a>>, rules: &mut Vec<Step<'a>>) {
        let live: Vec<&LiveRule> = self.live.get(hook.chain()).iter().flat_map(|chain| &chain.rules).collect();
        let desired: Vec<&Rule> = self.desired.hooks.get(&hook).into_iter().flatten().collect();
        Edit::between(&live, &desired, |rule| self.is_our_rule(hook, rule)).write(hook.chain(), deletions, rules);
    }
}

/// The changes of one chain.
#[derive(Debug, Default)]
struct Edit<'a> {
    /// The handles of the deleted rules.
    deleted: Vec<u64>,
    /// The inserted rules in their final order, each with the handle of the rule that follows it; `None` appends.
    inserted: Vec<(Option<u64>, &'a Rule)>,
}

impl<'a> Edit<'a> {
    /// Returns the changes from `live` to `desired`; foreign rules keep their places.
    fn between(live: &[&LiveRule], desired: &[&'a Rule], is_ours: impl Fn(&LiveRule) -> bool) -> Self {
        let ours: Vec<usize> = (0..live.len()).filter(|i| is_ours(live[*i])).collect();
        let unchanged = common_subsequence(ours.len(), desired.len(), MAX_COMPARED_PAIRS, |own, rule| {
            live[ours[own]].rule.as_ref() == Ok(desired[rule])
        });
        // After all unchanged rules: where the last of detour's rules was, or at the end.
        let follower = ours.last().and_then(|last| live.get(last + 1)).map(|rule| rule.handle);
        let mut edit = Self::default();
        let mut next_unchanged = unchanged.iter().peekable();
        for (at, rule) in desired.iter().enumerate() {
            match next_unchanged.peek() {
                Some((_, index)) if *index == at => {
                    next_unchanged.next();
                }
                Some((before, _)) => edit.inserted.push((Some(live[ours[*before]].handle), rule)),
                None => edit.inserted.push((follower, rule)),
            }
        }
        let unchanged: BTreeSet<usize> = unchanged.iter().map(|(own, _)| *own).collect();
        let deleted = ours.iter().enumerate().filter(|(own, _)| !unchanged.contains(own));
        edit.deleted = deleted.map(|(_, index)| live[*index].handle).collect();
        edit
    }

    fn write(self, chain: &'a str, deletions: &mut Vec<Step<'a>>, rules: &mut Vec<Step<'a>>) {
        deletions.extend(self.deleted.into_iter().map(|handle| Step::DeleteRule { chain: chain.into(), handle }));
        rules.extend(self.inserted.into_iter().map(|(before, rule)| Step::insert(chain, before, rule)));
    }
}
