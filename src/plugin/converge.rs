//! Makes the kernel hold what all attachments on a container ask for together. The intent is
//! written before the commit, so that whoever comes after a call that was killed knows what may
//! be in the kernel, and finishes the work.

use super::record::{Record, Records};
use crate::cni::{Code, Error};
use crate::firewall::nfnetlink::{self, Socket};
use crate::firewall::rule::{Family, Table};
use crate::firewall::{Change, Live, Made, Ruleset, Step, changes, commit};
use crate::policy::{Interception, InterceptionMode, Ipv6, Policy};
use crate::sandbox::{self, Fixtures, OwnFamilies, Routing, Sandbox};
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
        let leaving = matches!(wish, Wish::Leave);
        if leaving && own.is_none() && !records.0.is_empty() {
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
            let needed = fixtures(&policy, records.ip6());
            let missing = needed.missing(addresses)?;
            // Each knows what was made for any of them: whoever leaves last tidies up.
            let (mut made, mut added) = (records.made(), records.fixtures());
            made.add(&Made::by(&desired, &live));
            added.extend(&missing);
            let changes = changes(&live, &before, &desired, &made);
            if let Some(record) = records.get_mut(self.attachment) {
                (record.made, record.fixtures) = (made, added);
            }
            self.keep(&records, own.as_ref(), leaving)?;
            missing.add(addresses)?;
            match commit(&mut socket, &live, &changes) {
                Err(nfnetlink::Error::Changed) => continue,
                other => other.map_err(|e| refused(&e, &changes))?,
            }
            tracing::debug!(changes = changes.len(), "the kernel holds what is asked for");
            records.fixtures().remove_but(&needed)?;
            return self.settle(records, &needed, leaving);
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

    /// Writes the intent, unless that is what is kept already.
    fn keep(&self, records: &Records, kept: Option<&Record>, leaving: bool) -> Result<(), Error> {
        let intent = records.get(self.attachment);
        match intent.filter(|_| intent != kept && !(leaving && kept.is_none())) {
            Some(intent) => self.store.write(self.attachment, intent),
            None => Ok(()),
        }
    }

    /// The kernel holds what is asked for: what was asked for before need not be known any more.
    fn settle(&self, mut records: Records, needed: &Fixtures, leaving: bool) -> Result<(), Error> {
        if leaving {
            return self.store.remove(self.attachment);
        }
        let Some(record) = records.get_mut(self.attachment) else { return Ok(()) };
        let unsettled = record.before.take().is_some();
        let given_up = record.fixtures.retain(needed);
        if unsettled || given_up { self.store.write(self.attachment, record) } else { Ok(()) }
    }
}

/// What the rules for `policy` need of the namespace besides themselves.
fn fixtures(policy: &Policy, ip6: bool) -> Fixtures {
    let Some(redirect) = policy.redirect() else { return Fixtures::default() };
    let ip6 = writes_ip6(policy, ip6);
    let (mark, table) = (redirect.inbound_tproxy_mark, redirect.inbound_tproxy_route_table);
    let tproxy = redirect.inbound_interception_mode == InterceptionMode::Tproxy;
    let routing = tproxy.then_some(Routing { mark, table, ip6 }).into_iter().collect();
    Fixtures { proxy_loopback: ip6, routing }
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
