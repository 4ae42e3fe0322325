//! What a plugin's ADD came to, whatever version it was told in.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde_json::{Map, Value};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A result in the shape of 1.x, the widest (SPEC.md, "ADD Success"). Keys that the specification
/// does not know are kept where they stood.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AddResult {
    /// `interfaces`: those in the pod's network namespace and those on the host.
    pub interfaces: Vec<Interface>,
    /// `ips`.
    pub ips: Vec<InterfaceAddress>,
    /// `routes`.
    pub routes: Vec<Route>,
    /// `dns`.
    pub dns: Dns,
    /// Other keys.
    pub others: Map<String, Value>,
}

/// An interface that was made. What is empty or 0 was not said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// `name`.
    pub name: String,
    /// `mac`: its hardware address.
    pub mac: String,
    /// `mtu`, in bytes; since 1.1.0.
    pub mtu: u32,
    /// `sandbox`: the network namespace's path; empty for an interface of the host.
    pub sandbox: String,
    /// `socketPath`; since 1.1.0.
    pub socket_path: String,
    /// `pciID`; since 1.1.0.
    pub pci_id: String,
    /// Other keys.
    pub others: Map<String, Value>,
}

/// An address that was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// `interface`: which of the result's interfaces, counted from 0. Up to 0.2.0 nobody says.
    pub interface: Option<i64>,
    /// `address`, with its network's prefix length.
    pub address: IpNet,
    /// `gateway`.
    pub gateway: Option<IpAddr>,
    /// Other keys.
    pub others: Map<String, Value>,
}

/// A route that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// `dst`.
    pub dst: IpNet,
    /// `gw`.
    pub gw: Option<IpAddr>,
    /// `mtu`, `advmss`, `priority`, `table`, `scope`, as far as they are said; since 1.1.0, but the
    /// reference library takes them from 0.3.0 on.
    pub metrics: Map<String, Value>,
    /// Other keys.
    pub others: Map<String, Value>,
}

/// How names are resolved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Dns {
    /// `nameservers`: addresses, in order.
    pub nameservers: Vec<String>,
    /// `domain`.
    pub domain: String,
    /// `search`: domains, in order.
    pub search: Vec<String>,
    /// `options`, as resolv.conf(5) has them.
    pub options: Vec<String>,
    /// Other keys.
    pub others: Map<String, Value>,
}

impl AddResult {
    /// Whether it speaks of an interface or an address. A plugin that only changes what others
    /// made does not.
    #[must_use]
    pub fn has_interface(&self) -> bool {
        !self.interfaces.is_empty() || !self.ips.is_empty()
    }

    /// The gateways of its default routes, in order.
    pub fn default_gateways(&self) -> impl Iterator<Item = IpAddr> {
        self.routes.iter().filter(|route| route.is_default()).filter_map(|route| route.gw)
    }

    /// Takes its default routes away.
    pub fn remove_default_routes(&mut self) {
        self.routes.retain(|route| !route.is_default());
    }

    /// Adds a default route.
    pub fn add_default_route(&mut self, gateway: IpAddr) {
        let dst = match gateway {
            IpAddr::V4(_) => Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0).into(),
            IpAddr::V6(_) => Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        self.routes.push(Route { dst, gw: Some(gateway), metrics: Map::new(), others: Map::new() });
    }
}

impl Route {
    /// Whether it is for every destination of its family.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.dst.prefix_len() == 0
    }
}

impl Dns {
    /// Whether nothing is said.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
