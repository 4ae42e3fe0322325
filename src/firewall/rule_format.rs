//! The two ways to write the same rules into the kernel. Both read, plan, commit and compare;
//! which one a pod gets is decided where pods are known.
//!
//! Tables of the older iptables, which are no part of nf_tables.
//!
//! Changes as netlink messages, sent as one transaction.

use super::drift::{Drift, drift};
use super::live::LiveRuleset;
use super::native::rule::chain_type;
use super::nfnetlink::attributes::Attributes;
use super::nfnetlink::{Message, NLM_F_APPEND, NLM_F_CREATE, NfError, NfSocket, Verb};
use super::plan::{BY_HANDLE, CreatedTables, PlannedStep, Step, changes};
use super::rule::Ruleset;
use super::rule::{Family, Hook, Rule, Table};
use super::{iptables, native};
use crate::trusted_file::read_text;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// How the rules of a pod are written; never both ways at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RuleFormat {
    /// What iptables-nft itself would write, in its tables.
    #[default]
    Iptables,
    /// Native rules, in tables of family `inet` of our own.
    Nftables,
}

/// A transaction in one of the two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transaction {
    /// In iptables' tables.
    Iptables(Vec<PlannedStep>),
    /// In our own.
    Nftables(Vec<native::NativeChange>),
}

impl RuleFormat {
    /// The name, as configurations have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        }
    }

    /// The changes that lead from `live` to `desired`. `previous` is what was asked for before,
    /// and `made` what was not there before us; only iptables' tables, which are not ours alone,
    /// need the two.
    #[must_use]
    pub fn plan(self, live: &LiveRuleset, previous: &Ruleset, desired: &Ruleset, made: &CreatedTables) -> Transaction {
        match self {
            Self::Iptables => Transaction::Iptables(changes(live, previous, desired, made)),
            Self::Nftables => Transaction::Nftables(native::changes(&live.native, &native::translate(desired))),
        }
    }

    /// How `live` differs from `desired`. Foreign rules are no difference where they may be.
    #[must_use]
    pub fn drift(self, live: &LiveRuleset, desired: &Ruleset) -> Vec<Drift> {
        match self {
            Self::Iptables => drift(live, desired),
            Self::Nftables => native::drift(&live.native, &native::translate(desired)),
        }
    }
}

impl LiveRuleset {
    /// In which dialect the kernel holds rules of ours: native tables are always ours, iptables'
    /// where one of their chains is among those of `previous` or is called like ours.
    #[must_use]
    pub fn dialect(&self, previous: &Ruleset) -> Option<RuleFormat> {
        let ours = |(family, table, name, _): (_, _, &str, _)| {
            name.starts_with("DETOUR_") || previous.has_chain(family, table, name)
        };
        match (self.native.is_empty(), self.chains().any(ours)) {
            (false, _) => Some(RuleFormat::Nftables),
            (true, true) => Some(RuleFormat::Iptables),
            (true, false) => None,
        }
    }
}

impl Transaction {
    /// How many changes it has.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Iptables(changes) => changes.len(),
            Self::Nftables(changes) => changes.len(),
        }
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Commits it, all or nothing, on top of what `live` has read.
    ///
    /// # Errors
    /// The kernel refuses, where `index` is that of a change, or somebody changed the rules since.
    pub fn commit(&self, socket: &mut NfSocket, live: &LiveRuleset) -> Result<(), NfError> {
        match self {
            Self::Iptables(changes) => commit(socket, live, changes),
            Self::Nftables(changes) => {
                let (places, messages): (Vec<usize>, Vec<Message>) = native::messages(changes).into_iter().unzip();
                socket.transact(&messages, live.generation).map_err(|error| match error {
                    NfError::Refused { index, errno } => {
                        NfError::Refused { index: index.and_then(|index| places.get(index).copied()), errno }
                    }
                    other => other,
                })
            }
        }
    }

    /// One of its changes, in words.
    #[must_use]
    pub fn describe(&self, index: usize) -> Option<String> {
        match self {
            Self::Iptables(changes) => changes.get(index).map(|((family, table), step)| match step {
                Step::Rule { chain, rule, .. } => format!("{} {} -A {chain} {rule}", family.name(), table.name()),
                step => format!("{} {} {step:?}", family.name(), table.name()),
            }),
            Self::Nftables(changes) => changes.get(index).map(ToString::to_string),
        }
    }
}

