//! What the kernel should hold for a policy.

use crate::firewall::Ruleset;
use crate::firewall::rule::Family;
use crate::policy::{Ipv6, Policy};

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

/// Whether the proxy needs an address of its own on lo, as it has one for IPv4 anyway.
pub(super) fn needs_loopback(policy: &Policy, ip6: bool) -> bool {
    policy.redirect().is_some() && writes_ip6(policy, ip6)
}
