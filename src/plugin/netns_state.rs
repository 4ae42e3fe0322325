//! What all attachments in one network namespace ask for, found by the namespace alone.
//!
//! In which dialect a pod's rules are written: what is there already, and who redirects, count
//! before what is merely preferred. A pod never has rules of ours in both.
//!
//! Other tools' redirections of a pod, and what they mean for a policy.

use super::desired_policy::{fixtures, ruleset};
use super::reconcile::records;
use super::record::{AttachmentRecord, ContainerRecords};
use crate::cni;
use crate::cni::{Code, Error};
use crate::firewall::rule::{Family, Table};
use crate::firewall::{LiveChain, LiveRuleset, RuleFormat, Ruleset, legacy_tables};
use crate::netns::{Fixtures, NetNs};
use crate::policy::{Interception, Policy};
use crate::state::{Attachment, Store};

/// What is kept of a namespace's attachments, together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetnsState {
    /// Who asks.
    pub attachments: Vec<Attachment>,
    /// What they ask for together.
    pub policy: Policy,
    /// The rules that the namespace should hold.
    pub rules: Ruleset,
    /// How they are written.
    pub dialect: RuleFormat,
    /// What the rules need of the namespace besides themselves.
    pub fixtures: Fixtures,
}

/// Looks through all containers for the attachments whose rules are in `sandbox`; `None` where
/// nobody has asked for anything there.
///
/// # Errors
/// State can't be read, or the attachments contradict each other.
pub fn asked(store: &Store, sandbox: &NetNs) -> Result<Option<NetnsState>, Error> {
    let mut found = Vec::new();
    for container in store.containers()? {
        let mut records = records(store, &container, sandbox)?;
        records.0.retain(|(_, record)| record.sandbox == Some(sandbox.id()));
        if !records.0.is_empty() {
            found.push(records);
        }
    }
    // The kernel gives a namespace's number to a later one, and a pod that got no DEL leaves what it had.
    let current = found.iter().position(|records| records.0.iter().any(|(_, record)| leads_to(record, sandbox)));
    found.into_iter().nth(current.unwrap_or_default()).map(NetnsState::of).transpose()
}

/// Whether the path of the ADD still leads there. In the agent's container none may lead anywhere.
fn leads_to(record: &AttachmentRecord, sandbox: &NetNs) -> bool {
    let there = record.netns.as_deref().and_then(|path| NetNs::open(path).ok().flatten());
    there.is_some_and(|there| there.id() == sandbox.id())
}

impl NetnsState {
    fn of(records: ContainerRecords) -> Result<Self, Error> {
        let policy = records.policy()?;
        let (rules, fixtures) = (ruleset(&policy, records.ip6()), fixtures(&policy, records.ip6()));
        let dialect = records.dialect().unwrap_or_default();
        let attachments = records.0.into_iter().map(|(attachment, _)| attachment).collect();
        Ok(Self { attachments, policy, rules, dialect, fixtures })
    }
}

/// What is known of a pod when its dialect is chosen.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FormatFacts {
    /// The dialect of what the kernel holds of ours, or other attachments on the container have.
    pub(super) in_use: Option<RuleFormat>,
    /// The dialect that this attachment had before.
    pub(super) before: Option<RuleFormat>,
    /// Who else redirects the pod.
    pub(super) foreign: Option<ForeignRedirection>,
}

/// Chooses.
///
/// # Errors
/// The configuration demands a dialect that does not go with what is there.
pub(super) fn choose(asked: cni::RuleFormatSetting, known: FormatFacts) -> Result<RuleFormat, Error> {
    let wanted = match asked {
        cni::RuleFormatSetting::Auto => None,
        cni::RuleFormatSetting::Iptables => Some(RuleFormat::Iptables),
        cni::RuleFormatSetting::Nftables => Some(RuleFormat::Nftables),
    };
    let out_of_reach = known.foreign.is_some_and(|foreign| !foreign.in_iptables);
    match (wanted, known.in_use) {
        (Some(wanted), Some(used)) if wanted != used => {
            let msg = format!(
                "dialect: the pod's rules are written as {} already and can't be as {} too; delete the pod, or write auto",
                used.name(),
                wanted.name()
            );
            Err(Error::new(Code::InvalidConfig, msg))
        }
        (_, Some(used)) => Ok(used),
        (Some(RuleFormat::Iptables), None) if out_of_reach => {
            let msg = "dialect: another tool redirects the pod by rules of nftables or of iptables-legacy, which no rule \
                       of iptables-nft can exempt anything from; accepted: auto, nftables";
            Err(Error::new(Code::ForeignRules, msg))
        }
        (Some(wanted), None) => Ok(wanted),
        (None, None) if out_of_reach => Ok(RuleFormat::Nftables),
        (None, None) => Ok(known.before.unwrap_or_default()),
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use cni::RuleFormatSetting::{Auto, Iptables, Nftables};

    #[test]
    fn what_is_there_decides_before_what_is_preferred() {
        let nothing = FormatFacts::default();
        let used = |dialect| FormatFacts { in_use: Some(dialect), ..nothing };
        let by = |in_iptables| FormatFacts {
            foreign: Some(ForeignRedirection { in_iptables, captures_dns: true }),
            ..nothing
        };
        let table = [
            (Auto, nothing, Some(RuleFormat::Iptables)),
            (Iptables, nothing, Some(RuleFormat::Iptables)),
            (Nftables, nothing, Some(RuleFormat::Nftables)),
            (Auto, used(RuleFormat::Nftables), Some(RuleFormat::Nftables)),
            (Auto, FormatFacts { before: Some(RuleFormat::Nftables), ..nothing }, Some(RuleFormat::Nftables)),
            (Iptables, FormatFacts { before: Some(RuleFormat::Nftables), ..nothing }, Some(RuleFormat::Iptables)),
            (Iptables, used(RuleFormat::Nftables), None),
            (Nftables, used(RuleFormat::Iptables), None),
            (Auto, by(true), Some(RuleFormat::Iptables)),
            (Auto, by(false), Some(RuleFormat::Nftables)),
            (Iptables, by(false), None),
            (Nftables, by(false), Some(RuleFormat::Nftables)),
        ];
        for (asked, known, expected) in table {
            assert_eq!(choose(asked, known).ok(), expected, "{asked:?} {known:?}");
        }
    }

    #[test]
    fn an_error_names_both_dialects_and_the_way_out() {
        let known = FormatFacts { in_use: Some(RuleFormat::Nftables), ..FormatFacts::default() };
        let error = choose(Iptables, known).expect_err("not both");
        assert_eq!(error.code, Code::InvalidConfig);
        for word in ["nftables", "iptables", "delete the pod"] {
            assert!(error.msg.contains(word), "{error}");
        }
    }
}
