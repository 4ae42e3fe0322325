//! Annotations, with the place where each stands.
//!
//! Lists of owner groups: GIDs, names of the host's groups, `*`.
//!
//! Lists of interface names.
//!
//! Booleans as Go reads them: what Istio's own programs do with labels and variables.
//!
//! Lists of ports: `80`, `8000-8010`, `*`.
//!
//! Lists of transport protocols: `tcp`, `udp`, `*`.
//!
//! Lists of IP ranges: `10.0.0.0/8`, `10.0.0.1`, `fd00::/8`, `*`.

use super::context::{ListAuthor, name_of};
use super::{SettingSource, ids};
use crate::cni::{Error, ItemList, is_interface_of_rules};
use crate::pod::{Facts, Pod};
use crate::policy::{Groups, PortRange, Ports, Protocol, Ranges};
use ipnet::IpNet;
use std::net::IpAddr;

/// An annotation that is there, though its value may be empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AnnotationValue<'a> {
    /// For messages: its key, and whose it is.
    pub place: String,
    /// Its value.
    pub value: &'a str,
    /// Whose it is.
    pub author: ListAuthor,
}

impl<'a> AnnotationValue<'a> {
    /// The pod's.
    pub(super) fn of_pod(pod: &'a Pod, key: &str) -> Option<Self> {
        let value = pod.annotations.get(key)?;
        Some(Self { place: format!("annotation {key:?} of pod {}", name_of(pod)), value, author: ListAuthor::Pod })
    }

    /// The pod's or, where the pod has none, its namespace's.
    pub(super) fn of_pod_or_namespace(facts: &'a Facts, key: &str) -> Option<Self> {
        Self::of_pod(&facts.pod, key).or_else(|| {
            let namespace = facts.namespace.as_ref()?;
            let value = namespace.annotations.get(key)?;
            let place = format!("annotation {key:?} of namespace {}", namespace.name);
            Some(Self { place, value, author: ListAuthor::Administrator })
        })
    }

    /// Whose word it is; `key` is its own.
    pub(super) const fn source(&self, key: &'static str) -> SettingSource {
        match self.author {
            ListAuthor::Pod => SettingSource::Pod(key),
            ListAuthor::Administrator => SettingSource::Namespace(key),
        }
    }

    /// The error for a value that is not understood.
    pub(super) fn reject(&self, accepted: &str) -> Error {
        ItemList { place: self.place.clone(), items: Vec::new() }.reject(self.value, accepted)
    }

    /// Its value as a comma list.
    pub(super) fn list(&self) -> Result<ItemList, Error> {
        ItemList::from_text(&self.place, self.value)
    }
}

const ACCEPTED_GROUPS: &str = "GIDs from 0 to 4294967294, names of groups in the host's /etc/group, or *";

/// The list, in its order, none twice.
pub(super) fn parse_groups(list: &ItemList, group_id: &dyn Fn(&str) -> Option<u32>) -> Result<Groups, Error> {
    if list.items.iter().any(|item| item == "*") {
        return Ok(Groups::All);
    }
    list.distinct(ACCEPTED_GROUPS, |item| ids::number(item).or_else(|| group_id(item))).map(Groups::List)
}

const ACCEPTED_INTERFACES: &str = "names of interfaces: up to 15 of a-z, A-Z, 0-9, _, . and -, the first none of the last two \
                        (no alias such as eth0:7: name its interface, eth0)";

/// The list, in its order, none twice. What a name may be is what Istio allows
/// (`pkg/util/net/ip.go`: `interfaceNameRegex`), so neither iptables' `+` nor an alias's `:`.
pub(super) fn parse_interfaces(list: &ItemList) -> Result<Vec<String>, Error> {
    list.distinct(ACCEPTED_INTERFACES, |item| is_name(item).then(|| item.to_owned()))
}

