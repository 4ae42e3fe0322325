//! Which part of a changed policy a running pod follows.

use super::redirect::Redirect;
use super::traffic_policy::{Interception, Policy};
use std::fmt;
use std::str::FromStr;

/// Which changes of the desired policy a running pod follows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LivePolicyScope {
    /// None: only a new pod gets a changed policy.
    Off,
    /// Exclusions, and the lists of captured and excluded ports, ranges, groups and interfaces.
    #[default]
    Exclusions,
    /// All changes, except the begin and the end of a redirection.
    All,
}

impl LivePolicyScope {
    const NAMES: [(Self, &'static str); 3] = [(Self::Off, "off"), (Self::Exclusions, "exclusions"), (Self::All, "all")];
}

impl fmt::Display for LivePolicyScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(scope, _)| scope == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for LivePolicyScope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let scope = Self::NAMES.iter().find(|(_, name)| *name == text).map(|(scope, _)| *scope);
        scope.ok_or_else(|| format!("invalid value {text:?}; expected off, exclusions or all"))
    }
}

impl Policy {
    /// Returns the policy that a running pod with this policy gets if its desired policy is `desired`.
    ///
    /// The redirection of a running pod neither begins nor ends, nor that of IPv6: without a rule for NAT, the kernel
    /// does not translate the addresses of established connections either, and with the first one, it redirects them. A
    /// pod whose redirection would begin or end keeps its policy.
    ///
    /// With [`LivePolicyScope::Exclusions`], so does a pod whose kind of interception would change in another way: the
    /// proxy expects its traffic as it was when the pod started.
    #[must_use]
    pub fn following(&self, desired: &Self, scope: LivePolicyScope) -> Self {
        match scope {
            LivePolicyScope::Off => self.clone(),
            LivePolicyScope::Exclusions => self.with_exclusions_of(desired),
            LivePolicyScope::All => match (self.redirect(), desired.redirect()) {
                (None, None) => desired.clone(),
                (Some(own), Some(other)) => {
                    let redirect = Redirect { ipv6: own.ipv6, ..other.clone() };
                    Self { interception: Interception::On(Box::new(redirect)), ..desired.clone() }
                }
                _ => self.clone(),
            },
        }
    }

    fn with_exclusions_of(&self, desired: &Self) -> Self {
        let interception = match (&self.interception, &desired.interception) {
            (Interception::Unset, Interception::Unset) => Interception::Unset,
            (Interception::On(own), Interception::On(other)) => Interception::On(Box::new(own.with_lists_of(other))),
            _ => return self.clone(),
        };
        // A policy without rules does not depend on it.
        let known = if self.is_empty() { desired.dns_captured_elsewhere } else { self.dns_captured_elsewhere };
        let followed = Self {
            interception,
            exclusions: desired.exclusions.clone(),
            containers: desired.containers.clone(),
            dns_captured_elsewhere: known.or(desired.dns_captured_elsewhere),
            ambient: desired.ambient,
        };
        if self.is_empty() && followed.is_empty() { self.clone() } else { followed }
    }
}

