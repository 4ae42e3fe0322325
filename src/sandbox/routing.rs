//! TPROXY's routing: packets with the mark are delivered to this namespace, whatever address they
//! are for (the kernel's Documentation/networking/tproxy.rst).

use super::rtnl::{
    HEADER, LO, RTM_DELROUTE, RTM_DELRULE, RTM_GETRULE, RTM_NEWROUTE, RTM_NEWRULE, failed, open, unless_gone,
    unless_there,
};
use crate::cni::Error;
use crate::netlink::attributes::{Attributes, find};
use crate::netlink::{NLM_F_CREATE, NLM_F_EXCL, Socket};
use nix::errno::Errno;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// linux/rtnetlink.h.
const RTA_OIF: u16 = 4;
const RTA_TABLE: u16 = 15;
const RTPROT_BOOT: u8 = 3;
const RT_SCOPE_HOST: u8 = 254;
const RTN_LOCAL: u8 = 2;
/// linux/fib_rules.h.
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
const FR_ACT_TO_TBL: u8 = 1;

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
    fn families(self) -> impl Iterator<Item = u8> {
        [Some(AF_INET), self.ip6.then_some(AF_INET6)].into_iter().flatten()
    }

    /// Whether all policy rules are there.
    ///
    /// # Errors
    /// The kernel does not list them.
    pub fn is_there(self) -> Result<bool, Error> {
        let all_there = || {
            let mut socket = open()?;
            for family in self.families() {
                if self.find_rule(&mut socket, family)?.is_none() {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        all_there().map_err(|e: Errno| failed("the pod's policy rules can't be listed", &e))
    }

    /// Adds rules and routes; one that is there already is left as it is.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn add(self) -> Result<(), Error> {
        let add = || {
            let mut socket = open()?;
            for family in self.families() {
                self.add_to(&mut socket, family)?;
            }
            Ok(())
        };
        add().map_err(|e: Errno| failed(&format!("the route for packets with mark {} can't be added", self.mark), &e))
    }

    fn add_to(self, socket: &mut Socket, family: u8) -> Result<(), Errno> {
        const NEW: u16 = NLM_F_CREATE | NLM_F_EXCL;
        unless_there(socket.request(RTM_NEWROUTE, NEW, &route(family), self.route_attributes().as_bytes()))?;
        if self.find_rule(socket, family)?.is_none() {
            unless_there(socket.request(RTM_NEWRULE, NEW, &rule(family), self.rule_attributes().as_bytes()))?;
        }
        Ok(())
    }

    /// Removes rules and routes; one that has gone already is no error.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove(self) -> Result<(), Error> {
        let remove = || {
            let mut socket = open()?;
            for family in self.families() {
                if let Some(rule) = self.find_rule(&mut socket, family)? {
                    unless_gone(socket.request(RTM_DELRULE, 0, &rule, &[]))?;
                }
                let attributes = self.route_attributes();
                unless_gone(socket.request(RTM_DELROUTE, 0, &route(family), attributes.as_bytes()))?;
            }
            Ok(())
        };
        remove()
            .map_err(|e: Errno| failed(&format!("the route for packets with mark {} can't be removed", self.mark), &e))
    }

    /// The policy rule as the kernel lists it.
    fn find_rule(self, socket: &mut Socket, family: u8) -> Result<Option<Vec<u8>>, Errno> {
        let is_it = |body: &Vec<u8>| {
            let attributes = body.get(HEADER..).unwrap_or_default();
            let number = |kind| find(attributes, kind).and_then(|value| value.try_into().ok()).map(u32::from_ne_bytes);
            number(FRA_FWMARK) == Some(self.mark) && number(FRA_TABLE) == Some(self.table)
        };
        Ok(socket.list(RTM_GETRULE, &rule(family))?.into_iter().find(is_it))
    }

    fn rule_attributes(self) -> Attributes {
        Attributes::new().ne32(FRA_FWMARK, self.mark).ne32(FRA_TABLE, self.table)
    }

    fn route_attributes(self) -> Attributes {
        Attributes::new().ne32(RTA_OIF, LO).ne32(RTA_TABLE, self.table)
    }
}

/// `struct fib_rule_hdr`.
const fn rule(family: u8) -> [u8; HEADER] {
    [family, 0, 0, 0, 0, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0]
}

/// `struct rtmsg`.
const fn route(family: u8) -> [u8; HEADER] {
    [family, 0, 0, 0, 0, RTPROT_BOOT, RT_SCOPE_HOST, RTN_LOCAL, 0, 0, 0, 0]
}
