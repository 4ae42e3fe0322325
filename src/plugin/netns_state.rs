//! The desired state of a network namespace (rules, and the routes, policy rules and addresses that they need), and what is
//! constrained by the redirection that it already has: detour's,
//! in its rule format, or another tool's.

use super::record::{NetnsRecord, SandboxRecords, fixtures, writes_ip6};
use crate::cni::{Code, Error, at_most};
use crate::firewall::rule::Family;
use crate::firewall::{ForeignRedirection, LiveRuleset, MAX_RULES, RuleFormat, Ruleset, legacy_tables, max_rules};
use crate::netns::{Fixtures, NetNs, Routing};
use crate::policy::{Interception, Policy, Redirect};
use crate::state::{Attachment, Store};
use std::collections::BTreeSet;
use std::fmt::Display;

/// The desired state of a network namespace, from the saved state of its attachments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetnsState {
    /// The attachments in this network namespace.
    pub attachments: Vec<Attachment>,
    /// The union of their policies.
    pub policy: Policy,
    /// The desired rules.
    pub rules: Ruleset,
    /// The format of the redirection; the default without one.
    pub rule_format: RuleFormat,
    /// The routes, policy rules and addresses that the rules need.
    pub fixtures: Fixtures,
}

impl NetnsState {
    /// Finds the pod sandbox of `netns` and reads its attachments; `None` if there are none.
    ///
    /// # Errors
    /// The saved state can't be read, or the attachments contradict each other.
    pub fn find(store: &Store, netns: &NetNs) -> Result<Option<Self>, Error> {
        let owner = NetnsRecord::owner(store, netns)?;
        Ok(owner.map(|container_id| Self::of_sandbox(store, &container_id, netns)).transpose()?.flatten())
    }

    /// Reads the attachments of one pod sandbox in `netns`; `None` if there are none.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn of_sandbox(store: &Store, container_id: &str, netns: &NetNs) -> Result<Option<Self>, Error> {
        let mut records = SandboxRecords::read(store, container_id, netns)?;
        records.attachments.retain(|(_, record)| record.netns_id == Some(netns.id()));
        (!records.attachments.is_empty()).then(|| Self::new(records)).transpose()
    }

    fn new(records: SandboxRecords) -> Result<Self, Error> {
        let policy = records.policy()?;
        let (rules, fixtures) = (ruleset(&policy, records.ip6()), fixtures(&policy, records.ip6()));
        let rule_format = records.rule_format().unwrap_or_default();
        let attachments = records.attachments.into_iter().map(|(attachment, _)| attachment).collect();
        Ok(Self { attachments, policy, rules, rule_format, fixtures })
    }
}

/// The format that a configuration wants for a redirection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct FormatPreference {
    /// The one that it sets; `None` for `auto`.
    pub(super) requested: Option<RuleFormat>,
    /// The one that `auto` tries first; `None` for the default.
    pub(super) auto: Option<RuleFormat>,
}

/// The facts about a pod that constrain the format of its redirection. A pod never has redirections of detour in both
/// formats.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FormatFacts {
    /// The format of detour's redirection in the kernel, or of the other attachments.
    pub(super) in_use: Option<RuleFormat>,
    /// The saved format of this attachment.
    pub(super) saved: Option<RuleFormat>,
}

/// Chooses the format of a redirection: an existing one takes precedence over preferences.
///
/// # Errors
/// The setting conflicts with the existing redirection.
pub(super) fn choose_format(preference: FormatPreference, facts: FormatFacts) -> Result<RuleFormat, Error> {
    match (preference.requested, facts.in_use) {
        (Some(requested), Some(used)) if requested != used => {
            let (used, requested) = (used.name(), requested.name());
            let msg = format!(
                "rule_format: expected auto or {used}, got {requested}: the pod is already redirected in {used} format; set \
                 auto, or delete the pod"
            );
            Err(Error::new(Code::InvalidConfig, msg))
        }
        (_, Some(used)) => Ok(used),
        (Some(requested), None) => Ok(requested),
        (None, None) => Ok(facts.saved.or(preference.auto).unwrap_or_default()),
    }
}

/// Returns the policy without its redirection: another tool's remains, and only exclusions are added.
pub(super) fn beside(foreign: ForeignRedirection, mut policy: Policy) -> Policy {
    if policy.redirect().is_some() {
        tracing::warn!("another tool already redirects the pod: the plugin adds only exclusions");
        policy.interception = Interception::Unset;
    }
    policy.dns_captured_elsewhere = Some(foreign.captures_dns);
    policy
}