fn is_name(text: &str) -> bool {
    let plain = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    is_interface_of_rules(text)
        && text.bytes().next().is_some_and(plain)
        && text.bytes().all(|c| plain(c) || matches!(c, b'.' | b'-'))
}

/// `strconv.ParseBool` of Go's standard library; `None` where that is an error.
pub(super) fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

const ACCEPTED_PORTS: &str = "ports from 1 to 65535, ranges such as 8000-8010, or *";

/// The list, in its order, none twice.
pub(super) fn parse_ports(list: &ItemList) -> Result<Ports, Error> {
    if list.items.iter().any(|item| item == "*") {
        return Ok(Ports::All);
    }
    list.distinct(ACCEPTED_PORTS, port_range).map(Ports::List)
}

/// The same list and whichever of `always` it does not hold yet, these last.
pub(super) fn with(ports: Ports, always: &[u16]) -> Ports {
    let Ports::List(mut ranges) = ports else { return Ports::All };
    for &port in always {
        if !ranges.iter().any(|r| (r.first..=r.last).contains(&port)) {
            ranges.push(PortRange::one(port));
        }
    }
    Ports::List(ranges)
}

/// Sorted, without overlaps: the form that [`crate::policy::Exclusion::ports`] has.
pub(super) fn sorted(mut ranges: Vec<PortRange>) -> Vec<PortRange> {
    ranges.sort_unstable();
    let mut merged: Vec<PortRange> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.first <= last.last.saturating_add(1) => last.last = last.last.max(range.last),
            _ => merged.push(range),
        }
    }
    merged
}

fn port_range(text: &str) -> Option<PortRange> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = PortRange { first: port(first)?, last: port(last)? };
    (range.first <= range.last).then_some(range)
}

fn port(text: &str) -> Option<u16> {
    let text = text.trim();
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|port| digits && *port != 0)
}

/// The list, none twice; `None` in it is every protocol.
pub(super) fn parse_protocols(list: &ItemList) -> Result<Vec<Option<Protocol>>, Error> {
    list.distinct("tcp, udp, *", protocol)
}

/// Whether `item` names one of the two.
pub(super) fn is_named(item: &str) -> bool {
    matches!(protocol(item), Some(Some(_)))
}

fn protocol(item: &str) -> Option<Option<Protocol>> {
    match item.to_ascii_lowercase().as_str() {
        "tcp" => Some(Some(Protocol::Tcp)),
        "udp" => Some(Some(Protocol::Udp)),
        "*" => Some(None),
        _ => None,
    }
}

const ACCEPTED_RANGES: &str = "IP addresses, CIDRs such as 10.0.0.0/8 or fd00::/8, or *";

/// The list, in its order, none twice.
pub(super) fn parse_ranges(list: &ItemList) -> Result<Ranges, Error> {
    if list.items.iter().any(|item| item == "*") {
        return Ok(Ranges::All);
    }
    list.distinct(ACCEPTED_RANGES, range).map(Ranges::List)
}

/// One range, host bits cleared; a bare address is a range of one.
pub(super) fn range(text: &str) -> Option<IpNet> {
    let net: Option<IpNet> = text.parse().ok();
    net.map(|net| net.trunc()).or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Groups, Error> {
        parse_groups(&ItemList::from_text("k", text).expect("a list"), &|name| (name == "javausers").then_some(202))
    }

    #[test]
    fn numbers_and_names_of_the_host() {
        assert_eq!(of("101, javausers,202").expect("groups"), Groups::List(vec![101, 202]));
        assert_eq!(of("").expect("groups"), Groups::List(vec![]));
        assert_eq!(of("1,*").expect("groups"), Groups::All);
    }

    #[test]
    fn an_unknown_name_is_refused_by_place() {
        for text in ["nobody-knows", "4294967295", "-1", "1-2"] {
            let error = of(text).expect_err(text);
            assert_eq!(error.msg, format!("k: invalid value {text:?}; expected {ACCEPTED_GROUPS}"));
        }
    }
}

