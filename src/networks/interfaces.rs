//! How the interfaces of a pod's networks are called.

use super::Selection;
use crate::cni::{Code, Error};
use std::collections::HashMap;

/// The names of all interfaces, in the order of the networks, the default one first: each with where
/// it is named, for messages, and its selection where the pod selected it. Where nothing is asked
/// for, the default network's is `ifname` (`CNI_IFNAME`) and any other's `net` and its position, as
/// Multus counts it: every network before it counts, the default one as 0, whether it makes an
/// interface or not (multus-cni, `getIfname`).
///
/// # Errors
/// [`Code::InvalidConfig`]: two would be called the same; both are named.
pub fn interface_names(ifname: &str, networks: &[(String, Option<&Selection>)]) -> Result<Vec<String>, Error> {
    let (mut names, mut places): (Vec<String>, HashMap<String, &str>) = (Vec::new(), HashMap::new());
    for (position, (place, selection)) in networks.iter().enumerate() {
        let asked = selection.and_then(|selection| selection.interface.clone());
        let (why, name) = match (asked, position) {
            (Some(name), _) => ("this one asks for it", name),
            (None, 0) => ("the runtime gives it", ifname.to_owned()),
            (None, position) => ("this one gets it by its position", format!("net{position}")),
        };
        if let Some(other) = places.insert(name.clone(), place) {
            let msg = format!(
                "{place}: interface {name:?} is taken: {why}, and so is called the one of {other}; \
                 give one of them another name, as NAME@INTERFACE or in \"interface\""
            );
            return Err(Error::new(Code::InvalidConfig, msg));
        }
        names.push(name);
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Networks at places `0`, `1`, …, each with the name that it asks for, or none.
    fn names(asked: &[&str]) -> Result<Vec<String>, Error> {
        let interface = |name: &&str| (!name.is_empty()).then(|| (*name).to_owned());
        let selections: Vec<_> =
            asked.iter().map(|name| Selection { interface: interface(name), ..Selection::default() }).collect();
        let network = |(i, selection)| (format!("place {i}"), Some(selection));
        interface_names("eth0", &selections.iter().enumerate().map(network).collect::<Vec<_>>())
    }

    #[test]
    fn positions_are_counted_over_all_networks() {
        assert_eq!(names(&[""]).expect("names"), ["eth0"]);
        assert_eq!(names(&["", "", ""]).expect("names"), ["eth0", "net1", "net2"]);
        assert_eq!(names(&["", "", "data0", ""]).expect("names"), ["eth0", "net1", "data0", "net3"]);
        let unasked = [("clusterNetwork".to_owned(), None), ("defaultNetworks[0]".to_owned(), None)];
        assert_eq!(interface_names("eth0", &unasked).expect("names"), ["eth0", "net1"]);
    }

    #[test]
    fn the_default_network_may_ask_for_a_name_too() {
        assert_eq!(names(&["ovn0", "eth0"]).expect("names"), ["ovn0", "eth0"]);
    }

    #[test]
    fn a_collision_names_both() {
        let rows = [
            (&["", "eth0"][..], 1, "eth0", "this one asks for it", 0),
            (&["", "x", "", "x"], 3, "x", "this one asks for it", 1),
            (&["", "net2", ""], 2, "net2", "this one gets it by its position", 1),
            (&["", "", "net1"], 2, "net1", "this one asks for it", 1),
        ];
        for (asked, place, name, why, other) in rows {
            let error = names(asked).expect_err("a collision");
            assert_eq!(error.code, Code::InvalidConfig);
            let wanted = format!(
                "place {place}: interface {name:?} is taken: {why}, and so is called the one of place {other}; "
            );
            assert!(error.msg.starts_with(&wanted), "{error}");
        }
    }
}
