//! Which part of a changed policy a running pod follows, and the part that only takes bypasses away.

use super::exclusion::ContainerExclusion;
use super::owners::{ByTraffic, common};
use super::redirect::{ListOrAll, PortRange, Ports, Ranges, Redirect};
use super::traffic_policy::{Interception, Policy};
use ipnet::IpNet;
use std::collections::BTreeSet;
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
            guard: desired.guard.clone(),
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

impl Policy {
    /// Returns this policy without the exclusions that `desired` does not have: the policy of a running pod that follows
    /// no other change. What the redirection captures in either policy, it captures in the result.
    #[must_use]
    pub fn tightened(&self, desired: &Self) -> Self {
        if self == desired || self.interception == Interception::Off || desired.interception == Interception::Off {
            return self.clone();
        }
        let interception = match (&self.interception, desired.redirect()) {
            (Interception::On(own), Some(desired)) => Interception::On(Box::new(own.tightened(desired))),
            (own, _) => own.clone(),
        };
        let exclusions =
            common(&ByTraffic::group(self.exclusions.iter()), &ByTraffic::group(desired.exclusions.iter()));
        let containers = common_containers(&self.containers, &desired.containers);
        Self { interception, exclusions, containers, ..self.clone() }
    }
}

impl Redirect {
    fn tightened(&self, desired: &Self) -> Self {
        let desired = desired.clone();
        let inbound = inbound_bypass(self).common(&inbound_bypass(&desired));
        let (inbound_ports_include, inbound_ports_exclude) = if inbound == inbound_bypass(self) {
            (self.inbound_ports_include.clone(), self.inbound_ports_exclude.clone())
        } else {
            (Ports::All, Ports::List(inbound.ranges()))
        };
        Self {
            inbound_ports_include,
            inbound_ports_exclude,
            outbound_ports_include: self.outbound_ports_include.with(desired.outbound_ports_include),
            outbound_ports_exclude: common_ports(&self.outbound_ports_exclude, &desired.outbound_ports_exclude),
            outbound_ip_ranges_include: self.outbound_ip_ranges_include.with(desired.outbound_ip_ranges_include),
            outbound_ip_ranges_exclude: common_ranges(
                &self.outbound_ip_ranges_exclude,
                &desired.outbound_ip_ranges_exclude,
            ),
            owner_groups_include: self.owner_groups_include.with(desired.owner_groups_include),
            owner_groups_exclude: both(&self.owner_groups_exclude, &desired.owner_groups_exclude),
            // Inbound connections through them do not reach the proxy's inbound port.
            reroute_virtual_interfaces: both(&self.reroute_virtual_interfaces, &desired.reroute_virtual_interfaces),
            exclude_interfaces: both(&self.exclude_interfaces, &desired.exclude_interfaces),
            capture_secondary_networks: self.capture_secondary_networks || desired.capture_secondary_networks,
            ..self.clone()
        }
    }
}

/// A set of ports.
#[derive(Clone, PartialEq, Eq)]
struct PortSet(Vec<bool>);

impl PortSet {
    fn of(ports: &Ports) -> Self {
        let mut set = vec![*ports == Ports::All; 1 << 16];
        if let Ports::List(ranges) = ports {
            ranges.iter().for_each(|range| set[range.first.into()..=range.last.into()].fill(true));
        }
        Self(set)
    }

    fn common(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(own, other)| *own && *other).collect())
    }

    fn ranges(&self) -> Vec<PortRange> {
        let mut ranges: Vec<PortRange> = Vec::new();
        for port in (0..=u16::MAX).filter(|port| self.0[usize::from(*port)]) {
            match ranges.last_mut() {
                Some(range) if range.last.checked_add(1) == Some(port) => range.last = port,
                _ => ranges.push(PortRange::one(port)),
            }
        }
        ranges
    }
}

/// Returns the inbound ports that are not captured.
fn inbound_bypass(redirect: &Redirect) -> PortSet {
    match &redirect.inbound_ports_include {
        Ports::All => PortSet::of(&redirect.inbound_ports_exclude),
        included => PortSet(PortSet::of(included).0.iter().map(|is_captured| !is_captured).collect()),
    }
}

