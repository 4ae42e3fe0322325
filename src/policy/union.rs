//! The union of the policies of several attachments of one pod sandbox.

use super::owners::ByTraffic;
use super::redirect::{DnsCapture, InterceptionMode, ListOrAll, Redirect};
use super::traffic_policy::{AmbientGuard, Guard, Interception, Policy};
use crate::cni::{Code, Error};
use ipnet::Ipv4Net;
use std::collections::BTreeSet;
use std::fmt::{Debug, Display};

/// A single-valued setting with two different values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{setting} is {first} in one and {second} in the other")]
pub struct Conflict {
    /// The name of the setting in the `istio-redirect` block.
    pub setting: &'static str,
    /// The first value.
    pub first: String,
    /// The second value.
    pub second: String,
}

/// Two sources of one policy that contradict each other, with their names in messages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{first} and {second} contradict each other: {what}")]
pub struct Contradiction {
    /// The first source.
    pub first: String,
    /// The second source.
    pub second: String,
    /// The setting, and its values in both.
    pub what: String,
}

impl Contradiction {
    /// Returns the error for users, with the next step.
    #[must_use]
    pub fn into_error(self) -> Error {
        let msg = format!("{self}; a pod has one redirection: set the same value in both");
        Error::new(Code::InvalidConfig, msg)
    }
}

/// Returns the union of values by name, with `union` as the union of two.
///
/// # Errors
/// Two values contradict each other.
pub fn united<T: Clone + Default>(
    values: &[(impl Display, &T)],
    union: impl Fn(&T, &T) -> Result<T, Conflict>,
) -> Result<T, Contradiction> {
    let Some(((_, first), others)) = values.split_first() else { return Ok(T::default()) };
    let mut united = union(first, &T::default()).unwrap_or_else(|_| (*first).clone());
    for (index, (name, value)) in others.iter().enumerate() {
        united = union(&united, value).map_err(|conflict| {
            let other = values[..=index].iter().find(|(_, before)| union(before, value).is_err());
            let first = other.map_or_else(|| "the others".to_owned(), |(other, _)| other.to_string());
            Contradiction { first, second: name.to_string(), what: conflict.to_string() }
        })?;
    }
    Ok(united)
}

impl Policy {
    /// Returns the union of policies by name.
    ///
    /// # Errors
    /// Two policies contradict each other.
    pub fn united(policies: &[(impl Display, &Self)]) -> Result<Self, Contradiction> {
        let others = united(policies, Self::union_of_others)?;
        // At once: there can be many, and those of several attachments are often the same.
        let exclusions: BTreeSet<_> = policies.iter().flat_map(|(_, policy)| &policy.exclusions).collect();
        Ok(Self { exclusions: ByTraffic::group(exclusions.into_iter()).exclusions(), ..others })
    }

    /// Returns the union of policies for reports. If two contradict each other, which no ADD applies, the later one counts.
    #[must_use]
    pub fn union_of<'a>(policies: impl IntoIterator<Item = &'a Self>) -> Self {
        let unite = |union: Self, policy: &Self| union.union(policy).unwrap_or_else(|_| policy.clone());
        policies.into_iter().fold(Self::default(), unite)
    }

    /// Returns the policy as the union of policies has it: with merged ranges of owners.
    #[must_use]
    pub fn normalized(self) -> Self {
        let exclusions = ByTraffic::group(self.exclusions.iter()).exclusions();
        Self { exclusions, ..self }
    }

    /// Returns the union of two policies; the order does not matter. Exclusions that differ only in their owners are
    /// merged if their ranges overlap.
    ///
    /// # Errors
    /// A single-valued setting has two different values.
    pub fn union(&self, other: &Self) -> Result<Self, Conflict> {
        let exclusions = ByTraffic::group(self.exclusions.iter().chain(&other.exclusions)).exclusions();
        Ok(Self { exclusions, ..self.union_of_others(other)? })
    }

    /// Returns the union of everything except the exclusions by owner and destination.
    fn union_of_others(&self, other: &Self) -> Result<Self, Conflict> {
        let interception = self.interception.union(&other.interception)?;
        let mut containers = self.containers.clone();
        containers.extend(other.containers.iter().cloned());
        let dns_captured_elsewhere = match (self.dns_captured_elsewhere, other.dns_captured_elsewhere) {
            (Some(a), Some(b)) => Some(a || b),
            (a, b) => a.or(b),
        };
        let ambient = self.ambient || other.ambient;
        let guard = match (&self.guard, &other.guard) {
            (Some(a), Some(b)) => Some(a.union(b)?),
            (a, b) => a.as_ref().or(b.as_ref()).cloned(),
        };
        let exclusions = BTreeSet::new();
        Ok(Self { interception, exclusions, containers, dns_captured_elsewhere, ambient, guard })
    }
}

