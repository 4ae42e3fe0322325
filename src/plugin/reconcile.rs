//! Reconciles the rules in a pod's network namespace with the desired state of all attachments of the container.
//!
//! The intent is saved before the rules are committed. If the process is killed in between, the next call knows which
//! rules may be in the kernel and completes or removes them.

use super::desired_policy::{check_rules, fixtures, ruleset, unrecorded_fixtures};
use super::netns_state::{ForeignRedirection, FormatFacts, choose_format};
use super::record::{AttachmentRecord, ContainerRecords};
use crate::cgroup;
use crate::cni::{Code, Error, LIST_ITEMS, RuleFormatSetting, at_most};
use crate::firewall::nfnetlink::{NfError, NfSocket};
use crate::firewall::{self, CreatedTables, LiveRuleset, RuleFormat, Transaction};
use crate::netns::{self, Fixture, Fixtures, LockMode, NetNs, OwnFamilies};
use crate::policy::{Interception, Policy};
use crate::state::{Attachment, Store};
use nix::errno::Errno;
use std::collections::{BTreeSet, HashSet};
use std::time::{Duration, Instant};

/// How long a call waits for another call in the same network namespace.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum number of attempts if another process changes the rules concurrently.
const MAX_ATTEMPTS: usize = 100;
/// The time limit for these attempts: a process with CAP_NET_ADMIN in the pod can change rules without end.
const RETRY_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of netlink socket failures, each of which leaves the outcome of a transaction unknown.
const MAX_SOCKET_FAILURES: usize = 3;

/// What a call changes in the desired state of one attachment.
#[derive(Debug, Clone)]
pub(super) enum Operation {
    /// Replaces its policy, with a setting for the rule format.
    Apply(Policy, RuleFormatSetting),
    /// Restores its saved policy; does nothing without one.
    Reapply,
    /// Removes its policy.
    Remove,
}

/// Applies `operation` to the attachment and reconciles the rules with the policies of all attachments of the
/// container.
///
/// # Errors
/// The network namespace can't be entered, the attachments contradict each other, the state can't be saved, or the
/// kernel refuses the rules. Rules of this call that may be in the kernel are recorded in the saved state.
pub(super) fn reconcile(
    store: &Store,
    attachment: &Attachment,
    netns: &NetNs,
    operation: Operation,
) -> Result<(), Error> {
    let lock_mode = if operation.is_removal() { LockMode::CleanUp } else { LockMode::Change };
    netns.enter_to(lock_mode, LOCK_TIMEOUT, || match (Reconciler { store, attachment, netns }.run(operation)) {
        Err(error) if lock_mode == LockMode::CleanUp && error.code == Code::ForeignRules => {
            abandon(store, attachment, netns, &error)
        }
        other => other,
    })
}

impl Operation {
    const fn is_removal(&self) -> bool {
        matches!(self, Self::Remove)
    }

    const fn dialect(&self) -> RuleFormatSetting {
        match self {
            Self::Apply(_, dialect) => *dialect,
            Self::Reapply | Self::Remove => RuleFormatSetting::Auto,
        }
    }

    fn redirects(&self) -> bool {
        matches!(self, Self::Apply(policy, _) if policy.redirect().is_some())
    }

    /// Excludes the interfaces of secondary networks that exist already, if the policy does not capture such networks.
    fn exclude_secondary_networks(&mut self) -> Result<(), Error> {
        let Self::Apply(Policy { interception: Interception::On(redirect), .. }, _) = self else { return Ok(()) };
        if !redirect.capture_secondary_networks {
            let mut excluded: HashSet<String> = redirect.exclude_interfaces.iter().cloned().collect();
            let secondary = netns::secondary_interfaces()?;
            at_most(LIST_ITEMS, "interfaces", "the pod's network namespace", secondary.len())?;
            redirect.exclude_interfaces.extend(secondary.into_iter().filter(|name| excluded.insert(name.clone())));
        }
        Ok(())
    }
}

struct Reconciler<'a> {
    store: &'a Store,
    attachment: &'a Attachment,
    netns: &'a NetNs,
}

/// The inputs of one attempt.
#[derive(Clone, Copy)]
struct Attempt<'a> {
    operation: &'a Operation,
    /// Whether an ADD made the call: limits apply to an ADD only.
    is_add: bool,
    addresses: OwnFamilies,
    /// Whether the kernel has refused the rules in iptables format.
    force_nftables: bool,
}

