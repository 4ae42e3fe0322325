//! Where a pod's default route leads to once a selection asks for it (`default-route`).

use super::Selection;
use crate::cni::result::AddResult;
use crate::cni::{Code, Error};
use std::net::IpAddr;

/// What is to be done in the pod's network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefaultRouteChange {
    /// The interface whose default routes of both families are deleted.
    pub interface: String,
    /// The gateways to which default routes over this interface are then added.
    pub gateways: Vec<IpAddr>,
}

/// Refuses more than one gateway of a family for a pod.
///
/// # Errors
/// [`Code::InvalidConfig`] with the second one's place.
pub fn check_default_routes<'a>(selections: impl IntoIterator<Item = &'a Selection>) -> Result<(), Error> {
    let mut seen: Vec<(bool, &str)> = Vec::new();
    for selection in selections {
        for gateway in selection.default_route.iter().flatten() {
            let family = if gateway.is_ipv4() { "IPv4" } else { "IPv6" };
            if let Some((_, first)) = seen.iter().find(|(ipv4, _)| *ipv4 == gateway.is_ipv4()) {
                let msg = format!(
                    "{}: default-route: {gateway} is the pod's second {family} gateway, the first is asked for by {first}; \
                     accepted: one of each family for all networks together",
                    selection.place
                );
                return Err(Error::new(Code::InvalidConfig, msg));
            }
            seen.push((gateway.is_ipv4(), &selection.place));
        }
    }
    Ok(())
}

/// Moves the default route in the results of a pod's networks and says what has to be done to the
/// kernel's: nothing, where no selection has a `default-route`; else a network whose selection names
/// gateways gets these in place of its own, one whose list is empty keeps its own, and all others
/// lose theirs. Results without an interface or an address are left out of it.
///
/// For each network, in the order in which they were added: the name of its interface, its
/// selection where there is one, its result.
pub fn move_default_route(networks: &mut [(&str, Option<&Selection>, &mut AddResult)]) -> Vec<DefaultRouteChange> {
    let asked = |selection: &Option<&Selection>| selection.and_then(|selection| selection.default_route.clone());
    if !networks.iter().any(|(_, selection, _)| asked(selection).is_some()) {
        return Vec::new();
    }
    let mut changes = Vec::new();
    for (interface, selection, result) in networks.iter_mut().filter(|(_, _, result)| result.has_interface()) {
        let gateways = match asked(selection) {
            Some(gateways) if gateways.is_empty() => continue,
            asked => asked.unwrap_or_default(),
        };
        result.remove_default_routes();
        gateways.iter().for_each(|gateway| result.add_default_route(*gateway));
        changes.push(DefaultRouteChange { interface: (*interface).to_owned(), gateways });
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
    fn nothing_moves_unless_it_is_asked_for() {
        let (mut default, mut other) = (result("10.0.0.1"), result("10.1.0.1"));
        let one = selection("1", None);
        let changes = move_default_route(&mut [("eth0", None, &mut default), ("net1", Some(&one), &mut other)]);
        assert_eq!((changes, default, other), (vec![], result("10.0.0.1"), result("10.1.0.1")));
    }

    #[test]
    fn it_goes_to_who_asks_and_away_from_the_others() {
        let (mut default, mut second, mut third) = (result("10.0.0.1"), result("10.1.0.1"), result("10.2.0.1"));
        let mut bare = AddResult::default();
        let (one, two) = (selection("1", Some(&["10.1.0.254"])), selection("2", None));
        let changes = move_default_route(&mut [
            ("eth0", None, &mut default),
            ("net1", Some(&one), &mut second),
            ("net2", Some(&two), &mut third),
            ("net3", Some(&two), &mut bare),
        ]);
        let change = |interface: &str, gateways: &[&str]| DefaultRouteChange {
            interface: interface.into(),
            gateways: gateways.iter().map(|text| text.parse().expect("an address")).collect(),
        };
        assert_eq!(changes, [change("eth0", &[]), change("net1", &["10.1.0.254"]), change("net2", &[])]);
        assert_eq!((gateways(&default), gateways(&second)), (vec![], vec!["10.1.0.254".to_owned()]));
        assert_eq!((gateways(&third), default.routes.len()), (vec![], 1), "other routes stay");
    }

    #[test]
    fn an_empty_list_keeps_what_the_plugin_made() {
        let (mut default, mut other) = (result("10.0.0.1"), result("10.1.0.1"));
        let one = selection("1", Some(&[]));
        let changes = move_default_route(&mut [("eth0", None, &mut default), ("net1", Some(&one), &mut other)]);
        assert_eq!(changes, [DefaultRouteChange { interface: "eth0".into(), gateways: vec![] }]);
        assert_eq!((gateways(&default), other), (vec![], result("10.1.0.1")));
    }

    #[test]
    fn one_gateway_of_each_family_for_all() {
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
