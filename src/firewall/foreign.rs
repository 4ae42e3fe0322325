//! The live tables of other tools with chains that can divert traffic: where the chains are attached, and what their rules do.

use super::nfnetlink::{NfError, NfSocket, Verb, nfta};
use super::outline::Outline;
use super::rule::Hook;
use super::target::NF_DROP;
use crate::netlink::DumpLimit;
use crate::netlink::attributes::{Attributes, find, find_be32, find_text};
use std::collections::BTreeMap;

/// How much is read of the tables of other tools, all together.
const MAX_READ: DumpLimit = DumpLimit { objects: 5000, bytes: 4 << 20 };
/// A priority below this one is before connection tracking, where a rule can set the zone or end the tracking
/// (`NF_IP_PRI_CONNTRACK`).
pub(super) const CONNTRACK_PRIORITY: i32 = -200;

/// Where a chain of another tool is attached, if packets that a redirection captures pass it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachedAt {
    /// The hook.
    pub hook: Hook,
    /// Whether it is of type `nat`.
    pub is_nat: bool,
    /// The priority.
    pub priority: i32,
    /// Whether it drops the packets that no rule accepts.
    pub drops: bool,
}

impl AttachedAt {
    /// Reads the place of a chain as the kernel lists it.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let attached = find(body, nfta::CHAIN_HOOK)?;
        let number = find_be32(attached, nfta::HOOK_NUMBER)?;
        let hook = [Hook::Prerouting, Hook::Input, Hook::Output].into_iter().find(|hook| hook.number() == number)?;
        let priority = i32::from_be_bytes(find(attached, nfta::HOOK_PRIORITY)?.try_into().ok()?);
        let is_nat = find_text(body, nfta::CHAIN_TYPE) == Some("nat");
        let drops = find_be32(body, nfta::CHAIN_POLICY) == Some(NF_DROP);
        Some(Self { hook, is_nat, priority, drops })
    }
}

/// A table of another tool that is none of iptables'.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ForeignTable {
    pub(super) chains: BTreeMap<String, ForeignChain>,
    /// Whether it has more rules than are read.
    pub(super) is_partial: bool,
}

/// A chain of such a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ForeignChain {
    pub(super) at: Option<AttachedAt>,
    pub(super) rules: Vec<Outline>,
}

/// The tables of other tools by family (`NFPROTO_…`) and name.
pub(super) type ForeignTables = BTreeMap<(u8, String), ForeignTable>;

/// Adds a chain as the kernel lists it.
pub(super) fn add_chain(table: &mut ForeignTable, name: &str, at: Option<AttachedAt>) {
    table.chains.entry(name.to_owned()).or_default().at = at;
}

/// Reads the rules of the tables with a chain that can divert traffic.
pub(super) fn read_rules(socket: &mut NfSocket, tables: &mut ForeignTables) -> Result<(), NfError> {
    tables.retain(|_, table| table.chains.values().any(|chain| chain.at.is_some()));
    socket.allow(MAX_READ);
    for ((family, name), table) in tables {
        let which = Attributes::of(|list| list.text(nfta::TABLE, name));
        let read = socket.dump_of(Verb::GetRule, *family, which, |number, body| {
            let of_table = number == *family && find_text(body, nfta::TABLE) == Some(name);
            let chain = find_text(body, nfta::RULE_CHAIN).filter(|_| of_table);
            if let Some(chain) = chain.and_then(|chain| table.chains.get_mut(chain)) {
                chain.rules.push(Outline::read(find(body, nfta::RULE_EXPRESSIONS).unwrap_or_default()));
            }
        });
        match read {
            Err(NfError::TooMany(_)) => table.is_partial = true,
            other => other?,
        }
    }
    Ok(())
}
