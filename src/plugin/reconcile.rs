//! Reconciles the rules in a pod's network namespace with the desired state of all attachments of the pod sandbox.
//!
//! The intent is saved before the rules are committed. If the process is killed in between, the next call knows which
//! rules may be in the kernel and completes or removes them.

mod obstacle;
mod operation;
mod steps;

use super::netns_state::FormatFacts;
use super::netns_state::{check_rules, ruleset, unrecorded_fixtures, warn_of_legacy};
use super::record::{AttachmentRecord, ExclusionList, MAX_ATTACHMENTS, SandboxRecords, fixtures, since_boot};
use crate::cgroup;
use crate::cni::{Code, Error, at_most};
use crate::firewall::nfnetlink::{NfError, NfSocket};
use crate::firewall::{self, CreatedTables, LiveRuleset, Rejected, RuleFormat, Ruleset};
use crate::netns::{self, Fixtures, LockMode, NetNs, OwnFamilies};
use crate::policy::Policy;
use crate::state::{Attachment, Store};
use crate::wait;
use obstacle::{Obstacle, is_owned, is_unsupported, refused};
pub(super) use operation::Operation;
use operation::{Change, Changes, Kind, gone};
use std::time::Duration;
use steps::{Attempt, Existing, PendingWork, PlannedFixtures, Saved, StartedWork};

/// How long a call waits for another call in the same network namespace.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the agent waits for another call in the same network namespace: it must not delay other pods, and retries.
const REPEAT_LOCK_TIMEOUT: Duration = Duration::from_millis(200);
/// The time limit for attempts if another process changes the rules concurrently: a process with CAP_NET_ADMIN in the pod can change rules without end.
const RETRY_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of netlink socket failures, each of which leaves the outcome of a transaction unknown.
const MAX_SOCKET_FAILURES: usize = 3;

/// What a call has committed.
pub(super) struct Committed {
    /// The union of the policies of all attachments.
    pub(super) policy: Result<Policy, Error>,
    /// The number of changes in the kernel.
    pub(super) changes: usize,
    /// What the guard had rejected before the changes; `None` without a guard.
    pub(super) rejected: Option<Rejected>,
}

/// Applies `operation` to the attachment and reconciles the rules with the policies of all attachments of the
/// pod sandbox. Returns `None` if there was nothing to do.
///
/// # Errors
/// The network namespace can't be entered, the attachments contradict each other, the state can't be saved, or the
/// kernel refuses the rules. Rules of this call that may be in the kernel are recorded in the saved state.
pub(super) fn reconcile(
    store: &Store,
    attachment: &Attachment,
    netns: &NetNs,
    operation: Operation,
) -> Result<Option<Committed>, Error> {
    let kind = operation.kind();
    let lock_mode = if kind == Kind::Remove { LockMode::CleanUp } else { LockMode::Change };
    let lock_timeout = if kind == Kind::Repeat { REPEAT_LOCK_TIMEOUT } else { LOCK_TIMEOUT };
    netns.enter_to(lock_mode, lock_timeout, || {
        let reconciler = Reconciler { store, attachment, netns };
        if kind == Kind::Repeat {
            reconciler.complete_interrupted()?;
        }
        match reconciler.run(operation) {
            Err(error) if kind == Kind::Remove && error.code == Code::ForeignRules => {
                abandon(store, attachment, netns, &error).map(|()| None)
            }
            Ok(committed) if kind == Kind::Remove => {
                // Under the lock, so that it is not the record of a concurrent ADD; also if there were no rules.
                store.remove(attachment).unwrap_or_else(|error| tracing::warn!("{error}"));
                Ok(committed)
            }
            other => other,
        }
    })
}

struct Reconciler<'a> {
    store: &'a Store,
    attachment: &'a Attachment,
    netns: &'a NetNs,
}

/// Warns about netfilter chains of other tools that can redirect connections before detour's rules do.
fn warn_of_earlier_chains(desired: &Ruleset, format: RuleFormat, live: &LiveRuleset) {
    for drift in format.earlier(live, desired) {
        tracing::warn!("{drift}; remove it");
    }
}

