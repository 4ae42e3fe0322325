//! From what the kernel holds natively to what it should hold: a table that is right stays, any
//! other one is made anew, all in one transaction.

use super::encode::encode;
use super::live::{NativeLiveChain, NativeLiveTables};
use super::rule::{NativeChain, NativeRule, NativeTables, chain_type, priority, table_name};
use crate::firewall::nfnetlink::attributes::Attributes;
use crate::firewall::nfnetlink::{Message, NLM_F_APPEND, NLM_F_CREATE, Verb};
use crate::firewall::rule::{Hook, Table};
use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

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
    let same_rules =
        |live: &NativeLiveChain, wanted: &NativeChain| live.rules.iter().map(Option::as_ref).eq(wanted.rules.iter().map(Some));
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
