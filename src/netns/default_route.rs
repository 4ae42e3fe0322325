//! The default routes of the calling thread's network namespace: finds their interfaces, and moves them to other gateways.

use super::addresses::links;
use super::rtnetlink::{
    AF_INET, AF_INET6, HEADER, RTM_DELROUTE, RTM_GETROUTE, RTM_NEWROUTE, accept_existing, accept_missing, failed, open,
};
use crate::cni::Error;
use crate::netlink::attributes::{Attributes, find, parse};
use crate::netlink::{NLM_F_CREATE, NLM_F_EXCL};
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use std::collections::BTreeSet;
use std::net::IpAddr;

/// linux/rtnetlink.h.
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PRIORITY: u16 = 6;
const RTA_MULTIPATH: u16 = 9;
const RTA_TABLE: u16 = 15;
const RTA_VIA: u16 = 18;
const RTA_ENCAP_TYPE: u16 = 21;
const RTA_ENCAP: u16 = 22;
const RTA_NH_ID: u16 = 30;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RTN_UNICAST: u8 = 1;
const RTNH_F_ONLINK: u8 = 4;

/// Replaces the default routes of both families over `interface` by routes to `gateways`. A route over several
/// interfaces keeps its other paths. Other routing tables are not changed. Without gateways, an interface that does not
/// exist has no route to remove: that of a DPDK device is not in the kernel.
///
/// # Errors
/// The interface does not exist and needs a gateway, or the kernel refuses a change.
pub fn replace_default_routes(interface: &str, gateways: &[IpAddr]) -> Result<(), Error> {
    let replace = || {
        let index = match if_nametoindex(interface) {
            Err(Errno::ENODEV) if gateways.is_empty() => return Ok(()),
            index => index?,
        };
        let mut socket = open()?;
        for family in [AF_INET, AF_INET6] {
            for route in socket.list(RTM_GETROUTE, &header(family))? {
                let Some(remaining) = without_interface(&route, index) else { continue };
                accept_missing(socket.request(RTM_DELROUTE, 0, &by_nexthop(route), &[]))?;
                if let RemainingPaths::Paths(route) = remaining {
                    accept_existing(socket.request(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &route, &[]))?;
                }
            }
        }
        for gateway in gateways {
            let (family, address) = match gateway {
                IpAddr::V4(gateway) => (AF_INET, gateway.octets().to_vec()),
                IpAddr::V6(gateway) => (AF_INET6, gateway.octets().to_vec()),
            };
            let attributes = Attributes::of(|list| list.bytes(RTA_GATEWAY, &address).ne32(RTA_OIF, index));
            socket.request(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &header(family), attributes.as_bytes())?;
        }
        Ok(())
    };
    replace().map_err(|e: Errno| failed(&format!("can't replace the default route of {interface}"), &e))
}

/// Returns the interfaces of the default routes of both families.
///
/// # Errors
/// The kernel does not list the routes or the interfaces.
pub fn default_route_interfaces() -> Result<BTreeSet<String>, Error> {
    let list = || {
        let (mut socket, mut found) = (open()?, BTreeSet::new());
        for family in [AF_INET, AF_INET6] {
            let routes = socket.list(RTM_GETROUTE, &header(family))?;
            found.extend(routes.iter().flat_map(|route| interfaces(route)));
        }
        Ok(found)
    };
    let found: BTreeSet<u32> = list().map_err(|e: Errno| failed("can't list the pod's default routes", &e))?;
    Ok(links()?.into_iter().filter(|(index, _)| found.contains(index)).map(|(_, name)| name).collect())
}

/// Returns the interfaces of a default route of the main table; none for any other route.
fn interfaces(route: &[u8]) -> Vec<u32> {
    let Some((_, attributes)) = default_route(route) else { return Vec::new() };
    match find(attributes, RTA_MULTIPATH) {
        Some(paths) => self::paths(paths).map(|(interface, _)| interface).collect(),
        None => number(attributes, RTA_OIF).into_iter().collect(),
    }
}

