//! What other tools have put into a pod, and what that means for a policy.

use crate::cni::{Code, Error};
use crate::firewall::rule::{Family, Table};
use crate::firewall::{Live, LiveChain, Ruleset, legacy_tables};
use crate::policy::{Interception, Policy};

/// Where somebody else redirects this pod already, that stays: only the exclusions are ours, and
/// whether DNS is captured is read from those rules.
pub(super) fn beside_redirection(mut policy: Policy, live: &Live, known: &Ruleset) -> Policy {
    let Some(captures_dns) = redirection(live, known) else { return policy };
    if policy.redirect().is_some() {
        tracing::warn!("another tool's redirection is in the pod already and stays; only exclusions are added");
        policy.interception = Interception::Unsaid;
    }
    policy.dns_captured_elsewhere = Some(captures_dns);
    policy
}

/// Whether a redirection whose rules are not among those `known` as ours captures DNS; `None`
/// where there is no such redirection.
pub(super) fn redirection(live: &Live, known: &Ruleset) -> Option<bool> {
    let foreign = |(family, table, name, _): &(Family, Table, &str, &LiveChain)| {
        name.starts_with("ISTIO_") && !known.has_chain(*family, *table, name)
    };
    let captures = |(_, table, _, chain): (_, Table, _, &LiveChain)| table == Table::Raw && !chain.rules.is_empty();
    let native = live.native_istio.map(|istio| istio.captures_dns);
    live.chains().filter(foreign).map(captures).chain(native).reduce(|a, b| a || b)
}

/// Rules of the older iptables (`iptables-legacy`) are no part of nf_tables: the kernel passes both,
/// nobody's are lost, and a verdict in one does not stop the other's. So where those are what
/// redirects this pod, nothing that is written here can exempt from it. What they are can't be
/// read without iptables; that the pod is redirected by them shows in there being no other rules
/// that do.
pub(super) fn beside_legacy(policy: &Policy, live: &Live) -> Result<(), Error> {
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
