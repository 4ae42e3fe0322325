//! Makes the kernel hold what all attachments on a container ask for together. The intent is
//! written before the commit, so that whoever comes after a call that was killed knows what may
//! be in the kernel, and finishes the work.
//!
//! DEL in a network namespace that holds too much to find the rules of one attachment: what the pod's
//! processes put there must not keep the pod from being deleted.

use super::desired_policy::{check_rules, fixtures, ruleset, unrecorded_fixtures};
use super::netns_state::ForeignRedirection;
use super::netns_state::{FormatFacts, choose};
use super::record::{AttachmentRecord, ContainerRecords};
use crate::cni::{Code, Error, LIST_ITEMS, at_most};
use crate::firewall::nfnetlink::NfSocket;
use crate::firewall::{CreatedTables, LiveRuleset, RuleFormat, Transaction, nfnetlink};
use crate::netns::{Fixture, Fixtures, LockMode, NetNs, OwnFamilies};
use crate::policy::{Interception, Policy};
use crate::state::{Attachment, Store};
use crate::{cni, firewall, netns};
use nix::errno::Errno;
use std::collections::{BTreeSet, HashSet};
use std::time::{Duration, Instant};

/// How long a call waits for another one in the same namespace.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often the rules are read again because somebody else changed them at the same time.
const TRIES: usize = 100;
/// For how long they are: a process with CAP_NET_ADMIN in the pod can change them all the time.
const DEADLINE: Duration = Duration::from_secs(5);
/// How often they are read again because the netlink socket failed, and what became of a transaction is
/// not known.
const SOCKET_TRIES: usize = 3;

/// What a call wants of one attachment.
#[derive(Debug, Clone)]
pub(super) enum Operation {
    /// This policy, in place of what it asked for before, in this dialect.
    Apply(Policy, cni::RuleFormatSetting),
    /// What it asked for when it was added; nothing where it is there no more.
    Reapply,
    /// Nothing any more.
    Remove,
}

/// Makes the kernel hold what `wish` and all other attachments on the container ask for.
///
/// # Errors
/// The namespace can't be entered, the attachments contradict each other, state can't be kept, or
/// the kernel refuses; then nothing of this call is in the kernel, or state says what may be.
pub(super) fn converge(store: &Store, attachment: &Attachment, netns: &NetNs, wish: Operation) -> Result<(), Error> {
    let access = if matches!(wish, Operation::Remove) { LockMode::CleanUp } else { LockMode::Change };
    netns.enter_to(access, PATIENCE, || match (Reconciler { store, attachment, netns }.run(wish)) {
        Err(error) if access == LockMode::CleanUp && error.code == Code::ForeignRules => {
            abandon(store, attachment, netns, &error)
        }
        other => other,
    })
}

/// Reads what is kept of the container's attachments; what was left in another namespace is gone
/// with that.
pub(super) fn records(store: &Store, container_id: &str, netns: &NetNs) -> Result<ContainerRecords, Error> {
    let mut records = ContainerRecords::default();
    for attachment in store.of_container(container_id)? {
        if let Some(record) = store.read::<AttachmentRecord>(&attachment)?
            && record.sandbox.is_none_or(|id| id == netns.id())
        {
            records.0.push((attachment, record));
        }
    }
    Ok(records)
}

impl Operation {
    /// Where secondary networks are not to be captured: neither are those that are there already.
    fn spare_secondary_networks(&mut self) -> Result<(), Error> {
        let Self::Apply(Policy { interception: Interception::On(redirect), .. }, _) = self else { return Ok(()) };
        if !redirect.capture_secondary_networks {
            let mut known: HashSet<String> = redirect.exclude_interfaces.iter().cloned().collect();
            let there = netns::secondary_interfaces()?;
            at_most(LIST_ITEMS, "interfaces", "the pod's network namespace", there.len())?;
            redirect.exclude_interfaces.extend(there.into_iter().filter(|name| known.insert(name.clone())));
        }
        Ok(())
    }

    const fn dialect(&self) -> cni::RuleFormatSetting {
        match self {
            Self::Apply(_, dialect) => *dialect,
            Self::Reapply | Self::Remove => cni::RuleFormatSetting::Auto,
        }
    }

    fn redirects(&self) -> bool {
        matches!(self, Self::Apply(policy, _) if policy.redirect().is_some())
    }
}

/// Whether the kernel can't do what the `iptables` dialect needs: it has no nft_compat, or lacks an
/// extension, or the pod has a user namespace of its own (`owner_check` of net/netfilter/xt_owner.c:
/// EINVAL). A refused transaction leaves nothing, so that trying is the cheapest way to ask.
fn is_unable(error: &nfnetlink::NfError) -> bool {
    let unable = [Errno::EINVAL, Errno::ENOENT, Errno::EOPNOTSUPP, Errno::EPROTONOSUPPORT];
    matches!(error, nfnetlink::NfError::Refused { errno, .. } if unable.contains(errno))
}

