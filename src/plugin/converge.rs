//! Makes the kernel hold what all attachments on a container ask for together. The intent is
//! written before the commit, so that whoever comes after a call that was killed knows what may
//! be in the kernel, and finishes the work.

use super::dialect::{Known, choose};
use super::record::{Record, Records};
use crate::cni::{self, Code, Error};
use crate::firewall::nfnetlink::{self, Socket};
use crate::firewall::rule::{Family, Table};
use crate::firewall::{Dialect, Live, Made, Plan, Ruleset};
use crate::policy::{Interception, Ipv6, Policy};
use crate::sandbox::{self, OwnFamilies, Sandbox};
use crate::state::{Attachment, Store};
use nix::errno::Errno;
use std::time::Duration;

/// How long a call waits for another one in the same namespace.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often the rules are read again because somebody else changed them at the same time.
const TRIES: usize = 100;

/// What a call wants of one attachment.
#[derive(Debug, Clone)]
pub(super) enum Wish {
    /// This policy, in place of what it asked for before, in this dialect.
    Have(Policy, cni::Dialect),
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

impl Wish {
    const fn dialect(&self) -> cni::Dialect {
        match self {
            Self::Have(_, dialect) => *dialect,
            Self::Leave => cni::Dialect::Auto,
        }
    }
}

/// Whether the kernel can't do what the `iptables` dialect needs, as where it has no nft_compat or
/// lacks an extension, or where the pod has a user namespace of its own (`owner_check` of
/// net/netfilter/xt_owner.c: EINVAL). A refused transaction leaves nothing, so that trying is the
/// cheapest way to ask.
fn may_go_native(wish: &Wish, known: Known, error: &nfnetlink::Error) -> bool {
    let is_unknown =
        |errno| matches!(errno, Errno::EINVAL | Errno::ENOENT | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT);
    let refuses = matches!(error, nfnetlink::Error::Refused { errno, .. } if is_unknown(*errno));
    refuses && wish.dialect() == cni::Dialect::Auto && known.in_use.is_none()
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
        let mut socket = Socket::open().map_err(|e| refused(&e, None))?;
        let addresses = sandbox::own_families()?;
        let before = self.before(&records)?;
        let others = records.dialect_of_others(self.attachment);
        let mut iptables_refused = false;
        for _ in 0..TRIES {
            let live = match Live::read(&mut socket) {
                Err(nfnetlink::Error::Changed) => continue,
                other => other.map_err(|e| refused(&e, None))?,
            };
            let known = Known {
                in_use: live.dialect(&before).or(others),
                before: own.as_ref().map(|own| own.dialect),
                native_redirection: live.native_istio.is_some(),
            };
            let dialect = if iptables_refused { Dialect::Nftables } else { choose(wish.dialect(), known)? };
            let intent = self.intent(&wish, own.as_ref(), &live, &before, addresses, dialect);
            records.put(self.attachment, intent);
            let policy = records.policy()?;
            let desired = ruleset(&policy, records.ip6());
            if dialect == Dialect::Iptables {
                self.set_made(&mut records, &Made::by(&desired, &live));
            }
            let plan = dialect.plan(&live, &before, &desired, &records.made());
            let lacks_loopback = needs_loopback(&policy, records.ip6()) && !addresses.proxy_loopback;
            if own.is_some() || !matches!(wish, Wish::Leave) {
                self.keep(&mut records, lacks_loopback, own.as_ref())?;
            }
            if lacks_loopback {
                self.add_loopback(addresses)?;
            }
            match plan.commit(&mut socket, &live) {
                Err(nfnetlink::Error::Changed) => continue,
                Err(error) if dialect == Dialect::Iptables && may_go_native(&wish, known, &error) => {
                    tracing::info!("{}; the rules are written as nftables instead", refused(&error, Some(&plan)));
                    iptables_refused = true;
                    continue;
                }
                other => other.map_err(|e| refused(&e, Some(&plan)))?,
            }
            tracing::debug!(dialect = dialect.name(), changes = plan.len(), "the kernel holds what is asked for");
            return self.done(&records, &policy, matches!(wish, Wish::Leave));
        }
        let msg = "somebody else keeps changing the pod's rules at the same time; the runtime should try again";
        Err(Error::new(Code::TryAgain, msg))
    }

    /// Everything that may be in iptables' tables because of us, whichever call was killed when.
    fn before(&self, records: &Records) -> Result<Ruleset, Error> {
        if records.dialect() == Some(Dialect::Nftables) {
            return Ok(Ruleset::default());
        }
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
        dialect: Dialect,
    ) -> Record {
        let mut record = own.cloned().unwrap_or_default();
        let wanted = match wish {
            Wish::Have(policy, _) => beside_foreign_redirection(policy.clone(), live, before),
            Wish::Leave => Policy::default(),
        };
        if record.policy != wanted {
            record.before = own.map(|own| own.before.clone().unwrap_or_else(|| own.policy.clone()));
            record.policy = wanted;
        }
        record.sandbox = Some(self.sandbox.id());
        record.dialect = dialect;
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
    if foreign.is_empty() && live.native_istio.is_none() {
        return policy;
    }
    if policy.redirect().is_some() {
        tracing::warn!("another tool's redirection is in the pod already and stays; only exclusions are added");
        policy.interception = Interception::Unsaid;
    }
    let captures = foreign.iter().any(|(_, table, _, chain)| *table == Table::Raw && !chain.rules.is_empty());
    policy.dns_captured_elsewhere = Some(captures || live.native_istio.is_some_and(|istio| istio.captures_dns));
    policy
}

fn refused(error: &nfnetlink::Error, plan: Option<&Plan>) -> Error {
    let at = match error {
        nfnetlink::Error::Refused { index: Some(index), .. } => plan.and_then(|plan| plan.describe(*index)),
        _ => None,
    };
    let what = at.unwrap_or_else(|| "the pod's rules".to_owned());
    let needed = match plan {
        Some(Plan::Nftables(_)) => {
            "nf_tables with nat, redirect, tproxy and ct expressions for family inet (5.2 or later)"
        }
        _ => "nf_tables with nft_compat and the xtables extensions, which dialect nftables does without",
    };
    let msg = format!("{what}: {error}; does the node's kernel have {needed}?");
    Error::new(Code::KernelRefused, msg)
}
