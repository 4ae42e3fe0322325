//! Lists of transport protocols: `tcp`, `udp`, `*`.

use crate::cni::{Error, List};
use crate::policy::Protocol;

/// The list; `None` in it is every protocol.
pub(super) fn parse(list: &List) -> Result<Vec<Option<Protocol>>, Error> {
    let one = |item: &String| protocol(item).ok_or_else(|| list.reject(item, "tcp, udp, *"));
    list.items.iter().map(one).collect()
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
