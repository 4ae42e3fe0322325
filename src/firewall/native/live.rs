//! Detour's native tables in the kernel: the live state with its chains, rules and sets, and the changes that lead from
//! it to the desired state. A table that differs is deleted and created again, all in one transaction.

use super::nft_set::LiveSet;
use super::rule::{BaseHook, NativeChain, NativeRule, NativeTable, NativeTables, chain_type, container_sets};
use super::wire::{decode, encode, sets};
use crate::firewall::containers::{self, ContainerElement, is_container_set, scope_of_set, set_name};
use crate::firewall::expression::Counter;
use crate::firewall::nfnetlink::{Batch, NLM_F_APPEND, NfError, NfSocket, Verb, nfta};
use crate::firewall::rule::{Hook, NF_ACCEPT, NFPROTO_INET, Name, Table};
use crate::netlink::attributes::{Attributes, find, find_be32, find_text};
use crate::netlink::{DumpLimit, NLM_F_CREATE};
use crate::policy::ContainerScope;
use nix::errno::Errno;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

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
                |name: &str| Some(scope_of_set(name)).filter(|_| *table == NativeTable::Containers).flatten();
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
    let hook = Hook::ALL
        .into_iter()
        .find(|hook| find_be32(attached, nfta::HOOK_NUMBER) == Some(hook.number()))
        .ok_or(NotOurs)?;
    let has_priority = |like: &Table| {
        find(attached, nfta::HOOK_PRIORITY) == Some(&table.priority(*like).to_be_bytes())
            && (table == NativeTable::Containers || table == NativeTable::Of(*like))
    };
    let like = Table::ALL.into_iter().find(has_priority).ok_or(NotOurs)?;
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

/// One change of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NativeChange {
    /// Deletes a table with its chains, rules and sets.
    DeleteTable(NativeTable),
    /// Creates a table.
    Table(NativeTable),
    /// Creates a set of excluded containers.
    Set(ContainerScope),
    /// Adds a container that the set had before.
    Element(ContainerElement),
    /// Creates a chain.
    Chain {
        /// The table of the chain.
        table: NativeTable,
        /// The name of the chain.
        name: Name,
        /// The hook of a base chain.
        hook: Option<BaseHook>,
    },
    /// Appends a rule to a chain.
    Rule {
        /// The table of the chain.
        table: NativeTable,
        /// The name of the chain.
        chain: Name,
        /// The rule.
        rule: NativeRule,
    },
}

/// Returns the changes that lead from `live` to `desired` in `tables`. Sets that remain keep their `elements`.
#[must_use]
pub fn changes(
    tables: &[NativeTable],
    live: &NativeLiveTables,
    elements: &[ContainerElement],
    mut desired: NativeTables,
) -> Vec<NativeChange> {
    let mut changes = Vec::new();
    for table in tables.iter().copied() {
        let (live, desired) = (live.get(&table), desired.remove(&table));
        if live.is_some_and(|live| desired.as_ref().is_some_and(|desired| are_equal(live, desired))) {
            continue;
        }
        changes.extend(live.map(|_| NativeChange::DeleteTable(table)));
        changes.extend(desired.into_iter().flat_map(|chains| creation(table, chains, elements)));
    }
    changes
}

/// Reports whether a live table is as desired.
pub(crate) fn are_equal(live: &BTreeMap<String, NativeLiveChain>, desired: &BTreeMap<Name, NativeChain>) -> bool {
    let same_rules = |live: &NativeLiveChain, desired: &NativeChain| {
        live.rules.iter().map(Option::as_ref).eq(desired.rules.iter().map(Some))
    };
    let same =
        |live: &NativeLiveChain, desired: &NativeChain| live.hook == Ok(desired.hook) && same_rules(live, desired);
    live.keys().eq(desired.keys()) && live.values().zip(desired.values()).all(|(live, desired)| same(live, desired))
}

