//! Interface names of a pod's networks, and the default route that a selection can move to its network.

use super::annotations::Selection;
use crate::cni::result::AddResult;
use crate::cni::{Code, Error};
use std::net::IpAddr;

/// Returns the interface names of all networks, the default network first. Each network comes with its place, for
/// messages, and the pod's selection of it. Without a requested name, the default network's interface is `ifname`
/// (`CNI_IFNAME`) and any other's is `net` with its position. As in Multus, the position counts all networks before it,
/// even those without an interface (multus-cni, `getIfname`).
///
/// # Errors
/// [`Code::InvalidConfig`]: two interfaces have the same name; the message contains both places.
pub fn interface_names(ifname: &str, networks: &[(String, Option<&Selection>)]) -> Result<Vec<String>, Error> {
    let mut names: Vec<String> = Vec::new();
    for (position, (place, selection)) in networks.iter().enumerate() {
        let requested = selection.and_then(|selection| selection.interface.clone());
        let (why, name) = match (requested, position) {
            (Some(name), _) => ("as requested", name),
            (None, 0) => ("from the runtime", ifname.to_owned()),
            (None, position) => ("by its position", format!("net{position}")),
        };
        if let Some(other) = names.iter().position(|used| *used == name) {
            let msg = format!(
                "{place}: interface name {name:?} ({why}) is already used by {}; \
                 request another name with NAME@INTERFACE or \"interface\"",
                networks[other].0
            );
            return Err(Error::new(Code::InvalidConfig, msg));
        }
        names.push(name);
    }
    Ok(names)
}

/// A change of default routes in the pod's network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefaultRouteChange {
    /// The interface whose default routes of both families are removed.
    pub interface: String,
    /// The gateways of the default routes that are added after the ADD of all networks.
    pub gateways: Vec<IpAddr>,
}

/// Rejects more than one gateway per address family in all selections of a pod.
///
/// # Errors
/// [`Code::InvalidConfig`] with the places of both gateways.
pub fn check_default_routes<'a>(selections: impl IntoIterator<Item = &'a Selection>) -> Result<(), Error> {
    let mut seen: Vec<(bool, &str)> = Vec::new();
    for selection in selections {
        for gateway in selection.default_route.iter().flatten() {
            let family = if gateway.is_ipv4() { "IPv4" } else { "IPv6" };
            if let Some((_, first)) = seen.iter().find(|(ipv4, _)| *ipv4 == gateway.is_ipv4()) {
                let msg = format!(
                    "{}: default-route: {gateway} is the pod's second {family} gateway, after that of {first}; expected at most \
                     one per address family",
                    selection.place
                );
                return Err(Error::new(Code::InvalidConfig, msg));
            }
            seen.push((gateway.is_ipv4(), &selection.place));
        }
    }
    Ok(())
}

/// Returns whether the pod's default route moves: a selection has a `default-route`, even an empty one.
pub fn moves_default_route<'a>(selections: impl IntoIterator<Item = &'a Selection>) -> bool {
    selections.into_iter().any(|selection| selection.default_route.is_some())
}