/// What a call has begun, and may have to undo.
#[derive(Default)]
struct StartedWork {
    /// Whether the intent is saved, or may be.
    has_intent: bool,
    /// The fixtures that were added to the network namespace, or may be.
    added: BTreeSet<Fixture>,
    /// The generation of the rules before a transaction whose outcome is unknown.
    unknown_since: Option<u32>,
}

/// The changes to commit after the intent is saved.
struct PendingWork {
    /// The records that are saved until the changes are complete.
    records: ContainerRecords,
    transaction: Transaction,
    /// Whether the rules can be written in nftables format if the kernel refuses this one.
    may_use_nftables: bool,
    /// The fixtures that the rules need.
    needed: Fixtures,
    /// Those that do not exist.
    missing: BTreeSet<Fixture>,
    /// The fixtures of rules without saved state.
    unrecorded: Fixtures,
}

/// The reason why one attempt failed.
enum Obstacle {
    /// Another process changed the rules or the attachments concurrently.
    Changed,
    /// The kernel does not support the rule format.
    Unsupported(Error),
    /// The netlink socket failed.
    Socket(Error),
    /// An error that a retry does not solve.
    Final(Error),
}

impl Obstacle {
    fn new(error: NfError, transaction: Option<&Transaction>) -> Self {
        match error {
            NfError::Changed => Self::Changed,
            NfError::Socket(_) => Self::Socket(refused(&error, transaction)),
            _ => Self::Final(refused(&error, transaction)),
        }
    }
}

impl From<Error> for Obstacle {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

impl Reconciler<'_> {
    fn run(&self, mut operation: Operation) -> Result<(), Error> {
        let saved = self.read_records()?;
        let own = saved.get(self.attachment);
        let is_add = matches!(operation, Operation::Apply(..));
        let is_removal = operation.is_removal();
        if matches!(operation, Operation::Reapply) {
            let Some(own) = own else { return Ok(()) };
            operation = Operation::Apply(own.policy.clone(), RuleFormatSetting::Auto);
        }
        operation.exclude_secondary_networks()?;
        if is_removal && own.is_none() && !saved.0.is_empty() {
            return Ok(());
        }
        let mut started = StartedWork::default();
        let outcome = self.commit(&operation, is_add, &mut started).and_then(|work| self.complete(work, is_removal));
        // The next DEL retries what a DEL can't remove.
        if outcome.is_err() && !is_removal {
            self.undo(own, &started);
        }
        outcome
    }

    /// Retries until the rules are committed.
    fn commit(&self, operation: &Operation, is_add: bool, started: &mut StartedWork) -> Result<PendingWork, Error> {
        let mut attempt = Attempt { operation, is_add, addresses: netns::own_families()?, force_nftables: false };
        let mut socket_failures = 0;
        let deadline = Instant::now() + RETRY_TIMEOUT;
        for _ in (0..MAX_ATTEMPTS).take_while(|_| Instant::now() < deadline) {
            match self.commit_once(attempt, started) {
                Ok(work) => return Ok(work),
                Err(Obstacle::Changed) => {}
                Err(Obstacle::Unsupported(error)) => {
                    tracing::info!("using the nftables rule format: {error}");
                    attempt.force_nftables = true;
                }
                Err(Obstacle::Socket(error)) => {
                    socket_failures += 1;
                    if socket_failures == MAX_SOCKET_FAILURES {
                        return Err(error);
                    }
                    tracing::warn!("reading the rules again: {error}");
                }
                Err(Obstacle::Final(error)) => return Err(error),
            }
        }
        let msg = "can't change the pod's rules: another process keeps changing them; the runtime should retry";
        Err(Error::new(Code::TryAgain, msg))
    }

