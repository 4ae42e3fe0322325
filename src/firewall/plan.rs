//! The smallest changes that lead from live to desired rules in the tables of iptables: correct rules stay, missing
//! ones are inserted in their place, and only detour's are deleted.

use super::exclusions;
use super::live::{LiveRule, LiveRuleset, LiveTable};
use super::rule::{Family, Hook, Rule, Ruleset, Table, TableRules, is_own_chain};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// One change of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Creates a table, unless it exists.
    Table,
    /// Creates a built-in chain.
    Hook(Hook),
    /// Creates a chain.
    Chain(String),
    /// Inserts a rule.
    Rule {
        /// The chain of the rule.
        chain: String,
        /// The handle of the rule that follows it; `None` appends.
        before: Option<u64>,
        /// The rule.
        rule: Rule,
    },
    /// Deletes a rule.
    DeleteRule {
        /// The chain of the rule.
        chain: String,
        /// The handle of the rule.
        handle: u64,
    },
    /// Deletes all rules of a chain.
    Flush(String),
    /// Deletes an empty chain.
    DeleteChain(String),
    /// Deletes a table with its chains and rules.
    DeleteTable,
}

/// The maximum number of rules of one chain that are deleted one by one: for each, the kernel walks the chain until it
/// finds the handle (net/netfilter/nf_tables_api.c, `nft_rule_lookup`).
pub(super) const MAX_DELETIONS: usize = 256;
/// The maximum number of pairs of rules that are compared to find the longest common subsequence of two chains.
const MAX_COMPARED_PAIRS: usize = 1 << 20;

/// A step with the table that it changes.
pub type PlannedStep = ((Family, Table), Step);

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
/// rule is detour's if it is in either of the two, or if the chain has a name that only detour uses.
#[must_use]
pub(super) fn changes(
    live: &LiveRuleset,
    previous: &Ruleset,
    desired: &Ruleset,
    made: &CreatedTables,
) -> Vec<PlannedStep> {
    let steps = plans(live, previous, desired, made, AllowedBetween::Nothing);
    steps.into_iter().flat_map(|(key, steps)| steps.into_iter().map(move |step| (key, step))).collect()
}

/// Returns the steps by table that would lead from `live` to `desired`, if foreign rules may stay between detour's.
/// There are no steps if detour's rules are unchanged.
pub(super) fn check_steps(
    live: &LiveRuleset,
    desired: &Ruleset,
    made: &CreatedTables,
) -> Vec<((Family, Table), Vec<Step>)> {
    plans(live, desired, desired, made, AllowedBetween::ForeignRules)
}

/// What may be between the jump to the exclusions and the jump to the redirection after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AllowedBetween {
    Nothing,
    ForeignRules,
}

fn plans(
    live: &LiveRuleset,
    previous: &Ruleset,
    desired: &Ruleset,
    made: &CreatedTables,
    between: AllowedBetween,
) -> Vec<((Family, Table), Vec<Step>)> {
    let keys: BTreeSet<(Family, Table)> =
        live.tables.keys().chain(previous.tables.keys()).chain(desired.tables.keys()).copied().collect();
    let no_rules = TableRules::default();
    let no_table = LiveTable::new();
    let plan = |key| TablePlan {
        key,
        exists: live.tables.contains_key(&key),
        live: live.tables.get(&key).unwrap_or(&no_table),
        previous: previous.tables.get(&key).unwrap_or(&no_rules),
        desired: desired.tables.get(&key).unwrap_or(&no_rules),
        made,
        between,
    };
    keys.into_iter().map(|key| (key, plan(key).steps())).collect()
}

struct TablePlan<'a> {
    key: (Family, Table),
    exists: bool,
    live: &'a LiveTable,
    previous: &'a TableRules,
    desired: &'a TableRules,
    made: &'a CreatedTables,
    between: AllowedBetween,
}

