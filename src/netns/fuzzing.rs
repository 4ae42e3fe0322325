//! A target for routes and sockets as the kernel lists them.

use super::connections::connection;
use super::routes::{RemainingPaths, deletion, without_interface};
use super::rtnetlink::bytes;
use netlink_packet_core::Parseable;
use netlink_packet_route::route::RouteMessage;

/// The number of an interface, then a route or a socket.
pub(crate) fn dump(input: &[u8]) {
    let Some((interface, body)) = input.split_first() else { return };
    let _ = connection(body);
    let Ok(route) = RouteMessage::parse(body) else { return };
    let request = deletion(route.clone());
    assert_eq!(deletion(request.clone()), request);
    let _ = bytes(&request);
    // A route over other interfaces, which replaces this one, needs no change.
    if let Some(RemainingPaths::Paths(rest)) = without_interface(&route, (*interface).into()) {
        assert_eq!(without_interface(&rest, (*interface).into()), None, "{rest:?}");
        assert!(!rest.attributes.is_empty());
        let _ = bytes(&rest);
    }
}
