//! Reports about a pod's networks: the annotation `k8s.v1.cni.cncf.io/network-status`, and events. Both have exactly the
//! form that Multus gives them, because other tools search for it.

use crate::cluster::{Event, ObjectRef};
use crate::cni::result::{AddResult, Dns};
use crate::printable;
use serde::Serialize;
use serde_json::ser::PrettyFormatter;
use serde_json::{Serializer, Value};
use std::net::IpAddr;
use std::ops::Not;

/// A network that was added.
#[derive(Debug, Clone, Copy)]
pub struct AddedNetwork<'a> {
    /// The network's name: `NAMESPACE/NAME` of its definition, or its configuration's name.
    pub name: &'a str,
    /// Whether it is the pod's default network.
    pub default: bool,
    /// The result of the ADD.
    pub result: &'a AddResult,
    /// The device information of the network.
    pub device_info: Option<&'a Value>,
}

/// One interface (network-attachment-definition-client, `NetworkStatus`), with the fields in that order.
#[derive(Serialize)]
struct NetworkStatusEntry<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    interface: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ips: Vec<IpAddr>,
    #[serde(skip_serializing_if = "str::is_empty")]
    mac: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    mtu: Option<u32>,
    #[serde(skip_serializing_if = "Not::not")]
    default: bool,
    dns: &'a Dns,
    #[serde(rename = "device-info", skip_serializing_if = "Option::is_none")]
    device_info: Option<&'a Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gateway: Vec<IpAddr>,
}

/// Returns the annotation's value for the networks of a pod, in the order in which they were added. It has the form of
/// Multus's `SetNetworkStatus`: elements are indented by four blanks and joined by a comma. A network without an
/// interface has no element.
#[must_use]
pub fn network_status(networks: &[AddedNetwork<'_>]) -> String {
    let elements: Vec<String> =
        networks.iter().flat_map(|added| entries(*added)).map(|entry| indented(&entry)).collect();
    printable::json(&format!("[{}]", elements.join(","))).into_owned()
}

/// Returns an entry for each interface of the network in the pod. A single interface has an entry even if it is on the
/// host.
fn entries(added: AddedNetwork<'_>) -> Vec<NetworkStatusEntry<'_>> {
    let interfaces = &added.result.interfaces;
    let in_pod = |index: &usize| !interfaces[*index].sandbox.is_empty();
    let shown: Vec<usize> = (0..interfaces.len()).filter(in_pod).collect();
    if interfaces.len() == 1 {
        let ips = added.result.ips.iter().map(|ip| ip.address.addr()).collect();
        return vec![added.entry(shown.first().copied(), ips, added.default)];
    }
    let gateway = added.result.ips.iter().find(|ip| ip.gateway.is_some() && ip.interface.is_some());
    let default = gateway.and_then(|ip| usize::try_from(ip.interface?).ok()).or_else(|| shown.first().copied());
    let entry = |index: &usize| {
        let is_last = shown.last() == Some(index);
        let is_here = |interface: Option<i64>| interface.map_or(is_last, |one| usize::try_from(one) == Ok(*index));
        let ips = added.result.ips.iter().filter(|ip| is_here(ip.interface)).map(|ip| ip.address.addr());
        added.entry(Some(*index), ips.collect(), added.default && default == Some(*index))
    };
    shown.iter().map(entry).collect()
}

impl<'a> AddedNetwork<'a> {
    fn entry(self, interface: Option<usize>, ips: Vec<IpAddr>, default: bool) -> NetworkStatusEntry<'a> {
        let interface = interface.map(|index| &self.result.interfaces[index]);
        NetworkStatusEntry {
            name: self.name,
            interface: interface.map_or("", |interface| &interface.name),
            ips,
            mac: interface.map_or("", |interface| &interface.mac),
            mtu: interface.map(|interface| interface.mtu).filter(|mtu| *mtu != 0),
            default,
            dns: &self.result.dns,
            device_info: self.device_info,
            gateway: self.result.default_gateways().collect(),
        }
    }
}

fn indented(entry: &NetworkStatusEntry<'_>) -> String {
    let mut text = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut text, PrettyFormatter::with_indent(b"    "));
    // Serialization of strings, numbers and lists to memory cannot fail.
    let _ = entry.serialize(&mut serializer);
    String::from_utf8_lossy(&text).into_owned()
}

/// Returns the event that an interface was added; `None` if the result has neither an interface nor an address.
#[must_use]
pub fn added_interface(interface: &str, added: AddedNetwork<'_>) -> Option<Event> {
    let ips: Vec<String> = added.result.ips.iter().map(|ip| ip.address.to_string()).collect();
    let message = format!("Add {interface} [{}] from {}", ips.join(" "), added.name);
    added.result.has_interface().then_some(Event { warning: false, reason: "AddedInterface".into(), message })
}

