//! From what the kernel holds to what it should hold, as the fewest changes: what is right stays,
//! what is missing is put in its place, and only what is ours is taken away.

use super::exclusions;
use super::live::{LiveRule, LiveRuleset, LiveTable};
use super::rule::{Family, Hook, Rule, Table};
use super::rule::{Ruleset, TableRules};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// One change within a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Makes a table, unless it is there.
    Table,
    /// Makes a built-in chain.
    Hook(Hook),
    /// Makes a chain.
    Chain(String),
    /// Puts a rule in front of the one with this handle, or at the end.
    Rule {
        /// In which chain.
        chain: String,
        /// In front of which.
        before: Option<u64>,
        /// The rule.
        rule: Rule,
    },
    /// Deletes a rule.
    DeleteRule {
        /// In which chain.
        chain: String,
        /// Which.
        handle: u64,
    },
    /// Deletes all rules of a chain.
    Flush(String),
    /// Deletes a chain without rules.
    DeleteChain(String),
    /// Deletes a table with everything in it.
    DeleteTable,
}

/// How many rules of one chain are deleted one by one: for each, the kernel walks the chain until it finds
/// the handle (net/netfilter/nf_tables_api.c, `nft_rule_lookup`).
pub(super) const BY_HANDLE: usize = 256;
/// How many pairs of rules are compared to find the longest common subsequence of two chains.
const PAIRS: usize = 1 << 20;

/// A step and the table that it is for.
pub type PlannedStep = ((Family, Table), Step);

/// Tables and built-in chains that were not there before us, and so go when we go.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CreatedTables {
    /// Tables.
    pub tables: BTreeSet<(Family, Table)>,
    /// Built-in chains.
    pub hooks: BTreeSet<(Family, Table, Hook)>,
}

impl CreatedTables {
    /// What `desired` will make because it is not in `live`.
    #[must_use]
    pub fn by(desired: &Ruleset, live: &LiveRuleset) -> Self {
        let mut made = Self::default();
        for (key @ (family, table), rules) in &desired.tables {
            let there = live.tables.get(key);
            if there.is_none() {
                made.tables.insert(*key);
            }
            let missing = rules.hooks.keys().filter(|hook| there.is_none_or(|t| !t.contains_key(hook.chain())));
            made.hooks.extend(missing.map(|hook| (*family, *table, *hook)));
        }
        made
    }

    /// Adds what `other` made.
    pub fn add(&mut self, other: &Self) {
        self.tables.extend(&other.tables);
        self.hooks.extend(&other.hooks);
    }

    /// Leaves out what is not in `live`: whoever makes that next made it.
    pub fn forget_absent(&mut self, live: &LiveRuleset) {
        self.tables.retain(|table| live.tables.contains_key(table));
        self.hooks.retain(|(family, table, hook)| {
            live.tables.get(&(*family, *table)).is_some_and(|chains| chains.contains_key(hook.chain()))
        });
    }
}

/// The changes that lead from `live` to `desired`. `previous` is what was asked for before: of
/// the chains and rules in the kernel those are ours that are in either of the two, and every
/// chain whose name starts with `DETOUR_`.
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

/// The steps by table that would lead from `live` to `desired` if foreign rules that stand between
/// ours may stay there: none where nothing of ours has changed.
pub(super) fn check_steps(
    live: &LiveRuleset,
    desired: &Ruleset,
    made: &CreatedTables,
) -> Vec<((Family, Table), Vec<Step>)> {
    plans(live, desired, desired, made, AllowedBetween::ForeignRules)
}

