//! Reconciles the rules in a pod's network namespace with the desired state of all attachments of the pod sandbox.
//!
//! Each attempt reads the live rules, plans the desired ones, saves the intent, commits, and finishes. The intent is saved
//! before the rules are committed: if the process is killed in between, the next call knows which rules may be in the
//! kernel, and completes or removes them.

use super::inputs::SavedInputs;
use super::netns_state::{
    FormatPreference, beside, choose_format, exclude_secondary_networks, ruleset, unrecorded_fixtures, warn_of_legacy,
};
use super::probe::{Failure, is_owned, is_unsupported, refused};
use super::record::{AttachmentRecord, SandboxRecords, fixtures, since_boot};
use crate::cgroup;
use crate::cni::{Code, Error};
use crate::firewall::nfnetlink::{NfError, NfSocket};
use crate::firewall::{self, CreatedTables, ForeignRedirection, LiveRuleset, Rejected, RuleFormat, Ruleset};
use crate::netns::{self, Fixture, Fixtures, LockMode, NetNs, OwnFamilies};
use crate::policy::Policy;
use crate::state::{Attachment, Store};
use crate::wait;
use std::collections::BTreeSet;
use std::time::Duration;

/// How long a call waits for another call in the same network namespace.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the agent waits for another call in the same network namespace: it must not delay other pods, and retries.
const REPEAT_LOCK_TIMEOUT: Duration = Duration::from_millis(200);
/// The time limit for attempts if another process changes the rules concurrently: a process with CAP_NET_ADMIN in the pod can change rules without end.
const RETRY_TIMEOUT: Duration = Duration::from_secs(5);

/// The call that changes the desired state of the pod sandbox.
#[derive(Debug, Clone)]
pub(super) enum Operation {
    /// ADD, with a preference for the rule format and the inputs to save.
    Add(FormatPreference, Option<SavedInputs>),
    /// The agent's repeated ADD for a running pod: of recorded attachments, all or none.
    Repeat,
    /// DEL.
    Remove,
}

/// What a call has committed.
pub(super) struct Committed {
    /// The union of the policies of all attachments.
    pub(super) policy: Policy,
    /// The format of the redirection.
    pub(super) rule_format: RuleFormat,
    /// The number of changes in the kernel.
    pub(super) changes: usize,
    /// What the guard had rejected before the changes; `None` without a guard.
    pub(super) rejected: Option<Rejected>,
}

/// Records `policies`, the new policies of attachments, and reconciles the rules with the policies of all attachments of the
/// pod sandbox; a DEL removes the policy of `attachment`. Returns `None` if there was nothing to do.
///
/// # Errors
/// The network namespace can't be entered, the attachments contradict each other, the state can't be saved, or the
/// kernel refuses the rules. Rules of this call that may be in the kernel are recorded in the saved state.
pub(super) fn reconcile(
    store: &Store,
    attachment: &Attachment,
    netns: &NetNs,
    operation: &Operation,
    policies: &[(Attachment, Policy)],
) -> Result<Option<Committed>, Error> {
    let (lock_mode, timeout) = match operation {
        Operation::Add(..) => (LockMode::Change, LOCK_TIMEOUT),
        Operation::Repeat => (LockMode::Change, REPEAT_LOCK_TIMEOUT),
        Operation::Remove => (LockMode::CleanUp, LOCK_TIMEOUT),
    };
    netns.enter_to(lock_mode, timeout, || {
        let reconciler = Reconciler { store, attachment, netns, operation, policies };
        let committed = match reconciler.run() {
            Err(error) if reconciler.removes() && error.code == Code::ForeignRules => {
                reconciler.abandon(&error)?;
                None
            }
            other => other?,
        };
        if reconciler.removes() {
            // Under the lock, so that it is not the record of a concurrent ADD; also if there were no rules.
            store.remove(attachment).unwrap_or_else(|error| tracing::warn!("{error}"));
        }
        Ok(committed)
    })
}

/// The fixtures that a call removes if it fails: those that it has added to the network namespace, or may have added. `None`
/// before the intent is saved, and if the outcome of a transaction is unknown.
type Begun = Option<BTreeSet<Fixture>>;

/// The desired state of one attempt.
struct Plan {
    /// The records to save.
    records: SandboxRecords,
    policy: Policy,
    rule_format: RuleFormat,
    /// Whether the rules can be written in nftables format if the kernel refuses this one.
    may_use_nftables: bool,
    /// The rules that the records described before.
    known_rules: Ruleset,
    desired: Ruleset,
    /// The fixtures that the desired rules need.
    needed: Fixtures,
    /// Those that do not exist.
    missing: BTreeSet<Fixture>,
}