    fn commit_once(&self, attempt: Attempt<'_>, started: &mut StartedWork) -> Result<PendingWork, Obstacle> {
        let mut socket = NfSocket::open().map_err(|e| Obstacle::new(e, None))?;
        let live = LiveRuleset::read(&mut socket).map_err(|e| Obstacle::new(e, None))?;
        // Every transaction increments the generation, so the unknown one did not take effect.
        if started.unknown_since == Some(live.generation) {
            started.unknown_since = None;
        }
        let work = self.prepare(attempt, &live, started)?;
        if work.transaction.writes_container_rules() {
            cgroup::require()?;
        }
        netns::add_fixtures(&work.missing, attempt.addresses)?;
        match work.transaction.commit(&mut socket, &live) {
            Ok(()) => Ok(work),
            Err(error) if work.may_use_nftables && is_unsupported(&error, &work.transaction) => {
                Err(Obstacle::Unsupported(refused(&error, Some(&work.transaction))))
            }
            Err(error) => {
                if matches!(error, NfError::Socket(_)) {
                    started.unknown_since.get_or_insert(live.generation);
                }
                Err(Obstacle::new(error, Some(&work.transaction)))
            }
        }
    }

    fn read_records(&self) -> Result<ContainerRecords, Error> {
        ContainerRecords::read(self.store, &self.attachment.container_id, self.netns)
    }

    /// Plans the changes and saves the intent. Returns [`Obstacle::Changed`] if another attachment was added
    /// concurrently.
    fn prepare(
        &self,
        attempt: Attempt<'_>,
        live: &LiveRuleset,
        started: &mut StartedWork,
    ) -> Result<PendingWork, Obstacle> {
        let Attempt { operation, addresses, .. } = attempt;
        let attachments = self.store.attachments_of(&self.attachment.container_id)?;
        let saved = self.read_records()?;
        let known_rules = saved.known_rules();
        let mut records = saved.clone();
        let own = saved.get(self.attachment);
        let redirected = operation.redirects() || saved.policy().is_ok_and(|policy| policy.redirect().is_some());
        let foreign = ForeignRedirection::find(live, &known_rules, redirected);
        if foreign.is_none() && redirected {
            ForeignRedirection::log_legacy();
        }
        let facts = FormatFacts {
            in_use: live.rule_format(&known_rules).or_else(|| saved.dialect_of_others(self.attachment)),
            saved: own.map(|own| own.dialect),
            foreign,
        };
        let dialect = match attempt.force_nftables {
            true => RuleFormat::Nftables,
            false => choose_format(operation.dialect(), facts)?,
        };
        if own.is_some() || matches!(operation, Operation::Apply(..)) {
            records.insert(self.attachment, self.intent(operation, own, foreign, addresses, dialect));
        }
        let policy = records.policy()?;
        if attempt.is_add {
            check_rules(&policy, &format!("{} and the container's other attachments", self.attachment))?;
        }
        let desired = ruleset(&policy, records.ip6());
        let needed = fixtures(&policy, records.ip6());
        let missing = needed.missing(addresses)?;
        let created = match dialect {
            RuleFormat::Iptables => CreatedTables::missing_in(&desired, live),
            RuleFormat::Nftables => CreatedTables::default(),
        };
        let mut added = needed.those_with(&missing);
        let mut unrecorded = Fixtures::default();
        if saved.0.is_empty() && !live.native.is_empty() {
            unrecorded = unrecorded_fixtures(live)?;
            // The fixtures of rules without saved state were added together with them.
            added.extend(&needed);
            added.extend(&unrecorded);
        }
        records.record_additions(self.attachment, operation.is_removal(), live, &created, &added);
        started.has_intent = true;
        started.added.extend(&missing);
        match self.write_changed(&records, &saved) {
            // A DEL must not fail because its intent can't be saved: until it is complete, the old records apply.
            Err(error) if operation.is_removal() => tracing::warn!("{error}"),
            other => other?,
        }
        let now = self.store.attachments_of(&self.attachment.container_id)?;
        if now.iter().any(|other| other != self.attachment && !attachments.contains(other)) {
            return Err(Obstacle::Changed);
        }
        let transaction = dialect.plan(live, &known_rules, &desired, &records.created_tables());
        let may_use_nftables =
            !attempt.force_nftables && operation.dialect() == RuleFormatSetting::Auto && facts.in_use.is_none();
        Ok(PendingWork { records, transaction, may_use_nftables, needed, missing, unrecorded })
    }