/// What may stand between the exclusions and the redirection that they stand before.
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
    let nothing = TableRules::default();
    let no_table = LiveTable::new();
    let plan = |key| TablePlan {
        key,
        exists: live.tables.contains_key(&key),
        live: live.tables.get(&key).unwrap_or(&no_table),
        previous: previous.tables.get(&key).unwrap_or(&nothing),
        desired: desired.tables.get(&key).unwrap_or(&nothing),
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
        if self.whole_table_goes() {
            return vec![Step::DeleteTable];
        }
        let (mut deletions, mut rules) = (Vec::new(), Vec::new());
        for hook in Hook::ALL {
            self.edit_hook(hook, &mut deletions, &mut rules);
        }
        let mut making = Vec::new();
        if !self.exists && self.desired != &TableRules::default() {
            making.push(Step::Table);
        }
        making.extend(self.missing_hooks().map(Step::Hook));
        for (name, wanted) in &self.desired.chains {
            let there = self.live.get(name);
            if there.is_none() {
                making.push(Step::Chain(name.clone()));
            }
            let there: Vec<&LiveRule> = there.iter().flat_map(|chain| &chain.rules).collect();
            let mut edit = Edit::of(&there, wanted, |_| true);
            if self.between == AllowedBetween::Nothing && edit.deleted.len() > BY_HANDLE {
                deletions.push(Step::Flush(name.clone()));
                edit = Edit::of(&[], wanted, |_| true);
            }
            edit.write(name, &mut deletions, &mut rules);
        }
        let gone: Vec<&String> = self.live.keys().filter(|name| self.is_ours(name) && !self.is_desired(name)).collect();
        let full = gone.iter().filter(|name| !self.live[**name].rules.is_empty());
        deletions.extend(full.map(|name| Step::Flush((*name).clone())));
        // A foreign rule that goes to one of our chains keeps it from being deleted.
        let used = if gone.is_empty() { BTreeSet::new() } else { self.used_by_others() };
        let unused = gone.into_iter().filter(|name| !used.contains(name.as_str()));
        deletions.extend(unused.map(|name| Step::DeleteChain(name.clone())));
        deletions.extend(self.hooks_that_go().map(|hook| Step::DeleteChain(hook.chain().to_owned())));
        [deletions, making, rules].concat()
    }

    fn is_desired(&self, chain: &str) -> bool {
        self.desired.chains.iter().any(|(name, _)| name == chain)
    }

    fn is_ours(&self, chain: &str) -> bool {
        chain.starts_with("DETOUR_")
            || self.is_desired(chain)
            || self.previous.chains.iter().any(|(name, _)| name == chain)
    }

    fn rules_of(rules: &TableRules, hook: Hook) -> &[Rule] {
        rules.hooks.get(&hook).map_or(&[], Vec::as_slice)
    }

    /// A rule in a built-in chain that we put there: it goes to a chain of ours, or was asked for.
    fn is_our_rule(&self, hook: Hook, live: &LiveRule) -> bool {
        let asked_for = |rules: &TableRules| live.rule.as_ref().is_ok_and(|r| Self::rules_of(rules, hook).contains(r));
        live.goes_to().is_some_and(|chain| self.is_ours(chain)) || asked_for(self.previous) || asked_for(self.desired)
    }

    /// The chains that rules go to in chains which stay as they are.
    fn used_by_others(&self) -> BTreeSet<&str> {
        let cleared = |name: &str| self.is_ours(name) || Hook::ALL.into_iter().any(|hook| hook.chain() == name);
        let others = self.live.iter().filter(|(name, _)| !cleared(name));
        others.flat_map(|(_, other)| other.rules.iter().filter_map(LiveRule::goes_to)).collect()
    }

    fn foreign_rules(&self, hook: Hook) -> bool {
        let chain = self.live.get(hook.chain());
        chain.is_some_and(|chain| chain.rules.iter().any(|rule| !self.is_our_rule(hook, rule)))
    }

    /// Whether we made the table and nothing of anybody else's has come since.
    fn whole_table_goes(&self) -> bool {
        let foreign = |name: &String| match Hook::ALL.into_iter().find(|hook| hook.chain() == name) {
            Some(hook) => self.foreign_rules(hook),
            None if self.live[name].built_in => !self.live[name].rules.is_empty(),
            None => !self.is_ours(name),
        };
        self.exists
            && self.desired == &TableRules::default()
            && self.made.tables.contains(&self.key)
            && !self.live.keys().any(foreign)
    }

    fn missing_hooks(&self) -> impl Iterator<Item = Hook> {
        self.desired.hooks.keys().copied().filter(|hook| !self.live.contains_key(hook.chain()))
    }

    fn hooks_that_go(&self) -> impl Iterator<Item = Hook> {
        Hook::ALL.into_iter().filter(|hook| {
            self.made.hooks.contains(&(self.key.0, self.key.1, *hook))
                && self.live.contains_key(hook.chain())
                && !self.desired.hooks.contains_key(hook)
                && !self.foreign_rules(*hook)
        })
    }

    /// The exclusions stand directly before the first jump into a redirection, whoever made that;
    /// everything else of ours keeps its place among foreign rules.
    fn edit_hook(&self, hook: Hook, deletions: &mut Vec<Step>, rules: &mut Vec<Step>) {
        let chain = hook.chain();
        let live = self.live.get(chain).map_or(&[][..], |c| &c.rules);
        let exempts = |live: &LiveRule| live.goes_to() == Some(exclusions::OUTPUT);
        let others: Vec<&LiveRule> = live.iter().filter(|rule| !exempts(rule)).collect();
        let wanted: Vec<Rule> = Self::rules_of(self.desired, hook)
            .iter()
            .filter(|rule| rule.goes_to() != Some(exclusions::OUTPUT))
            .cloned()
            .collect();
        let mut edit = Edit::of(&others, &wanted, |rule| self.is_our_rule(hook, rule));
        let wants_exclusions = wanted.len() != Self::rules_of(self.desired, hook).len();
        let present: Vec<&LiveRule> = live.iter().filter(|rule| exempts(rule)).collect();
        let in_place = |rule: &LiveRule| {
            rule.rule == Ok(Rule::jump(exclusions::OUTPUT)) && edit.stands_right(live, rule, self.between)
        };
        if wants_exclusions && present.len() == 1 && in_place(present[0]) {
            edit.write(chain, deletions, rules);
            return;
        }
        edit.deleted.extend(present.iter().map(|rule| rule.handle));
        if wants_exclusions {
            edit.insert_before_redirection(&others, Rule::jump(exclusions::OUTPUT));
        }
        edit.write(chain, deletions, rules);
    }
}

