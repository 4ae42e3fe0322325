//! From a policy to rules: builds the ruleset, and computes an upper bound of its size before it is built, since the
//! lists of a policy multiply.

use super::containers::SCOPES;
use super::istio;
use super::rule::{ExcludedTraffic, Family, GuardedTraffic, Rule, Ruleset};
use crate::policy::{ContainerScope, DnsCapture, Groups, Guard, Interception, Ipv6, Policy, Ports, Ranges, Redirect};

/// The maximum number of rules that an ADD writes for a pod, both families together.
pub const MAX_RULES: usize = 16_000;
/// The number of a redirection's rules that don't depend on its lists.
const FIXED_RULES: usize = 30;
/// The limit of rules that lead to the exclusions, fix destinations and set zones, and of those for excluded containers:
/// two sets at each level, in raw and nat.
const EXCLUDED_RULES: usize = 60;
/// The rules of an exclusion, in raw and nat.
const RULES_PER_EXCLUSION: usize = 2;

impl Ruleset {
    /// Builds the rules that `policy` needs: its redirection in `families`, and its exclusions.
    #[must_use]
    pub fn of(policy: &Policy, families: &[Family]) -> Self {
        if policy.is_empty() {
            return Self::default();
        }
        let excluded = excluded(policy).filter(|_| policy.interception != Interception::Off);
        Self { excluded, guarded: guarded(policy), ..Self::of_redirection(policy, families) }
    }

    /// Builds the rules of the redirection of `policy` in `families`.
    #[must_use]
    pub fn of_redirection(policy: &Policy, families: &[Family]) -> Self {
        let mut ruleset = Self::default();
        if let Some(redirect) = policy.redirect() {
            families.iter().for_each(|family| istio::write(redirect, *family, &mut ruleset));
        }
        ruleset.rules_mut().for_each(Rule::drop_empty_conditions);
        ruleset
    }
}

fn guarded(policy: &Policy) -> Option<GuardedTraffic> {
    Some(match policy.guard.as_ref()? {
        Guard::Ambient(guard) => GuardedTraffic::Ambient(guard.clone()),
        Guard::Sidecar(redirect) => {
            let redirect = policy.redirect().unwrap_or(redirect);
            // A family whose addresses appear later is rejected until it is redirected.
            let families = if redirect.ipv6 == Ipv6::Off { &Family::ALL[..1] } else { &Family::ALL };
            let mut ruleset = Ruleset::default();
            families.iter().for_each(|family| istio::write(redirect, *family, &mut ruleset));
            ruleset.rules_mut().for_each(Rule::drop_empty_conditions);
            GuardedTraffic::Sidecar { rules: ruleset.tables, redirect: Box::new(redirect.clone()) }
        }
    })
}

fn excluded(policy: &Policy) -> Option<ExcludedTraffic> {
    let is_used = |scope: &ContainerScope| policy.containers.iter().any(|container| container.scope == *scope);
    let scopes: Vec<ContainerScope> = SCOPES.into_iter().filter(is_used).collect();
    let exclusions = policy.exclusions_in_effect();
    let captures_ip6 = policy.redirect().is_none_or(|redirect| redirect.ipv6 != Ipv6::Off);
    let is_any = !scopes.is_empty() || !exclusions.is_empty();
    let (capture, ambient) = (captured(policy).clone(), policy.ambient);
    is_any.then_some(ExcludedTraffic { exclusions, scopes, capture, captures_ip6, ambient })
}

/// Returns which DNS queries the pod's redirection captures, which may be another tool's. If that is unknown,
/// assumes all: istio-init runs after every attachment, and only captured queries are ever excluded.
fn captured(policy: &Policy) -> &DnsCapture {
    match (policy.redirect(), policy.dns_captured_elsewhere) {
        (Some(redirect), _) => &redirect.dns,
        (None, Some(false)) => &DnsCapture::Off,
        (None, Some(true) | None) => &DnsCapture::All,
    }
}

/// Returns an upper bound of the rules that `policy` needs, both families together, counted as iptables rules.
#[must_use]
pub fn max_rules(policy: &Policy) -> usize {
    let redirect = policy.redirect().map_or(0, |redirect| 2 * of_redirect(redirect));
    let guard = policy.guard.as_ref().map_or(0, |guard| match guard {
        Guard::Sidecar(own) => 2 * of_redirect(policy.redirect().unwrap_or(own)) + EXCLUDED_RULES,
        Guard::Ambient(_) => EXCLUDED_RULES,
    });
    let per_exclusion = RULES_PER_EXCLUSION + usize::from(policy.guard.is_some());
    redirect
        .saturating_add(guard)
        .saturating_add(EXCLUDED_RULES)
        .saturating_add(per_exclusion * policy.exclusions.len())
}

/// Returns the number of destinations to which queries are captured, in the family that has more of them.
fn captured_servers(capture: &DnsCapture) -> usize {
    match capture {
        DnsCapture::Off => 0,
        DnsCapture::All => 1,
        DnsCapture::Servers { v4, v6 } => v4.len().max(v6.len()),
    }
}

/// Returns an upper bound of a redirection's rules in one family.
fn of_redirect(redirect: &Redirect) -> usize {
    let ports = |ports: &Ports| match ports {
        Ports::All => 1,
        Ports::List(list) => list.len(),
    };
    let ranges = |ranges: &Ranges| match ranges {
        Ranges::All => 1,
        Ranges::List(list) => list.len(),
    };
    let included = ranges(&redirect.outbound_ip_ranges_include);
    let groups = match &redirect.owner_groups_include {
        Groups::All => redirect.owner_groups_exclude.len(),
        Groups::List(_) => 1,
    };
    let per_interface = 4 * redirect.exclude_interfaces.len();
    let per_owner = 6 * (redirect.proxy_uid.len() + redirect.proxy_gid.len());
    let per_port = ports(&redirect.inbound_ports_exclude)
        + 2 * ports(&redirect.inbound_ports_include)
        + 2 * ports(&redirect.outbound_ports_exclude)
        + ports(&redirect.outbound_ports_include);
    let rerouted = redirect.reroute_virtual_interfaces.len().saturating_mul(included + 1);
    let per_range = included + ranges(&redirect.outbound_ip_ranges_exclude);
    let per_server = 4 * captured_servers(&redirect.dns);
    FIXED_RULES.saturating_add(rerouted) + per_interface + per_owner + per_port + per_range + per_server + groups
}
