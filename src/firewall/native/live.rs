//! What the kernel holds natively: the tables of this plugin, chains, rules and sets.
//!
//! How the native tables in the kernel differ from what they should be, in words.
//!
//! From what the kernel holds natively to what it should hold: a table that is right stays, any
//! other one is made anew, all in one transaction.

use super::rule::{NativeChain, NativeRule, NativeTables, chain_type, priority, table_name};
use super::set::LiveSet;
use super::wire::decode;
use super::wire::encode;
use crate::firewall::drift::{Difference, Drift, pair};
use crate::firewall::live::Counter;
use crate::firewall::nfnetlink::attributes::{Attributes, find, find_be32, find_text};
use crate::firewall::nfnetlink::{Message, NLM_F_APPEND, NLM_F_CREATE, NfError, NfSocket, Verb};
use crate::firewall::rule::{Hook, Table};
use crate::netlink::Allowance;
use nix::errno::Errno;
use std::collections::BTreeMap;
use std::fmt;
use std::fmt::{Display, Formatter};

/// A chain in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NativeLiveChain {
    /// Where it is entered from; an error where it is not entered as this crate would have it.
    pub hook: Result<Option<Hook>, NotOurs>,
    /// In order; `None` for one that this crate would not write.
    pub rules: Vec<Option<NativeRule>>,
    /// What each of them has counted.
    pub counters: Vec<Counter>,
}

/// Something in the kernel that this crate would not write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotOurs;

/// The tables in the kernel, each with its chains by name.
pub type NativeLiveTables = BTreeMap<Table, BTreeMap<String, NativeLiveChain>>;

/// Which of our tables a name of family `family` is.
pub(in crate::firewall) fn table_of(family: u8, name: Option<&str>) -> Option<Table> {
    Table::ALL.into_iter().find(|table| family == INET && Some(table_name(*table)) == name)
}

/// How many elements the sets of our tables may have together.
const ELEMENTS: usize = 100_000;

/// The sets of our tables, read before the rules that look them up.
#[derive(Debug, Default)]
pub(in crate::firewall) struct Sets(BTreeMap<Table, BTreeMap<String, LiveSet>>);

impl Sets {
    /// Reads the sets of `tables` that belong to one rule each, as ours do. A pod can add others.
    pub(in crate::firewall) fn read(socket: &mut NfSocket, tables: &NativeLiveTables) -> Result<Self, NfError> {
        // What was listed may have gone since.
        let gone = |error| if error == NfError::Socket(Errno::ENOENT) { NfError::Changed } else { error };
        let (mut sets, mut elements) = (Self::default(), 0);
        for table in tables.keys() {
            let of_table = || Attributes::new().text(1, table_name(*table));
            let found = sets.0.entry(*table).or_default();
            let set = |_, body: &[u8]| found.extend(find_text(body, 2).map(str::to_owned).zip(LiveSet::of(body)));
            socket.dump_of(Verb::GetSet, INET, of_table(), set).map_err(gone)?;
            for (name, set) in found {
                let which = of_table().text(2, name);
                let read = |_, body: &[u8]| elements += set.read_elements(body, ELEMENTS - elements);
                socket.dump_of(Verb::GetSetElements, INET, which, read).map_err(gone)?;
                if elements == ELEMENTS {
                    return Err(NfError::TooMany(Allowance { objects: ELEMENTS, ..Allowance::USUAL }));
                }
            }
        }
        Ok(sets)
    }
}

/// Takes up a chain as it is listed.
pub(in crate::firewall) fn add_chain(tables: &mut NativeLiveTables, family: u8, body: &[u8]) {
    let table = table_of(family, find_text(body, 1));
    if let (Some(table), Some(name)) = (table, find_text(body, 3)) {
        let chain = NativeLiveChain { hook: hook(table, body), rules: Vec::new(), counters: Vec::new() };
        tables.entry(table).or_default().insert(name.to_owned(), chain);
    }
}

fn hook(table: Table, body: &[u8]) -> Result<Option<Hook>, NotOurs> {
    let Some(attached) = find(body, 4) else { return Ok(None) };
    let hook = Hook::ALL.into_iter().find(|hook| find_be32(attached, 1) == Some(hook.number())).ok_or(NotOurs)?;
    let is_ours = find(attached, 2) == Some(&priority(table).to_be_bytes())
        && find_text(body, 7) == Some(chain_type(table, hook))
        && find_be32(body, 5) == Some(NF_ACCEPT);
    if is_ours { Ok(Some(hook)) } else { Err(NotOurs) }
}

