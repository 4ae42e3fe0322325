//! The live rules of a network namespace: a consistent snapshot of the tables that iptables-nft manages, of detour's
//! native tables, and of Istio's.

use super::containers::ContainerElement;
use super::foreign::{self, AttachedAt, ForeignTables, LiveRule};
use super::iptables;
use super::native::Rejected;
use super::native::live::{NativeLiveTables, Sets, add_native_chain, add_native_rule, detach, native_table_of};
use super::nfnetlink::{NfError, NfSocket, Verb, nfta, retry_changed};
use super::rule::{Family, NFPROTO_INET, Table, Target};
use crate::cni;
use crate::cni::Code;
use crate::netlink::DumpLimit;
use crate::netlink::attributes::{Attributes, find, find_be32, find_text};
use std::collections::{BTreeMap, BTreeSet};

/// A live chain in a table of iptables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LiveChain {
    /// Whether it is attached to a hook, as iptables' built-in chains are.
    pub built_in: bool,
    /// Where it is attached, if it can redirect traffic there.
    pub(super) at: Option<AttachedAt>,
    /// Its rules in order.
    pub rules: Vec<LiveRule>,
}

/// The chains of a table by name.
pub(super) type LiveTable = BTreeMap<String, LiveChain>;

/// The live rules in the tables raw, mangle and nat of `ip` and `ip6`, and in detour's native tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LiveRuleset {
    /// The kernel's generation of the rules when they were read.
    pub generation: u32,
    /// The tables of iptables.
    pub tables: BTreeMap<(Family, Table), LiveTable>,
    /// Detour's native tables.
    pub native: NativeLiveTables,
    /// The elements of the sets of excluded containers.
    pub containers: Vec<ContainerElement>,
    /// The tables that a process switched off (`flags dormant`), by family and name.
    pub(super) dormant: BTreeSet<(u8, String)>,
    /// The tables of other tools with chains that can redirect traffic.
    pub(super) others: ForeignTables,
}

impl LiveRuleset {
    /// Reads the live rules of the calling thread's network namespace; reads again while other processes change them.
    ///
    /// # Errors
    /// [`Code::ForeignRules`] if they exceed [`DumpLimit::USUAL`], [`Code::TryAgain`] if another process keeps
    /// changing them, and [`Code::KernelRefused`] if netlink fails.
    pub fn now() -> Result<Self, cni::Error> {
        let mut socket = NfSocket::open().map_err(|e| failed("read", e))?;
        retry_changed(|| Self::read(&mut socket)).map_err(|error| match error {
            NfError::Changed => {
                let msg = "can't read the rules of the network namespace: another process keeps changing them; retry";
                cni::Error::new(Code::TryAgain, msg)
            }
            other => failed("read", other),
        })
    }

    /// Reads the live rules once, up to [`DumpLimit::USUAL`].
    ///
    /// # Errors
    /// Netlink fails, the rules exceed the limit, or another process changed them during the read.
    pub fn read(socket: &mut NfSocket) -> Result<Self, NfError> {
        Self::read_within(DumpLimit::USUAL, socket)
    }

