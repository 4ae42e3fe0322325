//! Lists of transport protocols: `tcp`, `udp`, `*`.

use crate::cni::{Error, ItemList};
use crate::policy::Protocol;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_protocol_and_all_of_them() {
        let of = |text| parse_protocols(&ItemList::from_text("k", text).expect("a list"));
        assert_eq!(of("tcp, UDP").expect("two"), [Some(Protocol::Tcp), Some(Protocol::Udp)]);
        assert_eq!(of("*").expect("all"), [None]);
        assert!(of("").expect("none").is_empty());
        assert_eq!(of("tcp,sctp").expect_err("sctp").msg, r#"k: "sctp" is not accepted; accepted: tcp, udp, *"#);
    }
}
