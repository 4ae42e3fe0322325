//! The two rule formats in which the same redirection can be written into the kernel: plan, commit and drift for either,
//! together with the exclusions, which are native in both. `plugin` decides which format a pod gets.
//!
//! From a network namespace that contains too many rules to be read, detour's rules are removed without reading all: only
//! the beginning of each built-in chain is read, and otherwise detour's chains are flushed by name.

use super::drift::{Drift, earlier_drift, iptables_drift, native_drift};
use super::expression::Counter;
use super::foreign::{LiveRule, Outline};
use super::iptables;
use super::live::LiveRuleset;
use super::native::rule::{NativeTable, TableId};
use super::native::{self, NativeTables};
use super::nfnetlink::{Batch, NfError, NfSocket, Verb, nfta, retry_changed};
use super::plan::{CreatedTables, MAX_DELETIONS, changes};
use super::rule::{Hook, is_redirection_chain};
use super::ruleset::Ruleset;
use super::step::{PlannedStep, Step};
use crate::cni::RuleFormat;
use crate::netlink::DumpLimit;
use crate::netlink::attributes::{Attributes, find_text};
use nix::errno::Errno;

/// A transaction: changes in the tables of iptables, then changes in detour's native tables. It borrows from the live
/// and the desired rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transaction<'a> {
    /// The changes in the tables of iptables; none in the format `nftables`.
    pub iptables: Vec<PlannedStep<'a>>,
    /// The changes in detour's native tables; in the format `iptables`, only in the one of exclusions.
    pub native: Vec<PlannedStep<'a>>,
}

impl RuleFormat {
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
            Self::Iptables => iptables_drift(live, desired),
            Self::Nftables => Vec::new(),
        };
        found.extend(native_drift(&live.native, &self.native(desired)));
        found.extend(self.earlier(live, desired));
        found
    }

    /// Returns the chains of other tools that can redirect a connection before the rules of `desired` do.
    #[must_use]
    pub fn earlier(self, live: &LiveRuleset, desired: &Ruleset) -> Vec<Drift> {
        earlier_drift(live, desired, self)
    }
}

impl LiveRuleset {
    /// Returns the format of detour's live redirection, if there is one: the `recorded` one if any of its chains exists,
    /// whose iptables chains are those of `known`. Without a record, native tables that redirect are detour's.
    #[must_use]
    pub fn rule_format(&self, recorded: Option<RuleFormat>, known: &Ruleset) -> Option<RuleFormat> {
        let exists = match recorded {
            Some(RuleFormat::Iptables) => {
                self.chains().any(|(family, table, name, _)| known.has_chain(family, table, name))
            }
            Some(RuleFormat::Nftables) => self.native.keys().any(|table| matches!(table, NativeTable::Of(_))),
            None => return self.redirects_natively().then_some(RuleFormat::Nftables),
        };
        recorded.filter(|_| exists)
    }
}