impl<T: Clone + Ord> ListOrAll<T> {
    fn with(&self, other: Self) -> Self {
        match (self, other) {
            (Self::All, _) | (_, Self::All) => Self::All,
            (Self::List(own), Self::List(other)) => Self::List(with(own, other)),
        }
    }
}

/// Returns the ports in both lists; `own` if they are the same.
fn common_ports(own: &Ports, other: &Ports) -> Ports {
    let set = PortSet::of(own);
    let common = set.common(&PortSet::of(other));
    if common == set { own.clone() } else { Ports::List(common.ranges()) }
}

/// Returns the addresses in both lists; `own` if they are the same.
fn common_ranges(own: &Ranges, other: &Ranges) -> Ranges {
    let (nets, others) = match (own, other) {
        (own, Ranges::All) => return own.clone(),
        (Ranges::All, other) => return other.clone(),
        (Ranges::List(nets), Ranges::List(others)) => (nets, others),
    };
    let within = |net: &IpNet, wide: &[IpNet]| wide.iter().any(|wide| wide.contains(net));
    let own_part = nets.iter().filter(|net| within(net, others));
    let part: BTreeSet<IpNet> = own_part.chain(others.iter().filter(|net| within(net, nets))).copied().collect();
    if part == nets.iter().copied().collect() { own.clone() } else { Ranges::List(part.into_iter().collect()) }
}

/// Returns the items of `own` followed by the other ones.
fn with<T: Clone + Ord>(own: &[T], other: Vec<T>) -> Vec<T> {
    let known: BTreeSet<&T> = own.iter().collect();
    let new: Vec<T> = other.into_iter().filter(|item| !known.contains(item)).collect();
    [own, &new].concat()
}

/// Returns the items of `own` that `other` has too.
fn both<T: Clone + Ord>(own: &[T], other: &[T]) -> Vec<T> {
    let other: BTreeSet<&T> = other.iter().collect();
    own.iter().filter(|item| other.contains(item)).cloned().collect()
}