/// Warns about tables of iptables-legacy in a pod that detour redirects. Call it in the network namespace.
pub(super) fn warn_of_legacy() {
    let tables = legacy_tables();
    if !tables.is_empty() {
        let all: Vec<String> = tables.iter().map(|(family, table)| format!("{} {table}", family.name())).collect();
        let all = all.join(", ");
        tracing::warn!("the pod also has tables of iptables-legacy ({all}): their rules apply in addition to detour's");
    }
}

/// Returns the rules for `policy` in a pod with or without IPv6. The rules for IPv4 are written in every pod, as
/// Istio does.
pub(super) fn ruleset(policy: &Policy, ip6: bool) -> Ruleset {
    Ruleset::of(policy, if writes_ip6(policy, ip6) { &Family::ALL } else { &[Family::Ip] })
}

/// Returns the fixtures of detour's native tables without saved state: the routing of the mark that these rules set.
/// If no policy rule has this mark, the default routing table is assumed.
///
/// # Errors
/// The kernel's policy rules can't be read.
pub(super) fn unrecorded_fixtures(live: &LiveRuleset) -> Result<Fixtures, Error> {
    let mut routing = BTreeSet::new();
    if let Some(mark) = live.native_tproxy_mark() {
        routing = Routing::of_mark(mark)?;
        if routing.is_empty() {
            routing.insert(Routing { mark, table: Redirect::default().inbound_tproxy_route_table, ip6: true });
        }
    }
    Ok(Fixtures { proxy_loopback: live.redirects_natively(), routing })
}

/// Refuses a policy with too many rules. Only an ADD calls it, so that existing rules can always be repaired and
/// removed.
///
/// # Errors
/// [`Code::InvalidConfig`](crate::cni::Code::InvalidConfig) with `place` and both numbers.
pub(super) fn check_rules(policy: &Policy, place: impl Display) -> Result<(), Error> {
    let place = format_args!("{place}: the redirection with all exclusions, for IPv4 and IPv6");
    at_most(MAX_RULES, "rules", place, max_rules(policy))
}

#[cfg(test)]
mod tests {
    use super::*;
    const IPTABLES: Option<RuleFormat> = Some(RuleFormat::Iptables);
    const NFTABLES: Option<RuleFormat> = Some(RuleFormat::Nftables);

    #[test]
    fn an_existing_redirection_takes_precedence_over_preferences() {
        let nothing = FormatFacts::default();
        let used = |rule_format| FormatFacts { in_use: Some(rule_format), ..nothing };
        let table = [
            (None, nothing, Some(RuleFormat::Iptables)),
            (IPTABLES, nothing, Some(RuleFormat::Iptables)),
            (NFTABLES, nothing, Some(RuleFormat::Nftables)),
            (None, used(RuleFormat::Nftables), Some(RuleFormat::Nftables)),
            (None, FormatFacts { saved: Some(RuleFormat::Nftables), ..nothing }, Some(RuleFormat::Nftables)),
            (IPTABLES, FormatFacts { saved: Some(RuleFormat::Nftables), ..nothing }, Some(RuleFormat::Iptables)),
            (IPTABLES, used(RuleFormat::Nftables), None),
            (NFTABLES, used(RuleFormat::Iptables), None),
        ];
        for (requested, facts, expected) in table {
            let preference = FormatPreference { requested, auto: None };
            assert_eq!(choose_format(preference, facts).ok(), expected, "{requested:?} {facts:?}");
        }
    }

    #[test]
    fn the_nodes_format_is_only_for_new_pods_without_a_setting() {
        let nothing = FormatFacts::default();
        for (requested, facts, expected) in [
            (None, nothing, RuleFormat::Nftables),
            (IPTABLES, nothing, RuleFormat::Iptables),
            (None, FormatFacts { in_use: IPTABLES, ..nothing }, RuleFormat::Iptables),
            (None, FormatFacts { saved: IPTABLES, ..nothing }, RuleFormat::Iptables),
        ] {
            let preference = FormatPreference { requested, auto: NFTABLES };
            assert_eq!(choose_format(preference, facts).ok(), Some(expected), "{requested:?} {facts:?}");
        }
    }

    #[test]
    fn a_format_conflict_names_both_formats_and_the_next_step() {
        let facts = FormatFacts { in_use: Some(RuleFormat::Nftables), ..FormatFacts::default() };
        let preference = FormatPreference { requested: IPTABLES, auto: None };
        let error = choose_format(preference, facts).expect_err("not both");
        assert_eq!(error.code, Code::InvalidConfig);
        for word in ["nftables", "iptables", "delete the pod"] {
            assert!(error.msg.contains(word), "{error}");
        }
    }
}