struct Reconciler<'a> {
    store: &'a Store,
    attachment: &'a Attachment,
    netns: &'a NetNs,
    operation: &'a Operation,
    policies: &'a [(Attachment, Policy)],
}

impl Reconciler<'_> {
    const fn removes(&self) -> bool {
        matches!(self.operation, Operation::Remove)
    }

    const fn adds(&self) -> bool {
        matches!(self.operation, Operation::Add(..))
    }

    fn run(&self) -> Result<Option<Committed>, Error> {
        let saved = self.read()?;
        // Without any saved state, rules with detour's names are removed.
        if self.removes() && !saved.attachments.is_empty() && saved.get(self.attachment).is_none() {
            return Ok(None);
        }
        let is_gone = |(attachment, _): &&(Attachment, Policy)| saved.get(attachment).is_none();
        if let (Operation::Repeat, Some((gone, _))) = (self.operation, self.policies.iter().find(is_gone)) {
            return Err(no_record(gone));
        }
        let mut begun = None;
        let committed = self.attempts(&saved, &mut begun);
        // The next DEL retries what a DEL can't remove.
        if committed.is_err()
            && !self.removes()
            && let Some(added) = begun
        {
            self.undo(&saved, &added);
        }
        committed.map(Some)
    }

    /// Reads the saved state.
    fn read(&self) -> Result<SandboxRecords, Error> {
        let removed = self.removes().then_some(self.attachment);
        SandboxRecords::read(self.store, &self.attachment.container_id, self.netns, removed)
    }

    /// Retries until the rules are committed. `before` is the saved state before the first attempt.
    fn attempts(&self, before: &SandboxRecords, begun: &mut Begun) -> Result<Committed, Error> {
        let (mut latest, mut force_nftables) = (None, false);
        let committed = wait::until(RETRY_TIMEOUT, wait::AT_ONCE, || {
            match self.attempt(latest.as_ref().unwrap_or(before), force_nftables, begun) {
                Ok(committed) => return Ok(Some(committed)),
                Err(Failure::Fatal(error)) => return Err(error),
                Err(Failure::OtherFormat(error)) => {
                    tracing::info!("using the nftables rule format: {error}");
                    force_nftables = true;
                }
                Err(Failure::Retry) => {}
            }
            latest = Some(self.read()?);
            Ok(None)
        })?;
        committed.ok_or_else(|| {
            let msg = "can't change the pod's rules: another process keeps changing them; the runtime should retry";
            Error::new(Code::TryAgain, msg)
        })
    }

    fn attempt(&self, saved: &SandboxRecords, force_nftables: bool, begun: &mut Begun) -> Result<Committed, Failure> {
        let addresses = netns::own_families()?;
        let mut socket = NfSocket::open().map_err(|error| Failure::of(error, None))?;
        let live = LiveRuleset::read(&mut socket).map_err(|error| Failure::of(error, None))?;
        let plan = self.plan(saved, &live, addresses, force_nftables)?;
        begun.get_or_insert_default().extend(&plan.missing);
        self.save_intent(&plan.records, saved)?;
        let changes = self.commit(&plan, addresses, &mut socket, &live, begun)? + plan.missing.len();
        let Plan { records, policy, rule_format, needed, .. } = plan;
        self.finish(records, &needed)?;
        Ok(Committed { policy, rule_format, changes, rejected: live.rejected() })
    }

    /// Determines the desired rules, and the records that describe them.
    fn plan(
        &self,
        saved: &SandboxRecords,
        live: &LiveRuleset,
        addresses: OwnFamilies,
        force_nftables: bool,
    ) -> Result<Plan, Error> {
        let known_rules = saved.known_rules();
        let foreign = live.foreign_redirection(&known_rules);
        let in_use = live.rule_format(saved.rule_format(None), &known_rules);
        let in_use = in_use.or_else(|| saved.rule_format(Some(self.attachment)));
        let preference = match self.operation {
            Operation::Add(preference, _) if self.policies.iter().any(|(_, policy)| policy.redirect().is_some()) => {
                *preference
            }
            _ => FormatPreference::default(),
        };
        let rule_format = if force_nftables {
            RuleFormat::Nftables
        } else {
            choose_format(preference, in_use, saved.get(self.attachment).map(|own| own.rule_format))?
        };
        let mut records = self.intended(saved, foreign, addresses, rule_format)?;
        let policy = records.policy()?;
        // Existing rules can always be repaired, limited and removed.
        if self.adds() {
            let place = format_args!("{} and the other attachments of the pod", self.attachment);
            records.check_limits(place)?;
        }
        let desired = ruleset(&policy, records.ip6());
        if self.adds() {
            if foreign.is_none() && policy.redirect().is_some() {
                warn_of_legacy();
            }
            for drift in rule_format.earlier(live, &desired) {
                tracing::warn!("{drift}; remove it");
            }
        }
        let needed = fixtures(&policy, records.ip6());
        let missing = needed.missing(addresses)?;
        let sandbox = &mut records.sandbox;
        sandbox.set_netns(self.netns.path(), self.netns.id());
        sandbox.created_tables.drop_missing(live);
        if rule_format == RuleFormat::Iptables {
            sandbox.created_tables.add(&CreatedTables::missing_in(&desired, live));
        }
        sandbox.fixtures.extend(&needed.those_with(&missing));
        if saved.attachments.is_empty() && !live.native.is_empty() {
            // The fixtures of rules without saved state were added together with them.
            sandbox.fixtures.extend(&needed);
            sandbox.fixtures.extend(&unrecorded_fixtures(live)?);
        }
        let may_use_nftables = !force_nftables && preference.requested.is_none() && in_use.is_none();
        Ok(Plan { records, policy, rule_format, may_use_nftables, known_rules, desired, needed, missing })
    }

    /// Returns the records of all attachments after the changes.
    fn intended(
        &self,
        saved: &SandboxRecords,
        foreign: Option<ForeignRedirection>,
        addresses: OwnFamilies,
        rule_format: RuleFormat,
    ) -> Result<SandboxRecords, Error> {
        let mut records = saved.clone();
        if self.removes() {
            records.attachments.retain(|(attachment, _)| attachment != self.attachment);
        }
        for (attachment, policy) in self.policies {
            let own = saved.get(attachment);
            let mut record = own.cloned().unwrap_or_default();
            let policy = self.adapted(policy, own, foreign)?;
            if record.policy != policy {
                record.previous_policy = own.map(AttachmentRecord::known_policy);
                record.policy = policy;
            }
            // The path is updated with the network namespace only: the agent's path differs from the runtime's.
            if record.netns_id.replace(self.netns.id()) != Some(self.netns.id()) {
                record.netns_path = Some(self.netns.path().to_owned());
                record.added_since_boot = since_boot();
            }
            record.rule_format = rule_format;
            // A pod without addresses may get addresses of both families later.
            record.ip6 |= addresses.ip6 || !addresses.ip;
            if let Operation::Add(_, inputs) = self.operation {
                record.inputs.clone_from(inputs);
            }
            records.insert(attachment, record);
        }
        Ok(records)
    }

    /// Returns the policy, adapted to the interfaces and to the redirection of another tool. What the saved record `own`
    /// redirects stays redirected, whatever another tool or a process in the pod adds later, and its exclusions follow.
    fn adapted(
        &self,
        policy: &Policy,
        own: Option<&AttachmentRecord>,
        foreign: Option<ForeignRedirection>,
    ) -> Result<Policy, Error> {
        let mut policy = policy.clone();
        exclude_secondary_networks(&mut policy)?;
        let is_recorded = own.is_some_and(|own| own.policy.redirect().is_some()) && policy.redirect().is_some();
        let is_adapted = !self.adds() && own.is_some_and(|own| !own.policy.is_empty());
        Ok(match foreign.filter(|_| !is_recorded && !is_adapted) {
            Some(foreign) => beside(foreign, policy),
            None => policy,
        })
    }

    /// Writes the records that differ from the `saved` ones.
    fn save_intent(&self, records: &SandboxRecords, saved: &SandboxRecords) -> Result<(), Error> {
        let is_changed = |(attachment, record): &&(Attachment, AttachmentRecord)| saved.get(attachment) != Some(record);
        let is_needed = self.adds() || records.sandbox != saved.sandbox;
        let written = if is_needed { self.write_sandbox(records) } else { Ok(()) };
        let mut changed = records.attachments.iter().filter(is_changed);
        match written.and_then(|()| changed.try_for_each(|(attachment, record)| self.write(attachment, record))) {
            // A DEL must not fail because its intent can't be saved: until it is complete, the old records apply.
            Err(error) if self.removes() => {
                tracing::warn!("{error}");
                Ok(())
            }
            other => other,
        }
    }

    /// Writes what the attachments share; their last DEL removes it.
    fn write_sandbox(&self, records: &SandboxRecords) -> Result<(), Error> {
        let is_needed = !records.attachments.is_empty();
        if is_needed { records.sandbox.write(self.store, &self.attachment.container_id) } else { Ok(()) }
    }

    /// Writes a record. Only an ADD creates records.
    fn write(&self, attachment: &Attachment, record: &AttachmentRecord) -> Result<(), Error> {
        match self.operation {
            Operation::Add(..) => self.store.write(attachment, record),
            _ if self.store.update(attachment, record)? => Ok(()),
            _ => Err(no_record(attachment)),
        }
    }

    /// Commits the changes that lead from the live rules to the desired ones. Returns their number.
    fn commit(
        &self,
        plan: &Plan,
        addresses: OwnFamilies,
        socket: &mut NfSocket,
        live: &LiveRuleset,
        begun: &mut Begun,
    ) -> Result<usize, Failure> {
        let created = &plan.records.sandbox.created_tables;
        let transaction = plan.rule_format.plan(live, &plan.known_rules, &plan.desired, created);
        if transaction.compares_cgroups() {
            cgroup::require()?;
        }
        if !plan.missing.is_empty() && self.netns.is_of_containerd() {
            netns::wait_for_lo(addresses)?;
        }
        netns::add_fixtures(&plan.missing, addresses)?;
        match transaction.commit(socket, live) {
            Ok(()) => {
                tracing::debug!(changes = transaction.len(), "rules committed");
                Ok(transaction.len())
            }
            Err(error) if plan.may_use_nftables && is_unsupported(&error, &transaction) => {
                Err(Failure::OtherFormat(refused(&error, Some(&transaction))))
            }
            Err(error) => {
                if matches!(error, NfError::Socket(_)) {
                    *begun = None;
                }
                Err(Failure::of(error, Some(&transaction)))
            }
        }
    }

    /// Removes fixtures that are no longer needed, and the intent from the records. Failing to write the records is
    /// not an error: the intent describes a superset of what is in the kernel.
    ///
    /// # Errors
    /// A DEL can't remove fixtures; they remain recorded.
    fn finish(&self, mut records: SandboxRecords, needed: &Fixtures) -> Result<(), Error> {
        let added = records.sandbox.fixtures.clone();
        match records.sandbox.fixtures.reduce(needed) {
            Ok(()) => {}
            Err(error) if self.removes() => return Err(error),
            // An unused fixture is harmless; DEL removes it.
            Err(error) => tracing::warn!("{error}"),
        }
        let mut written = if records.sandbox.fixtures == added { Ok(()) } else { self.write_sandbox(&records) };
        for (attachment, record) in &mut records.attachments {
            if record.previous_policy.take().is_some() {
                written = written.and_then(|()| self.write(attachment, record));
            }
        }
        written.unwrap_or_else(|error| tracing::warn!("{error}"));
        Ok(())
    }

    /// Reverts what a failed call began. If that fails, the saved state remains: it describes what DEL has to remove.
    fn undo(&self, saved: &SandboxRecords, added: &BTreeSet<Fixture>) {
        let mut restored = self.policies.iter().map(|(attachment, _)| match saved.get(attachment) {
            Some(record) => self.write(attachment, record),
            None => self.store.remove(attachment),
        });
        let undone = netns::remove_fixtures(added).and_then(|()| restored.try_for_each(|one| one));
        undone.unwrap_or_else(|error| tracing::warn!("can't undo the failed call: {}: {error}", self.attachment));
    }

    /// Removes the attachment in a network namespace that has too many rules to find those of one attachment: rules that
    /// the pod's processes add must not block its deletion. The rules are removed or disabled, unless another attachment
    /// of the pod sandbox needs them.
    ///
    /// # Errors
    /// The saved state can't be read or written, or a process in the pod owns a table.
    fn abandon(&self, cause: &Error) -> Result<(), Error> {
        tracing::warn!("DEL removes only the rules that it can find: {cause}");
        let mut records = self.read()?;
        let is_other =
            |(other, record): &&(Attachment, AttachmentRecord)| other != self.attachment && record.netns_id.is_some();
        if let Some((other, record)) = records.attachments.iter().find(is_other) {
            // The remaining attachment takes over the netfilter chains of this one.
            let record = AttachmentRecord { previous_policy: Some(records.policy()?), ..record.clone() };
            self.store.write(other, &record)?;
        } else {
            let rule_format = records.rule_format(None).unwrap_or_default();
            match firewall::remove(rule_format, &records.known_rules(), &records.sandbox.created_tables) {
                Err(error) if is_owned(&error) => return Err(refused(&error, None)),
                Err(error) => tracing::warn!("rules remain until the network namespace is deleted: {error}"),
                Ok(()) => {}
            }
            let removed = records.sandbox.fixtures.reduce(&Fixtures::default());
            removed.unwrap_or_else(|error| tracing::warn!("{error}"));
        }
        self.store.remove(self.attachment)
    }
}

/// Returns the error for an attachment whose record is gone.
fn no_record(attachment: &Attachment) -> Error {
    Error::new(Code::NoAdd, format!("no saved state of the {attachment}: the pod was deleted"))
}
