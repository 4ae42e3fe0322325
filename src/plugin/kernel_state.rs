//! The desired state of the kernel for a policy: its rules, and the routes, policy rules and addresses that they need.

use crate::cni::{Error, at_most};
use crate::firewall::rule::Family;
use crate::firewall::{LiveRuleset, MAX_RULES, Ruleset, max_rules};
use crate::netns::{Fixtures, Routing};
use crate::policy::{InterceptionMode, Ipv6, Policy, Redirect};
use std::collections::BTreeSet;
use std::fmt::Display;

/// Returns the rules for `policy` in a pod with or without IPv6. The rules for IPv4 are written in every pod, as
/// Istio does.
pub(super) fn ruleset(policy: &Policy, ip6: bool) -> Ruleset {
    Ruleset::of(policy, if writes_ip6(policy, ip6) { &Family::ALL } else { &[Family::Ip] })
}

/// Returns whether the rules for `policy` include IPv6, in a pod with or without IPv6.
pub(super) fn writes_ip6(policy: &Policy, ip6: bool) -> bool {
    match policy.redirect().map(|redirect| redirect.ipv6) {
        Some(Ipv6::On) => true,
        Some(Ipv6::Off) => false,
        Some(Ipv6::Auto) | None => ip6,
    }
}

/// Returns the routes, policy rules and addresses that the rules for `policy` need.
pub(super) fn fixtures(policy: &Policy, ip6: bool) -> Fixtures {
    let Some(redirect) = policy.redirect() else { return Fixtures::default() };
    let ip6 = writes_ip6(policy, ip6);
    let (mark, table) = (redirect.inbound_tproxy_mark, redirect.inbound_tproxy_route_table);
    let tproxy = redirect.inbound_interception_mode == InterceptionMode::Tproxy;
    let routing = tproxy.then_some(Routing { mark, table, ip6 }).into_iter().collect();
    Fixtures { proxy_loopback: ip6, routing }
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
