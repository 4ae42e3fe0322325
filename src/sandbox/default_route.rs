//! The default routes of the namespace that the calling thread is in.

use super::rtnl::{HEADER, RTM_DELROUTE, RTM_GETROUTE, RTM_NEWROUTE, failed, open, unless_gone};
use crate::cni::Error;
use crate::netlink::attributes::{Attributes, find};
use crate::netlink::{NLM_F_CREATE, NLM_F_EXCL};
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use std::net::IpAddr;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// linux/rtnetlink.h.
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_TABLE: u16 = 15;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RTN_UNICAST: u8 = 1;

/// Takes the default routes of both families over this interface away and adds those over these
/// gateways. What other routing tables say stays.
///
/// # Errors
/// There is no such interface, or the kernel refuses.
pub fn replace_default_routes(interface: &str, gateways: &[IpAddr]) -> Result<(), Error> {
    let replace = || {
        let index = if_nametoindex(interface)?;
        let mut socket = open()?;
        for family in [AF_INET, AF_INET6] {
            let routes = socket.list(RTM_GETROUTE, &header(family))?;
            for route in routes.iter().filter(|route| is_default_over(route, index)) {
                unless_gone(socket.request(RTM_DELROUTE, 0, route, &[]))?;
            }
        }
        for gateway in gateways {
            let (family, address) = match gateway {
                IpAddr::V4(gateway) => (AF_INET, gateway.octets().to_vec()),
                IpAddr::V6(gateway) => (AF_INET6, gateway.octets().to_vec()),
            };
            let attributes = Attributes::new().bytes(RTA_GATEWAY, &address).ne32(RTA_OIF, index);
            socket.request(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &header(family), attributes.as_bytes())?;
        }
        Ok(())
    };
    replace().map_err(|e: Errno| failed(&format!("the default route of {interface} can't be moved"), &e))
}

/// `struct rtmsg`.
const fn header(family: u8) -> [u8; HEADER] {
    [family, 0, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, 0, RTN_UNICAST, 0, 0, 0, 0]
}

fn is_default_over(route: &[u8], interface: u32) -> bool {
    let Some((header, attributes)) = route.split_first_chunk::<HEADER>() else { return false };
    let number = |kind| find(attributes, kind).and_then(|value| value.try_into().ok()).map(u32::from_ne_bytes);
    let [_, destination_length, _, _, table, _, _, kind, ..] = *header;
    destination_length == 0
        && kind == RTN_UNICAST
        && number(RTA_TABLE).unwrap_or_else(|| table.into()) == u32::from(RT_TABLE_MAIN)
        && number(RTA_OIF) == Some(interface)
}
