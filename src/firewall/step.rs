//! The steps of a transaction, in the tables of iptables and in detour's native ones: as messages to the kernel, and in
//! words.

use super::containers::{self, ContainerElement, set_name};
use super::expression::NF_ACCEPT;
use super::iptables;
use super::native::rule::{BaseHook, TableId, chain_type};
use super::native::wire::{encode, sets};
use super::nfnetlink::{Batch, NLM_F_APPEND, Verb, nfta};
use super::rule::{Hook, NFPROTO_INET, Rule, Table};
use crate::netlink::NLM_F_CREATE;
use crate::netlink::attributes::Attributes;
use crate::policy::ContainerScope;
use std::borrow::Cow;

/// A step of a transaction. It borrows from the live and the desired rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<'a> {
    /// Creates the table, unless it exists.
    Table,
    /// Creates a chain.
    Chain {
        /// The name of the chain.
        name: Cow<'a, str>,
        /// The hook of a base chain.
        hook: Option<BaseHook>,
    },
    /// Creates a set of excluded containers.
    Set(ContainerScope),
    /// Adds an element that the set had before.
    Element(ContainerElement),
    /// Inserts a rule.
    Rule {
        /// The chain of the rule.
        chain: Cow<'a, str>,
        /// The handle of the rule that follows it; `None` appends.
        before: Option<u64>,
        /// The rule.
        rule: Cow<'a, Rule>,
    },
    /// Deletes a rule.
    DeleteRule {
        /// The chain of the rule.
        chain: Cow<'a, str>,
        /// The handle of the rule.
        handle: u64,
    },
    /// Deletes all rules of a chain.
    Flush(Cow<'a, str>),
    /// Deletes an empty chain.
    DeleteChain(Cow<'a, str>),
    /// Deletes a set of excluded containers.
    DeleteSet(ContainerScope),
    /// Deletes the table with its chains, rules and sets.
    DeleteTable,
}

/// A step with the table that it changes.
pub type PlannedStep<'a> = (TableId, Step<'a>);

const fn family_of(table: TableId) -> u8 {
    match table {
        TableId::Iptables(family, _) => family.number(),
        TableId::Native(_) => NFPROTO_INET,
    }
}

/// Returns the priority of a base chain (linux/netfilter_ipv4.h), which iptables-nft sets in the tables of iptables.
pub(super) const fn priority_of(table: TableId, like: Table) -> i32 {
    match (table, like) {
        (TableId::Native(table), _) => table.priority(like),
        (TableId::Iptables(..), Table::Raw) => -300,
        (TableId::Iptables(..), Table::Mangle) => -150,
        (TableId::Iptables(..), Table::Nat) => -100,
        (TableId::Iptables(..), Table::Filter) => 0,
    }
}

impl<'a> Step<'a> {
    /// Returns the step that creates the built-in chain of a table of iptables.
    pub(super) fn built_in(like: Table, hook: Hook) -> Self {
        Self::Chain { name: hook.chain().into(), hook: Some(BaseHook { like, hook }) }
    }

    /// Returns the step that inserts a rule in a table of iptables.
    pub(super) fn insert(chain: &'a str, before: Option<u64>, rule: &'a Rule) -> Self {
        Self::Rule { chain: chain.into(), before, rule: Cow::Borrowed(rule) }
    }

    /// Returns whether the step writes a rule that compares control groups.
    #[must_use]
    pub fn compares_cgroups(&self) -> bool {
        matches!(self, Self::Rule { rule, .. } if rule.cgroup.is_some())
    }

    /// Returns whether the kernel needs support for control groups for the step.
    #[must_use]
    pub fn is_about_containers(&self) -> bool {
        matches!(self, Self::Set(_) | Self::Element(_)) || self.compares_cgroups()
    }

    /// Describes the step in `table`.
    #[must_use]
    pub fn describe(&self, id: TableId) -> String {
        let table = id.place();
        match self {
            Self::Table => format!("create table {table}"),
            Self::Chain { name, .. } => format!("{table} create chain {name}"),
            Self::Set(scope) => format!("{table} create set {}", set_name(*scope)),
            Self::Element(ContainerElement { scope, cgroup, .. }) => {
                format!("{table} add control group {cgroup} to set {}", set_name(*scope))
            }
            Self::Rule { chain, rule, .. } => id.rule_text(chain, &id.text_of(rule)),
            Self::DeleteRule { chain, handle } => format!("{table} delete rule with handle {handle} of chain {chain}"),
            Self::Flush(chain) => format!("{table} flush chain {chain}"),
            Self::DeleteChain(chain) => format!("{table} delete chain {chain}"),
            Self::DeleteSet(scope) => format!("{table} delete set {}", set_name(*scope)),
            Self::DeleteTable => format!("delete table {table}"),
        }
    }