/// Returns the exclusions of containers that both lists contain; one that another one covers is left out.
fn common_containers(
    own: &BTreeSet<ContainerExclusion>,
    desired: &BTreeSet<ContainerExclusion>,
) -> BTreeSet<ContainerExclusion> {
    let mut common = BTreeSet::new();
    for one in own {
        for other in desired.iter().filter(|other| other.name == one.name) {
            let (scope, until) = (one.scope.min(other.scope), one.until.min(other.until));
            common.insert(ContainerExclusion { name: one.name.clone(), scope, until });
        }
    }
    let covers = |wide: &ContainerExclusion, one: &ContainerExclusion| {
        wide != one && wide.name == one.name && wide.scope >= one.scope && wide.until >= one.until
    };
    let is_covered = |one: &&ContainerExclusion| common.iter().any(|wide| covers(wide, one));
    common.iter().filter(|one| !is_covered(one)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::super::{
        BypassEnd, ContainerScope, DnsCapture, Exclusion, IdRange, InterceptionMode, Ipv6, PortRange, Ports, Protocol,
        TrafficOwner,
    };
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

    fn uid(first: u32, last: u32) -> Exclusion {
        let owner = TrafficOwner::Uid(IdRange { first, last });
        Exclusion { owner, destination: None, protocol: None, ports: Vec::new() }
    }

    fn excluding_all(exclusions: impl IntoIterator<Item = Exclusion>) -> Policy {
        Policy { exclusions: exclusions.into_iter().collect(), ..Policy::default() }
    }

    #[test]
    fn exclusions_that_are_no_longer_desired_end_and_others_do_not_begin() {
        let dns = Exclusion { protocol: Some(Protocol::Udp), ports: vec![PortRange::one(53)], ..uid(7, 7) };
        let own = excluding_all([uid(1, 9), uid(1000, 1000)]);
        assert_eq!(own.tightened(&Policy::default()), Policy::default());
        assert_eq!(own.tightened(&excluding_all([uid(1, 9)])), excluding_all([uid(1, 9)]));
        assert_eq!(
            own.tightened(&excluding_all([uid(5, 20), dns.clone()])),
            excluding_all([uid(5, 9)]),
            "dns is covered"
        );
        assert_eq!(excluding_all([dns.clone()]).tightened(&own), excluding_all([dns]));
        assert_eq!(Policy::default().tightened(&own), Policy::default());
    }

    #[test]
    fn a_narrower_exclusion_of_a_container_replaces_a_wider_one() {
        let containers = |scope, until| Policy {
            containers: [ContainerExclusion { name: "vault".into(), scope, until }].into(),
            ..Policy::default()
        };
        let own = containers(ContainerScope::All, BypassEnd::ProxyReady);
        let desired = containers(ContainerScope::Dns, BypassEnd::ContainerExit);
        assert_eq!(own.tightened(&desired), containers(ContainerScope::Dns, BypassEnd::ProxyReady));
        assert_eq!(own.tightened(&Policy::default()), Policy::default());
    }

    #[test]
    fn a_tightened_policy_is_complete_with_several_exclusions_of_a_container() {
        let containers = |list: &[(ContainerScope, BypassEnd)]| Policy {
            containers: list
                .iter()
                .map(|(scope, until)| ContainerExclusion { name: "vault".into(), scope: *scope, until: *until })
                .collect(),
            ..Policy::default()
        };
        let (all, dns) =
            ((ContainerScope::All, BypassEnd::ProxyReady), (ContainerScope::Dns, BypassEnd::ContainerExit));
        let own = containers(&[all, dns, (ContainerScope::Dns, BypassEnd::ProxyReady)]);
        let tightened = own.tightened(&containers(&[all, dns]));
        assert_eq!(tightened, containers(&[all, dns]));
        assert_eq!(tightened.tightened(&own), tightened);
    }

    #[test]
    fn the_redirection_captures_what_either_policy_captures() {
        let list = |ports: &[u16]| Ports::List(ports.iter().copied().map(PortRange::one).collect());
        let nets = |nets: &[&str]| Ranges::List(nets.iter().map(|net| net.parse().expect("a range")).collect());
        let own = Redirect {
            inbound_ports_exclude: list(&[22, 15020]),
            outbound_ports_exclude: list(&[3306, 9]),
            outbound_ip_ranges_exclude: nets(&["10.0.0.0/8", "192.0.2.0/24"]),
            exclude_interfaces: vec!["net1".into(), "net2".into()],
            ..Redirect::default()
        };
        let desired = Redirect {
            inbound_ports_exclude: list(&[15020, 80]),
            outbound_ports_exclude: list(&[9, 10]),
            outbound_ip_ranges_exclude: nets(&["10.1.0.0/16"]),
            exclude_interfaces: vec!["net2".into()],
            proxy_uid: vec![7],
            ..Redirect::default()
        };
        let expected = Redirect {
            inbound_ports_exclude: list(&[15020]),
            outbound_ports_exclude: list(&[9]),
            outbound_ip_ranges_exclude: nets(&["10.1.0.0/16"]),
            exclude_interfaces: vec!["net2".into()],
            ..Redirect::default()
        };
        let on =
            |redirect: Redirect| Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() };
        assert_eq!(on(own.clone()).tightened(&on(desired.clone())), on(expected.clone()));
        assert_eq!(on(expected.clone()).tightened(&on(desired)), on(expected));
        let listed = Redirect { inbound_ports_include: list(&[80]), ..own.clone() };
        assert_eq!(
            on(own.clone()).tightened(&on(listed.clone())),
            on(own.clone()),
            "22 and 15020 stay excluded in both"
        );
        let both = Redirect { inbound_ports_exclude: list(&[22, 15020]), ..own };
        assert_eq!(on(listed).tightened(&on(both.clone())), on(both));
        let off = Policy { interception: Interception::Off, ..Policy::default() };
        assert_eq!(on(Redirect::default()).tightened(&off), on(Redirect::default()));
    }
}