impl Transaction<'_> {
    fn steps(&self) -> impl Iterator<Item = &PlannedStep<'_>> {
        self.iptables.iter().chain(&self.native)
    }

    /// Returns the number of steps.
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
        self.steps().any(|(_, step)| step.compares_cgroups())
    }

    /// Reports whether the kernel needs support for control groups for a step.
    #[must_use]
    pub fn is_about_containers(&self, index: usize) -> bool {
        self.steps().nth(index).is_some_and(|(_, step)| step.is_about_containers())
    }

    /// Reports whether a step is in the tables of iptables.
    #[must_use]
    pub fn is_in_iptables(&self, index: usize) -> bool {
        index < self.iptables.len()
    }

    /// Commits the transaction atomically, provided that the rules are still those of `live`.
    ///
    /// # Errors
    /// The kernel refuses ([`NfError::Refused`] with the index of the step), or another process changed the rules.
    pub fn commit(&self, socket: &mut NfSocket, live: &LiveRuleset) -> Result<(), NfError> {
        check_deletions(&self.iptables)?;
        // The number of messages after each step, which tells the step of a refused message.
        let mut ends = Vec::with_capacity(self.len());
        let write = |batch: &mut Batch<'_>| {
            let mut next_set = 1;
            for (table, step) in self.steps() {
                step.write(*table, batch, &mut next_set);
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

    /// Describes one of the steps.
    #[must_use]
    pub fn describe(&self, index: usize) -> Option<String> {
        self.steps().nth(index).map(|(table, step)| step.describe(*table))
    }
}

/// Refuses to delete more than [`MAX_DELETIONS`] rules of a chain.
fn check_deletions(steps: &[PlannedStep<'_>]) -> Result<(), NfError> {
    let delete_in_same_chain = |a: &PlannedStep<'_>, b: &PlannedStep<'_>| match (a, b) {
        ((a, Step::DeleteRule { chain: from, .. }), (b, Step::DeleteRule { chain, .. })) => (a, from) == (b, chain),
        _ => false,
    };
    match steps.chunk_by(delete_in_same_chain).find(|run| run.len() > MAX_DELETIONS) {
        Some(run) => Err(NfError::TooManyDeletions { count: run.len(), limit: MAX_DELETIONS }),
        None => Ok(()),
    }
}

/// How much of each built-in chain is read. Detour's rules come first, unless another tool inserted rules.
const MAX_READ_PER_CHAIN: DumpLimit = DumpLimit { objects: 5000, bytes: 4 << 20 };

/// Removes the chains of `own`, the rules that jump to them, and the tables and chains that detour `made`. If those
/// rules can't be found, flushes the chains, which then have no effect.
///
/// # Errors
/// The kernel refuses to flush the chains or to delete the native tables.
pub fn remove(format: RuleFormat, own: &Ruleset, made: &CreatedTables) -> Result<(), NfError> {
    let mut socket = NfSocket::open()?;
    if format == RuleFormat::Iptables {
        let live = read_beginnings(&mut socket, own);
        let removed = live.and_then(|live| {
            let no_rules = Ruleset::default();
            let plan = format.plan(&live, own, &no_rules, made);
            plan.commit(&mut socket, &live)
        });
        match removed {
            Ok(()) => return Ok(()),
            Err(error) => tracing::debug!("can't remove the rules: {error}; flushing detour's chains instead"),
        }
    }
    // One transaction for each: a missing chain or table, or one of another owner, would fail all others with it.
    flushes(format, own).into_iter().map(|flush| send(&mut socket, flush)).fold(Ok(()), Result::and)
}

/// Reads the live rules that removal needs: of each built-in chain, the rules of `own` and those that jump to
/// detour's chains, and one placeholder for all others.
fn read_beginnings(socket: &mut NfSocket, own: &Ruleset) -> Result<LiveRuleset, NfError> {
    let mut live = LiveRuleset::without_rules(socket)?;
    for (key @ (family, table), chains) in &mut live.tables {
        let hooks = own.tables.get(key).map(|rules| &rules.hooks);
        for (name, chain) in chains.iter_mut().filter(|(_, chain)| chain.built_in) {
            let own_rules = Hook::of_chain(name).and_then(|hook| hooks?.get(&hook)).map_or(&[][..], Vec::as_slice);
            let is_ours = |rule: &LiveRule| {
                rule.jump_target().is_some_and(is_redirection_chain)
                    || rule.rule.as_ref().is_ok_and(|rule| own_rules.contains(rule))
            };
            let mut has_others = false;
            let which = Attributes::of(|list| list.text(nfta::TABLE, table.name()).text(nfta::RULE_CHAIN, name));
            socket.allow(MAX_READ_PER_CHAIN);
            let read = socket.dump_of(Verb::GetRule, family.number(), which, |_, body| {
                let of_chain = find_text(body, nfta::RULE_CHAIN) == Some(name);
                match LiveRule::read(body, |list| iptables::decode(list, *family)).filter(|_| of_chain) {
                    Some(rule) if is_ours(&rule) => chain.rules.push(rule),
                    _ => has_others = true,
                }
            });
            match read {
                Err(NfError::TooMany(_)) => has_others = true,
                other => other?,
            }
            if has_others {
                chain.rules.push(placeholder());
            }
        }
        // Not read: with a placeholder, the plan flushes the chain before it deletes it.
        for chain in chains.values_mut().filter(|chain| !chain.built_in) {
            chain.rules.push(placeholder());
        }
    }
    Ok(live)
}

fn placeholder() -> LiveRule {
    LiveRule { handle: 0, rule: Err(Outline::default()), counter: Counter::default() }
}

/// Returns the steps that delete detour's native tables, and in the iptables format flush each chain of `own`.
fn flushes(format: RuleFormat, own: &Ruleset) -> Vec<PlannedStep<'_>> {
    let delete = |table: NativeTable| (TableId::Native(table), Step::DeleteTable);
    let mut flushes: Vec<PlannedStep<'_>> = NativeTable::ALL.map(delete).into();
    if format == RuleFormat::Iptables {
        for ((family, table), rules) in &own.tables {
            let id = TableId::Iptables(*family, *table);
            flushes.extend(rules.chains.iter().map(|(chain, _)| (id, Step::Flush(chain.as_ref().into()))));
        }
    }
    flushes
}

/// Commits one step as a transaction; a missing chain or table is no error.
fn send(socket: &mut NfSocket, step: PlannedStep<'_>) -> Result<(), NfError> {
    let transaction = Transaction { native: vec![step], ..Transaction::default() };
    let sent = retry_changed(|| {
        let live = LiveRuleset { generation: socket.generation()?, ..LiveRuleset::default() };
        transaction.commit(socket, &live)
    });
    match sent {
        Err(NfError::Refused { errno: Errno::ENOENT, .. }) => Ok(()),
        other => other,
    }
}
