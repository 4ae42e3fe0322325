//! Makes the kernel hold what all attachments on a container ask for together. The intent is
//! written before the commit, so that whoever comes after a call that was killed knows what may
//! be in the kernel, and finishes the work.

use super::record::{Record, Records};
use crate::cni::{Code, Error};
use crate::firewall::nfnetlink::{self, Socket};
use crate::firewall::rule::{Family, Table};
use crate::firewall::{Change, Live, Made, Ruleset, Step, changes, commit};
use crate::policy::{Interception, Ipv6, Policy};
use crate::sandbox::{self, OwnFamilies, Sandbox};
use crate::state::{Attachment, Store};
use std::time::Duration;

/// How long a call waits for another one in the same namespace.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often the rules are read again because somebody else changed them at the same time.
const TRIES: usize = 100;

/// What a call wants of one attachment.
#[derive(Debug, Clone)]
pub(super) enum Wish {
    /// This policy, in place of what it asked for before.
    Have(Policy),
    /// Nothing any more.
    Leave,
}

/// Makes the kernel hold what `wish` and all other attachments on the container ask for.
///
/// # Errors
/// The namespace can't be entered, the attachments contradict each other, state can't be kept, or
/// the kernel refuses; then nothing of this call is in the kernel.
pub(super) fn converge(store: &Store, attachment: &Attachment, sandbox: &Sandbox, wish: Wish) -> Result<(), Error> {
    sandbox.enter(PATIENCE, || Converge { store, attachment, sandbox }.run(wish))
}

/// Reads what is kept of the container's attachments; what was left in another namespace is gone
/// with that.
pub(super) fn records(store: &Store, container_id: &str, sandbox: &Sandbox) -> Result<Records, Error> {
    let mut records = Records::default();
    for attachment in store.of_container(container_id)? {
        if let Some(record) = store.read::<Record>(&attachment)? {
            let here = record.sandbox.is_none_or(|id| id == sandbox.id());
            records.0.push((attachment, if here { record } else { Record::default() }));
        }
    }
    Ok(records)
}

/// The rules that `policy` needs in a pod that has IPv6 or not. Istio's rules for IPv4 are there
/// in every pod.
pub(super) fn ruleset(policy: &Policy, ip6: bool) -> Ruleset {
    Ruleset::of(policy, if writes_ip6(policy, ip6) { &Family::ALL } else { &[Family::Ip] })
}

fn writes_ip6(policy: &Policy, ip6: bool) -> bool {
    match policy.redirect().map(|redirect| redirect.ipv6) {
        Some(Ipv6::On) => true,
        Some(Ipv6::Off) => false,
        Some(Ipv6::Auto) | None => ip6,
    }
}

struct Converge<'a> {
    store: &'a Store,
    attachment: &'a Attachment,
    sandbox: &'a Sandbox,
}