    /// Returns the attachment's record as the operation changes it.
    fn intent(
        &self,
        operation: &Operation,
        own: Option<&AttachmentRecord>,
        foreign: Option<ForeignRedirection>,
        addresses: OwnFamilies,
        dialect: RuleFormat,
    ) -> AttachmentRecord {
        let mut record = own.cloned().unwrap_or_default();
        let desired = match operation {
            Operation::Apply(policy, _) => foreign.map_or(policy.clone(), |foreign| foreign.adapt(policy.clone())),
            Operation::Reapply | Operation::Remove => Policy::default(),
        };
        if record.policy != desired {
            record.previous_policy = own.map(|own| own.previous_policy.clone().unwrap_or_else(|| own.policy.clone()));
            record.policy = desired;
        }
        // The path is updated with the network namespace only: the agent's path differs from the runtime's.
        if record.netns_id.replace(self.netns.id()) != Some(self.netns.id()) {
            record.netns_path = Some(self.netns.path().to_owned());
        }
        record.dialect = dialect;
        // A pod without addresses may get addresses of both families later.
        record.ip6 |= addresses.ip6 || !addresses.ip;
        record
    }

    /// Writes the records that differ from the saved ones.
    fn write_changed(&self, records: &ContainerRecords, saved: &ContainerRecords) -> Result<(), Error> {
        let mut changed = records.0.iter().filter(|(attachment, record)| saved.get(attachment) != Some(record));
        changed.try_for_each(|(attachment, record)| self.store.write(attachment, record))
    }

    /// Removes fixtures that are no longer needed, and the intent from the records. Failing to write the records is
    /// not an error: the intent describes a superset of what is in the kernel.
    ///
    /// # Errors
    /// A DEL can't remove fixtures; they remain recorded.
    fn complete(&self, work: PendingWork, is_removal: bool) -> Result<(), Error> {
        tracing::debug!(changes = work.transaction.len(), "rules committed");
        let mut records = work.records.clone();
        let mut added = records.fixtures();
        added.extend(&work.unrecorded);
        match added.remove_but(&work.needed) {
            Ok(()) => records.0.iter_mut().for_each(|(_, record)| record.fixtures.retain(&work.needed)),
            Err(error) if is_removal => return Err(error),
            // An unused fixture is harmless; DEL removes it.
            Err(error) => tracing::warn!("{error}"),
        }
        records.0.iter_mut().for_each(|(_, record)| record.previous_policy = None);
        if is_removal {
            records.0.retain(|(attachment, _)| attachment != self.attachment);
        }
        let written = self.write_changed(&records, &work.records);
        let removed = if is_removal { self.store.remove(self.attachment) } else { Ok(()) };
        for error in [written, removed].into_iter().filter_map(Result::err) {
            tracing::warn!("{error}");
        }
        Ok(())
    }

    /// Reverts what a failed call began. If that fails, or if its rules may be in the kernel, the saved state remains:
    /// it describes what DEL has to remove.
    fn undo(&self, own: Option<&AttachmentRecord>, started: &StartedWork) {
        if !started.has_intent || started.unknown_since.is_some() {
            return;
        }
        let undone = netns::remove_fixtures(&started.added).and_then(|()| match own {
            Some(record) => self.store.write(self.attachment, record),
            None => self.store.remove(self.attachment),
        });
        undone.unwrap_or_else(|error| tracing::warn!("can't undo the failed call: {}: {error}", self.attachment));
    }
}

/// Returns whether the kernel does not support the iptables format: it has no nft_compat, lacks an extension, or the
/// pod has a user namespace of its own (`owner_check` of net/netfilter/xt_owner.c: EINVAL). A refused transaction
/// changes nothing, so trying it is the cheapest probe.
fn is_unsupported(error: &NfError, transaction: &Transaction) -> bool {
    let errnos = [Errno::EINVAL, Errno::ENOENT, Errno::EOPNOTSUPP, Errno::EPROTONOSUPPORT];
    let NfError::Refused { errno, index } = error else { return false };
    // The rules for excluded containers are the same in both formats.
    errnos.contains(errno) && !index.is_some_and(|index| transaction.is_about_containers(index))
}

