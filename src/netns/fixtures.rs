//! Fixtures: what firewall rules need in the network namespace besides themselves, that is an address on lo and
//! TPROXY's policy routing. Fixtures are added before the rules, have no effect without them, and are removed when
//! no attachment needs them.

use super::addresses::{OwnFamilies, add_proxy_loopback, own_families, remove_proxy_loopback};
use super::rtnetlink::{
    AF_INET, AF_INET6, HEADER, LO, RTM_DELROUTE, RTM_DELRULE, RTM_GETROUTE, RTM_GETRULE, RTM_NEWROUTE, RTM_NEWRULE,
    accept_existing, accept_missing, failed, open,
};
use crate::cni::Error;
use crate::netlink::attributes::{Attributes, find};
use crate::netlink::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NetlinkSocket};
use nix::errno::Errno;
use std::collections::BTreeSet;

/// The fixtures that rules need, or that were added.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Fixtures {
    /// The address [`super::PROXY_LOOPBACK`] on lo.
    pub proxy_loopback: bool,
    /// TPROXY's routing.
    pub routing: BTreeSet<Routing>,
}

impl Fixtures {
    /// Adds the fixtures of `other`.
    pub fn extend(&mut self, other: &Self) {
        self.proxy_loopback |= other.proxy_loopback;
        self.routing.extend(&other.routing);
    }

    /// Drops the fixtures that are not in `needed`.
    pub fn retain(&mut self, needed: &Self) {
        self.proxy_loopback &= needed.proxy_loopback;
        self.routing.retain(|routing| needed.routing.contains(routing));
    }

    /// Returns the fixtures that are missing in the namespace.
    ///
    /// # Errors
    /// The kernel does not list policy rules or routes.
    pub fn missing(&self, addresses: OwnFamilies) -> Result<Self, Error> {
        let mut routing = BTreeSet::new();
        for needed in &self.routing {
            if !needed.missing()?.is_empty() {
                routing.insert(*needed);
            }
        }
        Ok(Self { proxy_loopback: self.proxy_loopback && !addresses.proxy_loopback, routing })
    }

    /// Adds the fixtures to the namespace.
    ///
    /// # Errors
    /// The kernel refuses a fixture. A refused address is only logged if the pod has no IPv6 address: then IPv6 may
    /// be disabled on lo, and no rule uses the address.
    pub fn add(&self, addresses: OwnFamilies) -> Result<(), Error> {
        if self.proxy_loopback {
            match add_proxy_loopback() {
                Err(error) if !addresses.ip6 => tracing::warn!("{error}"),
                other => other?,
            }
        }
        self.routing.iter().try_for_each(|routing| routing.add())
    }

    /// Removes the fixtures from the namespace, except those in `needed`.
    ///
    /// # Errors
    /// The kernel refuses a removal.
    pub fn remove_but(&self, needed: &Self) -> Result<(), Error> {
        if self.proxy_loopback && !needed.proxy_loopback {
            remove_proxy_loopback()?;
        }
        self.routing.difference(&needed.routing).try_for_each(|routing| routing.remove_but(&needed.routing))
    }

    /// Describes each missing fixture in one line.
    ///
    /// # Errors
    /// The kernel does not list addresses, policy rules or routes.
    pub fn drift(&self) -> Result<Vec<String>, Error> {
        if self == &Self::default() {
            return Ok(Vec::new());
        }
        let addresses = own_families()?;
        let missing = self.missing(addresses)?;
        let mut lines = Vec::new();
        // Without an IPv6 address in the pod, `add` may have failed to add it to lo.
        if missing.proxy_loopback && addresses.ip6 {
            lines.push("missing: address ::6/128 on lo".to_owned());
        }
        for routing in missing.routing {
            lines.extend(routing.missing()?.iter().map(|what| format!("missing: {what}")));
        }
        Ok(lines)
    }
}

/// linux/rtnetlink.h.
const RTA_OIF: u16 = 4;
const RTA_TABLE: u16 = 15;
const RTPROT_BOOT: u8 = 3;
const RT_SCOPE_HOST: u8 = 254;
const RTN_LOCAL: u8 = 2;
/// linux/fib_rules.h.
const FIB_RULE_INVERT: u8 = 2;
const FRA_IIFNAME: u16 = 3;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
const FRA_FWMASK: u16 = 16;
const FRA_OIFNAME: u16 = 17;
const FR_ACT_TO_TBL: u8 = 1;

/// TPROXY's routing: the policy rule `fwmark MARK lookup TABLE` and the route `local default dev lo table TABLE`.
/// They deliver packets with the mark locally, whatever their destination (the kernel's
/// Documentation/networking/tproxy.rst).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Routing {
    /// The firewall mark.
    pub mark: u32,
    /// The routing table.
    pub table: u32,
    /// Whether IPv6 is routed too.
    #[serde(default)]
    pub ip6: bool,
}

impl Routing {
    fn families(self) -> impl Iterator<Item = u8> {
        [Some(AF_INET), self.ip6.then_some(AF_INET6)].into_iter().flatten()
    }