impl Converge<'_> {
    fn run(&self, wish: Wish) -> Result<(), Error> {
        let mut records = records(self.store, &self.attachment.container_id, self.sandbox)?;
        let own = records.get(self.attachment).cloned();
        if matches!(wish, Wish::Leave) && own.is_none() && !records.0.is_empty() {
            return Ok(());
        }
        let mut socket = Socket::open().map_err(|e| refused(&e, &[]))?;
        let addresses = sandbox::own_families()?;
        let before = self.before(&records)?;
        for _ in 0..TRIES {
            let live = match Live::read(&mut socket) {
                Err(nfnetlink::Error::Changed) => continue,
                other => other.map_err(|e| refused(&e, &[]))?,
            };
            let intent = self.intent(&wish, own.as_ref(), &live, &before, addresses);
            records.put(self.attachment, intent);
            let policy = records.policy()?;
            let desired = ruleset(&policy, records.ip6());
            self.set_made(&mut records, &Made::by(&desired, &live));
            let changes = changes(&live, &before, &desired, &records.made());
            let lacks_loopback = needs_loopback(&policy, records.ip6()) && !addresses.proxy_loopback;
            if own.is_some() || !matches!(wish, Wish::Leave) {
                self.keep(&mut records, lacks_loopback, own.as_ref())?;
            }
            if lacks_loopback {
                self.add_loopback(addresses)?;
            }
            match commit(&mut socket, &live, &changes) {
                Err(nfnetlink::Error::Changed) => continue,
                other => other.map_err(|e| refused(&e, &changes))?,
            }
            tracing::debug!(changes = changes.len(), "the kernel holds what is asked for");
            return self.done(&records, &policy, matches!(wish, Wish::Leave));
        }
        let msg = "somebody else keeps changing the pod's rules at the same time; the runtime should try again";
        Err(Error::new(Code::TryAgain, msg))
    }

    /// Everything that may be in the kernel because of us, whichever call was killed when.
    fn before(&self, records: &Records) -> Result<Ruleset, Error> {
        let mut before = ruleset(&records.policy()?, true);
        before.know_also(&ruleset(&records.policy_before()?, true));
        Ok(before)
    }

    fn intent(
        &self,
        wish: &Wish,
        own: Option<&Record>,
        live: &Live,
        before: &Ruleset,
        addresses: OwnFamilies,
    ) -> Record {
        let mut record = own.cloned().unwrap_or_default();
        let wanted = match wish {
            Wish::Have(policy) => beside_foreign_redirection(policy.clone(), live, before),
            Wish::Leave => Policy::default(),
        };
        if record.policy != wanted {
            record.before = own.map(|own| own.before.clone().unwrap_or_else(|| own.policy.clone()));
            record.policy = wanted;
        }
        record.sandbox = Some(self.sandbox.id());
        // A pod without any address may get one of either family later.
        record.ip6 |= addresses.ip6 || !addresses.ip;
        record
    }

    fn set_made(&self, records: &mut Records, made: &Made) {
        if let Some((_, record)) = records.0.iter_mut().find(|(other, _)| other == self.attachment) {
            record.made.add(made);
        }
    }

    /// Writes the intent, unless that is what is kept already.
    fn keep(&self, records: &mut Records, lacks_loopback: bool, kept: Option<&Record>) -> Result<(), Error> {
        if let Some((_, record)) = records.0.iter_mut().find(|(other, _)| other == self.attachment) {
            record.proxy_loopback |= lacks_loopback;
            if Some(&*record) != kept {
                self.store.write(self.attachment, record)?;
            }
        }
        Ok(())
    }

    /// Where the pod has no address at all, IPv6 may be off; then nothing needs this one.
    fn add_loopback(&self, addresses: OwnFamilies) -> Result<(), Error> {
        match sandbox::add_proxy_loopback() {
            Err(error) if !addresses.ip6 => {
                tracing::warn!("{error}");
                Ok(())
            }
            other => other,
        }
    }

    fn done(&self, records: &Records, policy: &Policy, leaving: bool) -> Result<(), Error> {
        if records.proxy_loopback() && !needs_loopback(policy, records.ip6()) {
            sandbox::remove_proxy_loopback()?;
        }
        let Some(record) = records.get(self.attachment) else { return Ok(()) };
        if leaving {
            return self.store.remove(self.attachment);
        }
        if record.before.is_some() {
            let mut settled = record.clone();
            settled.before = None;
            self.store.write(self.attachment, &settled)?;
        }
        Ok(())
    }
}

fn needs_loopback(policy: &Policy, ip6: bool) -> bool {
    policy.redirect().is_some() && writes_ip6(policy, ip6)
}

/// Where somebody else redirects this pod already, that stays: only the exclusions are ours, and
/// whether DNS is captured is read from those rules.
fn beside_foreign_redirection(mut policy: Policy, live: &Live, before: &Ruleset) -> Policy {
    let foreign: Vec<_> = live
        .chains()
        .filter(|(family, table, name, _)| name.starts_with("ISTIO_") && !before.has_chain(*family, *table, name))
        .collect();
    if foreign.is_empty() {
        return policy;
    }
    if policy.redirect().is_some() {
        tracing::warn!("another tool's redirection is in the pod already and stays; only exclusions are added");
        policy.interception = Interception::Unsaid;
    }
    let captures = foreign.iter().any(|(_, table, _, chain)| *table == Table::Raw && !chain.rules.is_empty());
    policy.dns_captured_elsewhere = Some(captures);
    policy
}

fn refused(error: &nfnetlink::Error, changes: &[Change]) -> Error {
    let at = match error {
        nfnetlink::Error::Refused { index: Some(index), .. } => changes.get(*index),
        _ => None,
    };
    let what = match at {
        Some(((family, table), Step::Rule { chain, rule, .. })) => {
            format!("{} {} -A {chain} {rule}", family.name(), table.name())
        }
        Some(((family, table), step)) => format!("{} {} {step:?}", family.name(), table.name()),
        None => "the pod's rules".to_owned(),
    };
    let msg =
        format!("{what}: {error}; does the node's kernel have nf_tables with nft_compat and the xtables extensions?");
    Error::new(Code::KernelRefused, msg)
}