#[cfg(test)]
mod interfaces_tests {
    use super::*;

    #[test]
    fn names_that_istio_takes_are_taken() {
        let list = ItemList::from_text("k", "eth0, net1,k6t-eth0,eth0.100,_x,net1,123456789012345").expect("a list");
        let names = parse_interfaces(&list).expect("names");
        assert_eq!(names, ["eth0", "net1", "k6t-eth0", "eth0.100", "_x", "123456789012345"]);
        assert!(parse_interfaces(&ItemList::from_text("k", "").expect("a list")).expect("names").is_empty());
    }

    #[test]
    fn others_are_refused_by_place() {
        for text in ["1234567890123456", "a/b", "a b", "eth0:1", "eth+", "+", "*", "..", "-i", ".x", "é"] {
            let error = parse_interfaces(&ItemList::from_text("k", text).expect("a list")).expect_err(text);
            assert_eq!(error.msg, format!("k: invalid value {text:?}; expected {ACCEPTED_INTERFACES}"));
        }
    }
}

#[cfg(test)]
mod parse_bool_tests {
    use super::*;

    #[test]
    fn the_words_are_those_of_go_and_no_others() {
        for (text, meaning) in [
            ("1", Some(true)),
            ("t", Some(true)),
            ("T", Some(true)),
            ("true", Some(true)),
            ("TRUE", Some(true)),
            ("True", Some(true)),
            ("0", Some(false)),
            ("f", Some(false)),
            ("F", Some(false)),
            ("false", Some(false)),
            ("FALSE", Some(false)),
            ("False", Some(false)),
            ("", None),
            ("tRUE", None),
            ("yes", None),
            (" true", None),
        ] {
            assert_eq!(parse_bool(text), meaning, "{text:?}");
        }
    }
}

#[cfg(test)]
mod ports_tests {
    use super::*;
    use proptest::prelude::*;

    fn of(text: &str) -> Result<Ports, Error> {
        parse_ports(&ItemList::from_text("k", text).expect("a list"))
    }

    fn range(first: u16, last: u16) -> PortRange {
        PortRange { first, last }
    }

    #[test]
    fn each_form() {
        for (text, ports) in [
            ("", Ports::List(vec![])),
            ("*", Ports::All),
            ("80,*", Ports::All),
            ("80", Ports::List(vec![range(80, 80)])),
            (" 443 , 80,, ", Ports::List(vec![range(443, 443), range(80, 80)])),
            ("80,80", Ports::List(vec![range(80, 80)])),
            ("8000-8010", Ports::List(vec![range(8000, 8010)])),
            ("8000 - 8010", Ports::List(vec![range(8000, 8010)])),
            ("1-65535", Ports::List(vec![range(1, 65535)])),
        ] {
            assert_eq!(of(text).expect(text), ports, "{text:?}");
        }
    }

    #[test]
    fn what_is_no_port_is_refused_by_place() {
        for text in ["0", "65536", "-1", "+80", "http", "10-5", "0-5", "1-", "-", "1-2-3", "8000:8010", "8 0"] {
            let error = of(text).expect_err(text);
            assert_eq!(error.msg, format!("k: invalid value {text:?}; expected {ACCEPTED_PORTS}"));
        }
    }

    #[test]
    fn what_is_always_there_comes_last_and_once() {
        let after = |text| with(of(text).expect(text), &[15020, 15021]);
        assert_eq!(after(""), Ports::List(vec![range(15020, 15020), range(15021, 15021)]));
        assert_eq!(after("15021,80"), of("15021,80,15020").expect("ports"));
        assert_eq!(after("15000-16000"), of("15000-16000").expect("ports"));
        assert_eq!(after("*"), Ports::All);
    }

