//! Parsers of values in blocks and annotations: booleans, UIDs and GIDs, groups, interfaces, ports, protocols and IP
//! ranges. Lists keep their order and lose repeated items.

use crate::cni::{Error, ItemList, is_matchable_interface, parse_ip_net};
use crate::policy::{Groups, IdRange, ListOrAll, PortRange, Ports, Protocol, Ranges};
use ipnet::IpNet;
use std::hash::Hash;
use std::net::IpAddr;

const ACCEPTED_NUMBERS: &str = "numbers from 0 to 4294967294";
const ACCEPTED_GROUPS: &str = "GIDs from 0 to 4294967294, names of groups in the host's /etc/group, or *";
const ACCEPTED_INTERFACES: &str = "interface names: up to 15 of a-z, A-Z, 0-9, _, . and -, not starting with . or - (no alias \
                        such as eth0:7: name its interface, eth0)";
const ACCEPTED_PORTS: &str = "ports from 1 to 65535, ranges such as 8000-8010, or *";
const ACCEPTED_PROTOCOLS: &str = "tcp, udp, *";
const ACCEPTED_RANGES: &str = "IP addresses, CIDRs such as 10.0.0.0/8 or fd00::/8, or *";

/// Parses a boolean as `strconv.ParseBool` of Go does, which Istio uses for labels and variables.
pub(super) fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// Parses a UID or GID. 4294967295 is invalid: for the kernel it is `(uid_t) -1`, "unchanged".
pub(super) fn parse_id(text: &str) -> Option<u32> {
    digits(text)?.parse().ok().filter(|id| *id != u32::MAX)
}

/// Parses a range of UIDs or GIDs: `a`, `a-b` or `start/size`.
pub(super) fn parse_id_range(text: &str) -> Option<IdRange> {
    if let Some((start, size)) = text.split_once('/') {
        let (first, more) = (parse_id(start)?, parse_id(size)?.checked_sub(1)?);
        return first.checked_add(more).filter(|last| *last != u32::MAX).map(|last| IdRange { first, last });
    }
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = IdRange { first: parse_id(first)?, last: parse_id(last)? };
    (range.first <= range.last).then_some(range)
}

/// Parses a list of single UIDs or GIDs: those of the proxy.
pub(super) fn parse_ids(list: &ItemList) -> Result<Vec<u32>, Error> {
    list.distinct(ACCEPTED_NUMBERS, parse_id)
}

/// Parses a list of GIDs and group names of the host, which `group_id` resolves.
pub(super) fn parse_groups(list: &ItemList, group_id: &dyn Fn(&str) -> Option<u32>) -> Result<Groups, Error> {
    list_or_all(list, ACCEPTED_GROUPS, |item| parse_id(item).or_else(|| group_id(item)))
}

/// Parses a list of interface names as Istio restricts them (`pkg/util/net/ip.go`: `interfaceNameRegex`): neither a
/// prefix (`+` of iptables) nor an alias (`:`).
pub(super) fn parse_interfaces(list: &ItemList) -> Result<Vec<String>, Error> {
    list.distinct(ACCEPTED_INTERFACES, |item| is_interface_name(item).then(|| item.to_owned()))
}

/// Parses a list of ports and port ranges.
pub(super) fn parse_ports(list: &ItemList) -> Result<Ports, Error> {
    list_or_all(list, ACCEPTED_PORTS, parse_port_range)
}

/// Parses a list of ports that a pod requests: the bounds count each item.
pub(super) fn parse_requested_ports(list: &ItemList) -> Result<Ports, Error> {
    all_or_every(list, ACCEPTED_PORTS, parse_port_range)
}

/// Parses a list of transport protocols; `None` is every protocol.
pub(super) fn parse_protocols(list: &ItemList) -> Result<Vec<Option<Protocol>>, Error> {
    list.distinct(ACCEPTED_PROTOCOLS, parse_protocol)
}

/// Returns whether `item` is the name of a protocol; `*` is not.
pub(super) fn is_protocol_name(item: &str) -> bool {
    matches!(parse_protocol(item), Some(Some(_)))
}

/// Parses a list of IP addresses and ranges.
pub(super) fn parse_ranges(list: &ItemList) -> Result<Ranges, Error> {
    list_or_all(list, ACCEPTED_RANGES, parse_range)
}

/// Parses a list of IP addresses and ranges that a pod requests: the bounds count each item.
pub(super) fn parse_requested_ranges(list: &ItemList) -> Result<Ranges, Error> {
    all_or_every(list, ACCEPTED_RANGES, parse_range)
}