impl Guard {
    /// Returns the union of two guards: it rejects what one of them rejects.
    ///
    /// # Errors
    /// A single-valued setting of the redirection has two different values.
    pub fn union(&self, other: &Self) -> Result<Self, Conflict> {
        Ok(match (self, other) {
            (Self::Sidecar(a), Self::Sidecar(b)) => Self::Sidecar(Box::new(a.union(b)?)),
            (Self::Ambient(a), Self::Ambient(b)) => Self::Ambient(AmbientGuard {
                dns: a.dns || b.dns,
                inbound: a.inbound || b.inbound,
                probes: a.probes.union(&b.probes).copied().collect(),
            }),
            (sidecar @ Self::Sidecar(_), Self::Ambient(_)) | (Self::Ambient(_), sidecar @ Self::Sidecar(_)) => {
                sidecar.clone()
            }
        })
    }
}

impl Interception {
    fn union(&self, other: &Self) -> Result<Self, Conflict> {
        match (self, other) {
            (Self::Unset, other) | (other, Self::Unset) => Ok(other.clone()),
            (Self::Off, Self::Off) => Ok(Self::Off),
            (Self::On(a), Self::On(b)) => Ok(Self::On(Box::new(a.union(b)?))),
            (Self::On(r), Self::Off) => Err(mode_conflict(r.inbound_interception_mode.to_string(), "NONE".into())),
            (Self::Off, Self::On(r)) => Err(mode_conflict("NONE".into(), r.inbound_interception_mode.to_string())),
        }
    }
}

fn mode_conflict(first: String, second: String) -> Conflict {
    Conflict { setting: "inbound_interception_mode", first, second }
}

impl Redirect {
    pub(super) fn union(&self, other: &Self) -> Result<Self, Conflict> {
        macro_rules! same {
            ($($field:ident),+) => { $(same(stringify!($field), &self.$field, &other.$field)?;)+ };
        }
        same!(
            inbound_interception_mode,
            proxy_port,
            inbound_capture_port,
            inbound_tunnel_port,
            inbound_tproxy_mark,
            inbound_tproxy_route_table,
            capture_secondary_networks,
            drop_invalid,
            host_ipv4_loopback_cidr
        );
        same("enable_ipv6", &self.ipv6, &other.ipv6)?;
        Ok(Self {
            proxy_uid: merge(&self.proxy_uid, &other.proxy_uid),
            proxy_gid: merge(&self.proxy_gid, &other.proxy_gid),
            inbound_ports_include: self.inbound_ports_include.union(&other.inbound_ports_include),
            inbound_ports_exclude: self.inbound_ports_exclude.union(&other.inbound_ports_exclude),
            outbound_ports_include: self.outbound_ports_include.union(&other.outbound_ports_include),
            outbound_ports_exclude: self.outbound_ports_exclude.union(&other.outbound_ports_exclude),
            outbound_ip_ranges_include: self.outbound_ip_ranges_include.union(&other.outbound_ip_ranges_include),
            outbound_ip_ranges_exclude: self.outbound_ip_ranges_exclude.union(&other.outbound_ip_ranges_exclude),
            owner_groups_include: self.owner_groups_include.union(&other.owner_groups_include),
            owner_groups_exclude: merge(&self.owner_groups_exclude, &other.owner_groups_exclude),
            reroute_virtual_interfaces: merge(&self.reroute_virtual_interfaces, &other.reroute_virtual_interfaces),
            exclude_interfaces: merge(&self.exclude_interfaces, &other.exclude_interfaces),
            secondary_interfaces: merge(&self.secondary_interfaces, &other.secondary_interfaces),
            default_interfaces: merge(&self.default_interfaces, &other.default_interfaces),
            dns: self.dns.union(&other.dns),
            ..self.clone()
        })
    }
}

fn same<T: PartialEq + Display>(setting: &'static str, a: &T, b: &T) -> Result<(), Conflict> {
    if a == b { Ok(()) } else { Err(Conflict { setting, first: a.to_string(), second: b.to_string() }) }
}

/// The value of a setting that several sources can set.
pub trait Combine: Sized {
    /// Returns the combination of both values; `None` if they contradict each other.
    fn unite(&self, other: &Self) -> Option<Self>;

