//! Other tools' redirections of a pod, and what they mean for a policy.

use crate::firewall::rule::{Family, Table};
use crate::firewall::{LiveRuleset, LiveChain, Ruleset, legacy_tables};
use crate::policy::{Interception, Policy};

/// A redirection that is somebody else's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ForeignRedirection {
    /// Whether it is in the tables of iptables-nft, where what is exempt can be accepted before it.
    /// A verdict there does not stop other tables.
    pub(super) in_iptables: bool,
    /// Whether it captures DNS.
    pub(super) captures_dns: bool,
}

impl ForeignRedirection {
    /// Finds one whose rules are not among those `known` as ours. `redirected` says that the pod is
    /// redirected by us, so that nobody else need be.
    pub(super) fn find(live: &LiveRuleset, known: &Ruleset, redirected: bool) -> Option<Self> {
        let native = live.native_istio.map(|istio| Self { in_iptables: false, captures_dns: istio.captures_dns });
        let other = native.or_else(|| Self::in_iptables(live, known));
        if redirected { other } else { other.or_else(Self::in_legacy) }
    }

    /// Says that another redirection may apply too, in a pod that is redirected by us. To be asked in the
    /// namespace.
    pub(super) fn remark_legacy() {
        let tables = legacy_tables();
        if !tables.is_empty() {
            let all: Vec<String> = tables.iter().map(|(family, table)| format!("{} {table}", family.name())).collect();
            let all = all.join(", ");
            tracing::warn!("tables of iptables-legacy ({all}) are in the pod too; both theirs and these rules apply");
        }
    }

    fn in_iptables(live: &LiveRuleset, known: &Ruleset) -> Option<Self> {
        let foreign = |(family, table, name, _): &(Family, Table, &str, &LiveChain)| {
            name.starts_with("ISTIO_") && !known.has_chain(*family, *table, name)
        };
        let captures = |(_, table, _, chain): (_, Table, _, &LiveChain)| table == Table::Raw && !chain.rules.is_empty();
        let captures_dns = live.chains().filter(foreign).map(captures).reduce(|a, b| a || b)?;
        Some(Self { in_iptables: true, captures_dns })
    }

    /// Rules of the older iptables (`iptables-legacy`) are no part of nf_tables. What they are can't
    /// be read without iptables; that the pod is redirected by them shows in there being no other
    /// rules that do, and that DNS is captured in there being a table for its zones.
    fn in_legacy() -> Option<Self> {
        let tables = legacy_tables();
        let has = |table: Table| tables.iter().any(|(_, name)| name == table.name());
        has(Table::Nat).then(|| Self { in_iptables: false, captures_dns: has(Table::Raw) })
    }

    /// The policy beside it: it stays, so that only the exclusions are ours.
    pub(super) fn beside(self, mut policy: Policy) -> Policy {
        if policy.redirect().is_some() {
            tracing::warn!("another tool's redirection is in the pod already and stays; only exclusions are added");
            policy.interception = Interception::Unsaid;
        }
        policy.dns_captured_elsewhere = Some(self.captures_dns);
        policy
    }
}