    /// Appends the messages of the step; numbers its sets from `next_set` and advances it.
    pub(super) fn write(&self, table: TableId, batch: &mut Batch<'_>, next_set: &mut u32) {
        let mut message = |verb, flags, write: &dyn Fn(&mut Attributes)| {
            batch.message(verb, flags, family_of(table), |list| {
                write(list.text(nfta::TABLE, table.name()));
                list
            });
        };
        match self {
            Self::Table => message(Verb::NewTable, NLM_F_CREATE, &|_| ()),
            Self::Chain { name, hook } => message(Verb::NewChain, NLM_F_CREATE, &|list| {
                let list = list.text(nfta::CHAIN_NAME, name);
                if let Some(hook) = hook {
                    attach(list, *hook, priority_of(table, hook.like));
                }
            }),
            Self::Set(scope) => {
                batch
                    .message(Verb::NewSet, NLM_F_CREATE, NFPROTO_INET, |list| containers::set(list, *scope, *next_set));
                *next_set += 1;
            }
            Self::Element(element) => element.write(batch, Verb::NewSetElements),
            Self::Rule { chain, before, rule } => {
                let first_set = *next_set;
                if let TableId::Native(table) = table {
                    for set in sets(rule, first_set) {
                        set.write(batch, table.name());
                        *next_set += 1;
                    }
                }
                let flags = if before.is_none() { NLM_F_CREATE | NLM_F_APPEND } else { NLM_F_CREATE };
                batch.message(Verb::NewRule, flags, family_of(table), |list| {
                    let list = list.text(nfta::TABLE, table.name()).text(nfta::RULE_CHAIN, chain);
                    let list = write_rule(list, rule, table, first_set);
                    match before {
                        Some(handle) => list.be64(nfta::RULE_POSITION, *handle),
                        None => list,
                    }
                });
            }
            Self::DeleteRule { chain, handle } => message(Verb::DelRule, 0, &|list| {
                list.text(nfta::RULE_CHAIN, chain).be64(nfta::RULE_HANDLE, *handle);
            }),
            Self::Flush(chain) => message(Verb::DelRule, 0, &|list| _ = list.text(nfta::RULE_CHAIN, chain)),
            Self::DeleteChain(name) => message(Verb::DelChain, 0, &|list| _ = list.text(nfta::CHAIN_NAME, name)),
            Self::DeleteSet(scope) => {
                message(Verb::DelSet, 0, &|list| _ = list.text(nfta::SET_NAME, set_name(*scope)));
            }
            Self::DeleteTable => message(Verb::DelTable, 0, &|_| ()),
        }
    }
}

/// Appends the expressions of a rule, and the protocol that xtables extensions check.
fn write_rule<'l>(list: &'l mut Attributes, rule: &Rule, table: TableId, first_set: u32) -> &'l mut Attributes {
    match table {
        TableId::Native(_) => list.nested(nfta::RULE_EXPRESSIONS, |list| {
            encode(rule, first_set, &mut |expression| _ = expression.write(list));
            list
        }),
        TableId::Iptables(family, _) => {
            let list = list.nested(nfta::RULE_EXPRESSIONS, |list| iptables::expressions(list, rule, family));
            match rule.protocol().and_then(|protocol| u32::try_from(protocol).ok()) {
                Some(protocol) => list.nested(nfta::RULE_COMPAT, |list| iptables::compat(list, protocol)),
                None => list,
            }
        }
    }
}

/// Appends hook, priority, policy and type of a base chain to its attributes.
fn attach(chain: &mut Attributes, BaseHook { like, hook }: BaseHook, priority: i32) {
    let chain = chain.nested(nfta::CHAIN_HOOK, |list| {
        list.be32(nfta::HOOK_NUMBER, hook.number()).bytes(nfta::HOOK_PRIORITY, &priority.to_be_bytes())
    });
    chain.be32(nfta::CHAIN_POLICY, NF_ACCEPT).text(nfta::CHAIN_TYPE, chain_type(like, hook));
}