    /// Reads the live rules once, up to `limit`.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_within(limit: DumpLimit, socket: &mut NfSocket) -> Result<Self, NfError> {
        socket.allow(limit);
        let mut live = Self::read_tables(socket)?;
        if live.tables.is_empty() && live.native.is_empty() && live.others.is_empty() {
            return Ok(live);
        }
        let mut sets = Sets::read(socket, &live.native)?;
        live.containers = std::mem::take(&mut sets.containers);
        live.read_chains(socket)?;
        for (family, which) in live.dumps_of_rules() {
            socket.dump_of(Verb::GetRule, family, which, |number, body| live.add_rule(&sets, number, body))?;
        }
        foreign::read_rules(socket, &mut live.others)?;
        if socket.generation()? == live.generation { Ok(live) } else { Err(NfError::Changed) }
    }

    /// Reads tables and chains without rules.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) fn without_rules(socket: &mut NfSocket) -> Result<Self, NfError> {
        socket.allow(DumpLimit::USUAL);
        let mut live = Self::read_tables(socket)?;
        live.read_chains(socket)?;
        Ok(live)
    }

    fn read_tables(socket: &mut NfSocket) -> Result<Self, NfError> {
        let generation = socket.generation()?;
        let mut live = Self { generation, ..Self::default() };
        socket.dump(Verb::GetTable, |family, body| {
            let name = find_text(body, nfta::TABLE);
            if let Some(key) = table_of(family, name) {
                live.tables.entry(key).or_default();
            } else if let Some(table) = native_table_of(family, name) {
                live.native.entry(table).or_default();
            } else if let Some(name) = name {
                live.others.entry((family, name.to_owned())).or_default();
            }
            if find_be32(body, nfta::TABLE_FLAGS).unwrap_or_default() & nfta::DORMANT != 0 {
                live.dormant.extend(name.map(|name| (family, name.to_owned())));
            }
        })?;
        Ok(live)
    }

    fn read_chains(&mut self, socket: &mut NfSocket) -> Result<(), NfError> {
        socket.dump(Verb::GetChain, |family, body| {
            let (Some(table), Some(name)) = (find_text(body, nfta::TABLE), find_text(body, nfta::CHAIN_NAME)) else {
                return;
            };
            let key = (family, table.to_owned());
            let at = AttachedAt::read(body).filter(|_| !self.dormant.contains(&key));
            if let Some(table) = table_of(family, Some(table)).and_then(|key| self.tables.get_mut(&key)) {
                let chain = table.entry(name.to_owned()).or_default();
                (chain.built_in, chain.at) = (find(body, nfta::CHAIN_HOOK).is_some(), at);
            } else if let Some(table) = self.others.get_mut(&key) {
                foreign::add_chain(table, name, at);
            }
            add_native_chain(&mut self.native, family, body);
        })?;
        for table in self.dormant.iter().filter_map(|(family, name)| native_table_of(*family, Some(name))) {
            detach(self.native.entry(table).or_default());
        }
        Ok(())
    }

    /// Returns the dumps that list the rules of the tables of iptables and of detour: a single one, or one for each table
    /// if tables of other tools exist, which may contain any number of rules.
    fn dumps_of_rules(&self) -> Vec<(u8, Attributes)> {
        if self.others.is_empty() {
            return vec![(0, Attributes::new())];
        }
        let iptables = self.tables.keys().map(|(family, table)| (family.number(), table.name()));
        let native = self.native.keys().map(|table| (NFPROTO_INET, table.name()));
        let all = iptables.chain(native);
        all.map(|(family, table)| (family, Attributes::of(|list| list.text(nfta::TABLE, table)))).collect()
    }

    /// Adds a rule as the kernel lists it.
    fn add_rule(&mut self, sets: &Sets, number: u8, body: &[u8]) {
        let key = table_of(number, find_text(body, nfta::TABLE));
        let chain = key.and_then(|key| self.tables.get_mut(&key)?.get_mut(find_text(body, nfta::RULE_CHAIN)?));
        if let (Some(chain), Some((family, _))) = (chain, key) {
            chain.rules.extend(LiveRule::read(body, |list| iptables::decode(list, family)));
            return;
        }
        add_native_rule(&mut self.native, sets, number, body);
    }

    /// Returns what the pod's guard has rejected; `None` without a guard.
    #[must_use]
    pub fn rejected(&self) -> Option<Rejected> {
        Rejected::of(&self.native)
    }

    /// Returns the mark that the rules of detour's native tables set on packets for TPROXY.
    #[must_use]
    pub fn native_tproxy_mark(&self) -> Option<u32> {
        let chains = self.native.values().flat_map(BTreeMap::values);
        chains.flat_map(|chain| &chain.rules).find_map(|rule| match rule.rule.as_ref().ok()?.target {
            Target::Tproxy { mark, .. } => Some(mark),
            _ => None,
        })
    }

    /// Returns a chain's rules; an empty slice if the chain does not exist.
    #[must_use]
    pub fn rules(&self, family: Family, table: Table, chain: &str) -> &[LiveRule] {
        let chain = self.tables.get(&(family, table)).and_then(|t| t.get(chain));
        chain.map_or(&[], |c| c.rules.as_slice())
    }

    /// Returns every chain with its family, table and name.
    pub fn chains(&self) -> impl Iterator<Item = (Family, Table, &str, &LiveChain)> {
        self.tables.iter().flat_map(|((family, table), chains)| {
            chains.iter().map(|(name, chain)| (*family, *table, name.as_str(), chain))
        })
    }
}

/// Returns the CNI error for a failed `action` ("read") on the rules: [`Code::ForeignRules`] if there are
/// too many of them, [`Code::TryAgain`] if the node lacks memory, otherwise [`Code::KernelRefused`].
#[must_use]
pub fn failed(action: &str, error: NfError) -> cni::Error {
    let (code, next) = match error {
        NfError::TooMany(_) | NfError::TooManyDeletions { .. } => {
            (Code::ForeignRules, "; remove rules in the pod's network namespace, or delete the pod")
        }
        error if error.is_lack_of_resources() => (Code::TryAgain, ": the node lacks memory or file descriptors; retry"),
        _ => (Code::KernelRefused, ""),
    };
    cni::Error::new(code, format!("can't {action} the rules of the network namespace: {error}{next}"))
}

/// Returns which of the tables of iptables has this name in family `family` (`NFPROTO_…`).
fn table_of(family: u8, name: Option<&str>) -> Option<(Family, Table)> {
    let family = Family::ALL.into_iter().find(|f| f.number() == family)?;
    let name = name?;
    let table = Table::ALL.into_iter().find(|t| t.name() == name)?;
    Some((family, table))
}
