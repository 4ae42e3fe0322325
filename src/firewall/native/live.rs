//! Detour's native tables in the kernel: the live state with its chains, rules and sets.

use super::nft_set::LiveSet;
use super::rule::{BaseHook, NativeChain, NativeRule, NativeTable, chain_type};
use super::wire::decode;
use crate::firewall::containers::{ContainerElement, is_container_set, scope_of_set};
use crate::firewall::expression::Counter;
use crate::firewall::nfnetlink::{NfError, NfSocket, Verb, nfta};
use crate::firewall::rule::{Hook, NFPROTO_INET, Name, Table};
use crate::firewall::target::NF_ACCEPT;
use crate::netlink::DumpLimit;
use crate::netlink::attributes::{Attributes, find, find_be32, find_text};
use nix::errno::Errno;
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
    /// The rules in order; `None` for a rule that detour would not write.
    pub rules: Vec<Option<NativeRule>>,
    /// The counter of each rule.
    pub counters: Vec<Counter>,
}

impl NativeLiveChain {
    /// Reports whether the chain is as desired.
    pub(super) fn is(&self, desired: &NativeChain) -> bool {
        self.hook == Ok(desired.hook) && self.rules.iter().map(Option::as_ref).eq(desired.rules.iter().map(Some))
    }
}

/// Returns a live rule as `nft` prints it; `None` is one that detour would not write.
pub(in crate::firewall) fn native_text(rule: Option<&NativeRule>) -> String {
    rule.map_or_else(|| "(a foreign rule)".to_owned(), ToString::to_string)
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
        let chain = NativeLiveChain { hook: hook(table, body), rules: Vec::new(), counters: Vec::new() };
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
        let expressions = find(body, nfta::RULE_EXPRESSIONS).unwrap_or_default();
        chain.rules.push(decode(expressions, sets.by_name.get(&table).unwrap_or(&no_sets)));
        chain.counters.push(Counter::read(expressions));
    }
}

/// Reports whether a live table is as desired.
pub(crate) fn are_equal(live: &BTreeMap<String, NativeLiveChain>, desired: &BTreeMap<Name, NativeChain>) -> bool {
    live.keys().eq(desired.keys()) && live.values().zip(desired.values()).all(|(live, desired)| live.is(desired))
}
