//! The two rule formats in which the same redirection can be written into the kernel: plan, commit and drift for either,
//! together with the exclusions, which are native in both. `plugin` decides which format a pod gets.

use super::drift::{Drift, drift, earlier_drift, native_drift};
use super::live::LiveRuleset;
use super::native::rule::NativeTable;
use super::native::{NativeChange, NativeTables, attached_to_hook};
use super::nfnetlink::{Batch, NLM_F_APPEND, NfError, NfSocket, Verb, nfta};
use super::plan::{CreatedTables, MAX_DELETIONS, PlannedStep, Step, changes};
use super::rule::{Family, Hook, Rule, Ruleset, Table};
use super::{iptables, native};
use crate::cni::RuleFormatSetting;
use crate::netlink::NLM_F_CREATE;
use crate::netlink::attributes::Attributes;
use serde::{Deserialize, Serialize};

/// The format in which a pod's redirection is written; a pod never has both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RuleFormat {
    /// The rules that iptables-nft itself would write, in its tables.
    #[default]
    Iptables,
    /// Native rules, in detour's own tables of family `inet`.
    Nftables,
}

/// A transaction: changes in the tables of iptables, then changes in detour's native tables. It borrows from the live
/// and the desired rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transaction<'a> {
    /// The changes in the tables of iptables; none in the format `nftables`.
    pub iptables: Vec<PlannedStep<'a>>,
    /// The changes in detour's native tables; in the format `iptables`, only in the one of exclusions.
    pub native: Vec<NativeChange>,
}

impl RuleFormat {
    /// Returns the format that the configuration key `dialect` requests; `None` for `auto`.
    #[must_use]
    pub const fn requested(setting: RuleFormatSetting) -> Option<Self> {
        match setting {
            RuleFormatSetting::Auto => None,
            RuleFormatSetting::Iptables => Some(Self::Iptables),
            RuleFormatSetting::Nftables => Some(Self::Nftables),
        }
    }

    /// Returns the name as in the configuration key `dialect`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        }
    }

    /// Returns the native tables of `desired` in this format.
    #[must_use]
    pub fn native(self, desired: &Ruleset) -> NativeTables {
        native::tables(desired, self == Self::Nftables)
    }

    /// Returns the changes that lead from `live` to `desired`. `previous` are the rules desired before, and `made` the
    /// tables and chains that detour created; they matter only in the tables of iptables, which detour shares with
    /// other tools.
    #[must_use]
    pub fn plan<'a>(
        self,
        live: &'a LiveRuleset,
        previous: &Ruleset,
        desired: &'a Ruleset,
        made: &CreatedTables,
    ) -> Transaction<'a> {
        let iptables = match self {
            Self::Iptables => changes(live, previous, desired, made),
            Self::Nftables => Vec::new(),
        };
        let native = native::changes(&live.native, &live.containers, self.native(desired));
        Transaction { iptables, native }
    }

    /// Returns how `live` differs from `desired`. Foreign rules in places where they are allowed don't count.
    #[must_use]
    pub fn drift(self, live: &LiveRuleset, desired: &Ruleset) -> Vec<Drift> {
        let mut found = match self {
            Self::Iptables => drift(live, desired),
            Self::Nftables => Vec::new(),
        };
        found.extend(native_drift(&live.native, &self.native(desired)));
        found.extend(earlier_drift(live, desired));
        found
    }
}

impl LiveRuleset {
    /// Returns the format of detour's live redirection, if there is one. Native tables always are detour's; a chain in
    /// the tables of iptables is if it is in `previous`.
    #[must_use]
    pub fn rule_format(&self, previous: &Ruleset) -> Option<RuleFormat> {
        let is_native = self.native.keys().any(|table| matches!(table, NativeTable::Of(_)));
        let mut chains = self.chains();
        match (is_native, chains.any(|(family, table, name, _)| previous.has_chain(family, table, name))) {
            (true, _) => Some(RuleFormat::Nftables),
            (false, true) => Some(RuleFormat::Iptables),
            (false, false) => None,
        }
    }
}

