//! Lists of IP ranges: `10.0.0.0/8`, `10.0.0.1`, `fd00::/8`, `*`.

use crate::cni::{Error, ItemList};
use crate::policy::Ranges;
use ipnet::IpNet;
use std::net::IpAddr;

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
            assert_eq!(error.msg, format!("k: {text:?} is not accepted; accepted: {ACCEPTED_RANGES}"));
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