    /// Returns the value as text for messages.
    fn to_text(&self) -> String;
}

macro_rules! single_valued {
    ($($kind:ty),+) => { $(
        impl Combine for $kind {
            fn unite(&self, other: &Self) -> Option<Self> {
                (self == other).then(|| *self)
            }

            fn to_text(&self) -> String {
                self.to_string()
            }
        }
    )+ };
}
single_valued!(bool, u16, u32, Ipv4Net);

/// `None` is the mode `NONE`.
impl Combine for Option<InterceptionMode> {
    fn unite(&self, other: &Self) -> Option<Self> {
        (self == other).then_some(*self)
    }

    fn to_text(&self) -> String {
        self.map_or_else(|| "NONE".to_owned(), |mode| mode.to_string())
    }
}

impl<T: Clone + Ord + Debug> Combine for Vec<T> {
    fn unite(&self, other: &Self) -> Option<Self> {
        Some(merge(self, other))
    }

    fn to_text(&self) -> String {
        format!("{self:?}")
    }
}

/// Merges two lists without duplicates. Equal lists keep their order; others are sorted, so that the result does not
/// depend on the order of the arguments.
fn merge<T: Clone + Ord>(a: &[T], b: &[T]) -> Vec<T> {
    if a == b {
        return a.to_vec();
    }
    let both: BTreeSet<_> = a.iter().chain(b).cloned().collect();
    both.into_iter().collect()
}

impl<T: Clone + Ord> ListOrAll<T> {
    fn union(&self, other: &Self) -> Self {
        match (self, other) {
            (Self::All, _) | (_, Self::All) => Self::All,
            (Self::List(a), Self::List(b)) => Self::List(merge(a, b)),
        }
    }
}

impl<T: Clone + Ord + Debug> Combine for ListOrAll<T> {
    fn unite(&self, other: &Self) -> Option<Self> {
        Some(self.union(other))
    }

    fn to_text(&self) -> String {
        format!("{self:?}")
    }
}

impl DnsCapture {
    fn union(&self, other: &Self) -> Self {
        match (self, other) {
            (Self::All, _) | (_, Self::All) => Self::All,
            (Self::Off, x) | (x, Self::Off) => x.clone(),
            (Self::Servers { v4: a4, v6: a6 }, Self::Servers { v4: b4, v6: b6 }) => {
                Self::Servers { v4: merge(a4, b4), v6: merge(a6, b6) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Exclusion, IdRange, PortRange, Protocol, TrafficOwner};
    use super::*;

    fn on(redirect: Redirect) -> Policy {
        Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() }
    }

    #[test]
    fn the_union_of_lists_does_not_depend_on_the_order() {
        let a = on(Redirect { exclude_interfaces: vec!["b".into()], ..Redirect::default() });
        let b = on(Redirect { exclude_interfaces: vec!["a".into()], dns: DnsCapture::All, ..Redirect::default() });
        let both = a.union(&b).expect("no conflict");
        assert_eq!(both, b.union(&a).expect("no conflict"));
        let redirect = both.redirect().expect("a redirection");
        assert_eq!(redirect.exclude_interfaces, ["a", "b"]);
        assert_eq!(redirect.dns, DnsCapture::All);
    }

    #[test]
    fn two_values_of_a_single_valued_setting_are_a_conflict() {
        let other = on(Redirect { proxy_port: 1, ..Redirect::default() });
        let conflict = on(Redirect::default()).union(&other).expect_err("a conflict");
        assert_eq!(conflict.to_string(), "proxy_port is 15001 in one and 1 in the other");
        let off = Policy { interception: Interception::Off, ..Policy::default() };
        assert_eq!(off.union(&other).expect_err("a conflict").first, "NONE");
        assert!(off.union(&off).expect("no conflict").is_empty());
    }

    #[test]
    fn covered_exclusions_are_not_in_effect() {
        let all = Exclusion {
            owner: TrafficOwner::Uid(IdRange::one(1)),
            destination: None,
            protocol: None,
            ports: Vec::new(),
        };
        let dns = Exclusion { protocol: Some(Protocol::Udp), ports: vec![PortRange::one(53)], ..all.clone() };
        let with = |e: &Exclusion| Policy { exclusions: [e.clone()].into(), ..Policy::default() };
        let in_effect = |a, b| with(a).union(&with(b)).expect("no conflict").exclusions_in_effect();
        assert_eq!(in_effect(&all, &dns), [all.clone()].into());
        assert_eq!(in_effect(&dns, &all), [all.clone()].into());
    }
}
