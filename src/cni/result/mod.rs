//! Results of ADD, in every version's shape.
//!
//! What a plugin's ADD came to, whatever version it was told in.
//!
//! One result for the runtime out of those of all attachments.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
pub use read::passed_through;
use serde_json::{Map, Value};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

mod read;
mod write;

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

impl AddResult {
    /// The default network's result (`self`) with the interfaces of the other attachments after
    /// its own, and with `addresses` their addresses, too. Routes and DNS are the default network's.
    #[must_use]
    pub fn merged<'a>(mut self, others: impl IntoIterator<Item = &'a Self>, addresses: bool) -> Self {
        for other in others {
            let first = self.interfaces.len();
            self.interfaces.extend(other.interfaces.iter().cloned());
            if addresses {
                let moved = |ip: &InterfaceAddress| InterfaceAddress {
                    interface: other.moved(ip.interface, first),
                    ..ip.clone()
                };
                self.ips.extend(other.ips.iter().map(moved));
            }
        }
        self
    }

    /// Where the interface at `index` stands once this result's first one stands at `first`. An
    /// index of none of its interfaces must not become one of another attachment's.
    fn moved(&self, index: Option<i64>, first: usize) -> Option<i64> {
        let index = usize::try_from(index?).ok().filter(|index| *index < self.interfaces.len())?;
        i64::try_from(first + index).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn result(value: &Value) -> AddResult {
        AddResult::read(value, "1.0.0").expect("a result")
    }

    fn merged(addresses: bool) -> Value {
        let default = result(&json!({
            "interfaces": [{"name": "vethA"}, {"name": "eth0", "sandbox": "/n"}],
            "ips": [{"interface": 1, "address": "10.0.0.2/24", "gateway": "10.0.0.1"}],
            "routes": [{"dst": "0.0.0.0/0"}], "dns": {"domain": "d"}, "own": 1,
        }));
        let macvlan = result(&json!({
            "interfaces": [{"name": "net1", "sandbox": "/n"}],
            "ips": [{"interface": 0, "address": "10.1.0.2/24"}, {"interface": 1, "address": "fd::1/64"}],
            "routes": [{"dst": "10.9.0.0/16"}], "dns": {"domain": "e"}, "other": 1,
        }));
        let bridge = result(&json!({
            "interfaces": [{"name": "br0"}, {"name": "net2", "sandbox": "/n"}],
            "ips": [{"interface": 1, "address": "10.2.0.2/24"}, {"address": "10.2.0.3/24"}],
        }));
        default.merged([&macvlan, &AddResult::default(), &bridge], addresses).to_json("1.0.0").expect("JSON")
    }

    #[test]
    fn interfaces_are_all_attachments_and_the_rest_the_default_networks() {
        let merged = merged(false);
        let names: Vec<_> = merged["interfaces"].as_array().expect("an array").iter().map(|i| &i["name"]).collect();
        assert_eq!(names, ["vethA", "eth0", "net1", "br0", "net2"]);
        assert_eq!(merged["ips"], json!([{"interface": 1, "address": "10.0.0.2/24", "gateway": "10.0.0.1"}]));
        assert_eq!((&merged["routes"], &merged["dns"]), (&json!([{"dst": "0.0.0.0/0"}]), &json!({"domain": "d"})));
        assert_eq!((&merged["own"], &merged["other"]), (&json!(1), &Value::Null));
    }

    #[test]
    fn addresses_of_all_point_to_their_interfaces() {
        let wanted = json!([
            {"interface": 1, "address": "10.0.0.2/24", "gateway": "10.0.0.1"},
            {"interface": 2, "address": "10.1.0.2/24"}, {"address": "fd::1/64"},
            {"interface": 4, "address": "10.2.0.2/24"}, {"address": "10.2.0.3/24"},
        ]);
        assert_eq!(merged(true)["ips"], wanted);
    }
}