/// Returns the family and the attributes of a default route of the main table; `None` for any other route.
fn default_route(route: &[u8]) -> Option<(u8, &[u8])> {
    let (header, attributes) = route.split_first_chunk::<HEADER>()?;
    let [family, destination_length, _, _, table, _, _, kind, ..] = *header;
    let is_default = destination_length == 0
        && kind == RTN_UNICAST
        && number(attributes, RTA_TABLE).unwrap_or_else(|| table.into()) == u32::from(RT_TABLE_MAIN);
    is_default.then_some((family, attributes))
}

fn number(attributes: &[u8], kind: u16) -> Option<u32> {
    find(attributes, kind).and_then(|value| value.try_into().ok()).map(u32::from_ne_bytes)
}

/// Returns the `struct rtmsg` of a default route in the main table.
const fn header(family: u8) -> [u8; HEADER] {
    [family, 0, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, 0, RTN_UNICAST, 0, 0, 0, 0]
}

/// Converts a listed route to the form that a request accepts. The kernel lists a route over a nexthop object with the
/// object and its paths, but accepts only one of the two (`rtm_to_fib_config`, net/ipv4/fib_frontend.c).
pub(crate) fn by_nexthop(route: Vec<u8>) -> Vec<u8> {
    let Some((header, attributes)) = route.split_first_chunk::<HEADER>() else { return route };
    if find(attributes, RTA_NH_ID).is_none() {
        return route;
    }
    let paths = [RTA_OIF, RTA_GATEWAY, RTA_MULTIPATH, RTA_VIA, RTA_ENCAP_TYPE, RTA_ENCAP];
    let others = parse(attributes).filter(|(kind, _)| !paths.contains(kind));
    let others = Attributes::of(|list| others.fold(list, |list, (kind, value)| list.bytes(kind, value)));
    [header, others.as_bytes()].concat()
}

/// The rest of a default route without its paths over one interface.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RemainingPaths {
    Nothing,
    /// A route over the other paths.
    Paths(Vec<u8>),
}

/// Removes the paths over `interface` from a default route of the main table. Returns `None` for any other route, and
/// for one without such a path.
pub(crate) fn without_interface(route: &[u8], interface: u32) -> Option<RemainingPaths> {
    let (family, attributes) = default_route(route)?;
    let Some(paths) = find(attributes, RTA_MULTIPATH) else {
        return (number(attributes, RTA_OIF) == Some(interface)).then_some(RemainingPaths::Nothing);
    };
    let (mut rest, mut is_over) = (Vec::new(), false);
    for (path_interface, path) in self::paths(paths) {
        if path_interface == interface {
            is_over = true;
        } else {
            rest.extend(path);
        }
    }
    match (is_over, rest.is_empty()) {
        (false, _) => None,
        (true, true) => Some(RemainingPaths::Nothing),
        (true, false) => {
            let priority = find(attributes, RTA_PRIORITY).unwrap_or_default();
            let attributes = Attributes::of(|list| {
                let list = if priority.is_empty() { list } else { list.bytes(RTA_PRIORITY, priority) };
                list.bytes(RTA_MULTIPATH, &rest)
            });
            Some(RemainingPaths::Paths([&header(family), attributes.as_bytes()].concat()))
        }
    }
}

/// Returns the paths of a route (`struct rtnexthop` with its attributes), each with its interface. Clears flags
/// that the kernel does not accept in a new route, such as `RTNH_F_DEAD`.
fn paths(mut bytes: &[u8]) -> impl Iterator<Item = (u32, Vec<u8>)> {
    std::iter::from_fn(move || {
        let ([low, high, flags, hops, a, b, c, d], _) = bytes.split_first_chunk::<8>()?;
        let length = usize::from(u16::from_ne_bytes([*low, *high]));
        let attributes = bytes.get(8..length)?;
        let mut path = vec![*low, *high, flags & RTNH_F_ONLINK, *hops, *a, *b, *c, *d];
        path.extend(attributes);
        path.resize(path.len().next_multiple_of(4), 0);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u32::from_ne_bytes([*a, *b, *c, *d]), path))
    })
}