/// There is a handful of tables, each with a name of at most 32 bytes.
const LARGEST: u64 = 64 << 10;

/// The tables of `iptables-legacy` that are active in the calling thread's namespace; a kernel
/// without them has none. The kernel tells their names, not what is in them
/// (net/netfilter/x_tables.c, `xt_table_seq_ops`).
#[must_use]
pub fn legacy_tables() -> Vec<(Family, String)> {
    let names = |family: Family| {
        let file = match family {
            Family::Ip => "/proc/thread-self/net/ip_tables_names",
            Family::Ip6 => "/proc/thread-self/net/ip6_tables_names",
        };
        let text = read_text(Path::new(file), LARGEST).unwrap_or_default();
        text.lines().map(|name| (family, name.to_owned())).collect::<Vec<_>>()
    };
    Family::ALL.into_iter().flat_map(names).collect()
}

/// Commits `changes`, all or nothing, on top of what `live` has read.
///
/// # Errors
/// The kernel refuses, another process changed the rules since, or more rules of a chain would be deleted
/// one by one than [`BY_HANDLE`].
pub(super) fn commit(socket: &mut NfSocket, live: &LiveRuleset, changes: &[PlannedStep]) -> Result<(), NfError> {
    let deletes_alike = |a: &PlannedStep, b: &PlannedStep| match (a, b) {
        ((a, Step::DeleteRule { chain: from, .. }), (b, Step::DeleteRule { chain, .. })) => (a, from) == (b, chain),
        _ => false,
    };
    if let Some(run) = changes.chunk_by(deletes_alike).find(|run| run.len() > BY_HANDLE) {
        return Err(NfError::TooManyDeletions { count: run.len(), limit: BY_HANDLE });
    }
    let messages: Vec<Message> = changes.iter().map(|((family, table), step)| message(*family, *table, step)).collect();
    socket.transact(&messages, live.generation)
}

fn message(family: Family, table: Table, step: &Step) -> Message {
    let named = || Attributes::new().text(1, table.name());
    let (verb, flags, attributes) = match step {
        Step::Table => (Verb::NewTable, NLM_F_CREATE, named()),
        Step::Hook(hook) => (Verb::NewChain, NLM_F_CREATE, built_in(named(), table, *hook)),
        Step::Chain(name) => (Verb::NewChain, NLM_F_CREATE, named().text(3, name)),
        Step::Rule { chain, before, rule } => {
            let attributes = with_rule(named().text(2, chain), rule, family);
            match before {
                Some(handle) => (Verb::NewRule, NLM_F_CREATE, attributes.be64(6, *handle)),
                None => (Verb::NewRule, NLM_F_CREATE | NLM_F_APPEND, attributes),
            }
        }
        Step::DeleteRule { chain, handle } => (Verb::DelRule, 0, named().text(2, chain).be64(3, *handle)),
        Step::Flush(chain) => (Verb::DelRule, 0, named().text(2, chain)),
        Step::DeleteChain(name) => (Verb::DelChain, 0, named().text(3, name)),
        Step::DeleteTable => (Verb::DelTable, 0, named()),
    };
    Message { verb, flags, family: family.number(), attributes }
}

/// What iptables-nft gives its built-in chains: hook, priority (linux/netfilter_ipv4.h), policy
/// and type.
fn built_in(attributes: Attributes, table: Table, hook: Hook) -> Attributes {
    const NF_ACCEPT: u32 = 1;
    let priority: i32 = match table {
        Table::Raw => -300,
        Table::Mangle => -150,
        Table::Nat => -100,
    };
    let kind = chain_type(table, hook);
    let where_to = Attributes::new().be32(1, hook.number()).bytes(2, &priority.to_be_bytes());
    attributes.text(3, hook.chain()).nested(4, &where_to).be32(5, NF_ACCEPT).text(7, kind)
}

fn with_rule(attributes: Attributes, rule: &Rule, family: Family) -> Attributes {
    let attributes = attributes.nested(4, &iptables::expressions(rule, family));
    match iptables::compat(rule) {
        Some(compat) => attributes.nested(5, &compat),
        None => attributes,
    }
}