impl TablePlan<'_> {
    fn steps(&self) -> Vec<Step> {
        if self.can_delete_table() {
            return vec![Step::DeleteTable];
        }
        let (mut deletions, mut rules) = (Vec::new(), Vec::new());
        for hook in Hook::ALL {
            self.edit_hook(hook, &mut deletions, &mut rules);
        }
        let mut creations = Vec::new();
        if !self.exists && self.desired != &TableRules::default() {
            creations.push(Step::Table);
        }
        creations.extend(self.missing_hooks().map(Step::Hook));
        for (name, desired) in &self.desired.chains {
            let live = self.live.get(name);
            if live.is_none() {
                creations.push(Step::Chain(name.clone()));
            }
            let live: Vec<&LiveRule> = live.iter().flat_map(|chain| &chain.rules).collect();
            let mut edit = Edit::between(&live, desired, |_| true);
            if self.between == AllowedBetween::Nothing && edit.deleted.len() > MAX_DELETIONS {
                deletions.push(Step::Flush(name.clone()));
                edit = Edit::between(&[], desired, |_| true);
            }
            edit.write(name, &mut deletions, &mut rules);
        }
        let obsolete: Vec<&String> =
            self.live.keys().filter(|name| self.is_ours(name) && !self.is_desired(name)).collect();
        let nonempty = obsolete.iter().filter(|name| !self.live[**name].rules.is_empty());
        deletions.extend(nonempty.map(|name| Step::Flush((*name).clone())));
        // The kernel does not delete a chain to which a foreign rule jumps.
        let used = if obsolete.is_empty() { BTreeSet::new() } else { self.used_by_others() };
        let unused = obsolete.into_iter().filter(|name| !used.contains(name.as_str()));
        deletions.extend(unused.map(|name| Step::DeleteChain(name.clone())));
        deletions.extend(self.obsolete_hooks().map(|hook| Step::DeleteChain(hook.chain().to_owned())));
        deletions.into_iter().chain(creations).chain(rules).collect()
    }

    fn is_desired(&self, chain: &str) -> bool {
        self.desired.chains.iter().any(|(name, _)| name == chain)
    }

    fn is_ours(&self, chain: &str) -> bool {
        is_own_chain(chain) || self.is_desired(chain) || self.previous.chains.iter().any(|(name, _)| name == chain)
    }

    fn rules_of(rules: &TableRules, hook: Hook) -> &[Rule] {
        rules.hooks.get(&hook).map_or(&[], Vec::as_slice)
    }

    /// Reports whether a rule in a built-in chain is detour's: it jumps to one of detour's chains, or was desired.
    fn is_our_rule(&self, hook: Hook, live: &LiveRule) -> bool {
        let is_in = |rules: &TableRules| live.rule.as_ref().is_ok_and(|r| Self::rules_of(rules, hook).contains(r));
        live.jump_target().is_some_and(|chain| self.is_ours(chain)) || is_in(self.previous) || is_in(self.desired)
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
            && self.desired == &TableRules::default()
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

    /// Edits a built-in chain: the jump to the exclusions is placed directly before the first jump into a redirection,
    /// detour's or another tool's; all other rules of detour keep their places among foreign rules.
    fn edit_hook(&self, hook: Hook, deletions: &mut Vec<Step>, rules: &mut Vec<Step>) {
        let chain = hook.chain();
        let live = self.live.get(chain).map_or(&[][..], |c| &c.rules);
        let to_exclusions = |live: &LiveRule| live.jump_target() == Some(exclusions::OUTPUT);
        let others: Vec<&LiveRule> = live.iter().filter(|rule| !to_exclusions(rule)).collect();
        let desired: Vec<Rule> = Self::rules_of(self.desired, hook)
            .iter()
            .filter(|rule| rule.jump_target() != Some(exclusions::OUTPUT))
            .cloned()
            .collect();
        let mut edit = Edit::between(&others, &desired, |rule| self.is_our_rule(hook, rule));
        let needs_exclusions = desired.len() != Self::rules_of(self.desired, hook).len();
        let present: Vec<&LiveRule> = live.iter().filter(|rule| to_exclusions(rule)).collect();
        let in_place = |rule: &LiveRule| {
            rule.rule == Ok(Rule::jump(exclusions::OUTPUT)) && edit.is_in_place(live, rule, self.between)
        };
        if needs_exclusions && present.len() == 1 && in_place(present[0]) {
            edit.write(chain, deletions, rules);
            return;
        }
        edit.deleted.extend(present.iter().map(|rule| rule.handle));
        if needs_exclusions {
            edit.insert_before_redirection(&others, Rule::jump(exclusions::OUTPUT));
        }
        edit.write(chain, deletions, rules);
    }
}

/// The changes of one chain.
#[derive(Debug, Default)]
struct Edit {
    /// The handles of the deleted rules.
    deleted: Vec<u64>,
    /// The inserted rules in their final order, each with the handle of the rule that follows it; `None` appends.
    inserted: Vec<(Option<u64>, Rule)>,
}

impl Edit {
    /// Returns the changes from `live` to `desired`; foreign rules keep their places.
    fn between(live: &[&LiveRule], desired: &[Rule], is_ours: impl Fn(&LiveRule) -> bool) -> Self {
        let ours: Vec<usize> = (0..live.len()).filter(|i| is_ours(live[*i])).collect();
        let unchanged = common(&ours, live, desired);
        let mut edit = Self::default();
        let mut next_unchanged = unchanged.iter().peekable();
        for (at, rule) in desired.iter().enumerate() {
            match next_unchanged.peek() {
                Some((index, _)) if *index == at => {
                    next_unchanged.next();
                }
                Some((_, before)) => edit.inserted.push((Some(live[*before].handle), rule.clone())),
                // After all unchanged rules: where the last of detour's rules was, or at the end.
                None => {
                    let follower = ours.last().and_then(|last| live.get(last + 1)).map(|rule| rule.handle);
                    edit.inserted.push((follower, rule.clone()));
                }
            }
        }
        let unchanged: BTreeSet<usize> = unchanged.iter().map(|(_, live)| *live).collect();
        edit.deleted = ours.iter().filter(|i| !unchanged.contains(i)).map(|i| live[*i].handle).collect();
        edit
    }

