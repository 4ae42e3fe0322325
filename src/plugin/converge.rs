//! Makes the kernel hold what all attachments on a container ask for together. The intent is
//! written before the commit, so that whoever comes after a call that was killed knows what may
//! be in the kernel, and finishes the work.

use super::record::{Record, Records};
use crate::cni::{Code, Error};
use crate::firewall::nfnetlink::{self, Socket};
use crate::firewall::rule::{Family, Table};
use crate::firewall::{Change, Live, Made, Ruleset, Step, changes, commit, legacy_tables};
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
        if let Some(record) = store.read::<Record>(&attachment)?
            && record.sandbox.is_none_or(|id| id == sandbox.id())
        {
            records.0.push((attachment, record));
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
        let first = self.records()?;
        let own = first.get(self.attachment);
        if matches!(wish, Wish::Leave) && own.is_none() && !first.0.is_empty() {
            return Ok(());
        }
        let mut socket = Socket::open().map_err(|e| refused(&e, &[]))?;
        let addresses = sandbox::own_families()?;
        for _ in 0..TRIES {
            let live = match Live::read(&mut socket) {
                Err(nfnetlink::Error::Changed) => continue,
                other => other.map_err(|e| refused(&e, &[]))?,
            };
            let Some(work) = self.prepare(&wish, &live, addresses)? else { continue };
            let done = self.commit(&mut socket, &live, &work, addresses);
            match done {
                Ok(false) => {}
                Ok(true) => return self.settle(work, matches!(wish, Wish::Leave)),
                Err(error) => {
                    if matches!(wish, Wish::Have(_)) {
                        self.undo(own, &work);
                    }
                    return Err(error);
                }
            }
        }
        let msg = "somebody else keeps changing the pod's rules at the same time; the runtime should try again";
        Err(Error::new(Code::TryAgain, msg))
    }

    fn records(&self) -> Result<Records, Error> {
        records(self.store, &self.attachment.container_id, self.sandbox)
    }

    /// Finds out what is to be done and writes down the intent; `None` where another attachment
    /// has come meanwhile.
    fn prepare(&self, wish: &Wish, live: &Live, addresses: OwnFamilies) -> Result<Option<Work>, Error> {
        let present = self.store.of_container(&self.attachment.container_id)?;
        let kept = self.records()?;
        let before = kept.known_rules();
        let mut records = kept.clone();
        let own = kept.get(self.attachment);
        if own.is_some() || matches!(wish, Wish::Have(_)) {
            records.put(self.attachment, self.intent(wish, own, live, &before, addresses));
        }
        let policy = records.policy()?;
        if let Wish::Have(_) = wish {
            beside_legacy(&policy, live)?;
        }
        let desired = ruleset(&policy, records.ip6());
        let needed = fixtures(&policy, records.ip6());
        let missing = needed.missing(addresses)?;
        let leaving = matches!(wish, Wish::Leave);
        records.remember(self.attachment, leaving, live, &Made::by(&desired, live), &missing);
        match self.keep(&records, &kept) {
            // An intent is not worth a pod that can't go: until it is done, what is kept holds.
            Err(error) if leaving => tracing::warn!("{error}"),
            other => other?,
        }
        let now = self.store.of_container(&self.attachment.container_id)?;
        if now.iter().any(|other| other != self.attachment && !present.contains(other)) {
            return Ok(None);
        }
        let changes = changes(live, &before, &desired, &records.made());
        Ok(Some(Work { records, changes, needed, missing }))
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
        record.netns = Some(self.sandbox.path().to_owned());
        // A pod without any address may get one of either family later.
        record.ip6 |= addresses.ip6 || !addresses.ip;
        record
    }

    /// Writes what is not kept already.
    fn keep(&self, records: &Records, kept: &Records) -> Result<(), Error> {
        let mut changed = records.0.iter().filter(|(attachment, record)| kept.get(attachment) != Some(record));
        changed.try_for_each(|(attachment, record)| self.store.write(attachment, record))
    }

    /// Whether the kernel took it; `false` where somebody changed the rules meanwhile.
    fn commit(&self, socket: &mut Socket, live: &Live, work: &Work, addresses: OwnFamilies) -> Result<bool, Error> {
        work.missing.add(addresses)?;
        match commit(socket, live, &work.changes) {
            Err(nfnetlink::Error::Changed) => Ok(false),
            other => other.map(|()| true).map_err(|e| refused(&e, &work.changes)),
        }
    }

    /// Forgets what was there only while the work was under way. That it can't be written is no
    /// failure: the intent says as much, at more length.
    fn settle(&self, work: Work, leaving: bool) -> Result<(), Error> {
        tracing::debug!(changes = work.changes.len(), "the kernel holds what is asked for");
        let mut settled = work.records.clone();
        settled.fixtures().remove_but(&work.needed)?;
        for (_, record) in &mut settled.0 {
            record.fixtures.retain(&work.needed);
            record.before = None;
        }
        if leaving {
            settled.0.retain(|(attachment, _)| attachment != self.attachment);
        }
        if let Err(error) = self.keep(&settled, &work.records) {
            tracing::warn!("{error}");
        }
        if leaving { self.store.remove(self.attachment) } else { Ok(()) }
    }

    /// Takes back the intent of work that the kernel refused.
    fn undo(&self, own: Option<&Record>, work: &Work) {
        let restored = match own {
            Some(record) => self.store.write(self.attachment, record),
            None => self.store.remove(self.attachment),
        };
        let removed = work.missing.remove_but(&Fixtures::default());
        for error in [restored, removed].into_iter().filter_map(Result::err) {
            tracing::warn!("{error}");
        }
    }
}

/// What is to be done, once the intent is written.
struct Work {
    /// What will be kept of the container's attachments while it is done.
    records: Records,
    changes: Vec<Change>,
    /// What the rules need besides themselves.
    needed: Fixtures,
    /// What of that is not there.
    missing: Fixtures,
}

/// What the rules for `policy` need of the namespace besides themselves.
pub(super) fn fixtures(policy: &Policy, ip6: bool) -> Fixtures {
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

/// Rules of the older iptables (`iptables-legacy`) are no part of nf_tables: the kernel passes both,
/// nobody's are lost, and a verdict in one does not stop the other's. So where those are what
/// redirects this pod, nothing that is written here can exempt from it. What they are can't be
/// read without iptables; that the pod is redirected by them shows in there being no other rules
/// that do.
fn beside_legacy(policy: &Policy, live: &Live) -> Result<(), Error> {
    let tables = legacy_tables();
    if policy.is_empty() || tables.is_empty() {
        return Ok(());
    }
    let all: Vec<String> = tables.iter().map(|(family, table)| format!("{} {table}", family.name())).collect();
    let all = all.join(", ");
    let redirected = policy.redirect().is_some() || live.chains().any(|(_, _, name, _)| name.starts_with("ISTIO_"));
    if !redirected && tables.iter().any(|(_, table)| table == Table::Nat.name()) {
        let msg = format!(
            "the pod has tables of iptables-legacy ({all}) and no redirection in nf_tables: nothing can be exempt from \
             a redirection by iptables-legacy; let whatever redirects this pod use iptables-nft (for istio-cni: no \
             iptables-legacy on the node), or let this plugin redirect it"
        );
        return Err(Error::new(Code::ForeignRules, msg));
    }
    tracing::warn!("tables of iptables-legacy ({all}) are in the pod too; both theirs and these rules apply");
    Ok(())
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