/// Returns the event that a definition was not found; `searched` describes the search.
#[must_use]
pub fn no_network_found(definition: &ObjectRef, searched: &str) -> Event {
    let ObjectRef { namespace, name } = definition;
    let message =
        format!("cannot find a network-attachment-definition ({name}) in namespace ({namespace}): {searched}");
    Event { warning: true, reason: "NoNetworkFound".into(), message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::networks::added_interface;
    use serde_json::json;

    fn result(value: &Value) -> AddResult {
        AddResult::read(value, "1.1.0").expect("a result")
    }

    fn status(default: bool, value: &Value) -> Value {
        let text =
            network_status(&[AddedNetwork { name: "ns/net", default, result: &result(value), device_info: None }]);
        serde_json::from_str(&text).expect("JSON")
    }

    #[test]
    fn the_value_has_the_form_of_multus() {
        let ovn = result(&json!({
            "interfaces": [{"name": "vethA"}, {"name": "eth0", "mac": "0a:58:0a:80:00:05", "mtu": 1400, "sandbox": "/n"}],
            "ips": [{"interface": 1, "address": "10.128.0.5/23", "gateway": "10.128.0.1"}],
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.128.0.1"}, {"dst": "10.0.0.0/8", "gw": "10.128.0.1"}],
            "dns": {"nameservers": ["10.0.0.10"], "search": ["svc"]},
        }));
        let macvlan = result(&json!({
            "interfaces": [{"name": "net1", "sandbox": "/n"}], "ips": [{"address": "fd00::5/64"}, {"address": "10.1.0.5/24"}],
        }));
        let networks = [
            AddedNetwork { name: "ovn-kubernetes", default: true, result: &ovn, device_info: None },
            AddedNetwork {
                name: "default/istio-cni",
                default: false,
                result: &AddResult::default(),
                device_info: None,
            },
            AddedNetwork { name: "shop/macvlan", default: false, result: &macvlan, device_info: None },
        ];
        let wanted = r#"[{
    "name": "ovn-kubernetes",
    "interface": "eth0",
    "ips": [
        "10.128.0.5"
    ],
    "mac": "0a:58:0a:80:00:05",
    "mtu": 1400,
    "default": true,
    "dns": {
        "nameservers": [
            "10.0.0.10"
        ],
        "search": [
            "svc"
        ]
    },
    "gateway": [
        "10.128.0.1"
    ]
},{
    "name": "shop/macvlan",
    "interface": "net1",
    "ips": [
        "fd00::5",
        "10.1.0.5"
    ],
    "dns": {}
}]"#;
        assert_eq!(network_status(&networks), wanted);
        assert_eq!(network_status(&[]), "[]");
    }

    /// `kubectl get pod -o yaml` prints the value to a terminal; programs parse the same names.
    #[test]
    fn control_characters_are_escaped() {
        let bad = "n\u{1b}\u{9b}\u{202e}";
        let result = result(&json!({"interfaces": [{"name": bad, "sandbox": "/n"}]}));
        let text =
            network_status(&[AddedNetwork { name: "ns/net", default: false, result: &result, device_info: None }]);
        assert!(text.contains(r"n\u001b\u009b\u202e"), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).expect("JSON")[0]["interface"], bad);
    }

    #[test]
    fn a_single_interface_on_the_host_has_only_addresses() {
        let host = json!({"interfaces": [{"name": "br0", "mac": "x"}], "ips": [{"address": "10.0.0.1/24"}]});
        assert_eq!(status(true, &host), json!([{"name": "ns/net", "ips": ["10.0.0.1"], "default": true, "dns": {}}]));
    }

    #[test]
    fn several_interfaces_are_distinguished_by_index() {
        let several = |ips: Value| {
            let interfaces = json!([{"name": "v"}, {"name": "a", "sandbox": "/n"}, {"name": "b", "sandbox": "/n"}]);
            status(true, &json!({"interfaces": interfaces, "ips": ips}))
        };
        let entries = several(json!([
            {"interface": 0, "address": "10.0.0.1/24"}, {"interface": 1, "address": "10.0.0.2/24"},
            {"interface": 2, "address": "10.0.0.3/24", "gateway": "10.0.0.1"}, {"address": "10.0.0.4/24"},
        ]));
        let wanted = json!([
            {"name": "ns/net", "interface": "a", "ips": ["10.0.0.2"], "dns": {}},
            {"name": "ns/net", "interface": "b", "ips": ["10.0.0.3", "10.0.0.4"], "default": true, "dns": {}},
        ]);
        assert_eq!(entries, wanted);
        assert_eq!(several(json!([]))[0]["default"], true, "the first in the pod without any gateway");
        let on_host = several(json!([{"interface": 0, "address": "10.0.0.1/24", "gateway": "10.0.0.9"}]));
        assert_eq!((&on_host[0]["default"], &on_host[1]["default"]), (&Value::Null, &Value::Null));
    }

    #[test]
    fn an_event_contains_interface_addresses_and_network() {
        let added = |value: &Value| {
            let result = result(value);
            added_interface(
                "net1",
                AddedNetwork { name: "ns1/list", default: false, result: &result, device_info: None },
            )
            .map(|event| event.message)
        };
        let ips = json!({"ips": [{"address": "10.1.1.1/24"}, {"address": "fd::1/64"}]});
        assert_eq!(added(&ips).as_deref(), Some("Add net1 [10.1.1.1/24 fd::1/64] from ns1/list"));
        assert_eq!(added(&json!({"interfaces": [{"name": "x"}]})).as_deref(), Some("Add net1 [] from ns1/list"));
        assert_eq!(added(&json!({"dns": {}})), None);
    }
}
