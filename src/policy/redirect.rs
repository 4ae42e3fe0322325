//! The settings of the redirection to the sidecar: all that Istio's own redirection has.

use ipnet::{IpNet, Ipv4Net};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// A range of ports, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PortRange {
    /// The first port.
    pub first: u16,
    /// The last port.
    pub last: u16,
}

impl PortRange {
    /// Returns the range with only this port.
    #[must_use]
    pub const fn one(port: u16) -> Self {
        Self { first: port, last: port }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last { write!(f, "{}", self.first) } else { write!(f, "{}-{}", self.first, self.last) }
    }
}

/// A list of values, or `*`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ListOrAll<T> {
    /// `*`.
    All,
    /// These values in the configured order, without duplicates.
    List(Vec<T>),
}

/// A list of ports, or `*`.
pub type Ports = ListOrAll<PortRange>;
/// A list of IP ranges without host bits, or `*`.
pub type Ranges = ListOrAll<IpNet>;
/// A list of GIDs, or `*`.
pub type Groups = ListOrAll<u32>;

/// How inbound connections reach the proxy. The mode `NONE` has no [`Redirect`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum InterceptionMode {
    /// By NAT: the proxy sees 127.0.0.6 or ::6 as the source.
    Redirect,
    /// By TPROXY: the proxy sees the original source.
    Tproxy,
}

impl fmt::Display for InterceptionMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Redirect => "REDIRECT",
            Self::Tproxy => "TPROXY",
        })
    }
}

/// The DNS queries of applications that are redirected to the proxy's resolver (port 15053).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DnsCapture {
    /// No queries.
    Off,
    /// All queries.
    All,
    /// Queries to these resolvers; at least one of the lists is not empty.
    Servers {
        /// IPv4 resolvers.
        v4: Vec<Ipv4Addr>,
        /// IPv6 resolvers.
        v6: Vec<Ipv6Addr>,
    },
}

/// Whether IPv6 is redirected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ipv6 {
    /// If the pod has an IPv6 address.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl fmt::Display for Ipv6 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "not set",
            Self::On => "true",
            Self::Off => "false",
        })
    }
}

/// The settings of a redirection to the sidecar, named as in the `istio-redirect` block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Redirect {
    /// How inbound connections reach the proxy.
    pub inbound_interception_mode: InterceptionMode,
    /// The UIDs of the proxy.
    pub proxy_uid: Vec<u32>,
    /// The GIDs of the proxy.
    pub proxy_gid: Vec<u32>,
    /// The port to which outbound TCP is redirected.
    pub proxy_port: u16,
    /// The port to which inbound TCP is redirected.
    pub inbound_capture_port: u16,
    /// The port for HBONE, which is never captured.
    pub inbound_tunnel_port: u16,
    /// The mark of the proxy's packets in mode TPROXY.
    pub inbound_tproxy_mark: u32,
    /// The routing table for marked packets in mode TPROXY.
    pub inbound_tproxy_route_table: u32,
    /// The inbound ports that are captured.
    pub inbound_ports_include: Ports,
    /// The inbound ports that are not captured if all are included.
    pub inbound_ports_exclude: Ports,
    /// The TCP ports that are captured for all destinations.
    pub outbound_ports_include: Ports,
    /// The outbound TCP and UDP ports that are not captured.
    pub outbound_ports_exclude: Ports,
    /// The destinations that are captured.
    pub outbound_ip_ranges_include: Ranges,
    /// The destinations that are not captured.
    pub outbound_ip_ranges_exclude: Ranges,
    /// The groups whose processes are captured.
    pub owner_groups_include: Groups,
    /// The groups whose processes are not captured if all are included.
    pub owner_groups_exclude: Vec<u32>,
    /// The interfaces of virtual machines: traffic that arrives there is treated as outbound.
    pub reroute_virtual_interfaces: Vec<String>,
    /// The interfaces whose traffic is not captured, inbound and outbound.
    pub exclude_interfaces: Vec<String>,
    /// Whether interfaces of secondary networks are captured like that of the default network. If not, those that the
    /// pod's annotations name are in `exclude_interfaces`, and those found in the network namespace are added.
    pub capture_secondary_networks: bool,
    /// Those in `exclude_interfaces` that no setting names: the pod's annotations about its networks name them, or they
    /// were found in the network namespace. One of them through which traffic to public addresses leaves is captured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub secondary_interfaces: Vec<String>,
    /// The interfaces that carry the pod's default route according to its annotations. They are captured although they
    /// are not that of the cluster network.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub default_interfaces: Vec<String>,
    /// The DNS queries that are redirected to the proxy.
    pub dns: DnsCapture,
    /// Whether packets that connection tracking classifies as invalid are dropped.
    pub drop_invalid: bool,
    /// Whether IPv6 is redirected.
    pub ipv6: Ipv6,
    /// The IPv4 loopback range of the host.
    pub host_ipv4_loopback_cidr: Ipv4Net,
}

