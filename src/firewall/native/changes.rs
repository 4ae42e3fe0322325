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
use super::rule::{BaseHook, NativeChain, NativeRule, NativeTable, NativeTables, chain_type, container_sets};
use super::wire::{encode, sets};
use crate::firewall::containers::{self, ContainerElement, SCOPES, set_name};
use crate::firewall::nfnetlink::{Batch, NLM_F_APPEND, Verb, nfta};
use crate::firewall::rule::{Hook, NF_ACCEPT, NFPROTO_INET, Name, Table};
use crate::netlink::NLM_F_CREATE;
use crate::netlink::attributes::Attributes;
use crate::policy::ContainerScope;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

/// One change of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NativeChange {
    /// Deletes a table with its chains, rules and sets.
    DeleteTable(NativeTable),
    /// Deletes all rules of a chain.
    Flush(NativeTable, String),
    /// Deletes an empty chain.
    DeleteChain(NativeTable, String),
    /// Deletes a set of excluded containers.
    DeleteSet(ContainerScope),
    /// Creates a table, unless it exists.
    Table(NativeTable),
    /// Creates a set of excluded containers.
    Set(ContainerScope),
    /// Adds an element that the set had before.
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

/// Returns the changes that lead from `live` to `desired`. Sets that remain keep their `elements`.
#[must_use]
pub fn changes(live: &NativeLiveTables, elements: &[ContainerElement], mut desired: NativeTables) -> Vec<NativeChange> {
    let mut changes = Vec::new();
    for table in NativeTable::ALL {
        match (live.get(&table), desired.remove(&table)) {
            (None, None) => {}
            (Some(_), None) => changes.push(NativeChange::DeleteTable(table)),
            (Some(live), Some(desired)) if are_equal(live, &desired) => {}
            (live, Some(desired)) => TableChange { table, elements, desired }.add(live, &mut changes),
        }
    }
    changes
}

/// The inputs of a table's changes.
struct TableChange<'a> {
    table: NativeTable,
    elements: &'a [ContainerElement],
    desired: BTreeMap<Name, NativeChain>,
}

