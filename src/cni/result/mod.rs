//! Results of ADD: parsed from and written in the format of each protocol version, and how the results of several
//! attachments are merged.

mod read;
mod write;

pub use read::passed_through;

use crate::cni::document::null_is_empty;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The result of an ADD with the fields of 1.x, a superset of all versions (SPEC.md, "ADD Success"). As in the reference
/// library, keys that the specification does not define are dropped. A field that is empty, 0 or `null` is absent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AddResult {
    /// `interfaces`: in the pod's network namespace and on the host.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<Interface>,
    /// `ips`.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    pub ips: Vec<InterfaceAddress>,
    /// `routes`.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// `dns`.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "Dns::is_empty")]
    pub dns: Dns,
}

/// A created interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Interface {
    /// `name`.
    #[serde(deserialize_with = "null_is_empty")]
    pub name: String,
    /// `mac`: the hardware address.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "String::is_empty")]
    pub mac: String,
    /// `mtu`, in bytes; since 1.1.0.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "is_zero")]
    pub mtu: u32,
    /// `sandbox`: the path of the network namespace; empty for an interface of the host.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
    /// `socketPath`; since 1.1.0.
    #[serde(rename = "socketPath", deserialize_with = "null_is_empty", skip_serializing_if = "String::is_empty")]
    pub socket_path: String,
    /// `pciID`; since 1.1.0.
    #[serde(rename = "pciID", deserialize_with = "null_is_empty", skip_serializing_if = "String::is_empty")]
    pub pci_id: String,
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceAddress {
    /// `interface`: an index into the result's interfaces. Versions up to 0.2.0 do not have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<i64>,
    /// `address` with the prefix length of its network.
    #[serde(deserialize_with = "read::prefix")]
    pub address: IpNet,
    /// `gateway`.
    #[serde(default, deserialize_with = "read::gateway", skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// A created route. Its attributes are specified since 1.1.0, but the reference library accepts them since 0.3.0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// `dst`.
    #[serde(deserialize_with = "read::prefix")]
    pub dst: IpNet,
    /// `gw`.
    #[serde(default, deserialize_with = "read::gateway", skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
    /// The other attributes.
    #[serde(flatten)]
    pub metrics: Metrics,
}

/// The attributes of a route other than destination and gateway (reference library, `pkg/types`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Metrics {
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "is_zero")]
    mtu: i64,
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "is_zero")]
    advmss: i64,
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "is_zero")]
    priority: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    table: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<i64>,
}

/// The DNS configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// `nameservers`: addresses, in order.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// `domain`.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// `search`: domains, in order.
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// `options` of resolv.conf(5).
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

fn is_zero<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}

impl AddResult {
    /// Returns whether the result has an interface or an address. The result of a plugin that only changes the
    /// interfaces of others has neither.
    #[must_use]
    pub fn has_interface(&self) -> bool {
        !self.interfaces.is_empty() || !self.ips.is_empty()
    }

    /// Returns the gateways of the default routes, in order.
    pub fn default_gateways(&self) -> impl Iterator<Item = IpAddr> {
        self.routes.iter().filter(|route| route.is_default()).filter_map(|route| route.gw)
    }

    /// Removes the default routes.
    pub fn remove_default_routes(&mut self) {
        self.routes.retain(|route| !route.is_default());
    }

    /// Adds a default route.
    pub fn add_default_route(&mut self, gateway: IpAddr) {
        let dst = match gateway {
            IpAddr::V4(_) => Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0).into(),
            IpAddr::V6(_) => Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        self.routes.push(Route { dst, gw: Some(gateway), metrics: Metrics::default() });
    }

    /// Returns the default network's result (`self`) with the interfaces of the other attachments appended, and also
    /// their addresses if `addresses` is set. Routes and DNS remain those of the default network.
    #[must_use]
    pub fn merged<'a>(mut self, others: impl IntoIterator<Item = &'a Self>, addresses: bool) -> Self {
        for other in others {
            let first = self.interfaces.len();
            self.interfaces.extend(other.interfaces.iter().cloned());
            if addresses {
                let shifted = |ip: &InterfaceAddress| InterfaceAddress {
                    interface: other.shifted_index(ip.interface, first),
                    ..ip.clone()
                };
                self.ips.extend(other.ips.iter().map(shifted));
            }
        }
        self
    }

    /// Returns the index of an interface after this result's interfaces are appended at `first`. An invalid index is
    /// dropped, so that it does not point to an interface of another attachment.
    fn shifted_index(&self, index: Option<i64>, first: usize) -> Option<i64> {
        let index = usize::try_from(index?).ok().filter(|index| *index < self.interfaces.len())?;
        i64::try_from(first + index).ok()
    }
}

impl Route {
    /// Returns whether the route matches every destination of its address family.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.dst.prefix_len() == 0
    }
}

impl Dns {
    /// Returns whether all fields are empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
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
            "routes": [{"dst": "0.0.0.0/0"}], "dns": {"domain": "d"},
        }));
        let macvlan = result(&json!({
            "interfaces": [{"name": "net1", "sandbox": "/n"}],
            "ips": [{"interface": 0, "address": "10.1.0.2/24"}, {"interface": 1, "address": "fd::1/64"}],
            "routes": [{"dst": "10.9.0.0/16"}], "dns": {"domain": "e"},
        }));
        let bridge = result(&json!({
            "interfaces": [{"name": "br0"}, {"name": "net2", "sandbox": "/n"}],
            "ips": [{"interface": 1, "address": "10.2.0.2/24"}, {"address": "10.2.0.3/24"}],
        }));
        default.merged([&macvlan, &AddResult::default(), &bridge], addresses).to_json("1.0.0").expect("JSON")
    }

    #[test]
    fn merging_appends_interfaces_and_keeps_the_rest_of_the_default_network() {
        let merged = merged(false);
        let names: Vec<_> = merged["interfaces"].as_array().expect("an array").iter().map(|i| &i["name"]).collect();
        assert_eq!(names, ["vethA", "eth0", "net1", "br0", "net2"]);
        assert_eq!(merged["ips"], json!([{"interface": 1, "address": "10.0.0.2/24", "gateway": "10.0.0.1"}]));
        assert_eq!((&merged["routes"], &merged["dns"]), (&json!([{"dst": "0.0.0.0/0"}]), &json!({"domain": "d"})));
    }

    #[test]
    fn merged_addresses_refer_to_their_interfaces() {
        let wanted = json!([
            {"interface": 1, "address": "10.0.0.2/24", "gateway": "10.0.0.1"},
            {"interface": 2, "address": "10.1.0.2/24"}, {"address": "fd::1/64"},
            {"interface": 4, "address": "10.2.0.2/24"}, {"address": "10.2.0.3/24"},
        ]);
        assert_eq!(merged(true)["ips"], wanted);
    }
}
