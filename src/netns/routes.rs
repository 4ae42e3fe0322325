//! The routes of the calling thread's network namespace: the interfaces of those to public addresses, the replacement of
//! default routes by routes to other gateways, and the interface through which packets to an address leave.

use super::rtnetlink::links;
use super::rtnetlink::{
    EXISTS, FAMILIES, MISSING, RTM_DELROUTE, RTM_GETROUTE, RTM_GETRULE, RTM_NEWROUTE, accept, bytes, failed, list,
    open, request, rule_header,
};
use crate::cni::Error;
use crate::netlink::{Messages, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NLMSG_ERROR};
use crate::policy::Protocol;
use ipnet::IpNet;
use netlink_packet_core::Parseable;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteNextHopFlags, RouteProtocol, RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage};
use nix::errno::Errno;
use nix::net::if_::{if_indextoname, if_nametoindex};
use std::collections::BTreeSet;
use std::net::IpAddr;

/// `IPPROTO_TCP`, `IPPROTO_UDP`.
const IPPROTO_TCP: u8 = 6;
const IPPROTO_UDP: u8 = 17;

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
        for family in FAMILIES {
            for route in list(&mut socket, RTM_GETROUTE, &header(family))? {
                if !is_default_over(&route, index) {
                    continue;
                }
                let others = other_paths(&route, index);
                accept(request(&mut socket, RTM_DELROUTE, 0, &deletion(route)), MISSING)?;
                if let Some(others) = others {
                    accept(request(&mut socket, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &others), EXISTS)?;
                }
            }
        }
        for gateway in gateways {
            let (family, address) = route_address(*gateway);
            let route = message(header(family), vec![RouteAttribute::Gateway(address), RouteAttribute::Oif(index)]);
            request(&mut socket, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &route)?;
        }
        Ok(())
    };
    replace().map_err(|errno: Errno| failed(&format!("can't replace the default route of {interface}"), errno, ""))
}

/// The private and the special addresses (RFC 6890): no route to them leads to public ones.
const NOT_PUBLIC: &str = "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.2.0/24 \
    192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3 fc00::/7 fe80::/10 ff00::/8 2001:db8::/32";
/// A subnet with a shorter prefix is no network of its own, but a part of the public addresses.
const SHORTEST_SUBNET: [u8; 2] = [8, 16];

/// Returns the interfaces through which traffic to public addresses leaves: those of all routes to such addresses, in the
/// routing tables that the policy rules select for a process of the pod, whatever its UID and its protocol. The subnet of
/// an interface is no such route: its hosts belong to this network.
///
/// # Errors
/// The kernel does not list the policy rules, the routes or the interfaces.
pub fn public_route_interfaces() -> Result<BTreeSet<String>, Error> {
    let find = || {
        let (mut socket, mut found) = (open()?, BTreeSet::new());
        for family in FAMILIES {
            let rules: Vec<RuleMessage> = list(&mut socket, RTM_GETRULE, &rule_header(family))?;
            let tables: BTreeSet<u32> = rules.iter().filter_map(table_of_processes).collect();
            let routes: Vec<RouteMessage> = list(&mut socket, RTM_GETROUTE, &header(family))?;
            let is_public = |route: &&RouteMessage| tables.contains(&table(route)) && is_public(route);
            found.extend(routes.iter().filter(is_public).flat_map(interfaces));
        }
        Ok(found)
    };
    let found: BTreeSet<u32> = find().map_err(|errno: Errno| failed("can't list the pod's routes", errno, ""))?;
    let all = links()?.into_iter().filter(|(index, name)| found.contains(index) && name != "lo");
    Ok(all.map(|(_, name)| name).collect())
}

/// Returns the routing table that a policy rule selects for packets of the pod's processes. A rule for a source address, a
/// mark or an interface is for sockets that choose it themselves.
fn table_of_processes(rule: &RuleMessage) -> Option<u32> {
    let mut table = u32::from(rule.header.table);
    let mut is_chosen = rule.header.src_len != 0;
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::Table(found) => table = *found,
            RuleAttribute::FwMark(mark) => is_chosen |= *mark != 0,
            RuleAttribute::Iifname(_) | RuleAttribute::Oifname(_) | RuleAttribute::L3MDev(true) => is_chosen = true,
            _ => {}
        }
    }
    let is_selected = !is_chosen || rule.header.flags.contains(RuleFlags::Invert);
    (is_selected && rule.header.action == RuleAction::ToTable).then_some(table)
}

/// Returns whether a route leads to public addresses that are not a subnet of its interface.
fn is_public(route: &RouteMessage) -> bool {
    let RouteHeader { address_family, destination_prefix_length: length, protocol, kind, .. } = route.header;
    let destination = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Destination(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    });
    let is_special = destination.is_some_and(|to| {
        NOT_PUBLIC
            .split(' ')
            .filter_map(|net| net.parse::<IpNet>().ok())
            .any(|net| length >= net.prefix_len() && net.contains(&to))
    });
    let shortest = SHORTEST_SUBNET[usize::from(address_family == AddressFamily::Inet6)];
    let is_subnet = protocol == RouteProtocol::Kernel && length >= shortest;
    kind == RouteType::Unicast && !is_special && !is_subnet
}