impl Reconciler<'_> {
    /// Completes a change whose call was killed. A record can describe only one unfinished change, so another change must
    /// not begin before.
    fn complete_interrupted(&self) -> Result<(), Error> {
        let records = self.read()?.records.attachments;
        if records.iter().any(|(_, record)| record.previous_policy.is_some()) {
            let recorded = records.into_iter().map(|(attachment, record)| (attachment, record.policy));
            if let Err(error) = self.run(Operation::Repeat(recorded.collect())) {
                tracing::warn!("can't complete an interrupted change: {}: {error}", self.attachment);
            }
        }
        Ok(())
    }

    fn run(&self, operation: Operation) -> Result<Option<Committed>, Error> {
        let saved = self.read()?;
        let Some(changes) = operation.changes(self.attachment, &saved.records)? else { return Ok(None) };
        let mut started = StartedWork::default();
        let committed = self.commit(&changes, &saved, &mut started);
        let outcome = committed.and_then(|(work, count, rejected)| {
            let committed = Committed { policy: work.records.policy(), changes: count, rejected };
            self.complete(work, changes.kind).map(|()| Some(committed))
        });
        // The next DEL retries what a DEL can't remove.
        if outcome.is_err() && changes.kind != Kind::Remove {
            self.undo(&changes, &saved.records, &started);
        }
        outcome
    }

    /// Retries until the rules are committed. `saved` is the saved state before the first attempt.
    fn commit(
        &self,
        changes: &Changes,
        saved: &Saved,
        started: &mut StartedWork,
    ) -> Result<(PendingWork, usize, Option<Rejected>), Error> {
        // An ADD without rules takes no lock, so that the record of another attachment may have changed meanwhile.
        let is_alone = saved.attachments.iter().all(|attachment| attachment == self.attachment);
        let (saved, addresses) = (is_alone.then_some(saved), netns::own_families()?);
        let mut attempt = Attempt { changes, saved, addresses, force_nftables: false };
        let mut socket_failures = 0;
        let committed = wait::until(RETRY_TIMEOUT, wait::AT_ONCE, || {
            match self.commit_once(attempt, started) {
                Ok(work) => return Ok(Some(work)),
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
            attempt.saved = None;
            Ok(None)
        })?;
        committed.ok_or_else(|| {
            let msg = "can't change the pod's rules: another process keeps changing them; the runtime should retry";
            Error::new(Code::TryAgain, msg)
        })
    }

    fn commit_once(
        &self,
        attempt: Attempt<'_>,
        started: &mut StartedWork,
    ) -> Result<(PendingWork, usize, Option<Rejected>), Obstacle> {
        let mut socket = NfSocket::open().map_err(|e| Obstacle::new(e, None))?;
        let live = LiveRuleset::read(&mut socket).map_err(|e| Obstacle::new(e, None))?;
        // Every transaction increments the generation, so the unknown one did not take effect.
        if started.unknown_since == Some(live.generation) {
            started.unknown_since = None;
        }
        let work = self.prepare(attempt, &live, started)?;
        let count = self.apply(&work, attempt.addresses, &mut socket, &live, started)? + work.fixtures.missing.len();
        Ok((work, count, live.rejected()))
    }

    /// Plans and commits the changes that lead from the live rules to the desired ones. Returns their number.
    fn apply(
        &self,
        work: &PendingWork,
        addresses: OwnFamilies,
        socket: &mut NfSocket,
        live: &LiveRuleset,
        started: &mut StartedWork,
    ) -> Result<usize, Obstacle> {
        let created = work.records.created_tables();
        let transaction = work.rule_format.plan(live, &work.known_rules, &work.desired, created);
        if transaction.compares_cgroups() {
            cgroup::require()?;
        }
        let missing = &work.fixtures.missing;
        if !missing.is_empty() && self.netns.is_of_containerd() {
            netns::wait_for_lo(addresses)?;
        }
        netns::add_fixtures(missing, addresses)?;
        match transaction.commit(socket, live) {
            Ok(()) => {
                tracing::debug!(changes = transaction.len(), "rules committed");
                Ok(transaction.len())
            }
            Err(error) if work.may_use_nftables && is_unsupported(&error, &transaction) => {
                Err(Obstacle::Unsupported(refused(&error, Some(&transaction))))
            }
            Err(error) => {
                if matches!(error, NfError::Socket(_)) {
                    started.unknown_since.get_or_insert(live.generation);
                }
                Err(Obstacle::new(error, Some(&transaction)))
            }
        }
    }

    fn read(&self) -> Result<Saved, Error> {
        let attachments = self.store.attachments_of(&self.attachment.container_id)?;
        let container_id = &self.attachment.container_id;
        let records = SandboxRecords::read_of(self.store, container_id, &attachments, self.netns.id())?;
        Ok(Saved { attachments, records })
    }

    /// Determines the desired rules and saves the intent. Returns [`Obstacle::Changed`] if another attachment was added
    /// concurrently.
    fn prepare(
        &self,
        attempt: Attempt<'_>,
        live: &LiveRuleset,
        started: &mut StartedWork,
    ) -> Result<PendingWork, Obstacle> {
        let read_again;
        let saved = match attempt.saved {
            Some(saved) => saved,
            None => {
                read_again = self.read()?;
                &read_again
            }
        };
        let changes = attempt.changes;
        if changes.kind == Kind::Add {
            self.check_count(&saved.attachments)?;
        }
        let found = self.existing(changes, &saved.records, live);
        let rule_format = if attempt.force_nftables { RuleFormat::Nftables } else { found.choose_format(changes)? };
        let mut records = self.intended(attempt, &saved.records, &found, rule_format)?;
        let policy = records.policy()?;
        // Existing rules can always be repaired, limited and removed.
        if changes.kind == Kind::Add {
            let place = format_args!("{} and the other attachments of the pod", self.attachment);
            check_rules(&policy, place)?;
            records.check_size(place)?;
        }
        let desired = ruleset(&policy, records.ip6());
        if changes.kind == Kind::Add {
            warn_of_earlier_chains(&desired, rule_format, live);
        }
        let fixtures = self.plan_fixtures(attempt.addresses, &policy, &records, &saved.records, live)?;
        let created = match rule_format {
            RuleFormat::Iptables => CreatedTables::missing_in(&desired, live),
            RuleFormat::Nftables => CreatedTables::default(),
        };
        records.sandbox.set_netns(self.netns.path(), self.netns.id());
        records.sandbox.created_tables.drop_missing(live);
        records.sandbox.created_tables.add(&created);
        records.sandbox.fixtures.extend(&fixtures.added);
        started.has_intent = true;
        started.added.extend(&fixtures.missing);
        self.save_intent(changes.kind, &records, saved)?;
        let may_use_nftables =
            !attempt.force_nftables && changes.format.requested.is_none() && found.format.in_use.is_none();
        Ok(PendingWork { records, rule_format, known_rules: found.known_rules, desired, may_use_nftables, fixtures })
    }

    /// Refuses an ADD of too many attachments. Concurrent ADDs see each other's records only under the lock.
    fn check_count(&self, attachments: &[Attachment]) -> Result<(), Error> {
        let count = attachments.len() + usize::from(!attachments.contains(self.attachment));
        at_most(MAX_ATTACHMENTS, "attachments", self.attachment, count)
    }

    /// Finds what exists in the network namespace already: detour's own rules and another tool's redirection.
    fn existing(&self, changes: &Changes, saved: &SandboxRecords, live: &LiveRuleset) -> Existing {
        let known_rules = saved.known_rules();
        let redirected = changes.redirects() || saved.policy().is_ok_and(|policy| policy.redirect().is_some());
        let foreign = live.foreign_redirection(&known_rules);
        if foreign.is_none() && redirected && changes.kind == Kind::Add {
            warn_of_legacy();
        }
        let format = FormatFacts {
            in_use: live
                .rule_format(saved.rule_format(), &known_rules)
                .or_else(|| saved.rule_format_of_others(self.attachment)),
            saved: saved.get(self.attachment).map(|own| own.rule_format),
        };
        Existing { known_rules, foreign, format }
    }

    /// Returns the records of all attachments after the changes, each policy adapted to the network namespace.
    fn intended(
        &self,
        attempt: Attempt<'_>,
        saved: &SandboxRecords,
        found: &Existing,
        rule_format: RuleFormat,
    ) -> Result<SandboxRecords, Error> {
        let mut records = saved.clone();
        for change in &attempt.changes.list {
            let own = saved.get(&change.attachment);
            let mut record = self.intent(change, own, change.adapted(attempt.changes.kind, own, found.foreign));
            record.rule_format = rule_format;
            // A pod without addresses may get addresses of both families later.
            record.ip6 |= attempt.addresses.ip6 || !attempt.addresses.ip;
            records.insert(&change.attachment, record);
        }
        Ok(records)
    }

    /// Determines the fixtures that the rules need, and those that this call adds or takes over.
    fn plan_fixtures(
        &self,
        addresses: OwnFamilies,
        policy: &Policy,
        records: &SandboxRecords,
        saved: &SandboxRecords,
        live: &LiveRuleset,
    ) -> Result<PlannedFixtures, Error> {
        let needed = fixtures(policy, records.ip6());
        let missing = needed.missing(addresses)?;
        let mut added = needed.those_with(&missing);
        let mut unrecorded = Fixtures::default();
        if saved.attachments.is_empty() && !live.native.is_empty() {
            unrecorded = unrecorded_fixtures(live)?;
            // The fixtures of rules without saved state were added together with them.
            added.extend(&needed);
            added.extend(&unrecorded);
        }
        Ok(PlannedFixtures { needed, missing, added, unrecorded })
    }

    /// Writes the records that differ from the `saved` ones. Returns [`Obstacle::Changed`] if another attachment was added
    /// concurrently.
    fn save_intent(&self, kind: Kind, records: &SandboxRecords, saved: &Saved) -> Result<(), Obstacle> {
        let is_changed = |(attachment, record): &&_| saved.records.get(attachment) != Some(record);
        let is_needed = match kind {
            Kind::Add => true,
            Kind::Repeat => records.sandbox != saved.records.sandbox,
            Kind::Remove => saved.attachments.iter().any(|other| other != self.attachment),
        };
        let written = if is_needed { self.write_sandbox(records) } else { Ok(()) };
        let mut changed = records.attachments.iter().filter(is_changed);
        match written.and_then(|()| changed.try_for_each(|record| self.write(kind, record))) {
            // A DEL must not fail because its intent can't be saved: until it is complete, the old records apply.
            Err(error) if kind == Kind::Remove => tracing::warn!("{error}"),
            other => other?,
        }
        let now = self.store.attachments_of(&self.attachment.container_id)?;
        let is_new = |other: &Attachment| other != self.attachment && !saved.attachments.contains(other);
        if now.iter().any(is_new) { Err(Obstacle::Changed) } else { Ok(()) }
    }

    /// Returns an attachment's record with its new policy, which is adapted to the network namespace.
    fn intent(&self, change: &Change, own: Option<&AttachmentRecord>, adapted: Policy) -> AttachmentRecord {
        let mut record = own.cloned().unwrap_or_default();
        if record.policy != adapted {
            record.previous_policy = own.map(|own| own.previous_policy.clone().unwrap_or_else(|| own.policy.clone()));
            record.policy = adapted;
        }
        if let Some(inputs) = &change.inputs {
            record.inputs.clone_from(inputs);
        }
        // The path is updated with the network namespace only: the agent's path differs from the runtime's.
        if record.netns_id.replace(self.netns.id()) != Some(self.netns.id()) {
            record.netns_path = Some(self.netns.path().to_owned());
            record.added_since_boot = since_boot();
        }
        record
    }

    fn write_sandbox(&self, records: &SandboxRecords) -> Result<(), Error> {
        records.sandbox.write(self.store, &self.attachment.container_id)
    }

    /// Writes a record that differs from the saved one. Only an ADD creates records.
    fn write(&self, kind: Kind, (attachment, record): &(Attachment, AttachmentRecord)) -> Result<(), Error> {
        match kind {
            Kind::Add => record.write(self.store, attachment),
            _ if record.update(self.store, attachment)? => Ok(()),
            _ => Err(gone(attachment)),
        }
    }

    /// Removes fixtures that are no longer needed, and the intent from the records. Failing to write the records is
    /// not an error: the intent describes a superset of what is in the kernel.
    ///
    /// # Errors
    /// A DEL can't remove fixtures; they remain recorded.
    fn complete(&self, work: PendingWork, kind: Kind) -> Result<(), Error> {
        let is_removal = kind == Kind::Remove;
        let mut records = work.records;
        let mut added = records.fixtures().clone();
        added.extend(&work.fixtures.unrecorded);
        let only_needed = added.remove_but(&work.fixtures.needed);
        match &only_needed {
            Ok(()) => {}
            Err(_) if is_removal => return only_needed,
            // An unused fixture is harmless; DEL removes it.
            Err(error) => tracing::warn!("{error}"),
        }
        if is_removal {
            records.attachments.retain(|(attachment, _)| attachment != self.attachment);
        }
        let before = records.fixtures().clone();
        if only_needed.is_ok() {
            records.sandbox.fixtures.retain(&work.fixtures.needed);
        }
        let is_changed = *records.fixtures() != before && !records.attachments.is_empty();
        let shared = if is_changed { self.write_sandbox(&records) } else { Ok(()) };
        let was_changing = |one: &mut (Attachment, AttachmentRecord)| one.1.previous_policy.take().is_some();
        let mut changed = records.attachments.iter_mut().filter_map(|one| was_changing(one).then_some(&*one));
        let written = changed.try_for_each(|record| self.write(kind, record));
        let removed = if is_removal { self.store.remove(self.attachment) } else { Ok(()) };
        let unused = ExclusionList::remove_unused(self.store, &self.attachment.container_id);
        for error in [shared, written, removed, unused].into_iter().filter_map(Result::err) {
            tracing::warn!("{error}");
        }
        Ok(())
    }

    /// Reverts what a failed call began. If that fails, or if its rules may be in the kernel, the saved state remains:
    /// it describes what DEL has to remove.
    fn undo(&self, changes: &Changes, saved: &SandboxRecords, started: &StartedWork) {
        if !started.has_intent || started.unknown_since.is_some() {
            return;
        }
        let restore = |change: &Change| match saved.get(&change.attachment) {
            Some(record) if changes.kind == Kind::Add => record.write(self.store, &change.attachment),
            // If the record is gone, so is the pod.
            Some(record) => record.update(self.store, &change.attachment).map(drop),
            None => self.store.remove(&change.attachment),
        };
        let undone = netns::remove_fixtures(&started.added).and_then(|()| changes.list.iter().try_for_each(restore));
        undone.unwrap_or_else(|error| tracing::warn!("can't undo the failed call: {}: {error}", self.attachment));
    }
}

