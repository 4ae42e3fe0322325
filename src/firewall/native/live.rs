//! What the kernel holds natively: the tables of this plugin, chains, rules and sets.

use super::change::INET;
use super::decode::decode;
use super::rule::{NativeRule, chain_type, priority, table_name};
use super::set::LiveSet;
use crate::firewall::live::Counter;
use crate::firewall::nfnetlink::attributes::{Attributes, find, find_be32, find_text};
use crate::firewall::nfnetlink::{NfError, NfSocket, Verb};
use crate::firewall::rule::{Hook, Table};
use crate::netlink::Allowance;
use nix::errno::Errno;
use std::collections::BTreeMap;

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
        && find_be32(body, 5) == Some(super::change::NF_ACCEPT);
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