/// Returns the interface through which packets leave: those of a process with the UID `sender`, or of any process, to a
/// destination. Policy rules can depend on all of them. `None` without a route.
///
/// # Errors
/// The kernel refuses the request.
pub fn outgoing_interface(
    address: IpAddr,
    sender: Option<u32>,
    port: Option<(Protocol, u16)>,
) -> Result<Option<String>, Error> {
    match lookup(address, sender, port) {
        Ok(name) => Ok(Some(name)),
        Err(
            Errno::ENETUNREACH | Errno::EHOSTUNREACH | Errno::ENONET | Errno::EACCES | Errno::EINVAL | Errno::ENXIO,
        ) => Ok(None),
        Err(errno) => Err(failed(&format!("can't look up the route to {address}"), errno, "")),
    }
}

fn lookup(address: IpAddr, sender: Option<u32>, port: Option<(Protocol, u16)>) -> Result<String, Errno> {
    let (address_family, destination) = route_address(address);
    let destination_prefix_length = if address.is_ipv4() { 32 } else { 128 };
    let header = RouteHeader { address_family, destination_prefix_length, ..RouteHeader::default() };
    let mut attributes = vec![RouteAttribute::Destination(destination)];
    attributes.extend(sender.map(RouteAttribute::Uid));
    if let Some((protocol, port)) = port {
        let protocol = if protocol == Protocol::Tcp { IPPROTO_TCP } else { IPPROTO_UDP };
        attributes.extend([RouteAttribute::IpProto(protocol), RouteAttribute::Dport(port)]);
    }
    let question = bytes(&message(header, attributes));
    let mut socket = open()?;
    let sequence = socket.next_sequence();
    socket.send(Messages::one(RTM_GETROUTE, NLM_F_REQUEST, sequence, &question, &[]).as_bytes())?;
    loop {
        for reply in socket.receive()?.filter(|reply| reply.sequence == sequence) {
            match reply.kind {
                NLMSG_ERROR => return Err(Errno::from_raw(reply.errno())),
                RTM_NEWROUTE => {
                    let route = RouteMessage::parse(reply.body).ok();
                    let index = route.and_then(|route| out_interface(&route)).ok_or(Errno::ENONET)?;
                    return Ok(if_indextoname(index)?.to_string_lossy().into_owned());
                }
                _ => {}
            }
        }
    }
}

fn route_address(address: IpAddr) -> (AddressFamily, RouteAddress) {
    match address {
        IpAddr::V4(address) => (AddressFamily::Inet, RouteAddress::Inet(address)),
        IpAddr::V6(address) => (AddressFamily::Inet6, RouteAddress::Inet6(address)),
    }
}

/// Returns the header of a default route in the main table.
fn header(address_family: AddressFamily) -> RouteHeader {
    RouteHeader {
        address_family,
        table: RouteHeader::RT_TABLE_MAIN,
        protocol: RouteProtocol::Static,
        kind: RouteType::Unicast,
        ..RouteHeader::default()
    }
}

/// Returns a message with this header and these attributes.
pub(super) fn message(header: RouteHeader, attributes: Vec<RouteAttribute>) -> RouteMessage {
    let mut message = RouteMessage::default();
    (message.header, message.attributes) = (header, attributes);
    message
}

/// Returns the routing table of a route.
pub(super) fn table(route: &RouteMessage) -> u32 {
    let table = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    table.unwrap_or(route.header.table.into())
}

/// Returns the interface of a route with one path.
pub(super) fn out_interface(route: &RouteMessage) -> Option<u32> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        _ => None,
    })
}

/// Returns whether this is a default route of the main table with a path over `interface`.
pub(crate) fn is_default_over(route: &RouteMessage, interface: u32) -> bool {
    route.header.destination_prefix_length == 0
        && route.header.kind == RouteType::Unicast
        && table(route) == u32::from(RouteHeader::RT_TABLE_MAIN)
        && interfaces(route).contains(&interface)
}

fn interfaces(route: &RouteMessage) -> Vec<u32> {
    let paths = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::MultiPath(paths) => Some(paths.iter().map(|path| path.interface_index).collect()),
        _ => None,
    });
    paths.unwrap_or_else(|| out_interface(route).into_iter().collect())
}

/// Returns the request that deletes a listed route: what identifies it. The kernel lists a route over a nexthop object
/// with the object and its paths, but accepts only one of the two (`rtm_to_fib_config`, net/ipv4/fib_frontend.c).
pub(crate) fn deletion(mut route: RouteMessage) -> RouteMessage {
    let has_object = route.attributes.iter().any(|attribute| matches!(attribute, RouteAttribute::NhId(_)));
    route.attributes.retain(|attribute| match attribute {
        RouteAttribute::Table(_) | RouteAttribute::Priority(_) | RouteAttribute::Source(_) => true,
        RouteAttribute::NhId(_) => true,
        RouteAttribute::Oif(_) | RouteAttribute::Gateway(_) | RouteAttribute::MultiPath(_) => !has_object,
        RouteAttribute::Via(_) | RouteAttribute::EncapType(_) | RouteAttribute::Encap(_) => !has_object,
        _ => false,
    });
    route
}

/// Returns a default route of the main table without its paths over `interface`; `None` if it has no others.
pub(crate) fn other_paths(route: &RouteMessage, interface: u32) -> Option<RouteMessage> {
    let (mut others, mut attributes) = (Vec::new(), Vec::new());
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Priority(_) => attributes.push(attribute.clone()),
            RouteAttribute::MultiPath(paths) => others.extend(paths.clone()),
            _ => {}
        }
    }
    others.retain(|path| path.interface_index != interface);
    // The kernel does not accept the other flags in a new route, such as that of a dead path.
    others.iter_mut().for_each(|path| path.flags &= RouteNextHopFlags::Onlink);
    if others.is_empty() {
        return None;
    }
    attributes.push(RouteAttribute::MultiPath(others));
    Some(message(header(route.header.address_family), attributes))
}