/// Removes the attachment in a network namespace that has too many rules to find those of one attachment: rules that
/// the pod's processes add must not block its deletion. The rules are removed or disabled, unless another attachment
/// of the pod sandbox needs them. Call it in the network namespace.
///
/// # Errors
/// The saved state can't be read or written, or a process in the pod owns a table.
fn abandon(store: &Store, attachment: &Attachment, netns: &NetNs, cause: &Error) -> Result<(), Error> {
    tracing::warn!("DEL removes only the rules that it can find: {cause}");
    let records = SandboxRecords::read(store, &attachment.container_id, netns)?;
    let policy = records.policy();
    let other = records.attachments.iter().find(|(other, record)| other != attachment && record.netns_id.is_some());
    if let Some((other, record)) = other {
        // The remaining attachment takes over the netfilter chains of this one.
        let mut record = record.clone();
        record.previous_policy = Some(policy?);
        record.write(store, other)?;
    } else {
        let rule_format = records.rule_format().unwrap_or_default();
        match firewall::remove(rule_format, &records.known_rules(), records.created_tables()) {
            Err(error) if is_owned(&error) => return Err(refused(&error, None)),
            removed => removed
                .unwrap_or_else(|error| tracing::warn!("rules remain until the network namespace is deleted: {error}")),
        }
        let removed = records.fixtures().remove_but(&Fixtures::default());
        removed.unwrap_or_else(|error| tracing::warn!("{error}"));
    }
    store.remove(attachment)
}
