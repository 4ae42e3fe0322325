//! Results of ADD: parsed from and written in the format of each protocol version, and the combination of the results of
//! several attachments.

use crate::cni::document::null_is_empty;
use crate::cni::error::{Code, Error};
use crate::cni::version::ResultShape;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
pub use read::passed_through;
use read::{SingleAddress, SingleAddresses};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

mod read;

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

impl AddResult {
    /// Returns the result in the format of `cni_version`, a supported one.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`]: versions up to 0.2.0 cannot express an interface or a route without an address. Unlike
    /// the reference library, an empty result of a later version is accepted, since a plugin that creates nothing
    /// must be able to return one.
    pub fn to_json(&self, cni_version: &str) -> Result<Value, Error> {
        let mut object = Map::from_iter([("cniVersion".to_owned(), cni_version.into())]);
        match ResultShape::of(cni_version) {
            Some(ResultShape::V0_1) => object.extend(keys(&self.single_addresses(cni_version)?)),
            Some(ResultShape::V0_3) => {
                object.extend(keys(self));
                object.entry("dns").or_insert_with(|| json!({}));
                for interface in items(&mut object, "interfaces") {
                    interface.retain(|key, _| !["mtu", "socketPath", "pciID"].contains(&key.as_str()));
                }
                for (written, ip) in items(&mut object, "ips").zip(&self.ips) {
                    let version = if ip.address.addr().is_ipv4() { "4" } else { "6" };
                    written.shift_insert(0, "version".to_owned(), version.into());
                }
            }
            Some(ResultShape::V1_0) | None => object.extend(keys(self)),
        }
        Ok(Value::Object(object))
    }

    /// Returns the first address of each address family with the family's routes, without interfaces.
    fn single_addresses(&self, cni_version: &str) -> Result<SingleAddresses, Error> {
        if self.ips.is_empty() && !(self.interfaces.is_empty() && self.routes.is_empty()) {
            let msg = format!(
                "cniVersion: {cni_version} has no field for an interface without an address; set 0.3.0 or later in the \
                 configuration"
            );
            return Err(Error::new(Code::InvalidConfig, msg));
        }
        let single = |is_ours: fn(&IpAddr) -> bool| {
            let first = self.ips.iter().find(|ip| is_ours(&ip.address.addr()))?;
            let routes = self.routes.iter().filter(|route| is_ours(&route.dst.addr()));
            let routes = routes.map(|route| Route { metrics: Metrics::default(), ..route.clone() }).collect();
            Some(SingleAddress { ip: first.address, gateway: first.gateway, routes })
        };
        Ok(SingleAddresses { ip4: single(IpAddr::is_ipv4), ip6: single(IpAddr::is_ipv6), dns: self.dns.clone() })
    }
}

fn keys(value: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(value) {
        Ok(Value::Object(keys)) => keys,
        _ => Map::new(),
    }
}

