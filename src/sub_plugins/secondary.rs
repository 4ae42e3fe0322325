//! The interfaces of a pod's secondary networks, as far as the pod tells: from the networks that it
//! selects, before Multus makes them, and from what Multus wrote down when it had.

use crate::cni::{DEFAULT_INTERFACE, is_interface_of_rules};
use crate::networks::{interface_names, networks};
use crate::pod::Pod;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::net::IpAddr;

/// What Multus writes down of each interface (the NetworkAttachmentDefinition client's
/// `NetworkStatus`).
const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";

#[derive(Deserialize)]
struct NetworkStatusItem {
    #[serde(default)]
    interface: String,
    #[serde(default)]
    default: bool,
    #[serde(default)]
    ips: Vec<String>,
}

/// The pod's own addresses: those of its status, and those of all its networks that Multus wrote down.
#[must_use]
pub fn own_addresses(pod: &Pod) -> Vec<IpAddr> {
    let all = written_down(pod).into_iter().flat_map(|status| status.ips).filter_map(|ip| ip.parse().ok());
    let addresses: BTreeSet<IpAddr> = pod.addresses.iter().copied().chain(all).collect();
    addresses.into_iter().collect()
}

fn written_down(pod: &Pod) -> Vec<NetworkStatusItem> {
    let status = pod.annotations.get(NETWORK_STATUS).map(String::as_str).unwrap_or_default();
    serde_json::from_str(status).unwrap_or_default()
}

/// Their names. An annotation that can't be understood names none: Multus has refused it.
pub(super) fn interfaces(pod: &Pod) -> Vec<String> {
    let mut names: BTreeSet<String> = selected(pod).into_iter().collect();
    names.extend(written_down(pod).into_iter().filter(|s| !s.default).map(|s| s.interface));
    names.into_iter().filter(|name| name != DEFAULT_INTERFACE && name != "lo" && is_interface_of_rules(name)).collect()
}

/// An attachment without an interface of its own, this plugin's for one, takes a name, too; that
/// one is never seen.
fn selected(pod: &Pod) -> Vec<String> {
    let selections = networks(pod).unwrap_or_default().elements;
    let all: Vec<_> = std::iter::once((String::new(), None))
        .chain(selections.iter().map(|selection| (selection.place.clone(), Some(selection))))
        .collect();
    interface_names(DEFAULT_INTERFACE, &all).unwrap_or_default().split_off(1.min(all.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(annotations: &[(&str, &str)]) -> Vec<String> {
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        interfaces(&Pod { namespace: "shop".into(), annotations, ..Pod::default() })
    }

    #[test]
    fn selected_networks_have_names_before_they_are_there() {
        let selected = [("k8s.v1.cni.cncf.io/networks", "default/istio-cni, storage, fast@data0")];
        assert_eq!(of(&selected), ["data0", "net1", "net2"]);
        assert!(of(&[]).is_empty());
        assert!(of(&[("k8s.v1.cni.cncf.io/networks", "a//b")]).is_empty());
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

    #[test]
    fn what_multus_wrote_down_counts_but_for_the_default() {
        let status =
            r#"[{"name":"ovn","interface":"eth0","default":true},{"name":"a","interface":"net7"},{"name":"b"}]"#;
        assert_eq!(of(&[(NETWORK_STATUS, status)]), ["net7"]);
        assert!(of(&[(NETWORK_STATUS, "[{\"interface\":\"a/b\"}]")]).is_empty());
        assert!(of(&[(NETWORK_STATUS, "no JSON")]).is_empty());
        assert_eq!(of(&[(NETWORK_STATUS, r#"[{"interface":"net1:7"},{"interface":"net2"}]"#)]), ["net2"]);
    }

    /// Else the pod's author would exempt `eth0`, too, even where the node pins its policy.
    #[test]
    fn a_name_that_iptables_takes_for_a_prefix_is_none_and_lo_is_none() {
        assert_eq!(of(&[("k8s.v1.cni.cncf.io/networks", "a@eth+,b@+,c@data0,d@lo")]), ["data0"]);
        assert!(of(&[(NETWORK_STATUS, r#"[{"interface":"eth+"}]"#)]).is_empty());
    }
}