impl Transaction<'_> {
    /// Returns the number of changes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.iptables.len() + self.native.len()
    }

    /// Reports whether there is nothing to change.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reports whether the transaction writes rules that compare control groups. The kernel counts their levels from
    /// the cgroup namespace of the writing process.
    #[must_use]
    pub fn compares_cgroups(&self) -> bool {
        self.native.iter().any(NativeChange::compares_cgroups)
    }

    /// Reports whether the kernel needs support for control groups to make a change.
    #[must_use]
    pub fn is_about_containers(&self, index: usize) -> bool {
        let change = index.checked_sub(self.iptables.len()).and_then(|index| self.native.get(index));
        change.is_some_and(NativeChange::is_about_containers)
    }

    /// Reports whether a change is in the tables of iptables.
    #[must_use]
    pub fn is_in_iptables(&self, index: usize) -> bool {
        index < self.iptables.len()
    }

    /// Commits the transaction atomically, provided that the rules are still those of `live`.
    ///
    /// # Errors
    /// The kernel refuses ([`NfError::Refused`] with the index of the change), or another process changed the rules.
    pub fn commit(&self, socket: &mut NfSocket, live: &LiveRuleset) -> Result<(), NfError> {
        check_deletions(&self.iptables)?;
        // The number of messages after each change, which tells the change of a refused message.
        let mut ends = Vec::with_capacity(self.len());
        let write = |batch: &mut Batch<'_>| {
            for ((family, table), step) in &self.iptables {
                message(batch, *family, *table, step);
                ends.push(batch.len());
            }
            let mut next_set = 1;
            for change in &self.native {
                change.write(batch, &mut next_set);
                ends.push(batch.len());
            }
        };
        socket.transact(live.generation, write).map_err(|error| match error {
            NfError::Refused { index, errno } => {
                NfError::Refused { index: index.map(|index| ends.partition_point(|end| *end <= index)), errno }
            }
            other => other,
        })
    }

    /// Describes one of the changes.
    #[must_use]
    pub fn describe(&self, index: usize) -> Option<String> {
        let Some(((family, table), step)) = self.iptables.get(index) else {
            return self.native.get(index.checked_sub(self.iptables.len())?).map(ToString::to_string);
        };
        let step = match step {
            Step::Table => "create the table".to_owned(),
            Step::Hook(hook) => format!("create chain {}", hook.chain()),
            Step::Chain(name) => format!("create chain {name}"),
            Step::Rule { chain, rule, .. } => format!("-A {chain} {rule}"),
            Step::DeleteRule { chain, handle } => format!("delete rule with handle {handle} of chain {chain}"),
            Step::Flush(name) => format!("flush chain {name}"),
            Step::DeleteChain(name) => format!("delete chain {name}"),
            Step::DeleteTable => "delete the table".to_owned(),
        };
        Some(format!("{} {} {step}", family.name(), table.name()))
    }
}

/// Refuses to delete more than [`MAX_DELETIONS`] rules of a chain.
fn check_deletions(changes: &[PlannedStep<'_>]) -> Result<(), NfError> {
    let delete_in_same_chain = |a: &PlannedStep<'_>, b: &PlannedStep<'_>| match (a, b) {
        ((a, Step::DeleteRule { chain: from, .. }), (b, Step::DeleteRule { chain, .. })) => (a, from) == (b, chain),
        _ => false,
    };
    match changes.chunk_by(delete_in_same_chain).find(|run| run.len() > MAX_DELETIONS) {
        Some(run) => Err(NfError::TooManyDeletions { count: run.len(), limit: MAX_DELETIONS }),
        None => Ok(()),
    }
}

fn message(batch: &mut Batch<'_>, family: Family, table: Table, step: &Step<'_>) {
    let mut message = |verb, flags, write: &dyn Fn(&mut Attributes)| {
        batch.message(verb, flags, family.number(), |list| {
            write(list.text(nfta::TABLE, table.name()));
            list
        });
    };
    match step {
        Step::Table => message(Verb::NewTable, NLM_F_CREATE, &|_| ()),
        Step::Hook(hook) => message(Verb::NewChain, NLM_F_CREATE, &|list| built_in(list, table, *hook)),
        Step::Chain(name) => message(Verb::NewChain, NLM_F_CREATE, &|list| _ = list.text(nfta::CHAIN_NAME, name)),
        Step::Rule { chain, before: None, rule } => {
            message(Verb::NewRule, NLM_F_CREATE | NLM_F_APPEND, &|list| {
                with_rule(list.text(nfta::RULE_CHAIN, chain), rule, family);
            });
        }
        Step::Rule { chain, before: Some(handle), rule } => message(Verb::NewRule, NLM_F_CREATE, &|list| {
            with_rule(list.text(nfta::RULE_CHAIN, chain), rule, family).be64(nfta::RULE_POSITION, *handle);
        }),
        Step::DeleteRule { chain, handle } => message(Verb::DelRule, 0, &|list| {
            list.text(nfta::RULE_CHAIN, chain).be64(nfta::RULE_HANDLE, *handle);
        }),
        Step::Flush(chain) => message(Verb::DelRule, 0, &|list| _ = list.text(nfta::RULE_CHAIN, chain)),
        Step::DeleteChain(name) => message(Verb::DelChain, 0, &|list| _ = list.text(nfta::CHAIN_NAME, name)),
        Step::DeleteTable => message(Verb::DelTable, 0, &|_| ()),
    }
}

/// Adds name, hook, priority (linux/netfilter_ipv4.h), policy and type of a built-in chain, as iptables-nft sets them.
fn built_in(list: &mut Attributes, table: Table, hook: Hook) {
    let priority: i32 = match table {
        Table::Raw => -300,
        Table::Mangle => -150,
        Table::Nat => -100,
    };
    attached_to_hook(list.text(nfta::CHAIN_NAME, hook.chain()), table, hook, priority);
}

/// Adds the expressions of a rule and its protocol.
fn with_rule<'l>(list: &'l mut Attributes, rule: &Rule, family: Family) -> &'l mut Attributes {
    list.nested(nfta::RULE_EXPRESSIONS, |list| iptables::expressions(list, rule, family));
    match rule.protocol {
        Some(protocol) => list.nested(nfta::RULE_COMPAT, |list| iptables::compat(list, protocol)),
        None => list,
    }
}