/// Returns the objects of a list.
fn items<'a>(object: &'a mut Map<String, Value>, key: &str) -> impl Iterator<Item = &'a mut Map<String, Value>> {
    object.get_mut(key).and_then(Value::as_array_mut).into_iter().flatten().filter_map(Value::as_object_mut)
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

    /// Converts a result to another version.
    fn converted(from: &Value, to: &str) -> Value {
        AddResult::read(from, "0.1.0").and_then(|result| result.to_json(to)).expect("a result")
    }

    #[test]
    fn keys_that_the_version_does_not_define_are_dropped() {
        let old = json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.2/24", "interface": "x", "own": 1}, "ips": [7], "own": 2});
        let new = converted(&old, "1.0.0");
        assert_eq!(new, json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24"}]}));
        let new = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24", "routes": 7}], "ip6": "x"});
        let old = converted(&new, "0.2.0");
        assert_eq!(old, json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.2/24"}, "dns": {}}));
    }

    fn newest() -> Value {
        json!({
            "cniVersion": "1.1.0",
            "interfaces": [
                {"name": "eth0", "mac": "02:00:00:00:00:01", "mtu": 1500, "sandbox": "/n"},
                {"name": "v", "socketPath": "/s", "pciID": "0000:00:01.0"},
            ],
            "ips": [
                {"interface": 0, "address": "10.0.0.2/24", "gateway": "10.0.0.1"},
                {"interface": 0, "address": "fd00::2/64"},
                {"address": "10.0.0.3/24"},
            ],
            "routes": [
                {"dst": "0.0.0.0/0", "gw": "10.0.0.1", "mtu": 1400, "priority": 5, "table": 0, "scope": 0},
                {"dst": "fd01::/64"},
            ],
            "dns": {"nameservers": ["10.0.0.10"], "domain": "d", "search": ["s"], "options": ["o"]},
        })
    }

    #[test]
    fn conversion_to_the_newest_version_preserves_everything() {
        assert_eq!(converted(&newest(), "1.1.0"), newest());
        let mut older = newest();
        older["cniVersion"] = json!("1.0.0");
        assert_eq!(converted(&newest(), "1.0.0"), older, "versions with the same format");
    }

    #[test]
    fn conversion_to_0_4_adds_address_versions_and_drops_newer_keys_of_interfaces() {
        let wanted = json!({
            "cniVersion": "0.4.0",
            "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/n"}, {"name": "v"}],
            "ips": [
                {"version": "4", "interface": 0, "address": "10.0.0.2/24", "gateway": "10.0.0.1"},
                {"version": "6", "interface": 0, "address": "fd00::2/64"},
                {"version": "4", "address": "10.0.0.3/24"},
            ],
            "routes": newest()["routes"], "dns": newest()["dns"],
        });
        assert_eq!(converted(&newest(), "0.4.0"), wanted);
    }

    #[test]
    fn conversion_to_0_2_preserves_one_address_of_each_family() {
        let wanted = json!({
            "cniVersion": "0.2.0",
            "ip4": {
                "ip": "10.0.0.2/24", "gateway": "10.0.0.1",
                "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.0.1"}],
            },
            "ip6": {"ip": "fd00::2/64", "routes": [{"dst": "fd01::/64"}]},
            "dns": newest()["dns"],
        });
        assert_eq!(converted(&newest(), "0.2.0"), wanted);
        let only6 = json!({"cniVersion": "1.0.0", "ips": [{"address": "fd::1/64"}], "routes": [{"dst": "0.0.0.0/0"}]});
        let wanted = json!({"cniVersion": "0.1.0", "ip6": {"ip": "fd::1/64"}, "dns": {}});
        assert_eq!(converted(&only6, "0.1.0"), wanted);
    }

    #[test]
    fn conversion_from_0_2_gives_addresses_without_an_interface() {
        let old = json!({
            "cniVersion": "0.2.0", "ip6": {"ip": "fd00::2/64", "routes": [{"dst": "::/0", "gw": "fd00::1"}]},
            "ip4": {"ip": "10.0.0.2/24", "gateway": "10.0.0.1", "routes": [{"dst": "0.0.0.0/0", "mtu": 7}]},
            "dns": {"search": []},
        });
        let wanted = json!({
            "cniVersion": "1.0.0",
            "ips": [{"address": "10.0.0.2/24", "gateway": "10.0.0.1"}, {"address": "fd00::2/64"}],
            "routes": [{"dst": "0.0.0.0/0", "mtu": 7}, {"dst": "::/0", "gw": "fd00::1"}],
        });
        assert_eq!(converted(&old, "1.0.0"), wanted);
        let (again, route) = (converted(&old, "0.1.0"), json!({"dst": "0.0.0.0/0"}));
        let wanted = json!({"ip": "10.0.0.2/24", "gateway": "10.0.0.1", "routes": [route]});
        assert_eq!((&again["ip4"], &again["dns"]), (&wanted, &json!({})));
    }

    #[test]
    fn an_empty_dns_is_written_only_up_to_0_4() {
        let empty = AddResult::default();
        assert_eq!(empty.to_json("0.3.1").expect("JSON"), json!({"cniVersion": "0.3.1", "dns": {}}));
        assert_eq!(empty.to_json("1.1.0").expect("JSON"), json!({"cniVersion": "1.1.0"}));
        assert_eq!(empty.to_json("0.2.0").expect("JSON"), json!({"cniVersion": "0.2.0", "dns": {}}));
        let bare = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]});
        let bare = AddResult::read(&bare, "1.0.0").expect("a result");
        let error = bare.to_json("0.2.0").expect_err("no address");
        assert_eq!(error.code, Code::InvalidConfig);
        assert!(error.msg.contains("0.2.0") && error.msg.contains("0.3.0"), "{error}");
    }
}