struct Reconciler<'a> {
    store: &'a Store,
    attachment: &'a Attachment,
    netns: &'a NetNs,
}

impl Reconciler<'_> {
    fn run(&self, mut wish: Operation) -> Result<(), Error> {
        let first = self.records()?;
        let own = first.get(self.attachment);
        let is_new = matches!(wish, Operation::Apply(..));
        if matches!(wish, Operation::Reapply) {
            let Some(own) = own else { return Ok(()) };
            wish = Operation::Apply(own.policy.clone(), cni::RuleFormatSetting::Auto);
        }
        wish.spare_secondary_networks()?;
        if matches!(wish, Operation::Remove) && own.is_none() && !first.0.is_empty() {
            return Ok(());
        }
        let leaving = matches!(wish, Operation::Remove);
        let mut begun = StartedWork::default();
        let done = self.commit(&wish, is_new, &mut begun).and_then(|work| self.settle(work, leaving));
        // What a DEL can't remove is for the next one.
        if done.is_err() && !leaving {
            self.undo(own, &begun);
        }
        done
    }

    /// Tries until the kernel holds what is asked for.
    fn commit(&self, wish: &Operation, is_new: bool, begun: &mut StartedWork) -> Result<PendingWork, Error> {
        let addresses = netns::own_families()?;
        let (mut go_native, mut failures) = (false, 0);
        let deadline = Instant::now() + DEADLINE;
        for _ in (0..TRIES).take_while(|_| Instant::now() < deadline) {
            match self.try_once(wish, is_new, addresses, go_native, begun) {
                Ok(work) => return Ok(work),
                Err(Obstacle::Changed) => {}
                Err(Obstacle::Unable(why)) => {
                    tracing::info!("{why}; the rules are written as nftables");
                    go_native = true;
                }
                Err(Obstacle::Socket(error)) => {
                    failures += 1;
                    if failures == SOCKET_TRIES {
                        return Err(error);
                    }
                    tracing::warn!("{error}; the rules are read again");
                }
                Err(Obstacle::Final(error)) => return Err(error),
            }
        }
        let msg = "somebody else keeps changing the pod's rules at the same time; the runtime should try again";
        Err(Error::new(Code::TryAgain, msg))
    }

    fn try_once(
        &self,
        wish: &Operation,
        is_new: bool,
        addresses: OwnFamilies,
        go_native: bool,
        begun: &mut StartedWork,
    ) -> Result<PendingWork, Obstacle> {
        let mut socket = NfSocket::open().map_err(|e| Obstacle::of(e, None))?;
        let live = LiveRuleset::read(&mut socket).map_err(|e| Obstacle::of(e, None))?;
        // Each transaction makes a generation: this one did not take effect.
        if begun.unknown == Some(live.generation) {
            begun.unknown = None;
        }
        let work = self.prepare(wish, is_new, &live, addresses, go_native, begun)?;
        netns::add_fixtures(&work.missing, addresses)?;
        match work.plan.commit(&mut socket, &live) {
            Ok(()) => Ok(work),
            Err(error) if work.may_go_native && is_unable(&error) => {
                Err(Obstacle::Unable(refused(&error, Some(&work.plan))))
            }
            Err(error) => {
                if matches!(error, nfnetlink::NfError::Socket(_)) {
                    begun.unknown.get_or_insert(live.generation);
                }
                Err(Obstacle::of(error, Some(&work.plan)))
            }
        }
    }

    fn records(&self) -> Result<ContainerRecords, Error> {
        records(self.store, &self.attachment.container_id, self.netns)
    }

    /// Finds out what is to be done and writes down the intent; [`Obstacle::Changed`] where another
    /// attachment has come meanwhile.
    fn prepare(
        &self,
        wish: &Operation,
        is_new: bool,
        live: &LiveRuleset,
        addresses: OwnFamilies,
        go_native: bool,
        begun: &mut StartedWork,
    ) -> Result<PendingWork, Obstacle> {
        let present = self.store.of_container(&self.attachment.container_id)?;
        let kept = self.records()?;
        let before = kept.known_rules();
        let mut records = kept.clone();
        let own = kept.get(self.attachment);
        let redirected = wish.redirects() || kept.policy().is_ok_and(|policy| policy.redirect().is_some());
        let foreign = ForeignRedirection::find(live, &before, redirected);
        if foreign.is_none() && redirected {
            ForeignRedirection::remark_legacy();
        }
        let known = FormatFacts {
            in_use: live.dialect(&before).or_else(|| kept.dialect_of_others(self.attachment)),
            before: own.map(|own| own.dialect),
            foreign,
        };
        let dialect = if go_native { RuleFormat::Nftables } else { choose(wish.dialect(), known)? };
        if own.is_some() || matches!(wish, Operation::Apply(..)) {
            records.put(self.attachment, self.intent(wish, own, foreign, addresses, dialect));
        }
        let policy = records.policy()?;
        if is_new {
            check_rules(&policy, &format!("{} and the container's others", self.attachment))?;
        }
        let desired = ruleset(&policy, records.ip6());
        let needed = fixtures(&policy, records.ip6());
        let missing = needed.missing(addresses)?;
        let leaving = matches!(wish, Operation::Remove);
        let made =
            if dialect == RuleFormat::Iptables { CreatedTables::by(&desired, live) } else { CreatedTables::default() };
        let mut added = needed.those_with(&missing);
        let mut unrecorded = Fixtures::default();
        if kept.0.is_empty() && !live.native.is_empty() {
            unrecorded = unrecorded_fixtures(live)?;
            // What its rules need was added with them.
            added.extend(&needed);
            added.extend(&unrecorded);
        }
        records.remember(self.attachment, leaving, live, &made, &added);
        begun.intent = true;
        begun.missing.extend(&missing);
        match self.keep(&records, &kept) {
            // An intent is not worth a pod that can't go: until it is done, what is kept holds.
            Err(error) if leaving => tracing::warn!("{error}"),
            other => other?,
        }
        let now = self.store.of_container(&self.attachment.container_id)?;
        if now.iter().any(|other| other != self.attachment && !present.contains(other)) {
            return Err(Obstacle::Changed);
        }
        let plan = dialect.plan(live, &before, &desired, &records.made());
        let may_go_native = !go_native && wish.dialect() == cni::RuleFormatSetting::Auto && known.in_use.is_none();
        Ok(PendingWork { records, plan, may_go_native, needed, missing, unrecorded })
    }

    fn intent(
        &self,
        wish: &Operation,
        own: Option<&AttachmentRecord>,
        foreign: Option<ForeignRedirection>,
        addresses: OwnFamilies,
        dialect: RuleFormat,
    ) -> AttachmentRecord {
        let mut record = own.cloned().unwrap_or_default();
        let wanted = match wish {
            Operation::Apply(policy, _) => foreign.map_or(policy.clone(), |foreign| foreign.beside(policy.clone())),
            Operation::Reapply | Operation::Remove => Policy::default(),
        };
        if record.policy != wanted {
            record.before = own.map(|own| own.before.clone().unwrap_or_else(|| own.policy.clone()));
            record.policy = wanted;
        }
        // The same namespace keeps its path: the agent's way to it is not the runtime's.
        if record.sandbox.replace(self.netns.id()) != Some(self.netns.id()) {
            record.netns = Some(self.netns.path().to_owned());
        }
        record.dialect = dialect;
        // A pod without any address may get one of either family later.
        record.ip6 |= addresses.ip6 || !addresses.ip;
        record
    }

    /// Writes what is not kept already.
    fn keep(&self, records: &ContainerRecords, kept: &ContainerRecords) -> Result<(), Error> {
        let mut changed = records.0.iter().filter(|(attachment, record)| kept.get(attachment) != Some(record));
        changed.try_for_each(|(attachment, record)| self.store.write(attachment, record))
    }

    /// Forgets what was there only while the work was under way. That it can't be written is no
    /// failure: the intent says as much, at more length.
    ///
    /// # Errors
    /// A DEL can't remove what is needed no more; state still says so.
    fn settle(&self, work: PendingWork, leaving: bool) -> Result<(), Error> {
        tracing::debug!(changes = work.plan.len(), "the kernel holds what is asked for");
        let mut settled = work.records.clone();
        let mut added = settled.fixtures();
        added.extend(&work.unrecorded);
        match added.remove_but(&work.needed) {
            Ok(()) => settled.0.iter_mut().for_each(|(_, record)| record.fixtures.retain(&work.needed)),
            Err(error) if leaving => return Err(error),
            // It does no harm, and DEL removes it.
            Err(error) => tracing::warn!("{error}"),
        }
        settled.0.iter_mut().for_each(|(_, record)| record.before = None);
        if leaving {
            settled.0.retain(|(attachment, _)| attachment != self.attachment);
        }
        let kept = self.keep(&settled, &work.records);
        let forgotten = if leaving { self.store.remove(self.attachment) } else { Ok(()) };
        for error in [kept, forgotten].into_iter().filter_map(Result::err) {
            tracing::warn!("{error}");
        }
        Ok(())
    }

    /// Takes back what a failed call began. Where that can't be done, or where its rules may be in the
    /// kernel, state stays as it is: it says what DEL has to remove.
    fn undo(&self, own: Option<&AttachmentRecord>, begun: &StartedWork) {
        if !begun.intent || begun.unknown.is_some() {
            return;
        }
        let undone = netns::remove_fixtures(&begun.missing).and_then(|()| match own {
            Some(record) => self.store.write(self.attachment, record),
            None => self.store.remove(self.attachment),
        });
        undone.unwrap_or_else(|error| tracing::warn!("undoing a failed call: {error}"));
    }
}