impl TableChange<'_> {
    fn add(self, live: Option<&BTreeMap<String, NativeLiveChain>>, changes: &mut Vec<NativeChange>) {
        let no_chains = BTreeMap::new();
        match live {
            Some(live) if self.has_same_structure(live) => {
                let changed = |(name, chain): &(&Name, &NativeChain)| !live[name.as_ref()].is(chain);
                for (name, _) in self.desired.iter().filter(changed) {
                    changes.push(NativeChange::Flush(self.table, name.to_string()));
                }
                self.fill(live, changes);
            }
            Some(live) if self.can_be_refilled(live) => {
                self.clear(live, changes);
                self.create(live, changes);
                self.fill(&no_chains, changes);
            }
            live => {
                changes.extend(live.map(|_| NativeChange::DeleteTable(self.table)));
                changes.push(NativeChange::Table(self.table));
                self.create(&no_chains, changes);
                self.fill(&no_chains, changes);
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

    /// Adds the changes that remove everything but the desired base chains: rules before the chains and sets that they
    /// refer to.
    fn clear(&self, live: &BTreeMap<String, NativeLiveChain>, changes: &mut Vec<NativeChange>) {
        let nonempty = live.iter().filter(|(_, chain)| !chain.rules.is_empty());
        changes.extend(nonempty.map(|(name, _)| NativeChange::Flush(self.table, name.clone())));
        let goes = |(name, chain): &(&String, &NativeLiveChain)| {
            chain.hook == Ok(None) || !self.desired.contains_key(name.as_str())
        };
        changes.extend(live.iter().filter(goes).map(|(name, _)| NativeChange::DeleteChain(self.table, name.clone())));
        changes.extend(self.live_sets(live).into_iter().map(NativeChange::DeleteSet));
    }

    /// Adds the changes that create sets with their elements, and chains, except base chains that are live.
    fn create(&self, live: &BTreeMap<String, NativeLiveChain>, changes: &mut Vec<NativeChange>) {
        for scope in container_sets(&self.desired) {
            changes.push(NativeChange::Set(scope));
            let elements = self.elements.iter().filter(|element| element.scope == scope);
            changes.extend(elements.take(containers::MAX_ELEMENTS as usize).cloned().map(NativeChange::Element));
        }
        let is_new = |(name, chain): &(&Name, &NativeChain)| chain.hook.is_none() || !live.contains_key(name.as_ref());
        let mut chains: Vec<(&Name, &NativeChain)> = self.desired.iter().filter(is_new).collect();
        // Base chains first.
        chains.sort_by_key(|(_, chain)| chain.hook.is_none());
        let creation = |(name, chain): (&Name, &NativeChain)| NativeChange::Chain {
            table: self.table,
            name: name.clone(),
            hook: chain.hook,
        };
        changes.extend(chains.into_iter().map(creation));
    }

    /// Adds the rules of all chains that are not as in `live`.
    fn fill(self, live: &BTreeMap<String, NativeLiveChain>, changes: &mut Vec<NativeChange>) {
        for (name, chain) in self.desired {
            if live.get(name.as_ref()).is_some_and(|live| live.is(&chain)) {
                continue;
            }
            let rule = |rule| NativeChange::Rule { table: self.table, chain: name.clone(), rule };
            changes.extend(chain.rules.into_iter().map(rule));
        }
    }
}

impl NativeChange {
    /// Returns the changed table.
    #[must_use]
    pub const fn table(&self) -> NativeTable {
        match self {
            Self::DeleteTable(table)
            | Self::Flush(table, _)
            | Self::DeleteChain(table, _)
            | Self::Table(table)
            | Self::Chain { table, .. }
            | Self::Rule { table, .. } => *table,
            Self::Set(_) | Self::DeleteSet(_) | Self::Element(_) => NativeTable::Exclusions,
        }
    }

    /// Reports whether the change writes a rule that compares control groups.
    #[must_use]
    pub const fn compares_cgroups(&self) -> bool {
        matches!(self, Self::Rule { rule, .. } if rule.cgroup.is_some())
    }

    /// Reports whether the kernel needs support for control groups to make the change.
    #[must_use]
    pub const fn is_about_containers(&self) -> bool {
        matches!(self, Self::Set(_) | Self::Element(_)) || self.compares_cgroups()
    }

    /// Appends the messages of the change; numbers its sets from `next_set` and advances it.
    pub(crate) fn write(&self, batch: &mut Batch<'_>, next_set: &mut u32) {
        let named = self.table().name();
        let mut message = |verb, flags, write: &dyn Fn(&mut Attributes)| {
            batch.message(verb, flags, NFPROTO_INET, |list| {
                write(list.text(nfta::TABLE, named));
                list
            });
        };
        match self {
            Self::DeleteTable(_) => message(Verb::DelTable, 0, &|_| ()),
            Self::Flush(_, chain) => message(Verb::DelRule, 0, &|list| _ = list.text(nfta::RULE_CHAIN, chain)),
            Self::DeleteChain(_, name) => message(Verb::DelChain, 0, &|list| _ = list.text(nfta::CHAIN_NAME, name)),
            Self::DeleteSet(scope) => {
                message(Verb::DelSet, 0, &|list| _ = list.text(nfta::SET_NAME, set_name(*scope)));
            }
            Self::Table(_) => message(Verb::NewTable, NLM_F_CREATE, &|_| ()),
            Self::Set(scope) => {
                batch
                    .message(Verb::NewSet, NLM_F_CREATE, NFPROTO_INET, |list| containers::set(list, *scope, *next_set));
                *next_set += 1;
            }
            Self::Element(element) => element.write(batch, Verb::NewSetElements),
            Self::Chain { table, name, hook } => message(Verb::NewChain, NLM_F_CREATE, &|list| {
                let list = list.text(nfta::CHAIN_NAME, name);
                if let Some(BaseHook { like, hook }) = hook {
                    attached_to_hook(list, *like, *hook, table.priority(*like));
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
            Self::Flush(_, chain) => write!(f, "inet {table} flush chain {chain}"),
            Self::DeleteChain(_, chain) => write!(f, "inet {table} delete chain {chain}"),
            Self::DeleteSet(scope) => write!(f, "inet {table} delete set {}", set_name(*scope)),
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
