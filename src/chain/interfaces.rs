//! Lists of interface names.

use crate::cni::{Error, List, is_interface_of_rules};

const ACCEPTED: &str = "names of interfaces: up to 15 of a-z, A-Z, 0-9, _, . and -, the first none of the last two \
                        (no alias such as eth0:7: name its interface, eth0)";

/// The list, in its order, none twice. What a name may be is what Istio allows
/// (`pkg/util/net/ip.go`: `interfaceNameRegex`), so neither iptables' `+` nor an alias's `:`.
pub(super) fn parse(list: &List) -> Result<Vec<String>, Error> {
    list.distinct(ACCEPTED, |item| is_name(item).then(|| item.to_owned()))
}

fn is_name(text: &str) -> bool {
    let plain = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    is_interface_of_rules(text)
        && text.bytes().next().is_some_and(plain)
        && text.bytes().all(|c| plain(c) || matches!(c, b'.' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_istio_takes_are_taken() {
        let list = List::from_text("k", "eth0, net1,k6t-eth0,eth0.100,_x,net1,123456789012345").expect("a list");
        let names = parse(&list).expect("names");
        assert_eq!(names, ["eth0", "net1", "k6t-eth0", "eth0.100", "_x", "123456789012345"]);
        assert!(parse(&List::from_text("k", "").expect("a list")).expect("names").is_empty());
    }

    #[test]
    fn others_are_refused_by_place() {
        for text in ["1234567890123456", "a/b", "a b", "eth0:1", "eth+", "+", "*", "..", "-i", ".x", "é"] {
            let error = parse(&List::from_text("k", text).expect("a list")).expect_err(text);
            assert_eq!(error.msg, format!("k: {text:?} is not accepted; accepted: {ACCEPTED}"));
        }
    }
}
