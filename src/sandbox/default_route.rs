//! The default routes of the namespace that the calling thread is in.

use super::rtnl::{failed, run, unless_gone};
use crate::cni::Error;
use futures_util::TryStreamExt;
use netlink_packet_route::route::{RouteAttribute, RouteHeader, RouteMessage, RouteType};
use nix::net::if_::if_nametoindex;
use rtnetlink::RouteMessageBuilder;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Takes the default routes of both families over this interface away and adds those over these
/// gateways. What other routing tables say stays.
///
/// # Errors
/// There is no such interface, or the kernel refuses.
pub fn replace_default_routes(interface: &str, gateways: &[IpAddr]) -> Result<(), Error> {
    let refused =
        |why: &dyn std::fmt::Display| failed(&format!("the default route of {interface} can't be moved"), why);
    let index = if_nametoindex(interface).map_err(|errno| refused(&errno))?;
    run(async |handle| {
        let all = [RouteMessageBuilder::<Ipv4Addr>::new().build(), RouteMessageBuilder::<Ipv6Addr>::new().build()];
        for family in all {
            let routes: Vec<RouteMessage> = handle.route().get(family).execute().try_collect().await?;
            for route in routes.into_iter().filter(|route| is_default_over(route, index)) {
                unless_gone(handle.route().del(route).execute().await)?;
            }
        }
        for gateway in gateways {
            let route = match gateway {
                IpAddr::V4(gateway) => {
                    RouteMessageBuilder::<Ipv4Addr>::new().gateway(*gateway).output_interface(index).build()
                }
                IpAddr::V6(gateway) => {
                    RouteMessageBuilder::<Ipv6Addr>::new().gateway(*gateway).output_interface(index).build()
                }
            };
            handle.route().add(route).execute().await?;
        }
        Ok(())
    })
    .map_err(|error| refused(&error))
}

fn is_default_over(route: &RouteMessage, interface: u32) -> bool {
    let table = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    route.header.destination_prefix_length == 0
        && route.header.kind == RouteType::Unicast
        && table.unwrap_or_else(|| route.header.table.into()) == u32::from(RouteHeader::RT_TABLE_MAIN)
        && route.attributes.contains(&RouteAttribute::Oif(interface))
}
