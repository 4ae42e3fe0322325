//! How the interfaces of a pod's networks are called.

use super::Selection;
use crate::cni::{Code, Error};

/// The names of all interfaces, in the order of the networks: first the default network's, then
/// those of `configured` networks that every pod gets, then those of `selected` ones. Where
/// nothing is said, the default network's is `ifname` (`CNI_IFNAME`) and any other's `net` and its
/// position, as Multus counts it: every network before it counts, the default one as 0, whether it
/// makes an interface or not (multus-cni, `getIfname`).
///
/// # Errors
/// [`Code::InvalidConfig`]: two would be called the same; both are named.
pub fn interface_names(
    ifname: &str,
    default: Option<&Selection>,
    configured: usize,
    selected: &[Selection],
) -> Result<Vec<String>, Error> {
    let requests = (0..configured).map(|_| None).chain(selected.iter().map(Some));
    let mut named: Vec<(String, String)> = vec![match default {
        Some(default) => (asked(default).unwrap_or(ifname).to_owned(), default.place.clone()),
        None => (ifname.to_owned(), "the default network".to_owned()),
    }];
    for (position, request) in (1..).zip(requests) {
        let name = request.and_then(asked).map_or_else(|| format!("net{position}"), str::to_owned);
        let place = request.map_or_else(|| format!("defaultNetworks[{}]", position - 1), |s| s.place.clone());
        if let Some((_, other)) = named.iter().find(|(earlier, _)| *earlier == name) {
            let why = match request.and_then(asked) {
                Some(_) => "asks for it",
                None => "gets it by its position",
            };
            let msg = format!(
                "{place}: interface {name:?} is taken: this one {why}, and so is called the one of {other}; \
                 give one of them another name, as NAME@INTERFACE or in \"interface\""
            );
            return Err(Error::new(Code::InvalidConfig, msg));
        }
        named.push((name, place));
    }
    Ok(named.into_iter().map(|(name, _)| name).collect())
}

fn asked(selection: &Selection) -> Option<&str> {
    selection.interface.as_deref()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Selections at places `1`, `2`, …, each with the name that it asks for.
    fn selections(interfaces: &[&str]) -> Vec<Selection> {
        let interface = |name: &&str| (!name.is_empty()).then(|| (*name).to_owned());
        let selection =
            |(i, name)| Selection { place: format!("element {i}"), interface: interface(name), ..Selection::default() };
        (1..).zip(interfaces).map(selection).collect()
    }

    #[test]
    fn positions_are_counted_over_all_networks() {
        let names = |configured, selected: &[&str]| interface_names("eth0", None, configured, &selections(selected));
        assert_eq!(names(0, &[]).expect("names"), ["eth0"]);
        assert_eq!(names(0, &["", ""]).expect("names"), ["eth0", "net1", "net2"]);
        assert_eq!(names(2, &["", "data0", ""]).expect("names"), ["eth0", "net1", "net2", "net3", "data0", "net5"]);
    }

    #[test]
    fn the_default_network_may_ask_for_a_name_too() {
        let default = &selections(&["ovn0"])[0];
        assert_eq!(interface_names("eth0", Some(default), 0, &selections(&["eth0"])).expect("names"), ["ovn0", "eth0"]);
        let default = &selections(&[""])[0];
        assert_eq!(interface_names("eth0", Some(default), 0, &[]).expect("names"), ["eth0"]);
    }

    #[test]
    fn a_collision_names_both() {
        for (configured, selected, wanted) in [
            (
                0,
                &["eth0"][..],
                r#"element 1: interface "eth0" is taken: this one asks for it, and so is called the one of the default network; "#,
            ),
            (
                0,
                &["x", "", "x"],
                r#"element 3: interface "x" is taken: this one asks for it, and so is called the one of element 1; "#,
            ),
            (
                0,
                &["net2", ""],
                r#"element 2: interface "net2" is taken: this one gets it by its position, and so is called the one of element 1; "#,
            ),
            (
                1,
                &["net1"],
                r#"element 1: interface "net1" is taken: this one asks for it, and so is called the one of defaultNetworks[0]; "#,
            ),
        ] {
            let error = interface_names("eth0", None, configured, &selections(selected)).expect_err("a collision");
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with(wanted), "{error}");
        }
    }
}
