//! What the kernel should hold for a policy.

use crate::cni::{Error, at_most};
use crate::firewall::rule::Family;
use crate::firewall::{Live, MOST_RULES, Ruleset, most_rules};
use crate::policy::{InterceptionMode, Ipv6, Policy, Redirect};
use crate::sandbox::{Fixtures, Routing};

/// The rules that `policy` needs in a pod that has IPv6 or not. Istio's rules for IPv4 are there
/// in every pod.
pub(super) fn ruleset(policy: &Policy, ip6: bool) -> Ruleset {
    Ruleset::of(policy, if writes_ip6(policy, ip6) { &Family::ALL } else { &[Family::Ip] })
}

/// Whether the rules for `policy` are there for IPv6 too, in a pod that has IPv6 or not.
pub(super) fn writes_ip6(policy: &Policy, ip6: bool) -> bool {
    match policy.redirect().map(|redirect| redirect.ipv6) {
        Some(Ipv6::On) => true,
        Some(Ipv6::Off) => false,
        Some(Ipv6::Auto) | None => ip6,
    }
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

/// What the rules of detour's native tables needed besides themselves, if no record tells: with the default
/// mark and table.
pub(super) fn unrecorded_fixtures(live: &Live) -> Fixtures {
    let (redirects, by_tproxy) = live.native_redirection();
    let Redirect { inbound_tproxy_mark: mark, inbound_tproxy_route_table: table, .. } = Redirect::default();
    let routing = by_tproxy.then_some(Routing { mark, table, ip6: true }).into_iter().collect();
    Fixtures { proxy_loopback: redirects, routing }
}

/// Refuses a policy that needs too many rules. Only an ADD does: what is there can always be repaired and
/// removed.
///
/// # Errors
/// [`Code::InvalidConfig`](crate::cni::Code::InvalidConfig) with `place` and both numbers.
pub(super) fn check_rules(policy: &Policy, place: &str) -> Result<(), Error> {
    let what = format!("{place}: the redirection with all exclusions, for IPv4 and IPv6");
    at_most(MOST_RULES, "rules", &what, most_rules(policy))
}
