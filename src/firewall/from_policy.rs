//! From a policy to rules: builds the ruleset, and computes an upper bound of its size before it is built, since the
//! lists of a policy multiply.

use super::containers::SCOPES;
use super::exclusions::{self, captured, covers_dns_port, protocols};
use super::istio;
use super::rule::{ContainerRules, Family, MULTIPORT_SLOTS, Rule, Ruleset};
use crate::policy::{ContainerScope, DnsCapture, Exclusion, Groups, Policy, Ports, Protocol, Ranges, Redirect};

/// The maximum number of rules that an ADD writes for a pod, both families together.
pub const MAX_RULES: usize = 16_000;
/// The number of a redirection's rules that don't depend on its lists.
const FIXED_RULES: usize = 30;
/// The jumps to the exclusions, in nat and raw of both families.
const JUMPS: usize = 4;
/// The rules of both families that lead to the chain of excluded queries to given destinations, and set their zone.
const QUERY_RULES: usize = 10;
/// The limit of rules for excluded containers: two sets at each level, in raw and nat, and the chains that they lead to.
const CONTAINER_RULES: usize = 60;
/// The number of port ranges that fit into one `multiport`; a range takes two slots.
const RANGES_PER_RULE: usize = MULTIPORT_SLOTS / 2;

impl Ruleset {
    /// Builds the rules that `policy` needs in `families`.
    #[must_use]
    pub fn of(policy: &Policy, families: &[Family]) -> Self {
        let mut ruleset = Self::default();
        if !policy.is_empty() {
            let exclusions = policy.exclusions_in_effect();
            for &family in families {
                if let Some(redirect) = policy.redirect() {
                    istio::write(redirect, family, &mut ruleset);
                }
                exclusions::write(policy, &exclusions, family, &mut ruleset);
            }
            ruleset.containers = container_rules(policy, families);
        }
        ruleset.rules_mut().for_each(Rule::drop_empty_conditions);
        ruleset
    }
}

fn container_rules(policy: &Policy, families: &[Family]) -> Option<ContainerRules> {
    let is_used = |scope: &ContainerScope| policy.containers.iter().any(|container| container.scope == *scope);
    let scopes: Vec<ContainerScope> = SCOPES.into_iter().filter(is_used).collect();
    (!scopes.is_empty()).then(|| ContainerRules {
        scopes,
        capture: captured(policy).clone(),
        families: families.to_vec(),
    })
}

/// Returns an upper bound of the rules that `policy` needs, both families together, counted as iptables rules.
#[must_use]
pub fn max_rules(policy: &Policy) -> usize {
    let redirect = policy.redirect().map_or(0, |redirect| 2 * of_redirect(redirect));
    let capture = captured(policy);
    let exclusions = policy.exclusions.iter().map(|exclusion| of_exclusion(exclusion, capture));
    let containers = if policy.containers.is_empty() { 0 } else { CONTAINER_RULES };
    exclusions.fold(redirect + JUMPS + QUERY_RULES + containers, usize::saturating_add)
}

fn of_exclusion(exclusion: &Exclusion, capture: &DnsCapture) -> usize {
    let families = if exclusion.destination.is_some() { 1 } else { 2 };
    let protocols = protocols(exclusion);
    let accepts = match exclusion.ports.len() {
        0 => 1,
        ports => protocols.len() * ports.div_ceil(RANGES_PER_RULE),
    };
    let queries = match captured_servers(capture) {
        0 => 0,
        _ if !covers_dns_port(exclusion) => 0,
        servers if protocols.contains(&Protocol::Udp) => protocols.len() + 2 * servers,
        _ => protocols.len(),
    };
    families * (accepts + queries)
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
