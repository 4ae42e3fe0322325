//! Writes results in the format of any version. Like the reference library (`pkg/types/020`, `040`, `100`), it drops
//! what a version cannot express.

use super::{AddResult, Dns, Interface, InterfaceAddress, Route};
use crate::cni::error::{Code, Error};
use crate::cni::version::ResultShape;
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
        let mut object = Map::new();
        object.insert("cniVersion".to_owned(), cni_version.into());
        match ResultShape::of(cni_version) {
            Some(ResultShape::V0_1) => {
                self.single_addresses(cni_version, &mut object)?;
                object.insert("dns".to_owned(), dns(&self.dns));
            }
            shape => {
                let shape = shape.unwrap_or(ResultShape::V1_0);
                let interfaces = self.interfaces.iter().map(|one| interface(one, shape));
                insert(&mut object, "interfaces", interfaces.collect::<Vec<_>>());
                insert(&mut object, "ips", self.ips.iter().map(|one| address(one, shape)).collect::<Vec<_>>());
                insert(&mut object, "routes", self.routes.iter().map(route).collect::<Vec<_>>());
                if shape == ResultShape::V0_3 || !self.dns.is_empty() {
                    object.insert("dns".to_owned(), dns(&self.dns));
                }
            }
        }
        let defined: &[&str] = match ResultShape::of(cni_version) {
            Some(ResultShape::V0_1) => &["ip4", "ip6"],
            _ => &["interfaces", "ips", "routes"],
        };
        Ok(with_undefined(object, &self.others, defined))
    }

    /// Adds the first address of each address family with the family's routes; interfaces are dropped.
    fn single_addresses(&self, cni_version: &str, object: &mut Map<String, Value>) -> Result<(), Error> {
        for (key, is_ours) in [("ip4", IpAddr::is_ipv4 as fn(&IpAddr) -> bool), ("ip6", IpAddr::is_ipv6)] {
            let Some(first) = self.ips.iter().find(|ip| is_ours(&ip.address.addr())) else { continue };
            let mut ip = Map::new();
            ip.insert("ip".to_owned(), first.address.to_string().into());
            insert(&mut ip, "gateway", text(first.gateway));
            let routes = self.routes.iter().filter(|route| is_ours(&route.dst.addr()));
            let routes = routes.map(|one| route(&Route { metrics: Map::new(), ..one.clone() }));
            insert(&mut ip, "routes", routes.collect::<Vec<_>>());
            object.insert(key.to_owned(), with_undefined(ip, &first.others, &["routes"]));
        }
        if !self.ips.is_empty() || (self.interfaces.is_empty() && self.routes.is_empty()) {
            return Ok(());
        }
        let msg = format!(
            "cniVersion: {cni_version} has no field for an interface without an address; set 0.3.0 or later in the configuration"
        );
        Err(Error::new(Code::InvalidConfig, msg))
    }
}

fn interface(interface: &Interface, shape: ResultShape) -> Value {
    let mut object = Map::new();
    object.insert("name".to_owned(), interface.name.clone().into());
    insert(&mut object, "mac", &*interface.mac);
    if shape == ResultShape::V1_0 && interface.mtu != 0 {
        object.insert("mtu".to_owned(), interface.mtu.into());
    }
    insert(&mut object, "sandbox", &*interface.sandbox);
    if shape == ResultShape::V1_0 {
        insert(&mut object, "socketPath", &*interface.socket_path);
        insert(&mut object, "pciID", &*interface.pci_id);
    }
    with_others(object, &interface.others)
}

fn address(ip: &InterfaceAddress, shape: ResultShape) -> Value {
    let mut object = Map::new();
    if shape == ResultShape::V0_3 {
        object.insert("version".to_owned(), if ip.address.addr().is_ipv4() { "4" } else { "6" }.into());
    }
    if let Some(index) = ip.interface {
        object.insert("interface".to_owned(), index.into());
    }
    object.insert("address".to_owned(), ip.address.to_string().into());
    insert(&mut object, "gateway", text(ip.gateway));
    with_undefined(object, &ip.others, &["interface"])
}

fn route(route: &Route) -> Value {
    let mut object = Map::new();
    object.insert("dst".to_owned(), route.dst.to_string().into());
    insert(&mut object, "gw", text(route.gw));
    object.extend(route.metrics.clone());
    with_others(object, &route.others)
}

