//! Detour's native tables in the kernel, with their chains, rules and sets; and the changes that lead to the desired ones.
//!
//! Base chains that remain are flushed and filled again: the kernel replaces the rules of a base chain and of all chains
//! that it reaches at once, so that each packet passes either the old or the new ones (net/netfilter/nf_tables_core.c,
//! `nft_do_chain`). If a table were deleted and created again, a packet could pass both or neither, because the kernel
//! attaches new base chains before the commit and detaches old ones after it. Only a table that another process changed
//! beyond its known rules is replaced.
//!
//! The order in which `nft` lists chains and sets does not depend on the changes: if one is added or removed, the others
//! are created again, too.

use super::nft_set::LiveSet;
use super::rule::{BaseHook, NativeChain, NativeTable, NativeTables, TableId, chain_type, container_sets};
use super::wire::decode;
use crate::firewall::containers::{self, ContainerElement, SCOPES, is_container_set, scope_of_set};
use crate::firewall::expression::NF_ACCEPT;
use crate::firewall::foreign::LiveRule;
use crate::firewall::nfnetlink::{NfError, NfSocket, Verb, nfta};
use crate::firewall::rule::{Hook, NFPROTO_INET, Name, Table};
use crate::firewall::step::{PlannedStep, Step};
use crate::netlink::DumpLimit;
use crate::netlink::attributes::{Attributes, find, find_be32, find_text};
use crate::policy::ContainerScope;
use nix::errno::Errno;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Something in the kernel that detour would not write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotOurs;

/// A live chain in one of detour's native tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NativeLiveChain {
    /// The hook that it is attached to; an error if hook, type, priority or policy differ from detour's, or if the table
    /// is switched off.
    pub hook: Result<Option<BaseHook>, NotOurs>,
    /// The rules in order.
    pub rules: Vec<LiveRule>,
}

impl NativeLiveChain {
    /// Reports whether the chain is as desired.
    pub(super) fn is(&self, desired: &NativeChain) -> bool {
        self.hook == Ok(desired.hook)
            && self.rules.iter().map(|live| live.rule.as_ref().ok()).eq(desired.rules.iter().map(Some))
    }
}

/// Detour's live native tables, each with its chains by name.
pub type NativeLiveTables = BTreeMap<NativeTable, BTreeMap<String, NativeLiveChain>>;

/// Returns which of detour's native tables has this name in family `family` (`NFPROTO_…`).
pub(crate) fn native_table_of(family: u8, name: Option<&str>) -> Option<NativeTable> {
    NativeTable::ALL.into_iter().find(|table| family == NFPROTO_INET && Some(table.name()) == name)
}

/// The maximum number of elements in all sets of detour's tables together.
const MAX_ELEMENTS: usize = 100_000;

/// The sets of detour's native tables, read before the rules that look them up.
#[derive(Debug, Default)]
pub(crate) struct Sets {
    by_name: BTreeMap<NativeTable, BTreeMap<String, LiveSet>>,
    /// The elements of the sets of excluded containers.
    pub(crate) containers: Vec<ContainerElement>,
}

impl Sets {
    /// Reads the anonymous sets of `tables`, which belong to one rule each, and the sets of excluded containers. A
    /// process in the pod can add other sets, which are skipped.
    pub(crate) fn read(socket: &mut NfSocket, tables: &NativeLiveTables) -> Result<Self, NfError> {
        // A listed table or set may have been deleted since.
        let changed = |error| if error == NfError::Socket(Errno::ENOENT) { NfError::Changed } else { error };
        let (mut sets, mut elements) = (Self::default(), 0);
        for table in tables.keys() {
            let of_table = || Attributes::of(|list| list.text(nfta::TABLE, table.name()));
            let found = sets.by_name.entry(*table).or_default();
            let container_scope =
                |name: &str| Some(scope_of_set(name)).filter(|_| *table == NativeTable::Exclusions).flatten();
            let set = |_, body: &[u8]| {
                let Some(name) = find_text(body, nfta::SET_NAME) else { return };
                let named = container_scope(name).filter(|_| is_container_set(body)).map(|_| LiveSet::default());
                found.extend(named.or_else(|| LiveSet::parse(body)).map(|set| (name.to_owned(), set)));
            };
            socket.dump_of(Verb::GetSet, NFPROTO_INET, of_table(), set).map_err(changed)?;
            for (name, set) in found {
                let mut which = of_table();
                which.text(nfta::ELEMENTS_SET, name);
                let read = |_, body: &[u8]| match container_scope(name) {
                    Some(scope) => {
                        let before = sets.containers.len();
                        sets.containers.extend(ContainerElement::read(scope, body).take(MAX_ELEMENTS - elements));
                        elements += sets.containers.len() - before;
                    }
                    None => elements += set.read_elements(body, MAX_ELEMENTS - elements),
                };
                socket.dump_of(Verb::GetSetElements, NFPROTO_INET, which, read).map_err(changed)?;
                if elements == MAX_ELEMENTS {
                    return Err(NfError::TooMany(DumpLimit { objects: MAX_ELEMENTS, ..DumpLimit::USUAL }));
                }
            }
        }
        Ok(sets)
    }
}

