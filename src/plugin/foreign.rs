//! Redirections of the pod that are somebody else's.

use crate::cni::{Code, Error};
use crate::firewall::rule::Table;
use crate::firewall::{Live, Ruleset, legacy_tables};
use crate::policy::{Interception, Policy};

/// Where somebody else redirects this pod already, that stays: only the exclusions are ours, and
/// whether DNS is captured is read from those rules.
pub(super) fn beside_foreign_redirection(mut policy: Policy, live: &Live, before: &Ruleset) -> Policy {
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
