//! Writes results in the format of any version. Like the reference library (`pkg/types/020`, `040`, `100`), it drops
//! what a version cannot express.

use super::read::{SingleAddress, SingleAddresses};
use super::{AddResult, Metrics, Route};
use crate::cni::error::{Code, Error};
use crate::cni::version::ResultShape;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::net::IpAddr;

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
