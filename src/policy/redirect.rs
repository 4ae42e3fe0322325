//! The redirection to the sidecar: every setting that Istio's own redirection can be told.

use ipnet::{IpNet, Ipv4Net};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// Ports, first and last included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PortRange {
    /// The first that belongs to it.
    pub first: u16,
    /// The last that belongs to it.
    pub last: u16,
}

impl PortRange {
    /// The range of one.
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

/// A list of ports, or `*`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ports {
    /// `*`.
    All,
    /// These, in the order in which they were written, none twice.
    List(Vec<PortRange>),
}

/// A list of IP ranges, or `*`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ranges {
    /// `*`.
    All,
    /// These, host bits cleared, in the order in which they were written, none twice.
    List(Vec<IpNet>),
}

/// A list of GIDs, or `*`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Groups {
    /// `*`.
    All,
    /// These, in the order in which they were written, none twice.
    List(Vec<u32>),
}

/// How inbound connections reach the proxy. `NONE` is no [`Redirect`] at all.
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

/// Which DNS queries of the applications go to the proxy's own resolver (port 15053).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DnsCapture {
    /// None.
    Off,
    /// All, whatever resolver they are for.
    All,
    /// Those for these resolvers; at least one of the lists has an item.
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
    /// Where the pod has an IPv6 address of its own.
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

/// A redirection to the sidecar. The names are those of the `istio-redirect` block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Redirect {
    /// How inbound connections are taken.
    pub inbound_interception_mode: InterceptionMode,
    /// UIDs that the proxy runs as.
    pub proxy_uid: Vec<u32>,
    /// GIDs that the proxy runs as.
    pub proxy_gid: Vec<u32>,
    /// Where outbound TCP goes.
    pub proxy_port: u16,
    /// Where inbound TCP goes.
    pub inbound_capture_port: u16,
    /// HBONE: never captured.
    pub inbound_tunnel_port: u16,
    /// TPROXY: the mark of packets that are the proxy's.
    pub inbound_tproxy_mark: u32,
    /// TPROXY: the routing table for marked packets.
    pub inbound_tproxy_route_table: u32,
    /// Inbound ports that are captured.
    pub inbound_ports_include: Ports,
    /// Inbound ports that are not, where all are included.
    pub inbound_ports_exclude: Ports,
    /// TCP ports that are captured wherever they go to.
    pub outbound_ports_include: Ports,
    /// Ports, TCP and UDP, that are not captured.
    pub outbound_ports_exclude: Ports,
    /// Destinations that are captured.
    pub outbound_ip_ranges_include: Ranges,
    /// Destinations that are not.
    pub outbound_ip_ranges_exclude: Ranges,
    /// Groups whose processes are captured.
    pub owner_groups_include: Groups,
    /// Groups whose processes are not, where all are included.
    pub owner_groups_exclude: Vec<u32>,
    /// Interfaces behind which virtual machines stand: what comes in there is outbound.
    pub reroute_virtual_interfaces: Vec<String>,
    /// Interfaces that are left alone both ways.
    pub exclude_interfaces: Vec<String>,
    /// Whether interfaces of secondary networks are captured like the default network's. Where not,
    /// those that the pod tells of are in `exclude_interfaces`, and those in the namespace come to it.
    pub capture_secondary_networks: bool,
    /// Which DNS queries the proxy answers.
    pub dns: DnsCapture,
    /// Packets that connection tracking can't place are dropped.
    pub drop_invalid: bool,
    /// Whether IPv6 is redirected.
    pub ipv6: Ipv6,
    /// What counts as loopback for IPv4.
    pub host_ipv4_loopback_cidr: Ipv4Net,
}

impl Default for Redirect {
    /// Istio's own defaults, for a pod without any annotation.
    fn default() -> Self {
        let status_port = PortRange::one(15020);
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
            inbound_ports_exclude: Ports::List(vec![status_port, PortRange::one(15021), PortRange::one(15090)]),
            outbound_ports_include: Ports::List(Vec::new()),
            outbound_ports_exclude: Ports::List(vec![status_port]),
            outbound_ip_ranges_include: Ranges::All,
            outbound_ip_ranges_exclude: Ranges::List(Vec::new()),
            owner_groups_include: Groups::All,
            owner_groups_exclude: Vec::new(),
            reroute_virtual_interfaces: Vec::new(),
            exclude_interfaces: Vec::new(),
            capture_secondary_networks: true,
            dns: DnsCapture::Off,
            drop_invalid: false,
            ipv6: Ipv6::Auto,
            host_ipv4_loopback_cidr: Ipv4Net::new_assert(Ipv4Addr::LOCALHOST, 32),
        }
    }
}
