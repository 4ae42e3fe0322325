//! Lists of ports: `80`, `8000-8010`, `*`.

use crate::cni::{Error, ItemList};
use crate::policy::{PortRange, Ports};

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

#[cfg(test)]
mod tests {
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
            assert_eq!(error.msg, format!("k: {text:?} is not accepted; accepted: {ACCEPTED_PORTS}"));
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
