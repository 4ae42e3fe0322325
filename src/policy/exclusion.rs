//! What bypasses the sidecar: outbound traffic by its owner and destination, and containers.

use super::redirect::PortRange;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A range of UIDs or GIDs, both ends included; 32 bits wide as in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct IdRange {
    /// The first ID.
    pub first: u32,
    /// The last ID.
    pub last: u32,
}

impl IdRange {
    /// Returns the range with only this ID.
    #[must_use]
    pub const fn one(id: u32) -> Self {
        Self { first: id, last: id }
    }

    /// Returns whether `other` is a part of this range.
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

/// The owner of the socket that sends the traffic.
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
    /// Returns whether every process of `other` is also one of this owner.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        match (self, other) {
            (Self::Any, _) => true,
            (Self::Uid(a), Self::Uid(b)) | (Self::Gid(a), Self::Gid(b)) => a.covers(b),
            _ => false,
        }
    }
}

/// A transport protocol that redirections affect.
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

/// Excluded outbound traffic; all conditions must match.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Exclusion {
    /// The processes that send it.
    pub owner: TrafficOwner,
    /// The destination; `None` matches any.
    pub destination: Option<IpNet>,
    /// The protocol; `None` matches any, without `ports` also protocols that have no ports.
    pub protocol: Option<Protocol>,
    /// The destination ports, sorted, without overlaps; empty matches any.
    #[serde(default)]
    pub ports: Vec<PortRange>,
}

impl Exclusion {
    /// Returns whether this exclusion covers all traffic that `other` covers.
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

/// Returns whether `wide` contains all ports of `narrow`, both in the form of [`Exclusion::ports`].
pub(super) fn ports_cover(wide: &[PortRange], narrow: &[PortRange]) -> bool {
    let within = |ports: &PortRange| {
        let own = wide.get(wide.partition_point(|own| own.last < ports.first));
        own.is_some_and(|own| own.first <= ports.first && ports.last <= own.last)
    };
    wide.is_empty() || (!narrow.is_empty() && narrow.iter().all(within))
}

/// Which traffic of an excluded container bypasses the sidecar, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContainerScope {
    /// DNS queries over UDP and TCP.
    Dns,
    /// All outbound traffic.
    All,
}

/// A container of the pod whose traffic bypasses the sidecar until it exits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContainerExclusion {
    /// The name of the container.
    pub name: String,
    /// The traffic that bypasses the sidecar.
    pub scope: ContainerScope,
}

impl fmt::Display for ContainerScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dns => "dns",
            Self::All => "all",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exclusion(owner: TrafficOwner) -> Exclusion {
        Exclusion { owner, destination: None, protocol: None, ports: Vec::new() }
    }

    #[test]
    fn only_the_wider_exclusion_covers_the_narrower_one() {
        let all = exclusion(TrafficOwner::Uid(IdRange { first: 1, last: 9 }));
        let dns = Exclusion {
            protocol: Some(Protocol::Udp),
            ports: vec![PortRange::one(53)],
            destination: Some("10.0.0.0/8".parse().expect("a CIDR")),
            ..exclusion(TrafficOwner::Uid(IdRange::one(5)))
        };
        assert!(all.covers(&dns) && all.covers(&all) && dns.covers(&dns));
        assert!(!dns.covers(&all));
        assert!(!exclusion(TrafficOwner::Gid(IdRange::one(5))).covers(&dns));
        assert!(exclusion(TrafficOwner::Any).covers(&all));
        let tcp = Exclusion { protocol: Some(Protocol::Tcp), ..dns.clone() };
        assert!(!tcp.covers(&dns));
        let host = Exclusion { destination: Some("10.0.0.1/32".parse().expect("a CIDR")), ..dns.clone() };
        assert!(dns.covers(&host) && !host.covers(&dns));
    }
}
