//! The changes that lead from the live to the desired native tables.
//!
//! Base chains that remain are flushed and filled again: the kernel replaces the rules of a base chain and of all chains
//! that it reaches at once, so that each packet passes either the old or the new ones (net/netfilter/nf_tables_core.c,
//! `nft_do_chain`). If a table were deleted and created again, a packet could pass both or neither, because the kernel
//! attaches new base chains before the commit and detaches old ones after it. Only a table that another process changed
//! beyond its known rules is replaced.
//!
//! The order in which `nft` lists chains and sets does not depend on the changes: if one is added or removed, the others
//! are created again, too.

use super::live::{NativeLiveChain, NativeLiveTables, are_equal};
use super::rule::{NativeChain, NativeTable, NativeTables, container_sets};
use crate::firewall::containers::{ContainerElement, MAX_ELEMENTS, SCOPES};
use crate::firewall::rule::Name;
use crate::firewall::step::{PlannedStep, Step, StepRule};
use crate::firewall::view::TableId;
use crate::policy::ContainerScope;
use std::collections::BTreeMap;

/// Returns the changes that lead from `live` to `desired`. Sets that remain keep their `elements`.
#[must_use]
pub(in crate::firewall) fn changes(
    live: &NativeLiveTables,
    elements: &[ContainerElement],
    mut desired: NativeTables,
) -> Vec<PlannedStep<'static>> {
    let mut all = Vec::new();
    for table in NativeTable::ALL {
        let mut steps = Vec::new();
        match (live.get(&table), desired.remove(&table)) {
            (None, None) => {}
            (Some(_), None) => steps.push(Step::DeleteTable),
            (Some(live), Some(desired)) if are_equal(live, &desired) => {}
            (live, Some(desired)) => TableChange { table, elements, desired }.add(live, &mut steps),
        }
        all.extend(steps.into_iter().map(|step| (TableId::Native(table), step)));
    }
    all
}

/// The inputs of a table's changes.
struct TableChange<'a> {
    table: NativeTable,
    elements: &'a [ContainerElement],
    desired: BTreeMap<Name, NativeChain>,
}

impl TableChange<'_> {
    fn add(self, live: Option<&BTreeMap<String, NativeLiveChain>>, steps: &mut Vec<Step<'static>>) {
        let no_chains = BTreeMap::new();
        match live {
            Some(live) if self.has_same_structure(live) => {
                let changed = |(name, chain): &(&Name, &NativeChain)| !live[name.as_ref()].is(chain);
                for (name, _) in self.desired.iter().filter(changed) {
                    steps.push(Step::Flush(name.clone()));
                }
                self.fill(live, steps);
            }
            Some(live) if self.can_be_refilled(live) => {
                self.clear(live, steps);
                self.create(live, steps);
                self.fill(&no_chains, steps);
            }
            live => {
                steps.extend(live.map(|_| Step::DeleteTable));
                steps.push(Step::Table);
                self.create(&no_chains, steps);
                self.fill(&no_chains, steps);
            }
        }
    }

    fn is_known(live: &BTreeMap<String, NativeLiveChain>) -> bool {
        live.values().all(|chain| chain.hook.is_ok() && chain.rules.iter().all(Option::is_some))
    }

    /// Reports whether only rules differ.
    fn has_same_structure(&self, live: &BTreeMap<String, NativeLiveChain>) -> bool {
        let hooks = |(live, desired): (&NativeLiveChain, &NativeChain)| live.hook == Ok(desired.hook);
        Self::is_known(live)
            && live.keys().eq(self.desired.keys())
            && live.values().zip(self.desired.values()).all(hooks)
            && self.live_sets(live) == container_sets(&self.desired)
    }

    /// Reports whether the desired base chains that are live can remain: they are attached as desired and are the first
    /// ones to be created, and all rules are such that detour could have written them. Those of other processes may refer
    /// to chains and sets.
    fn can_be_refilled(&self, live: &BTreeMap<String, NativeLiveChain>) -> bool {
        let is_attached = |(name, chain): (&Name, &NativeChain)| {
            live.get(name.as_ref()).is_none_or(|live| live.hook == Ok(chain.hook))
        };
        let mut bases = self.desired.iter().filter(|(_, chain)| chain.hook.is_some()).map(|(name, _)| name.as_ref());
        let is_live = |name: &str| live.contains_key(name);
        Self::is_known(live)
            && self.desired.iter().all(is_attached)
            && bases.by_ref().skip_while(|name| is_live(name)).all(|name| !is_live(name))
    }

    fn live_sets(&self, live: &BTreeMap<String, NativeLiveChain>) -> Vec<ContainerScope> {
        if self.table != NativeTable::Exclusions {
            return Vec::new();
        }
        let rules = live.values().flat_map(|chain| chain.rules.iter().flatten());
        let used: Vec<ContainerScope> = rules.filter_map(|rule| Some(rule.cgroup?.set)).collect();
        let exists = |scope: &ContainerScope| used.contains(scope) || self.elements.iter().any(|e| e.scope == *scope);
        SCOPES.into_iter().filter(exists).collect()
    }

    /// Adds the steps that remove everything but the desired base chains: rules before the chains and sets that they
    /// refer to.
    fn clear(&self, live: &BTreeMap<String, NativeLiveChain>, steps: &mut Vec<Step<'static>>) {
        let nonempty = live.iter().filter(|(_, chain)| !chain.rules.is_empty());
        steps.extend(nonempty.map(|(name, _)| Step::Flush(name.clone().into())));
        let goes = |(name, chain): &(&String, &NativeLiveChain)| {
            chain.hook == Ok(None) || !self.desired.contains_key(name.as_str())
        };
        steps.extend(live.iter().filter(goes).map(|(name, _)| Step::DeleteChain(name.clone().into())));
        steps.extend(self.live_sets(live).into_iter().map(Step::DeleteSet));
    }

    /// Adds the steps that create sets with their elements, and chains, except base chains that are live.
    fn create(&self, live: &BTreeMap<String, NativeLiveChain>, steps: &mut Vec<Step<'static>>) {
        for scope in container_sets(&self.desired) {
            steps.push(Step::Set(scope));
            let elements = self.elements.iter().filter(|element| element.scope == scope);
            steps.extend(elements.take(MAX_ELEMENTS as usize).cloned().map(Step::Element));
        }
        let is_new = |(name, chain): &(&Name, &NativeChain)| chain.hook.is_none() || !live.contains_key(name.as_ref());
        let mut chains: Vec<(&Name, &NativeChain)> = self.desired.iter().filter(is_new).collect();
        // Base chains first.
        chains.sort_by_key(|(_, chain)| chain.hook.is_none());
        let creation = |(name, chain): (&Name, &NativeChain)| Step::Chain { name: name.clone(), hook: chain.hook };
        steps.extend(chains.into_iter().map(creation));
    }

    /// Adds the rules of all chains that are not as in `live`.
    fn fill(self, live: &BTreeMap<String, NativeLiveChain>, steps: &mut Vec<Step<'static>>) {
        for (name, chain) in self.desired {
            if live.get(name.as_ref()).is_some_and(|live| live.is(&chain)) {
                continue;
            }
            let append = |rule| Step::Rule { chain: name.clone(), before: None, rule: StepRule::Native(rule) };
            steps.extend(chain.rules.into_iter().map(append));
        }
    }
}