/// Adds a chain as the kernel lists it.
pub(crate) fn add_native_chain(tables: &mut NativeLiveTables, family: u8, body: &[u8]) {
    let table = native_table_of(family, find_text(body, nfta::TABLE));
    if let (Some(table), Some(name)) = (table, find_text(body, nfta::CHAIN_NAME)) {
        let chain = NativeLiveChain { hook: hook(table, body), rules: Vec::new() };
        tables.entry(table).or_default().insert(name.to_owned(), chain);
    }
}

/// Marks the base chains of a table that is switched off as different from detour's: no packet passes them.
pub(crate) fn detach(chains: &mut BTreeMap<String, NativeLiveChain>) {
    let attached = chains.values_mut().filter(|chain| chain.hook != Ok(None));
    attached.for_each(|chain| chain.hook = Err(NotOurs));
}

fn hook(table: NativeTable, body: &[u8]) -> Result<Option<BaseHook>, NotOurs> {
    let Some(attached) = find(body, nfta::CHAIN_HOOK) else { return Ok(None) };
    let hook = Hook::EVERY
        .into_iter()
        .find(|hook| find_be32(attached, nfta::HOOK_NUMBER) == Some(hook.number()))
        .ok_or(NotOurs)?;
    let has_priority = |like: &Table| {
        find(attached, nfta::HOOK_PRIORITY) == Some(&table.priority(*like).to_be_bytes())
            && (table == NativeTable::Exclusions || table == NativeTable::Of(*like))
    };
    let like = Table::ALL.into_iter().chain([Table::Filter]).find(has_priority).ok_or(NotOurs)?;
    let is_ours = find_text(body, nfta::CHAIN_TYPE) == Some(chain_type(like, hook))
        && find_be32(body, nfta::CHAIN_POLICY) == Some(NF_ACCEPT);
    if is_ours { Ok(Some(BaseHook { like, hook })) } else { Err(NotOurs) }
}

/// Adds a rule as the kernel lists it.
pub(crate) fn add_native_rule(tables: &mut NativeLiveTables, sets: &Sets, family: u8, body: &[u8]) {
    let Some(table) = native_table_of(family, find_text(body, nfta::TABLE)) else { return };
    let chain = tables.get_mut(&table).and_then(|chains| chains.get_mut(find_text(body, nfta::RULE_CHAIN)?));
    if let Some(chain) = chain {
        let no_sets = BTreeMap::new();
        let sets = sets.by_name.get(&table).unwrap_or(&no_sets);
        chain.rules.extend(LiveRule::read(body, |list| decode(list, sets)));
    }
}

/// Reports whether a live table is as desired.
pub(crate) fn are_equal(live: &BTreeMap<String, NativeLiveChain>, desired: &BTreeMap<Name, NativeChain>) -> bool {
    live.keys().eq(desired.keys()) && live.values().zip(desired.values()).all(|(live, desired)| live.is(desired))
}

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
        live.values().all(|chain| chain.hook.is_ok() && chain.rules.iter().all(|rule| rule.rule.is_ok()))
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
        let rules = live.values().flat_map(|chain| &chain.rules).filter_map(|rule| rule.rule.as_ref().ok());
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
            steps.extend(elements.take(containers::MAX_ELEMENTS as usize).cloned().map(Step::Element));
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
            let append = |rule| Step::Rule { chain: name.clone(), before: None, rule: Cow::Owned(rule) };
            steps.extend(chain.rules.into_iter().map(append));
        }
    }
}