/// Moves the default route in the result of a network, for a pod whose default route moves, and returns the change for
/// the kernel. As in Multus, every network loses its default routes of both families, so that the next network's plugin
/// can add one; a network whose selection names gateways gets routes to these. `None` if the result has neither an
/// interface nor an address.
pub fn move_default_route(
    interface: &str,
    selection: Option<&Selection>,
    result: &mut AddResult,
) -> Option<DefaultRouteChange> {
    if !result.has_interface() {
        return None;
    }
    let gateways = selection.and_then(|selection| selection.default_route.clone()).unwrap_or_default();
    result.remove_default_routes();
    gateways.iter().for_each(|gateway| result.add_default_route(*gateway));
    Some(DefaultRouteChange { interface: interface.to_owned(), gateways })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Returns the names of networks at places `0`, `1`, … that request these names; an empty one requests none.
    fn names(requested: &[&str]) -> Result<Vec<String>, Error> {
        let interface = |name: &&str| (!name.is_empty()).then(|| (*name).to_owned());
        let selections: Vec<_> =
            requested.iter().map(|name| Selection { interface: interface(name), ..Selection::default() }).collect();
        let network = |(i, selection)| (format!("place {i}"), Some(selection));
        interface_names("eth0", &selections.iter().enumerate().map(network).collect::<Vec<_>>())
    }

    #[test]
    fn positions_count_all_networks() {
        assert_eq!(names(&[""]).expect("names"), ["eth0"]);
        assert_eq!(names(&["", "", ""]).expect("names"), ["eth0", "net1", "net2"]);
        assert_eq!(names(&["", "", "data0", ""]).expect("names"), ["eth0", "net1", "data0", "net3"]);
        let unselected = [("clusterNetwork".to_owned(), None), ("defaultNetworks[0]".to_owned(), None)];
        assert_eq!(interface_names("eth0", &unselected).expect("names"), ["eth0", "net1"]);
    }

    #[test]
    fn the_default_network_can_request_a_name() {
        assert_eq!(names(&["ovn0", "eth0"]).expect("names"), ["ovn0", "eth0"]);
    }

    #[test]
    fn a_name_conflict_names_both_places() {
        let rows = [
            (&["", "eth0"][..], 1, "eth0", "as requested", 0),
            (&["", "x", "", "x"], 3, "x", "as requested", 1),
            (&["", "net2", ""], 2, "net2", "by its position", 1),
            (&["", "", "net1"], 2, "net1", "as requested", 1),
        ];
        for (requested, place, name, why, other) in rows {
            let error = names(requested).expect_err("a conflict");
            assert_eq!(error.code, Code::InvalidConfig);
            let wanted = format!("place {place}: interface name {name:?} ({why}) is already used by place {other}; ");
            assert!(error.msg.starts_with(&wanted), "{error}");
        }
    }

    fn selection(place: &str, gateways: Option<&[&str]>) -> Selection {
        let parse = |text: &&str| text.parse().expect("an address");
        let default_route = gateways.map(|gateways| gateways.iter().map(parse).collect());
        Selection { place: place.into(), default_route, ..Selection::default() }
    }

    fn result(gateway: &str) -> AddResult {
        let routes =
            json!([{"dst": "0.0.0.0/0", "gw": gateway}, {"dst": "10.0.0.0/8"}, {"dst": "::/0", "gw": "fd00::1"}]);
        let value = json!({"interfaces": [{"name": "x"}], "routes": routes});
        AddResult::read(&value, "1.0.0").expect("a result")
    }

    fn gateways(result: &AddResult) -> Vec<String> {
        result.default_gateways().map(|gateway| gateway.to_string()).collect()
    }

    #[test]
    fn the_default_route_moves_only_if_a_selection_has_the_key() {
        let (absent, empty) = (selection("1", None), selection("2", Some(&[])));
        assert!(!moves_default_route([&absent]) && moves_default_route([&absent, &empty]));
    }

    #[test]
    fn every_network_loses_its_default_route_and_one_with_gateways_gets_those() {
        let change = |gateways: &[&str]| DefaultRouteChange {
            interface: "net1".into(),
            gateways: gateways.iter().map(|text| text.parse().expect("an address")).collect(),
        };
        for (selection, wanted) in [
            (None, &[][..]),
            (Some(selection("1", None)), &[]),
            (Some(selection("1", Some(&[]))), &[]),
            (Some(selection("1", Some(&["10.1.0.254", "fd00::fe"]))), &["10.1.0.254", "fd00::fe"]),
        ] {
            let mut result = result("10.1.0.1");
            assert_eq!(move_default_route("net1", selection.as_ref(), &mut result), Some(change(wanted)));
            assert_eq!(gateways(&result), wanted);
            assert_eq!(result.routes.len(), 1 + wanted.len(), "other routes stay");
        }
        let mut bare = AddResult::default();
        assert_eq!(move_default_route("net1", Some(&selection("1", Some(&["10.0.0.1"]))), &mut bare), None);
        assert_eq!(bare, AddResult::default());
    }

    #[test]
    fn at_most_one_gateway_per_address_family_is_accepted() {
        let both = [selection("1", Some(&["10.0.0.1"])), selection("2", Some(&[])), selection("3", Some(&["fd::1"]))];
        check_default_routes(&both).expect("accepted");
        for (first, second) in [(&["10.0.0.1"][..], &["10.0.0.2"][..]), (&["fd::1", "10.0.0.1"], &["fd::2"])] {
            let error = check_default_routes(&[selection("1", Some(first)), selection("2", Some(second))]);
            let error = error.expect_err("two of a family");
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with(&format!("2: default-route: {} is the pod's second", second[0])), "{error}");
        }
        assert!(check_default_routes(&[selection("1", Some(&["10.0.0.1", "10.0.0.2"]))]).is_err());
    }
}
