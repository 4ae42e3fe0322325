//! A target for routes and sockets as the kernel lists them.

use super::connections::connection;
use super::default_route::{RemainingPaths, by_nexthop, without_interface};
use crate::netlink::attributes::parse;

/// The length of `struct rtmsg`.
const HEADER: usize = 12;

/// The number of an interface, then a route or a socket.
pub(crate) fn dump(input: &[u8]) {
    let Some((interface, body)) = input.split_first() else { return };
    let _ = connection(body);
    let request = by_nexthop(body.to_vec());
    assert!(
        request.len() <= body.len().next_multiple_of(4) && body.get(..HEADER).is_none_or(|h| request.starts_with(h))
    );
    if body.len() >= HEADER {
        assert_eq!(by_nexthop(request.clone()), request);
    }
    // A route over other interfaces, which replaces this one, needs no change.
    if let Some(RemainingPaths::Paths(route)) = without_interface(body, (*interface).into()) {
        assert_eq!(without_interface(&route, (*interface).into()), None, "{route:?}");
        assert!(parse(&route[HEADER..]).count() > 0);
    }
}
