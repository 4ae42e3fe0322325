//! Traffic that leaves untouched although the pod is redirected.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::fmt;

use super::PortRange;

/// UIDs or GIDs, first and last included; both 32 bits wide, as the kernel's are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct IdRange {
    /// The first that belongs to it.
    pub first: u32,
    /// The last that belongs to it.
    pub last: u32,
}

impl IdRange {
    /// The range of one.
    #[must_use]
    pub const fn one(id: u32) -> Self {
        Self { first: id, last: id }
    }

    /// Whether `other` lies wholly within.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        self.first <= other.first && other.last <= self.last
    }
}

impl fmt::Display for IdRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last { write!(f, "{}", self.first) } else { write!(f, "{}-{}", self.first, self.last) }
    }
}

/// Whose traffic: the owner of the socket that it leaves by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TrafficOwner {
    /// Every process.
    Any,
    /// Processes with one of these effective UIDs.
    Uid(IdRange),
    /// Processes with one of these effective GIDs.
    Gid(IdRange),
}

impl TrafficOwner {
    /// Whether every process that `other` means is meant.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        match (self, other) {
            (Self::Any, _) => true,
            (Self::Uid(a), Self::Uid(b)) | (Self::Gid(a), Self::Gid(b)) => a.covers(b),
            _ => false,
        }
    }
}

/// The two transport protocols that a redirection can touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// One kind of outbound traffic that is exempt: every condition must hold.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Exclusion {
    /// Whose.
    pub owner: TrafficOwner,
    /// Where to; `None` is anywhere.
    pub destination: Option<IpNet>,
    /// `None` is every protocol, those without ports too where `ports` is empty.
    pub protocol: Option<Protocol>,
    /// Destination ports, sorted, without overlaps; none is every port.
    #[serde(default)]
    pub ports: Vec<PortRange>,
}

impl Exclusion {
    /// Whether everything that `other` exempts is exempt by this one already.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        let destination = match (&self.destination, &other.destination) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(a), Some(b)) => a.contains(b),
        };
        let protocol = self.protocol.is_none() || self.protocol == other.protocol;
        self.owner.covers(other.owner) && destination && protocol && ports_cover(&self.ports, &other.ports)
    }
}

/// Whether all of `narrow` is within `wide`, both as [`Exclusion::ports`].
pub(super) fn ports_cover(wide: &[PortRange], narrow: &[PortRange]) -> bool {
    let within = |ports: &PortRange| {
        let own = wide.get(wide.partition_point(|own| own.last < ports.first));
        own.is_some_and(|own| own.first <= ports.first && ports.last <= own.last)
    };
    wide.is_empty() || (!narrow.is_empty() && narrow.iter().all(within))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(owner: TrafficOwner) -> Exclusion {
        Exclusion { owner, destination: None, protocol: None, ports: Vec::new() }
    }

    #[test]
    fn the_wider_covers_the_narrower_and_not_the_other_way_round() {
        let all = of(TrafficOwner::Uid(IdRange { first: 1, last: 9 }));
        let dns = Exclusion {
            protocol: Some(Protocol::Udp),
            ports: vec![PortRange::one(53)],
            destination: Some("10.0.0.0/8".parse().expect("a CIDR")),
            ..of(TrafficOwner::Uid(IdRange::one(5)))
        };
        assert!(all.covers(&dns) && all.covers(&all) && dns.covers(&dns));
        assert!(!dns.covers(&all));
        assert!(!of(TrafficOwner::Gid(IdRange::one(5))).covers(&dns));
        assert!(of(TrafficOwner::Any).covers(&all));
        let tcp = Exclusion { protocol: Some(Protocol::Tcp), ..dns.clone() };
        assert!(!tcp.covers(&dns));
        let host = Exclusion { destination: Some("10.0.0.1/32".parse().expect("a CIDR")), ..dns.clone() };
        assert!(dns.covers(&host) && !host.covers(&dns));
    }
}