    /// Describes each missing policy rule and route in one line.
    ///
    /// # Errors
    /// The kernel does not list them.
    pub fn missing(self) -> Result<Vec<String>, Error> {
        let missing = || {
            let (mut socket, mut missing) = (open()?, Vec::new());
            for family in self.families() {
                let name = if family == AF_INET { "IPv4" } else { "IPv6" };
                if self.find_rule(&mut socket, family)?.is_none() {
                    missing.push(format!("{name} policy rule fwmark {:#x} lookup {}", self.mark, self.table));
                }
                if !self.has_route(&mut socket, family)? {
                    missing.push(format!("{name} route local default dev lo table {}", self.table));
                }
            }
            Ok(missing)
        };
        missing().map_err(|e: Errno| failed("listing the pod's policy rules and routes failed", &e))
    }

    /// Adds the missing policy rules and routes; replaces another default route of the table.
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
        add().map_err(|e: Errno| failed(&format!("adding the route for packets with mark {} failed", self.mark), &e))
    }

    fn add_to(self, socket: &mut NetlinkSocket, family: u8) -> Result<(), Errno> {
        if !self.has_route(socket, family)? {
            let flags = NLM_F_CREATE | NLM_F_REPLACE;
            socket.request(RTM_NEWROUTE, flags, &route(family), self.route_attributes().as_bytes())?;
        }
        if self.find_rule(socket, family)?.is_none() {
            let flags = NLM_F_CREATE | NLM_F_EXCL;
            accept_existing(socket.request(RTM_NEWRULE, flags, &rule(family), self.rule_attributes().as_bytes()))?;
        }
        Ok(())
    }

    /// Removes the policy rules and routes, except those that a routing in `needed` shares. Missing ones are no error.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove_but(self, needed: &BTreeSet<Self>) -> Result<(), Error> {
        let is_needed = |family: u8, is_same: &dyn Fn(&Self) -> bool| {
            needed.iter().any(|other| is_same(other) && other.families().any(|other| other == family))
        };
        let remove = || {
            let mut socket = open()?;
            for family in self.families() {
                if !is_needed(family, &|other| (other.mark, other.table) == (self.mark, self.table))
                    && let Some(rule) = self.find_rule(&mut socket, family)?
                {
                    accept_missing(socket.request(RTM_DELRULE, 0, &rule, &[]))?;
                }
                if !is_needed(family, &|other| other.table == self.table) {
                    let attributes = self.route_attributes();
                    accept_missing(socket.request(RTM_DELROUTE, 0, &route(family), attributes.as_bytes()))?;
                }
            }
            Ok(())
        };
        remove()
            .map_err(|e: Errno| failed(&format!("removing the route for packets with mark {} failed", self.mark), &e))
    }

    /// Returns the policy rule as the kernel lists it.
    fn find_rule(self, socket: &mut NetlinkSocket, family: u8) -> Result<Option<Vec<u8>>, Errno> {
        Ok(socket.list(RTM_GETRULE, &rule(family))?.into_iter().find(|body| self.is_rule(body)))
    }

    /// Reports whether `body` is the policy rule, with the mark as its only condition.
    fn is_rule(self, body: &[u8]) -> bool {
        let Some((header, attributes)) = body.split_first_chunk::<HEADER>() else { return false };
        let [_, to, from, tos, _, _, _, action, flags, ..] = *header;
        let number = |kind| find(attributes, kind).and_then(|value| value.try_into().ok()).map(u32::from_ne_bytes);
        let is_narrower = [FRA_IIFNAME, FRA_OIFNAME].iter().any(|kind| find(attributes, *kind).is_some());
        (to, from, tos, action, flags & FIB_RULE_INVERT) == (0, 0, 0, FR_ACT_TO_TBL, 0)
            && number(FRA_FWMARK) == Some(self.mark)
            && number(FRA_FWMASK).is_none_or(|mask| mask == u32::MAX)
            && number(FRA_TABLE) == Some(self.table)
            && !is_narrower
    }

    fn has_route(self, socket: &mut NetlinkSocket, family: u8) -> Result<bool, Errno> {
        let is_it = |body: &Vec<u8>| {
            let Some((header, attributes)) = body.split_first_chunk::<HEADER>() else { return false };
            let [_, to, _, _, table, _, _, kind, ..] = *header;
            let number = |kind| find(attributes, kind).and_then(|value| value.try_into().ok()).map(u32::from_ne_bytes);
            (to, kind) == (0, RTN_LOCAL)
                && number(RTA_TABLE).unwrap_or_else(|| table.into()) == self.table
                && number(RTA_OIF) == Some(LO)
        };
        Ok(socket.list(RTM_GETROUTE, &route(family))?.iter().any(is_it))
    }

    fn rule_attributes(self) -> Attributes {
        Attributes::new().ne32(FRA_FWMARK, self.mark).ne32(FRA_TABLE, self.table)
    }

    fn route_attributes(self) -> Attributes {
        Attributes::new().ne32(RTA_OIF, LO).ne32(RTA_TABLE, self.table)
    }
}

/// Returns the `struct fib_rule_hdr` of the policy rule.
const fn rule(family: u8) -> [u8; HEADER] {
    [family, 0, 0, 0, 0, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0]
}

/// Returns the `struct rtmsg` of the route.
const fn route(family: u8) -> [u8; HEADER] {
    [family, 0, 0, 0, 0, RTPROT_BOOT, RT_SCOPE_HOST, RTN_LOCAL, 0, 0, 0, 0]
}
