//! Interfaces and addresses of a pod's networks according to its annotations.

use crate::cni::{DEFAULT_INTERFACE, is_matchable_interface};
use crate::networks::{interface_names, networks};
use crate::pod::Pod;
use crate::pod::well_known::NETWORK_STATUS;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::net::IpAddr;

/// Returns the pod's own addresses: those of its status, and those that Multus has reported for all its networks.
#[must_use]
pub fn own_addresses(pod: &Pod) -> Vec<IpAddr> {
    let reported = network_status(pod).into_iter().flat_map(|entry| entry.ips).filter_map(|ip| ip.parse().ok());
    let addresses: BTreeSet<IpAddr> = pod.addresses.iter().copied().chain(reported).collect();
    addresses.into_iter().collect()
}

/// Returns the interfaces of the pod's secondary networks: those of the networks that it selects, which Multus creates
/// later, and those that Multus has reported. An annotation that is not valid adds no interfaces, because Multus rejects
/// it too.
pub(super) fn secondary_interfaces(pod: &Pod) -> Vec<String> {
    let mut names: BTreeSet<String> = selected_interfaces(pod).into_iter().collect();
    names.extend(network_status(pod).into_iter().filter(|entry| !entry.default).map(|entry| entry.interface));
    names.into_iter().filter(|name| name != DEFAULT_INTERFACE && name != "lo" && is_matchable_interface(name)).collect()
}

/// An element of Multus's annotation (network-attachment-definition-client, `NetworkStatus`).
#[derive(Deserialize)]
struct StatusInterface {
    #[serde(default)]
    interface: String,
    #[serde(default)]
    default: bool,
    #[serde(default)]
    ips: Vec<String>,
}

fn network_status(pod: &Pod) -> Vec<StatusInterface> {
    let status = pod.annotations.get(NETWORK_STATUS).map(String::as_str).unwrap_or_default();
    serde_json::from_str(status).unwrap_or_default()
}

/// Returns the names of the selected networks' interfaces. An attachment without an interface, such as this plugin's,
/// has a name too; no packet ever matches it.
fn selected_interfaces(pod: &Pod) -> Vec<String> {
    let selections = networks(pod).unwrap_or_default().elements;
    let all: Vec<_> = std::iter::once((String::new(), None))
        .chain(selections.iter().map(|selection| (selection.place.clone(), Some(selection))))
        .collect();
    interface_names(DEFAULT_INTERFACE, &all).unwrap_or_default().split_off(1.min(all.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secondary(annotations: &[(&str, &str)]) -> Vec<String> {
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        secondary_interfaces(&Pod { namespace: "shop".into(), annotations, ..Pod::default() })
    }

    #[test]
    fn selected_networks_have_interface_names_before_they_exist() {
        let selected = [("k8s.v1.cni.cncf.io/networks", "default/istio-cni, storage, fast@data0")];
        assert_eq!(secondary(&selected), ["data0", "net1", "net2"]);
        assert!(secondary(&[]).is_empty());
        assert!(secondary(&[("k8s.v1.cni.cncf.io/networks", "a//b")]).is_empty());
    }

    #[test]
    fn reported_interfaces_count_except_the_default_one() {
        let status =
            r#"[{"name":"ovn","interface":"eth0","default":true},{"name":"a","interface":"net7"},{"name":"b"}]"#;
        assert_eq!(secondary(&[(NETWORK_STATUS, status)]), ["net7"]);
        assert!(secondary(&[(NETWORK_STATUS, "[{\"interface\":\"a/b\"}]")]).is_empty());
        assert!(secondary(&[(NETWORK_STATUS, "no JSON")]).is_empty());
        assert_eq!(secondary(&[(NETWORK_STATUS, r#"[{"interface":"net1:7"},{"interface":"net2"}]"#)]), ["net2"]);
    }

    /// Otherwise the pod's author could exclude `eth0` even if the node pins its policy.
    #[test]
    fn lo_and_interface_prefixes_of_iptables_are_ignored() {
        assert_eq!(secondary(&[("k8s.v1.cni.cncf.io/networks", "a@eth+,b@+,c@data0,d@lo")]), ["data0"]);
        assert!(secondary(&[(NETWORK_STATUS, r#"[{"interface":"eth+"}]"#)]).is_empty());
    }

    #[test]
    fn a_pods_own_addresses_are_those_of_all_its_networks() {
        let of = |status: &str| {
            let annotations = [(NETWORK_STATUS.to_owned(), status.to_owned())].into();
            let addresses = vec!["10.0.0.2".parse().expect("an address")];
            let own = own_addresses(&Pod { annotations, addresses, ..Pod::default() });
            own.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let status = r#"[{"name": "ovn", "interface": "eth0", "ips": ["10.0.0.2", "fd00::2"], "default": true},
            {"name": "a", "interface": "net1", "ips": ["192.168.7.2", "no address"]}, {"name": "b"}]"#;
        assert_eq!(of(status), ["10.0.0.2", "192.168.7.2", "fd00::2"]);
        assert_eq!(of("no JSON"), ["10.0.0.2"]);
    }
}