fn dns(dns: &Dns) -> Value {
    let mut object = Map::new();
    insert(&mut object, "nameservers", &*dns.nameservers);
    insert(&mut object, "domain", &*dns.domain);
    insert(&mut object, "search", &*dns.search);
    insert(&mut object, "options", &*dns.options);
    with_others(object, &dns.others)
}

fn text(address: Option<IpAddr>) -> String {
    address.map(|address| address.to_string()).unwrap_or_default()
}

/// Inserts a string or a list unless it is empty.
fn insert(object: &mut Map<String, Value>, key: &str, value: impl Into<Value>) {
    let value = value.into();
    if value != json!("") && value != json!([]) {
        object.insert(key.to_owned(), value);
    }
}

/// Appends keys that the specification does not define in any version, or in the version of the result. `defined` are
/// keys that only the version to be written defines: in the result, they had no meaning and were not checked.
fn with_undefined(object: Map<String, Value>, others: &Map<String, Value>, defined: &[&str]) -> Value {
    let is_undefined = |(key, _): &(&String, &Value)| !defined.contains(&key.as_str());
    let undefined = others.iter().filter(is_undefined).map(|(key, value)| (key.clone(), value.clone()));
    with_others(object, &undefined.collect())
}

/// Appends keys that the specification does not define.
fn with_others(mut object: Map<String, Value>, others: &Map<String, Value>) -> Value {
    for (key, value) in others {
        object.entry(key.clone()).or_insert_with(|| value.clone());
    }
    Value::Object(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Converts a result to another version.
    fn converted(from: &Value, to: &str) -> Value {
        AddResult::read(from, "0.1.0").and_then(|result| result.to_json(to)).expect("a result")
    }

    #[test]
    fn keys_that_only_the_version_to_be_written_defines_are_dropped() {
        let old = json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.2/24", "interface": "x", "own": 1}, "ips": [7], "own": 2});
        let new = converted(&old, "1.0.0");
        assert_eq!(new, json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24", "own": 1}], "own": 2}));
        let new = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24", "routes": 7}], "ip6": "x"});
        let old = converted(&new, "0.2.0");
        assert_eq!(old, json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.2/24"}, "dns": {}}));
    }

    fn newest() -> Value {
        json!({
            "cniVersion": "1.1.0",
            "interfaces": [
                {"name": "eth0", "mac": "02:00:00:00:00:01", "mtu": 1500, "sandbox": "/n", "own": [1]},
                {"name": "v", "socketPath": "/s", "pciID": "0000:00:01.0"},
            ],
            "ips": [
                {"interface": 0, "address": "10.0.0.2/24", "gateway": "10.0.0.1", "own": true},
                {"interface": 0, "address": "fd00::2/64"},
                {"address": "10.0.0.3/24"},
            ],
            "routes": [
                {"dst": "0.0.0.0/0", "gw": "10.0.0.1", "mtu": 1400, "priority": 5, "table": 0, "scope": 0},
                {"dst": "fd01::/64", "own": "x"},
            ],
            "dns": {"nameservers": ["10.0.0.10"], "domain": "d", "search": ["s"], "options": ["o"], "own": 1},
            "own": {"a": 1},
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
            "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/n", "own": [1]}, {"name": "v"}],
            "ips": [
                {"version": "4", "interface": 0, "address": "10.0.0.2/24", "gateway": "10.0.0.1", "own": true},
                {"version": "6", "interface": 0, "address": "fd00::2/64"},
                {"version": "4", "address": "10.0.0.3/24"},
            ],
            "routes": newest()["routes"], "dns": newest()["dns"], "own": {"a": 1},
        });
        assert_eq!(converted(&newest(), "0.4.0"), wanted);
    }

    #[test]
    fn conversion_to_0_2_preserves_one_address_of_each_family() {
        let wanted = json!({
            "cniVersion": "0.2.0",
            "ip4": {
                "ip": "10.0.0.2/24", "gateway": "10.0.0.1", "own": true,
                "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.0.1"}],
            },
            "ip6": {"ip": "fd00::2/64", "routes": [{"dst": "fd01::/64", "own": "x"}]},
            "dns": newest()["dns"], "own": {"a": 1},
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
        let again = converted(&old, "0.1.0");
        assert_eq!((&again["ip4"], &again["dns"]), (&old["ip4"], &json!({})));
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