/// Parses one IP range and clears its host bits. A single address is a range of one.
pub(super) fn parse_range(text: &str) -> Option<IpNet> {
    parse_ip_net(text).map(|net| net.trunc()).or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

/// Appends the ports of `always` that `ports` lacks.
pub(super) fn with_ports(ports: Ports, always: &Ports) -> Ports {
    match (ports, always) {
        (Ports::List(mut ranges), Ports::List(always)) => {
            for added in always {
                if !ranges.iter().any(|range| range.first <= added.first && added.last <= range.last) {
                    ranges.push(*added);
                }
            }
            Ports::List(ranges)
        }
        (Ports::All, _) | (_, Ports::All) => Ports::All,
    }
}

/// Sorts ranges and merges those that overlap or touch: the form of [`crate::policy::Exclusion::ports`].
pub(super) fn merged(mut ranges: Vec<PortRange>) -> Vec<PortRange> {
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

fn list_or_all<T: Clone + Eq + Hash>(
    list: &ItemList,
    accepted: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<ListOrAll<T>, Error> {
    if list.items.iter().any(|item| item == "*") {
        return Ok(ListOrAll::All);
    }
    list.distinct(accepted, parse).map(ListOrAll::List)
}

fn all_or_every<T>(list: &ItemList, accepted: &str, parse: impl Fn(&str) -> Option<T>) -> Result<ListOrAll<T>, Error> {
    if list.items.iter().any(|item| item == "*") {
        return Ok(ListOrAll::All);
    }
    list.all(accepted, parse).map(ListOrAll::List)
}

/// Returns the trimmed text if it consists of digits; `parse` alone would accept a `+`.
fn digits(text: &str) -> Option<&str> {
    let text = text.trim();
    (!text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())).then_some(text)
}

fn is_interface_name(text: &str) -> bool {
    let plain = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    is_matchable_interface(text)
        && text.bytes().next().is_some_and(plain)
        && text.bytes().all(|c| plain(c) || matches!(c, b'.' | b'-'))
}

fn parse_port_range(text: &str) -> Option<PortRange> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = PortRange { first: parse_port(first)?, last: parse_port(last)? };
    (range.first <= range.last).then_some(range)
}

fn parse_port(text: &str) -> Option<u16> {
    digits(text)?.parse().ok().filter(|port| *port != 0)
}

fn parse_protocol(item: &str) -> Option<Option<Protocol>> {
    match item.to_ascii_lowercase().as_str() {
        "tcp" => Some(Some(Protocol::Tcp)),
        "udp" => Some(Some(Protocol::Udp)),
        "*" => Some(None),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(text: &str) -> ItemList {
        ItemList::from_text("k", text).expect("a list")
    }

    fn rejected<T: std::fmt::Debug>(parse: impl Fn(&ItemList) -> Result<T, Error>, accepted: &str, texts: &[&str]) {
        for text in texts {
            assert_eq!(parse(&list(text)).expect_err(text), list(text).reject(text, accepted));
        }
    }

    #[test]
    fn booleans_are_exactly_those_of_go() {
        for text in ["1", "t", "T", "true", "TRUE", "True"] {
            assert_eq!(parse_bool(text), Some(true), "{text:?}");
        }
        for text in ["0", "f", "F", "false", "FALSE", "False"] {
            assert_eq!(parse_bool(text), Some(false), "{text:?}");
        }
        for text in ["", "tRUE", "yes", " true"] {
            assert_eq!(parse_bool(text), None, "{text:?}");
        }
    }

    #[test]
    fn ids_of_the_proxy_are_single_numbers() {
        assert_eq!(parse_ids(&list("1337, 5,1337")).expect("numbers"), [1337, 5]);
        rejected(parse_ids, ACCEPTED_NUMBERS, &["1-2", "*", "4294967295", "container:a"]);
    }

    #[test]
    fn groups_are_numbers_and_names_of_the_host() {
        let parse = |list: &ItemList| parse_groups(list, &|name| (name == "javausers").then_some(202));
        assert_eq!(parse(&list("101, javausers,202")).expect("groups"), Groups::List(vec![101, 202]));
        assert_eq!(parse(&list("")).expect("groups"), Groups::List(vec![]));
        assert_eq!(parse(&list("1,*")).expect("groups"), Groups::All);
        rejected(parse, ACCEPTED_GROUPS, &["unknown-group", "4294967295", "-1", "1-2"]);
    }

    #[test]
    fn interface_names_are_those_that_istio_accepts() {
        let names = parse_interfaces(&list("eth0, net1,k6t-eth0,eth0.100,_x,net1,123456789012345")).expect("names");
        assert_eq!(names, ["eth0", "net1", "k6t-eth0", "eth0.100", "_x", "123456789012345"]);
        assert!(parse_interfaces(&list("")).expect("names").is_empty());
        let wrong = ["1234567890123456", "a/b", "a b", "eth0:1", "eth+", "+", "*", "..", "-i", ".x", "é"];
        rejected(parse_interfaces, ACCEPTED_INTERFACES, &wrong);
    }

    fn ports(first: u16, last: u16) -> PortRange {
        PortRange { first, last }
    }

    #[test]
    fn ports_are_numbers_ranges_or_a_wildcard() {
        for (text, expected) in [
            ("", Ports::List(vec![])),
            ("*", Ports::All),
            ("80,*", Ports::All),
            ("80", Ports::List(vec![ports(80, 80)])),
            (" 443 , 80,, ", Ports::List(vec![ports(443, 443), ports(80, 80)])),
            ("80,80", Ports::List(vec![ports(80, 80)])),
            ("8000-8010", Ports::List(vec![ports(8000, 8010)])),
            ("8000 - 8010", Ports::List(vec![ports(8000, 8010)])),
            ("1-65535", Ports::List(vec![ports(1, 65535)])),
        ] {
            assert_eq!(parse_ports(&list(text)).expect(text), expected, "{text:?}");
        }
        let wrong = ["0", "65536", "-1", "+80", "http", "10-5", "0-5", "1-", "-", "1-2-3", "8000:8010", "8 0"];
        rejected(parse_ports, ACCEPTED_PORTS, &wrong);
    }

    #[test]
    fn appended_ports_come_last_and_are_not_repeated() {
        let parse = |text| parse_ports(&list(text)).expect(text);
        let with = |text| with_ports(parse(text), &parse("15020,15021"));
        assert_eq!(with(""), parse("15020,15021"));
        assert_eq!(with("15021,80"), parse("15021,80,15020"));
        assert_eq!(with("15000-16000"), parse("15000-16000"));
        assert_eq!(with("*"), Ports::All);
    }

    #[test]
    fn overlapping_and_touching_ranges_are_merged() {
        let given = vec![ports(90, 95), ports(1, 5), ports(4, 9), ports(10, 10), ports(65535, 65535), ports(2, 3)];
        assert_eq!(merged(given), [ports(1, 10), ports(90, 95), ports(65535, 65535)]);
    }

    #[test]
    fn protocols_are_tcp_udp_or_a_wildcard() {
        assert_eq!(parse_protocols(&list("tcp, UDP")).expect("two"), [Some(Protocol::Tcp), Some(Protocol::Udp)]);
        assert_eq!(parse_protocols(&list("*")).expect("all"), [None]);
        assert!(parse_protocols(&list("")).expect("an empty list").is_empty());
        rejected(parse_protocols, ACCEPTED_PROTOCOLS, &["sctp"]);
    }

    #[test]
    fn ranges_are_addresses_and_cidrs_without_host_bits() {
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
            let Ranges::List(ranges) = parse_ranges(&list(text)).expect(text) else { panic!("{text:?} is all") };
            assert_eq!(ranges.iter().map(ToString::to_string).collect::<Vec<_>>(), shown, "{text:?}");
        }
        assert_eq!(parse_ranges(&list("10.0.0.1,*")).expect("all"), Ranges::All);
        let wrong = ["10.0.0.0/33", "10.0.0", "::/129", "localhost", "10.0.0.1-10.0.0.9", "fe80::1%eth0", "10.0.0.0/"];
        rejected(parse_ranges, ACCEPTED_RANGES, &wrong);
    }

    proptest! {
        #[test]
        fn displayed_values_parse_to_the_same_values(first: u16, more: u16, address: IpAddr, bits in 0u8..=32) {
            let range = ports(first.max(1), first.max(1).saturating_add(more));
            prop_assert_eq!(parse_port_range(&range.to_string()), Some(range));
            let net = IpNet::new(address, bits).expect("at most 32 bits").trunc();
            prop_assert_eq!(parse_range(&net.to_string()), Some(net));
        }

        #[test]
        fn no_text_causes_a_panic(text in "[0-9a-f:./*, -]{0,40}|[0-9*, a-z-]{0,40}|.{0,20}") {
            if let Ok(list) = ItemList::from_text("k", &text) {
                let _ = (parse_ports(&list), parse_ranges(&list), parse_ids(&list), parse_protocols(&list));
            }
        }

        #[test]
        fn merged_ranges_contain_the_same_ports(pairs in prop::collection::vec((1u16.., 0u16..50), 0..8), probe: u16) {
            let ranges: Vec<_> = pairs.iter().map(|&(first, n)| ports(first, first.saturating_add(n))).collect();
            let contain = |all: &[PortRange]| all.iter().any(|r| (r.first..=r.last).contains(&probe));
            let merged = merged(ranges.clone());
            prop_assert_eq!(contain(&ranges), contain(&merged));
            prop_assert!(merged.windows(2).all(|w| w[0].last < w[1].first));
        }

        #[test]
        fn a_start_and_size_cover_that_many_ids(first in 0..u32::MAX, size in 1u32..) {
            let parsed = parse_id_range(&format!("{first}/{size}"));
            match u32::try_from(u64::from(first) + u64::from(size) - 1) {
                Ok(last) if last != u32::MAX => prop_assert_eq!(parsed, Some(IdRange { first, last })),
                _ => prop_assert_eq!(parsed, None),
            }
        }
    }
}