/// Takes up a rule as it is listed.
pub(in crate::firewall) fn add_rule(tables: &mut NativeLiveTables, sets: &Sets, family: u8, body: &[u8]) {
    let Some(table) = table_of(family, find_text(body, 1)) else { return };
    let chain = tables.get_mut(&table).and_then(|chains| chains.get_mut(find_text(body, 2)?));
    if let Some(chain) = chain {
        let none = BTreeMap::new();
        let expressions = find(body, 4).unwrap_or_default();
        chain.rules.push(decode(expressions, sets.0.get(&table).unwrap_or(&none)));
        chain.counters.push(Counter::read(expressions));
    }
}

/// Every chain and rule of the tables is this plugin's own, so whatever differs is drift.
#[must_use]
pub fn drift(live: &NativeLiveTables, desired: &NativeTables) -> Vec<Drift> {
    let (no_live, nothing) = (BTreeMap::new(), BTreeMap::new());
    let mut found = Vec::new();
    for table in Table::ALL {
        let (live, desired) = (live.get(&table).unwrap_or(&no_live), desired.get(&table).unwrap_or(&nothing));
        let place = format!("inet {}", table_name(table));
        found.extend(differences(live, desired).into_iter().map(|what| Drift { place: place.clone(), what }));
    }
    found
}

fn differences(live: &BTreeMap<String, NativeLiveChain>, desired: &BTreeMap<String, NativeChain>) -> Vec<Difference> {
    let mut found = Vec::new();
    for (name, wanted) in desired {
        match live.get(name) {
            Some(there) => found.extend(differences_of_chain(name, there, wanted)),
            None => found.push(Difference::NoChain(name.clone())),
        }
    }
    found.extend(live.keys().filter(|name| !desired.contains_key(*name)).cloned().map(Difference::ExtraChain));
    found
}

fn differences_of_chain(name: &str, live: &NativeLiveChain, wanted: &NativeChain) -> Vec<Difference> {
    let mut found = Vec::new();
    if live.hook != Ok(wanted.hook) {
        found.push(Difference::OtherHook(name.to_owned()));
    }
    let text = |rule: &dyn ToString| format!("{name} {}", rule.to_string());
    let rules = live.rules.iter();
    let there = rules.map(|rule| rule.as_ref().map_or_else(|| format!("{name} (a foreign rule)"), |rule| text(rule)));
    let wanted = wanted.rules.iter().map(|rule| text(rule));
    let (paired, extra) = pair(wanted.collect(), there.collect());
    let (there, missing): (Vec<_>, Vec<_>) = paired.into_iter().partition(|(_, is_there)| *is_there);
    let there: Vec<String> = there.into_iter().map(|(rule, _)| rule).collect();
    found.extend(missing.into_iter().map(|(rule, _)| Difference::Missing(rule)));
    let in_order: Vec<String> = live.rules.iter().flatten().map(|rule| text(rule)).collect();
    let is_out_of_order = found.is_empty() && extra.is_empty() && in_order != there;
    found.extend(extra.into_iter().map(Difference::Extra));
    if is_out_of_order {
        let moved = in_order.into_iter().zip(there).filter(|(live, wanted)| live != wanted);
        found.extend(moved.map(|(_, wanted)| Difference::Moved(wanted)));
    }
    found
}

/// `NFPROTO_INET`.
pub(super) const INET: u8 = 1;
pub(super) const NF_ACCEPT: u32 = 1;

/// One change within a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NativeChange {
    /// Deletes a table with everything in it.
    DeleteTable(Table),
    /// Makes a table.
    Table(Table),
    /// Makes a chain.
    Chain {
        /// In which table.
        table: Table,
        /// Its name.
        name: String,
        /// Where it is entered from, if from a hook.
        hook: Option<Hook>,
    },
    /// Adds a rule to the end of a chain.
    Rule {
        /// In which table.
        table: Table,
        /// In which chain.
        chain: String,
        /// The rule.
        rule: NativeRule,
    },
}

/// The changes that lead from `live` to `desired`.
#[must_use]
pub fn changes(live: &NativeLiveTables, desired: &NativeTables) -> Vec<NativeChange> {
    let mut changes = Vec::new();
    for table in Table::ALL {
        let (there, wanted) = (live.get(&table), desired.get(&table));
        if there.is_some_and(|there| wanted.is_some_and(|wanted| is_as(there, wanted))) {
            continue;
        }
        changes.extend(there.map(|_| NativeChange::DeleteTable(table)));
        changes.extend(wanted.into_iter().flat_map(|wanted| making(table, wanted)));
    }
    changes
}