/// The proxy's ports for status, health and metrics, which are never captured inbound. By default, the first one is not
/// captured outbound either.
const PROXY_PORTS: [PortRange; 3] = [PortRange::one(15020), PortRange::one(15021), PortRange::one(15090)];

impl Redirect {
    /// Returns whether connections to other hosts can be captured: the lists do not leave out all of them.
    #[must_use]
    pub fn captures_outbound(&self) -> bool {
        let includes = match (&self.outbound_ip_ranges_include, &self.outbound_ports_include) {
            (Ranges::List(ranges), Ports::List(ports)) => !(ranges.is_empty() && ports.is_empty()),
            _ => true,
        };
        let excludes_ports = match &self.outbound_ports_exclude {
            Ports::All => true,
            Ports::List(ports) => ports.iter().any(|range| range.first <= 1 && range.last == u16::MAX),
        };
        let excludes_ranges = match &self.outbound_ip_ranges_exclude {
            Ranges::All => true,
            Ranges::List(ranges) => {
                let all =
                    |is_ipv4: bool| ranges.iter().any(|net| net.prefix_len() == 0 && net.addr().is_ipv4() == is_ipv4);
                all(true) && (all(false) || self.ipv6 == Ipv6::Off)
            }
        };
        includes && !excludes_ports && !excludes_ranges
    }

    /// Returns these settings with the lists of `desired`. The proxy's own configuration depends on all other settings.
    pub(super) fn with_lists_of(&self, desired: &Self) -> Self {
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

impl Default for Redirect {
    /// Returns Istio's defaults for a pod without annotations.
    fn default() -> Self {
        Self {
            inbound_interception_mode: InterceptionMode::Redirect,
            proxy_uid: vec![1337],
            proxy_gid: vec![1337],
            proxy_port: 15001,
            inbound_capture_port: 15006,
            inbound_tunnel_port: 15008,
            inbound_tproxy_mark: 1337,
            inbound_tproxy_route_table: 133,
            inbound_ports_include: Ports::All,
            inbound_ports_exclude: Ports::List(PROXY_PORTS.to_vec()),
            outbound_ports_include: Ports::List(Vec::new()),
            outbound_ports_exclude: Ports::List(vec![PROXY_PORTS[0]]),
            outbound_ip_ranges_include: Ranges::All,
            outbound_ip_ranges_exclude: Ranges::List(Vec::new()),
            owner_groups_include: Groups::All,
            owner_groups_exclude: Vec::new(),
            reroute_virtual_interfaces: Vec::new(),
            exclude_interfaces: Vec::new(),
            capture_secondary_networks: true,
            secondary_interfaces: Vec::new(),
            default_interfaces: Vec::new(),
            dns: DnsCapture::Off,
            drop_invalid: false,
            ipv6: Ipv6::Auto,
            host_ipv4_loopback_cidr: Ipv4Net::new_assert(Ipv4Addr::LOCALHOST, 32),
        }
    }
}