    /// Reports whether `to_exclusions` is directly before the first jump into a redirection once the changes are made.
    fn is_in_place(&self, live: &[LiveRule], to_exclusions: &LiveRule, between: AllowedBetween) -> bool {
        let deleted: BTreeSet<u64> = self.deleted.iter().copied().collect();
        let survivors: Vec<&LiveRule> = live.iter().filter(|rule| !deleted.contains(&rule.handle)).collect();
        let at = survivors.iter().position(|rule| rule.handle == to_exclusions.handle);
        let first = survivors.iter().position(|rule| rule.enters_redirection());
        let Some(at) = at else { return false };
        let inserted = self.inserted.iter().find(|(_, rule)| rule.enters_redirection());
        match (first, inserted) {
            (Some(first), None) => match between {
                AllowedBetween::Nothing => first == at + 1 && !self.inserts_before(survivors[first].handle),
                AllowedBetween::ForeignRules => first > at,
            },
            (None, None) => true,
            (None, Some((None, _))) => at + 1 == survivors.len() && self.inserted.len() == 1,
            _ => false,
        }
    }

    fn inserts_before(&self, handle: u64) -> bool {
        self.inserted.iter().any(|(before, _)| *before == Some(handle))
    }

    fn insert_before_redirection(&mut self, others: &[&LiveRule], rule: Rule) {
        let deleted: BTreeSet<u64> = self.deleted.iter().copied().collect();
        let survivors: Vec<&&LiveRule> = others.iter().filter(|r| !deleted.contains(&r.handle)).collect();
        let first_live = survivors.iter().position(|r| r.enters_redirection());
        let first_new = self.inserted.iter().position(|(_, r)| r.enters_redirection());
        let handles: Vec<u64> = survivors.iter().map(|r| r.handle).collect();
        // The index of the surviving rule before which the new jump is inserted.
        let index_of_new = first_new.map(|i| {
            self.inserted[i]
                .0
                .map_or(handles.len(), |before| handles.iter().position(|h| *h == before).unwrap_or(handles.len()))
        });
        match (first_new, index_of_new, first_live) {
            (Some(new), Some(index), live) if live.is_none_or(|live| index <= live) => {
                self.inserted.insert(new, (self.inserted[new].0, rule));
            }
            (_, _, Some(live)) => self.inserted.push((Some(handles[live]), rule)),
            _ => self.inserted.push((None, rule)),
        }
    }

    fn write(self, chain: &str, deletions: &mut Vec<Step>, rules: &mut Vec<Step>) {
        let chain = || chain.to_owned();
        deletions.extend(self.deleted.into_iter().map(|handle| Step::DeleteRule { chain: chain(), handle }));
        rules.extend(self.inserted.into_iter().map(|(before, rule)| Step::Rule { chain: chain(), before, rule }));
    }
}

/// Returns the longest common subsequence as pairs of an index in `desired` and one in `live`. For chains that differ
/// in too many rules, returns only their common beginning and end.
fn common(ours: &[usize], live: &[&LiveRule], desired: &[Rule]) -> Vec<(usize, usize)> {
    let same = |o: usize, d: usize| live[ours[o]].rule.as_ref() == Ok(&desired[d]);
    let shorter = ours.len().min(desired.len());
    let head = (0..shorter).take_while(|i| same(*i, *i)).count();
    let tail = (1..=shorter - head).take_while(|i| same(ours.len() - i, desired.len() - i)).count();
    let (mut rows, columns) = (ours.len() - head - tail, desired.len() - head - tail);
    if rows.saturating_mul(columns) > MAX_COMPARED_PAIRS {
        rows = 0;
    }
    let mut lengths = vec![vec![0_u32; columns + 1]; rows + 1];
    for row in (0..rows).rev() {
        for column in (0..columns).rev() {
            lengths[row][column] = if same(head + row, head + column) {
                lengths[row + 1][column + 1] + 1
            } else {
                lengths[row + 1][column].max(lengths[row][column + 1])
            };
        }
    }
    let mut pairs: Vec<(usize, usize)> = (0..head).map(|i| (i, ours[i])).collect();
    let (mut row, mut column) = (0, 0);
    while row < rows && column < columns {
        if same(head + row, head + column) {
            pairs.push((head + column, ours[head + row]));
            (row, column) = (row + 1, column + 1);
        } else if lengths[row + 1][column] >= lengths[row][column + 1] {
            row += 1;
        } else {
            column += 1;
        }
    }
    pairs.extend((1..=tail).rev().map(|i| (desired.len() - i, ours[ours.len() - i])));
    pairs
}