/// What happens to one chain: which rules are deleted, and which are put where.
#[derive(Debug, Default)]
struct Edit {
    deleted: Vec<u64>,
    /// In the order in which they will stand; in front of a handle or at the end.
    inserted: Vec<(Option<u64>, Rule)>,
}

impl Edit {
    /// From `live` to `wanted`; rules that are not ours keep their places.
    fn of(live: &[&LiveRule], wanted: &[Rule], is_ours: impl Fn(&LiveRule) -> bool) -> Self {
        let ours: Vec<usize> = (0..live.len()).filter(|i| is_ours(live[*i])).collect();
        let kept = common(&ours, live, wanted);
        let mut edit = Self::default();
        let mut next_kept = kept.iter().peekable();
        for (at, rule) in wanted.iter().enumerate() {
            match next_kept.peek() {
                Some((index, _)) if *index == at => {
                    next_kept.next();
                }
                Some((_, before)) => edit.inserted.push((Some(live[*before].handle), rule.clone())),
                // Behind all that stay: where the last of ours stood, or at the end.
                None => {
                    let follower = ours.last().and_then(|last| live.get(last + 1)).map(|rule| rule.handle);
                    edit.inserted.push((follower, rule.clone()));
                }
            }
        }
        let stay: BTreeSet<usize> = kept.iter().map(|(_, live)| *live).collect();
        edit.deleted = ours.iter().filter(|i| !stay.contains(i)).map(|i| live[*i].handle).collect();
        edit
    }

    /// Whether `exempting` stands directly before the first rule that will enter a redirection.
    fn stands_right(&self, live: &[LiveRule], exempting: &LiveRule, between: AllowedBetween) -> bool {
        let deleted: BTreeSet<u64> = self.deleted.iter().copied().collect();
        let survivors: Vec<&LiveRule> = live.iter().filter(|rule| !deleted.contains(&rule.handle)).collect();
        let at = survivors.iter().position(|rule| rule.handle == exempting.handle);
        let first = survivors.iter().position(|rule| enters_redirection(rule));
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
        let first_live = survivors.iter().position(|r| enters_redirection(r));
        let first_new = self.inserted.iter().position(|(_, r)| r.enters_redirection());
        let handles: Vec<u64> = survivors.iter().map(|r| r.handle).collect();
        // A new rule in front of a handle stands before that rule, one at the end behind all.
        let place_of_new = first_new.map(|i| {
            self.inserted[i]
                .0
                .map_or(handles.len(), |before| handles.iter().position(|h| *h == before).unwrap_or(handles.len()))
        });
        match (first_new, place_of_new, first_live) {
            (Some(new), Some(place), live) if live.is_none_or(|live| place <= live) => {
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

fn enters_redirection(rule: &LiveRule) -> bool {
    rule.goes_to().is_some_and(|chain| chain.starts_with("ISTIO_"))
}

/// The longest common subsequence, as pairs of an index in `wanted` and one in `live`; of chains that
/// differ in too many rules, only what they have in common at both ends.
fn common(ours: &[usize], live: &[&LiveRule], wanted: &[Rule]) -> Vec<(usize, usize)> {
    let same = |o: usize, w: usize| live[ours[o]].rule.as_ref() == Ok(&wanted[w]);
    let shorter = ours.len().min(wanted.len());
    let head = (0..shorter).take_while(|i| same(*i, *i)).count();
    let tail = (1..=shorter - head).take_while(|i| same(ours.len() - i, wanted.len() - i)).count();
    let (mut rows, columns) = (ours.len() - head - tail, wanted.len() - head - tail);
    if rows.saturating_mul(columns) > PAIRS {
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
    pairs.extend((1..=tail).rev().map(|i| (wanted.len() - i, ours[ours.len() - i])));
    pairs
}