/// Returns the changes that create a table: sets before the rules that look them up, and all chains before the rules
/// that jump to them.
fn creation(
    table: NativeTable,
    chains: BTreeMap<Name, NativeChain>,
    elements: &[ContainerElement],
) -> Vec<NativeChange> {
    let mut changes = vec![NativeChange::Table(table)];
    for scope in container_sets(&chains) {
        changes.push(NativeChange::Set(scope));
        let elements = elements.iter().filter(|element| element.scope == scope);
        changes.extend(elements.take(containers::MAX_ELEMENTS as usize).cloned().map(NativeChange::Element));
    }
    let mut chains: Vec<(Name, NativeChain)> = chains.into_iter().collect();
    // Base chains first.
    chains.sort_by_key(|(_, chain)| chain.hook.is_none());
    let creations = chains.iter();
    changes.extend(creations.map(|(name, chain)| NativeChange::Chain { table, name: name.clone(), hook: chain.hook }));
    for (name, chain) in chains {
        let rules = chain.rules.into_iter();
        changes.extend(rules.map(|rule| NativeChange::Rule { table, chain: name.clone(), rule }));
    }
    changes
}

impl NativeChange {
    /// Returns the changed table.
    #[must_use]
    pub const fn table(&self) -> NativeTable {
        match self {
            Self::DeleteTable(table) | Self::Table(table) | Self::Chain { table, .. } | Self::Rule { table, .. } => {
                *table
            }
            Self::Set(_) | Self::Element(_) => NativeTable::Containers,
        }
    }

    /// Appends the messages of the change; numbers its sets from `next_set` and advances it.
    pub(crate) fn write(&self, batch: &mut Batch<'_>, next_set: &mut u32) {
        let named = self.table().name();
        match self {
            Self::DeleteTable(_) => {
                batch.message(Verb::DelTable, 0, NFPROTO_INET, |list| list.text(nfta::TABLE, named));
            }
            Self::Table(_) => {
                batch.message(Verb::NewTable, NLM_F_CREATE, NFPROTO_INET, |list| list.text(nfta::TABLE, named));
            }
            Self::Set(scope) => {
                batch
                    .message(Verb::NewSet, NLM_F_CREATE, NFPROTO_INET, |list| containers::set(list, *scope, *next_set));
                *next_set += 1;
            }
            Self::Element(element) => element.write(batch, Verb::NewSetElements),
            Self::Chain { table, name, hook } => batch.message(Verb::NewChain, NLM_F_CREATE, NFPROTO_INET, |list| {
                let list = list.text(nfta::TABLE, named).text(nfta::CHAIN_NAME, name);
                match hook {
                    Some(BaseHook { like, hook }) => attached_to_hook(list, *like, *hook, table.priority(*like)),
                    None => list,
                }
            }),
            Self::Rule { chain, rule, .. } => {
                let first_set = *next_set;
                for set in sets(rule, first_set) {
                    set.write(batch, named);
                    *next_set += 1;
                }
                batch.message(Verb::NewRule, NLM_F_CREATE | NLM_F_APPEND, NFPROTO_INET, |list| {
                    list.text(nfta::TABLE, named).text(nfta::RULE_CHAIN, chain).nested(nfta::RULE_EXPRESSIONS, |list| {
                        encode(rule, first_set, &mut |expression| _ = expression.write(list));
                        list
                    })
                });
            }
        }
    }
}

/// Adds hook, priority, policy and type of a base chain to its attributes.
pub(crate) fn attached_to_hook(chain: &mut Attributes, table: Table, hook: Hook, priority: i32) -> &mut Attributes {
    let chain = chain.nested(nfta::CHAIN_HOOK, |list| {
        list.be32(nfta::HOOK_NUMBER, hook.number()).bytes(nfta::HOOK_PRIORITY, &priority.to_be_bytes())
    });
    chain.be32(nfta::CHAIN_POLICY, NF_ACCEPT).text(nfta::CHAIN_TYPE, chain_type(table, hook))
}

impl Display for NativeChange {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let table = self.table().name();
        match self {
            Self::DeleteTable(_) => write!(f, "delete table inet {table}"),
            Self::Table(_) => write!(f, "create table inet {table}"),
            Self::Set(scope) => write!(f, "inet {table} create set {}", set_name(*scope)),
            Self::Element(ContainerElement { scope, cgroup, .. }) => {
                write!(f, "inet {table} add control group {cgroup} to set {}", set_name(*scope))
            }
            Self::Chain { name, .. } => write!(f, "inet {table} create chain {name}"),
            Self::Rule { chain, rule, .. } => write!(f, "inet {table} {chain} {rule}"),
        }
    }
}
