//! TPROXY's routing: packets with the mark are delivered to this namespace, whatever address they
//! are for (the kernel's Documentation/networking/tproxy.rst).

use super::rtnl::{LO, failed, run, unless_gone, unless_there};
use crate::cni::Error;
use futures_util::TryStreamExt;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{RouteMessage, RouteProtocol, RouteScope, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{Handle, IpVersion, RouteMessageBuilder};
use std::net::{Ipv4Addr, Ipv6Addr};

/// A policy rule `fwmark MARK lookup TABLE` and a route `local default dev lo table TABLE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Routing {
    /// The mark.
    pub mark: u32,
    /// The routing table.
    pub table: u32,
    /// For IPv6 too.
    pub ip6: bool,
}

impl Routing {
    fn families(self) -> impl Iterator<Item = Ip> {
        [Some(Ip::V4), self.ip6.then_some(Ip::V6)].into_iter().flatten()
    }

    /// Whether all policy rules are there.
    ///
    /// # Errors
    /// The kernel does not list them.
    pub fn is_there(self) -> Result<bool, Error> {
        run(async |handle| {
            for family in self.families() {
                if self.find_rule(&handle, family).await?.is_none() {
                    return Ok(false);
                }
            }
            Ok(true)
        })
        .map_err(|e| failed("the pod's policy rules can't be listed", &e))
    }

    /// Adds rules and routes; one that is there already is left as it is.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn add(self) -> Result<(), Error> {
        run(async |handle| {
            for family in self.families() {
                unless_there(handle.route().add(self.route(family)).execute().await)?;
                if self.find_rule(&handle, family).await?.is_none() {
                    let mut request = handle.rule().add().table_id(self.table).fw_mark(self.mark);
                    request = request.action(RuleAction::ToTable);
                    request.message_mut().header.family = family.number();
                    unless_there(request.execute().await)?;
                }
            }
            Ok(())
        })
        .map_err(|e| failed(&format!("the route for packets with mark {} can't be added", self.mark), &e))
    }

    /// Removes rules and routes; one that has gone already is no error.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove(self) -> Result<(), Error> {
        run(async |handle| {
            for family in self.families() {
                if let Some(rule) = self.find_rule(&handle, family).await? {
                    unless_gone(handle.rule().del(rule).execute().await)?;
                }
                unless_gone(handle.route().del(self.route(family)).execute().await)?;
            }
            Ok(())
        })
        .map_err(|e| failed(&format!("the route for packets with mark {} can't be removed", self.mark), &e))
    }

    async fn find_rule(self, handle: &Handle, family: Ip) -> Result<Option<RuleMessage>, rtnetlink::Error> {
        let mut all = std::pin::pin!(handle.rule().get(family.version()).execute());
        while let Some(rule) = all.try_next().await? {
            let table = rule.attributes.iter().find_map(|a| match a {
                RuleAttribute::Table(table) => Some(*table),
                _ => None,
            });
            let marks = rule.attributes.contains(&RuleAttribute::FwMark(self.mark));
            if marks && table.unwrap_or_else(|| u32::from(rule.header.table)) == self.table {
                return Ok(Some(rule));
            }
        }
        Ok(None)
    }

    fn route(self, family: Ip) -> RouteMessage {
        let mut message = match family {
            Ip::V4 => RouteMessageBuilder::<Ipv4Addr>::new().table_id(self.table).output_interface(LO).build(),
            Ip::V6 => RouteMessageBuilder::<Ipv6Addr>::new().table_id(self.table).output_interface(LO).build(),
        };
        message.header.kind = RouteType::Local;
        message.header.scope = RouteScope::Host;
        message.header.protocol = RouteProtocol::Boot;
        message
    }
}

#[derive(Clone, Copy)]
enum Ip {
    V4,
    V6,
}

impl Ip {
    const fn version(self) -> IpVersion {
        match self {
            Self::V4 => IpVersion::V4,
            Self::V6 => IpVersion::V6,
        }
    }

    const fn number(self) -> AddressFamily {
        match self {
            Self::V4 => AddressFamily::Inet,
            Self::V6 => AddressFamily::Inet6,
        }
    }
}