impl Redirect {
    /// Returns these settings with the lists of `desired`. The proxy's own configuration depends on all other settings.
    fn with_lists_of(&self, desired: &Self) -> Self {
        let desired = desired.clone();
        Self {
            inbound_ports_include: desired.inbound_ports_include,
            inbound_ports_exclude: desired.inbound_ports_exclude,
            outbound_ports_include: desired.outbound_ports_include,
            outbound_ports_exclude: desired.outbound_ports_exclude,
            outbound_ip_ranges_include: desired.outbound_ip_ranges_include,
            outbound_ip_ranges_exclude: desired.outbound_ip_ranges_exclude,
            owner_groups_include: desired.owner_groups_include,
            owner_groups_exclude: desired.owner_groups_exclude,
            reroute_virtual_interfaces: desired.reroute_virtual_interfaces,
            exclude_interfaces: desired.exclude_interfaces,
            capture_secondary_networks: desired.capture_secondary_networks,
            secondary_interfaces: desired.secondary_interfaces,
            default_interfaces: desired.default_interfaces,
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{DnsCapture, Exclusion, IdRange, InterceptionMode, Ipv6, PortRange, Ports, TrafficOwner};
    use super::*;

    fn on(redirect: Redirect) -> Policy {
        Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() }
    }

    fn excluding(uid: u32) -> Policy {
        let owner = TrafficOwner::Uid(IdRange::one(uid));
        let exclusion = Exclusion { owner, destination: None, protocol: None, ports: Vec::new() };
        Policy { exclusions: [exclusion].into(), ..Policy::default() }
    }

    #[test]
    fn the_scope_has_three_values() {
        for name in ["off", "exclusions", "all"] {
            assert_eq!(name.parse::<LivePolicyScope>().map(|scope| scope.to_string()), Ok(name.to_owned()));
        }
        let error = "false".parse::<LivePolicyScope>().expect_err("invalid");
        assert_eq!(error, "invalid value \"false\"; expected off, exclusions or all");
    }

    #[test]
    fn only_lists_and_exclusions_follow_in_scope_exclusions() {
        let old = on(Redirect::default());
        let lists = Redirect {
            inbound_ports_exclude: Ports::List(vec![PortRange::one(9)]),
            outbound_ports_include: Ports::All,
            exclude_interfaces: vec!["net1".into()],
            ..Redirect::default()
        };
        let desired = Policy {
            exclusions: excluding(7).exclusions,
            dns_captured_elsewhere: Some(true),
            ..on(Redirect {
                proxy_uid: vec![7],
                proxy_port: 7,
                inbound_capture_port: 7,
                inbound_interception_mode: InterceptionMode::Tproxy,
                inbound_tproxy_mark: 7,
                dns: DnsCapture::All,
                drop_invalid: true,
                ipv6: Ipv6::Off,
                ..lists.clone()
            })
        };
        let followed = old.following(&desired, LivePolicyScope::Exclusions);
        let expected = Policy { exclusions: excluding(7).exclusions, dns_captured_elsewhere: Some(true), ..on(lists) };
        assert_eq!(followed, expected);
        assert_eq!(old.following(&desired, LivePolicyScope::Off), old);
        let Some(redirect) = desired.redirect().cloned() else { panic!("redirected") };
        let interception = on(Redirect { ipv6: Ipv6::Auto, ..redirect }).interception;
        let expected = Policy { interception, ..desired.clone() };
        assert_eq!(old.following(&desired, LivePolicyScope::All), expected);
    }

    #[test]
    fn nothing_follows_if_the_kind_of_interception_changes() {
        let off = Policy { interception: Interception::Off, ..Policy::default() };
        let kinds = [on(Redirect::default()), excluding(7), off];
        for (old, new) in kinds.iter().flat_map(|old| kinds.iter().map(move |new| (old, new))) {
            assert_eq!(old.following(new, LivePolicyScope::Exclusions), *old);
        }
        let [redirected, excluding, off] = kinds;
        for (old, new) in
            [(&redirected, &excluding), (&redirected, &off), (&excluding, &redirected), (&off, &redirected)]
        {
            assert_eq!(old.following(new, LivePolicyScope::All), *old);
        }
        assert_eq!(off.following(&excluding, LivePolicyScope::All), excluding);
    }

    #[test]
    fn a_known_dns_capture_remains_while_the_policy_has_rules() {
        let captured = |policy: Policy, captured| Policy { dns_captured_elsewhere: captured, ..policy };
        let follow = |old: &Policy, new: &Policy| old.following(new, LivePolicyScope::Exclusions);
        let old = captured(excluding(7), Some(true));
        assert_eq!(follow(&old, &captured(excluding(8), Some(false))), captured(excluding(8), Some(true)));
        let empty = captured(Policy::default(), None);
        assert_eq!(follow(&empty, &captured(excluding(8), Some(false))), captured(excluding(8), Some(false)));
        // Without rules, nothing depends on it.
        assert_eq!(follow(&empty, &captured(Policy::default(), Some(false))), empty);
    }
}