    #[test]
    fn sorting_joins_what_overlaps_or_touches() {
        let given = vec![range(90, 95), range(1, 5), range(4, 9), range(10, 10), range(65535, 65535), range(2, 3)];
        assert_eq!(sorted(given), [range(1, 10), range(90, 95), range(65535, 65535)]);
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read_again(first: u16, more: u16) {
            let shown = range(first.max(1), first.max(1).saturating_add(more));
            prop_assert_eq!(port_range(&shown.to_string()), Some(shown));
        }

        #[test]
        fn no_text_makes_it_panic(text in "[0-9*, a-z-]{0,40}|.{0,20}") {
            let _ = of(&text);
        }

        #[test]
        fn sorted_ranges_hold_the_same_ports(pairs in prop::collection::vec((1u16.., 0u16..50), 0..8), probe: u16) {
            let ranges: Vec<_> = pairs.iter().map(|&(f, n)| range(f, f.saturating_add(n))).collect();
            let holds = |all: &[PortRange]| all.iter().any(|r| (r.first..=r.last).contains(&probe));
            let merged = sorted(ranges.clone());
            prop_assert_eq!(holds(&ranges), holds(&merged));
            prop_assert!(merged.windows(2).all(|w| w[0].last < w[1].first));
        }
    }
}

#[cfg(test)]
mod protocols_tests {
    use super::*;

    #[test]
    fn each_protocol_and_all_of_them() {
        let of = |text| parse_protocols(&ItemList::from_text("k", text).expect("a list"));
        assert_eq!(of("tcp, UDP").expect("two"), [Some(Protocol::Tcp), Some(Protocol::Udp)]);
        assert_eq!(of("*").expect("all"), [None]);
        assert!(of("").expect("none").is_empty());
        assert_eq!(of("tcp,sctp").expect_err("sctp").msg, r#"k: invalid value "sctp"; expected tcp, udp, *"#);
    }
}

#[cfg(test)]
mod ranges_tests {
    use super::*;
    use proptest::prelude::*;

    fn of(text: &str) -> Result<Ranges, Error> {
        parse_ranges(&ItemList::from_text("k", text).expect("a list"))
    }

    #[test]
    fn each_form() {
        for (text, shown) in [
            ("", vec![]),
            ("10.0.0.0/8", vec!["10.0.0.0/8"]),
            ("10.0.0.1/8", vec!["10.0.0.0/8"]),
            ("10.0.0.1", vec!["10.0.0.1/32"]),
            ("fd00::1", vec!["fd00::1/128"]),
            ("fd00::1/64", vec!["fd00::/64"]),
            ("0.0.0.0/0, ::/0", vec!["0.0.0.0/0", "::/0"]),
            ("10.1.0.0/16,10.0.0.1/32, 10.0.0.1,", vec!["10.1.0.0/16", "10.0.0.1/32"]),
        ] {
            let Ranges::List(ranges) = of(text).expect(text) else { panic!("{text:?} is all") };
            assert_eq!(ranges.iter().map(ToString::to_string).collect::<Vec<_>>(), shown, "{text:?}");
        }
        assert_eq!(of("10.0.0.1,*").expect("all"), Ranges::All);
    }

    #[test]
    fn what_is_no_range_is_refused_by_place() {
        for text in ["10.0.0.0/33", "10.0.0", "::/129", "localhost", "10.0.0.1-10.0.0.9", "fe80::1%eth0", "10.0.0.0/"] {
            let error = of(text).expect_err(text);
            assert_eq!(error.msg, format!("k: invalid value {text:?}; expected {ACCEPTED_RANGES}"));
        }
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read_again(address: IpAddr, bits in 0u8..=32) {
            let shown = IpNet::new(address, bits).expect("at most 32 bits").trunc();
            prop_assert_eq!(range(&shown.to_string()), Some(shown));
        }

        #[test]
        fn no_text_makes_it_panic(text in "[0-9a-f:./*, ]{0,40}|.{0,20}") {
            let _ = of(&text);
        }
    }
}