/// What a call has begun, and may have to undo.
#[derive(Default)]
struct StartedWork {
    /// The intent was written, or may have been.
    intent: bool,
    /// What was added to the namespace besides rules, or may have been.
    missing: BTreeSet<Fixture>,
    /// The generation of the rules before a transaction of which it is not known whether it took effect.
    unknown: Option<u32>,
}

/// Why the kernel does not hold what is asked for after one try.
enum Obstacle {
    /// Another process changed the rules or the attachments meanwhile.
    Changed,
    /// The kernel is unable to take the rules in this dialect.
    Unable(Error),
    /// The socket failed.
    Socket(Error),
    /// Another try would not help.
    Final(Error),
}

impl Obstacle {
    fn of(error: nfnetlink::NfError, plan: Option<&Transaction>) -> Self {
        match error {
            nfnetlink::NfError::Changed => Self::Changed,
            nfnetlink::NfError::Socket(_) => Self::Socket(refused(&error, plan)),
            _ => Self::Final(refused(&error, plan)),
        }
    }
}

impl From<Error> for Obstacle {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

/// What is to be done, once the intent is written.
struct PendingWork {
    /// What will be kept of the container's attachments while it is done.
    records: ContainerRecords,
    plan: Transaction,
    /// Whether it can be written as nftables where the kernel is unable to take it as it is.
    may_go_native: bool,
    /// What the rules need besides themselves.
    needed: Fixtures,
    /// What of that is not there.
    missing: BTreeSet<Fixture>,
    /// What rules without saved state needed.
    unrecorded: Fixtures,
}

fn refused(error: &nfnetlink::NfError, plan: Option<&Transaction>) -> Error {
    use nfnetlink::NfError::{TooMany, TooManyDeletions};
    if matches!(error, TooMany(_) | TooManyDeletions { .. }) {
        return firewall::failed("changing", *error);
    }
    let lacking = [Errno::EAGAIN, Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    if matches!(error, nfnetlink::NfError::Socket(errno) if lacking.contains(errno)) {
        let msg = format!("the pod's rules: {error}: the node lacks memory or file descriptors; try again");
        return Error::new(Code::TryAgain, msg);
    }
    let at = match error {
        nfnetlink::NfError::Refused { index: Some(index), .. } => plan.and_then(|plan| plan.describe(*index)),
        _ => None,
    };
    let what = at.unwrap_or_else(|| "the pod's rules".to_owned());
    let needed = match plan {
        Some(Transaction::Nftables(_)) => {
            "nf_tables with nat, redirect, tproxy and ct expressions for family inet (5.2 or later)"
        }
        _ => "nf_tables with nft_compat and the xtables extensions, which dialect nftables does without",
    };
    let msg = format!("{what}: {error}; does the node's kernel have {needed}?");
    Error::new(Code::KernelRefused, msg)
}

/// Removes the rules, or makes them have no effect, if no other attachment of the container needs them, and
/// forgets the attachment. To be called in the namespace.
///
/// # Errors
/// The saved state can't be read or written.
pub(super) fn abandon(store: &Store, attachment: &Attachment, sandbox: &NetNs, why: &Error) -> Result<(), Error> {
    tracing::warn!("the rules are removed as far as they are found: {why}");
    let records = records(store, &attachment.container_id, sandbox)?;
    let known = records.policy();
    let other = records.0.iter().find(|(other, record)| other != attachment && record.sandbox.is_some());
    if let Some((other, record)) = other {
        // The chains of the attachment that leaves are known as ours by the one that stays.
        let mut record = record.clone();
        record.before = Some(known?);
        store.write(other, &record)?;
    } else {
        let dialect = records.dialect().unwrap_or_default();
        firewall::remove(dialect, &records.known_rules(), &records.made())
            .unwrap_or_else(|error| tracing::warn!("rules stay in the network namespace until it is deleted: {error}"));
        let removed = records.fixtures().remove_but(&Fixtures::default());
        removed.unwrap_or_else(|error| tracing::warn!("{error}"));
    }
    store.remove(attachment)
}
