//! Interfaces and addresses of a pod's networks according to its annotations.

use crate::cni::{DEFAULT_INTERFACE, is_matchable_interface};
use crate::networks::{Selection, interface_names, networks};
use crate::pod::Pod;
use crate::pod::well_known::NETWORK_STATUS;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::IpAddr;

/// Returns the pod's own addresses: those of its status, and those that Multus has reported for all its networks.
#[must_use]
pub fn own_addresses(pod: &Pod) -> Vec<IpAddr> {
    let reported = network_status(pod)
        .into_iter()
        .flat_map(|entry| entry.ips.unwrap_or_default())
        .filter_map(|ip| ip.parse().ok());
    let addresses: BTreeSet<IpAddr> = pod.addresses.iter().copied().chain(reported).collect();
    addresses.into_iter().collect()
}

/// Returns the interface of the pod's default route according to its annotations: that of the cluster network unless the
/// route is on another network.
#[must_use]
pub fn default_interface(pod: &Pod) -> String {
    PodInterfaces::of(pod).default.into_iter().next().unwrap_or_else(|| DEFAULT_INTERFACE.to_owned())
}

/// The interfaces of a pod's networks other than the cluster network's, according to its annotations.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PodInterfaces {
    /// Those of secondary networks: the networks that the pod selects, which Multus creates later, and those that Multus
    /// has reported.
    pub(super) secondary: Vec<String>,
    /// Those that carry the pod's default route: of a selected network to which it moves, and of one that is reported as
    /// the default.
    pub(super) default: Vec<String>,
}

impl PodInterfaces {
    /// Finds the interfaces. An annotation that is not valid adds none, because Multus rejects it too.
    pub(super) fn of(pod: &Pod) -> Self {
        let reported = network_status(pod).into_iter().map(|entry| (entry.interface, entry.default));
        let mut all: Vec<_> = selected_interfaces(pod).into_iter().chain(reported).collect();
        all.retain(|(name, _)| name != DEFAULT_INTERFACE && name != "lo" && is_matchable_interface(name));
        let named = |is_default: bool| {
            let names = all.iter().filter(move |(_, default)| *default == is_default).map(|(name, _)| name.clone());
            names.collect::<BTreeSet<String>>()
        };
        let (default, others) = (named(true), named(false));
        Self { secondary: others.difference(&default).cloned().collect(), default: default.into_iter().collect() }
    }
}

/// An element of Multus's annotation (network-attachment-definition-client, `NetworkStatus`).
#[derive(Deserialize)]
struct StatusInterface {
    #[serde(default)]
    interface: String,
    #[serde(default)]
    default: bool,
    ips: Option<Vec<String>>,
}

/// Returns the elements of the annotation. An element that is not valid does not hide the others.
fn network_status(pod: &Pod) -> Vec<StatusInterface> {
    let status = pod.annotations.get(NETWORK_STATUS).map(String::as_str).unwrap_or_default();
    let elements: Vec<Value> = serde_json::from_str(status).unwrap_or_default();
    elements.into_iter().filter_map(|element| serde_json::from_value(element).ok()).collect()
}

/// Returns the names of the selected networks' interfaces, each with whether the pod's default route moves there. An
/// attachment without an interface, such as this plugin's, has a name too; no packet ever matches it.
fn selected_interfaces(pod: &Pod) -> Vec<(String, bool)> {
    let selections = networks(pod).unwrap_or_default().elements;
    let all: Vec<_> = std::iter::once((String::new(), None))
        .chain(selections.iter().map(|selection| (selection.place.clone(), Some(selection))))
        .collect();
    let names = interface_names(DEFAULT_INTERFACE, &all).unwrap_or_default().into_iter().skip(1);
    let gets_route = |selection: &Selection| selection.default_route.as_ref().is_some_and(|route| !route.is_empty());
    names.zip(selections.iter().map(gets_route)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interfaces(annotations: &[(&str, &str)]) -> PodInterfaces {
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        PodInterfaces::of(&Pod { namespace: "shop".into(), annotations, ..Pod::default() })
    }

    fn secondary(annotations: &[(&str, &str)]) -> Vec<String> {
        interfaces(annotations).secondary
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
        let one_is_odd =
            r#"[{"interface":"net1","default":true,"ips":null},{"interface":"net2","ips":7},{"interface":"net3"}]"#;
        let found = interfaces(&[(NETWORK_STATUS, one_is_odd)]);
        assert_eq!((found.secondary, found.default), (vec!["net3".to_owned()], vec!["net1".to_owned()]));
        assert_eq!(secondary(&[(NETWORK_STATUS, r#"[{"interface":"net1:7"},{"interface":"net2"}]"#)]), ["net2"]);
    }

    #[test]
    fn a_network_with_the_default_route_is_not_secondary() {
        let selected = r#"[{"name": "a", "default-route": ["10.0.0.1"]}, {"name": "b", "default-route": []}]"#;
        let found = interfaces(&[("k8s.v1.cni.cncf.io/networks", selected)]);
        assert_eq!((found.secondary, found.default), (vec!["net2".to_owned()], vec!["net1".to_owned()]));
        let status = r#"[{"interface": "eth0"}, {"interface": "ovn-udn1", "default": true}, {"interface": "net1"},
            {"interface": "net2", "default": true}]"#;
        let both = [("k8s.v1.cni.cncf.io/networks", "a,b,c"), (NETWORK_STATUS, status)];
        let found = interfaces(&both);
        assert_eq!(found.secondary, ["net1", "net3"]);
        assert_eq!(found.default, ["net2", "ovn-udn1"]);
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