fn is_as(live: &BTreeMap<String, NativeLiveChain>, wanted: &BTreeMap<String, NativeChain>) -> bool {
    let same_rules = |live: &NativeLiveChain, wanted: &NativeChain| {
        live.rules.iter().map(Option::as_ref).eq(wanted.rules.iter().map(Some))
    };
    let same = |live: &NativeLiveChain, wanted: &NativeChain| live.hook == Ok(wanted.hook) && same_rules(live, wanted);
    live.keys().eq(wanted.keys()) && live.values().zip(wanted.values()).all(|(live, wanted)| same(live, wanted))
}

fn making(table: Table, chains: &BTreeMap<String, NativeChain>) -> Vec<NativeChange> {
    let mut changes = vec![NativeChange::Table(table)];
    let (base, others): (Vec<_>, Vec<_>) = chains.iter().partition(|(_, chain)| chain.hook.is_some());
    let all = || base.iter().chain(&others);
    changes.extend(all().map(|(name, chain)| NativeChange::Chain { table, name: (*name).clone(), hook: chain.hook }));
    for (name, chain) in all() {
        let rules = chain.rules.iter();
        changes.extend(rules.map(|rule| NativeChange::Rule { table, chain: (*name).clone(), rule: rule.clone() }));
    }
    changes
}

/// The messages of all changes, each with the place of its change among them.
#[must_use]
pub fn messages(changes: &[NativeChange]) -> Vec<(usize, Message)> {
    let mut next_set = 1;
    let each = changes.iter().enumerate();
    each.flat_map(|(at, change)| change.messages(&mut next_set).into_iter().map(move |message| (at, message))).collect()
}

impl NativeChange {
    fn table(&self) -> Table {
        match self {
            Self::DeleteTable(table) | Self::Table(table) | Self::Chain { table, .. } | Self::Rule { table, .. } => {
                *table
            }
        }
    }

    /// The messages of the change; its sets are numbered from `next_set`, which is moved on.
    fn messages(&self, next_set: &mut u32) -> Vec<Message> {
        let table = table_name(self.table());
        let named = || Attributes::new().text(1, table);
        let message = |verb, flags, attributes| Message { verb, flags, family: INET, attributes };
        match self {
            Self::DeleteTable(_) => vec![message(Verb::DelTable, 0, named())],
            Self::Table(_) => vec![message(Verb::NewTable, NLM_F_CREATE, named())],
            Self::Chain { table, name, hook } => {
                let chain = named().text(3, name);
                let chain = hook.map_or(chain.clone(), |hook| with_hook(chain, *table, hook));
                vec![message(Verb::NewChain, NLM_F_CREATE, chain)]
            }
            Self::Rule { chain, rule, .. } => {
                let encoded = encode(rule, *next_set);
                let mut all = Vec::new();
                for set in &encoded.sets {
                    all.push(message(Verb::NewSet, NLM_F_CREATE, set.write(table)));
                    let elements = set.write_elements(table).into_iter();
                    all.extend(elements.map(|list| message(Verb::NewSetElements, NLM_F_CREATE, list)));
                    *next_set += 1;
                }
                let list = encoded.expressions.iter().fold(Attributes::new(), |list, e| e.write(list));
                let rule = named().text(2, chain).nested(4, &list);
                all.push(message(Verb::NewRule, NLM_F_CREATE | NLM_F_APPEND, rule));
                all
            }
        }
    }
}

fn with_hook(chain: Attributes, table: Table, hook: Hook) -> Attributes {
    let where_to = Attributes::new().be32(1, hook.number()).bytes(2, &priority(table).to_be_bytes());
    chain.nested(4, &where_to).be32(5, NF_ACCEPT).text(7, chain_type(table, hook))
}

impl Display for NativeChange {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let table = table_name(self.table());
        match self {
            Self::DeleteTable(_) => write!(f, "delete table inet {table}"),
            Self::Table(_) => write!(f, "table inet {table}"),
            Self::Chain { name, .. } => write!(f, "inet {table} chain {name}"),
            Self::Rule { chain, rule, .. } => write!(f, "inet {table} {chain} {rule}"),
        }
    }
}