/// Returns the error of a transaction, with the rule that the kernel refused and what the kernel must support.
fn refused(error: &NfError, transaction: Option<&Transaction>) -> Error {
    if matches!(error, NfError::TooMany(_) | NfError::TooManyDeletions { .. }) {
        return firewall::failed("change", *error);
    }
    let lacking = [Errno::EAGAIN, Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    if matches!(error, NfError::Socket(errno) if lacking.contains(errno)) {
        let msg =
            format!("the pod's rules: {error}: the node lacks memory or file descriptors; the runtime should retry");
        return Error::new(Code::TryAgain, msg);
    }
    let place = match error {
        NfError::Refused { index: Some(index), .. } => transaction.and_then(|plan| plan.describe(*index)),
        _ => None,
    };
    let place = place.unwrap_or_else(|| "the pod's rules".to_owned());
    let is_about_containers = |index| transaction.is_some_and(|plan| plan.is_about_containers(index));
    if matches!(error, NfError::Refused { index: Some(index), .. } if is_about_containers(*index)) {
        let msg = format!(
            "container-exclude: {place}: {error}; check that the node's kernel can match control groups (cgroup v2 in \
             nft_socket: CONFIG_NFT_SOCKET and CONFIG_SOCK_CGROUP_DATA, 5.13 or later), or remove container-exclude"
        );
        return Error::new(Code::KernelRefused, msg);
    }
    let needed = match transaction {
        Some(transaction) if transaction.iptables.is_empty() => {
            "nf_tables with nat, redirect, tproxy and ct expressions for family inet (5.2 or later)"
        }
        _ => "nf_tables with nft_compat and the xtables extensions (dialect nftables needs only nf_tables)",
    };
    let msg = format!("{place}: {error}; check that the node's kernel has {needed}");
    Error::new(Code::KernelRefused, msg)
}

/// Removes the attachment in a network namespace that has too many rules to find those of one attachment: rules that
/// the pod's processes add must not block its deletion. The rules are removed or disabled, unless another attachment
/// of the container needs them. Call it in the network namespace.
///
/// # Errors
/// The saved state can't be read or written.
fn abandon(store: &Store, attachment: &Attachment, netns: &NetNs, cause: &Error) -> Result<(), Error> {
    tracing::warn!("DEL removes only the rules that it can find: {cause}");
    let records = ContainerRecords::read(store, &attachment.container_id, netns)?;
    let policy = records.policy();
    let other = records.0.iter().find(|(other, record)| other != attachment && record.netns_id.is_some());
    if let Some((other, record)) = other {
        // The remaining attachment takes over the netfilter chains of this one.
        let mut record = record.clone();
        record.previous_policy = Some(policy?);
        store.write(other, &record)?;
    } else {
        let dialect = records.dialect().unwrap_or_default();
        firewall::remove(dialect, &records.known_rules(), &records.created_tables())
            .unwrap_or_else(|error| tracing::warn!("rules remain until the network namespace is deleted: {error}"));
        let removed = records.fixtures().remove_but(&Fixtures::default());
        removed.unwrap_or_else(|error| tracing::warn!("{error}"));
    }
    store.remove(attachment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::Ruleset;
    use crate::firewall::rule::Family;
    use crate::policy::{BypassEnd, ContainerExclusion, ContainerScope};

    /// The kernel has no expression `socket`, or can't compare control groups.
    #[test]
    fn a_kernel_that_refuses_control_groups_is_named_and_no_other_format_is_tried() {
        let container = ContainerExclusion {
            name: "vault".to_owned(),
            scope: ContainerScope::All,
            until: BypassEnd::ContainerExit,
        };
        let interception = Interception::On(Box::default());
        let policy = Policy { containers: [container].into(), interception, ..Policy::default() };
        let (live, nothing) = (LiveRuleset::default(), Ruleset::default());
        let desired = Ruleset::of(&policy, &Family::ALL);
        let plan = RuleFormat::Iptables.plan(&live, &nothing, &desired, &CreatedTables::default());
        let has_cgroup = |index: &usize| plan.describe(*index).is_some_and(|text| text.contains("socket cgroupv2"));
        let index = (0..plan.len()).find(has_cgroup);
        for errno in [Errno::ENOENT, Errno::EOPNOTSUPP] {
            let error = NfError::Refused { index, errno };
            assert!(!is_unsupported(&error, &plan));
            let error = refused(&error, Some(&plan));
            assert_eq!(error.code, Code::KernelRefused);
            for word in ["container-exclude", "socket cgroupv2 level 1 @excluded-all", "cgroup v2", "nft_socket"] {
                assert!(error.msg.contains(word), "{error}");
            }
            assert!(is_unsupported(&NfError::Refused { index: Some(0), errno }, &plan));
        }
    }
}
