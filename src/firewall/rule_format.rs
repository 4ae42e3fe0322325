//! The two ways to write the same rules into the kernel. Both read, plan, commit and compare;
//! which one a pod gets is decided where pods are known.

use super::commit::commit;
use super::drift::{Drift, drift};
use super::live::LiveRuleset;
use super::native;
use super::nfnetlink::{NfError, Message, NfSocket};
use super::plan::{self, CreatedTables, Step, changes};
use super::ruleset::Ruleset;
use serde::{Deserialize, Serialize};

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
    Iptables(Vec<plan::PlannedStep>),
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
