//! Fixtures: what firewall rules need in the network namespace besides themselves, that is an address on lo and
//! TPROXY's policy routing. Fixtures are added before the rules, have no effect without them, and are removed when
//! no attachment needs them.

use super::addresses::{OwnFamilies, add_proxy_loopback, own_families, remove_proxy_loopback};
use super::rtnetlink::{
    HEADER, IP6_HINT, LO, RTM_DELROUTE, RTM_DELRULE, RTM_GETROUTE, RTM_GETRULE, RTM_NEWROUTE, RTM_NEWRULE,
    accept_existing, accept_missing, failed, failed_with_hint, open,
};
use crate::cni::Error;
use crate::netlink::attributes::{Attributes, find};
use crate::netlink::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NetlinkSocket};
use nix::errno::Errno;
use std::collections::BTreeSet;
use std::fmt;

/// linux/rtnetlink.h.
const RTA_OIF: u16 = 4;
const RTA_PRIORITY: u16 = 6;
const RTA_TABLE: u16 = 15;
const RTPROT_BOOT: u8 = 3;
const RT_SCOPE_HOST: u8 = 254;
const RTN_LOCAL: u8 = 2;
/// linux/ipv6_route.h, `IP6_RT_PRIO_USER`: the metric of an IPv6 route that is added without one.
const IP6_METRIC: u32 = 1024;
/// linux/fib_rules.h.
const FIB_RULE_INVERT: u8 = 2;
const FRA_IIFNAME: u16 = 3;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
const FRA_FWMASK: u16 = 16;
const FRA_OIFNAME: u16 = 17;
const FR_ACT_TO_TBL: u8 = 1;

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

    /// Keeps only the fixtures that have an object in common with `needed`.
    pub fn retain(&mut self, needed: &Self) {
        let own = self.objects();
        *self = needed.those_with(&own);
    }

    /// Returns those of these fixtures that have an object in `fixtures`.
    #[must_use]
    pub fn those_with(&self, fixtures: &BTreeSet<Fixture>) -> Self {
        let has = |(route, rule)| {
            [Kind::Route(route), Kind::Rule(rule)].iter().any(|kind| fixtures.contains(&Fixture(*kind)))
        };
        Self {
            proxy_loopback: self.proxy_loopback && fixtures.contains(&Fixture(Kind::ProxyLoopback)),
            routing: self.routing.iter().copied().filter(|routing| routing.parts().any(has)).collect(),
        }
    }

    /// Returns the objects of the fixtures.
    fn objects(&self) -> BTreeSet<Fixture> {
        let routing = self.routing.iter().flat_map(|routing| routing.parts());
        let kinds = routing.flat_map(|(route, rule)| [Kind::Route(route), Kind::Rule(rule)]);
        kinds.chain(self.proxy_loopback.then_some(Kind::ProxyLoopback)).map(Fixture).collect()
    }

    /// Returns the objects that are missing in the namespace, or have no effect.
    ///
    /// # Errors
    /// The kernel does not list policy rules or routes.
    pub fn missing(&self, addresses: OwnFamilies) -> Result<BTreeSet<Fixture>, Error> {
        let mut missing = self.objects();
        let mut find = || {
            // Most pods need no routing, and therefore no socket.
            let mut socket = if self.routing.is_empty() { None } else { Some(open()?) };
            let mut failure = Ok(());
            missing.retain(|fixture| {
                let exists = match (fixture.0, &mut socket) {
                    (Kind::Route(route), Some(socket)) => route.is_in_effect(socket),
                    (Kind::Rule(rule), Some(socket)) => rule.exists(socket),
                    _ => Ok(addresses.proxy_loopback),
                };
                !exists.unwrap_or_else(|error| {
                    failure = Err(error);
                    false
                })
            });
            failure
        };
        find().map_err(|e| failed("can't list the pod's policy rules and routes", &e))?;
        Ok(missing)
    }

    /// Adds the missing objects.
    ///
    /// # Errors
    /// As [`Self::missing`] and [`add_fixtures`].
    pub fn add(&self, addresses: OwnFamilies) -> Result<(), Error> {
        add_fixtures(&self.missing(addresses)?, addresses)
    }

    /// Removes the objects of these fixtures that `needed` does not have.
    ///
    /// # Errors
    /// The kernel refuses a removal.
    pub fn remove_but(&self, needed: &Self) -> Result<(), Error> {
        remove_fixtures(&(&self.objects() - &needed.objects()))
    }

    /// Describes each missing object in one line.
    ///
    /// # Errors
    /// The kernel does not list addresses, policy rules or routes.
    pub fn drift(&self) -> Result<Vec<String>, Error> {
        if self == &Self::default() {
            return Ok(Vec::new());
        }
        let addresses = own_families()?;
        let mut missing = self.missing(addresses)?;
        // Without an IPv6 address in the pod, `add_fixtures` may have failed to add IPv6 objects.
        missing.retain(|fixture| addresses.ip6 || !fixture.is_ip6());
        Ok(missing.iter().map(|fixture| format!("missing: {fixture}")).collect())
    }
}

/// A single object in the namespace; fixtures are sorted in the order in which they are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fixture(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    ProxyLoopback,
    Route(LocalRoute),
    Rule(PolicyRule),
}

impl fmt::Display for Fixture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Kind::ProxyLoopback => f.write_str("address ::6/128 on lo"),
            Kind::Route(route) => route.fmt(f),
            Kind::Rule(rule) => rule.fmt(f),
        }
    }
}

impl Fixture {
    const fn is_ip6(self) -> bool {
        match self.0 {
            Kind::ProxyLoopback => true,
            Kind::Route(LocalRoute { family, .. }) | Kind::Rule(PolicyRule { family, .. }) => {
                matches!(family, IpFamily::Ip6)
            }
        }
    }

    fn add(self, socket: &mut NetlinkSocket) -> Result<(), Error> {
        let added = match self.0 {
            Kind::ProxyLoopback => return add_proxy_loopback(socket),
            Kind::Route(route) => route.add(socket),
            Kind::Rule(rule) => rule.add(socket),
        };
        added.map_err(|e| {
            let hint = match e {
                Errno::EACCES | Errno::EAFNOSUPPORT | Errno::EOPNOTSUPP if self.is_ip6() => IP6_HINT,
                Errno::ENETDOWN => "; check that lo is up",
                _ => "",
            };
            failed_with_hint(&format!("can't add the {self}"), &e, hint)
        })
    }

    fn remove(self, socket: &mut NetlinkSocket) -> Result<(), Error> {
        let removed = match self.0 {
            Kind::ProxyLoopback => return remove_proxy_loopback(socket),
            Kind::Route(route) => route.remove(socket),
            Kind::Rule(rule) => rule.remove(socket),
        };
        removed.map_err(|e| failed(&format!("can't remove the {self}"), &e))
    }
}

/// Adds fixtures.
///
/// # Errors
/// The kernel refuses a fixture. If the pod has no IPv6 address, a refused IPv6 fixture is only logged: IPv6 may be
/// disabled on lo, and no rule needs the fixture.
pub fn add_fixtures(fixtures: &BTreeSet<Fixture>, addresses: OwnFamilies) -> Result<(), Error> {
    if fixtures.is_empty() {
        return Ok(());
    }
    let mut socket = socket()?;
    fixtures.iter().try_for_each(|fixture| match fixture.add(&mut socket) {
        Err(error) if fixture.is_ip6() && !addresses.ip6 => {
            tracing::warn!("{error}");
            Ok(())
        }
        other => other,
    })
}

/// Removes fixtures; a missing one is no error.
///
/// # Errors
/// The kernel refuses a removal.
pub fn remove_fixtures(fixtures: &BTreeSet<Fixture>) -> Result<(), Error> {
    if fixtures.is_empty() {
        return Ok(());
    }
    let mut socket = socket()?;
    fixtures.iter().rev().try_for_each(|fixture| fixture.remove(&mut socket))
}

fn socket() -> Result<NetlinkSocket, Error> {
    open().map_err(|e| failed("can't open a routing socket in the pod", &e))
}

/// TPROXY's routing: the policy rule `fwmark MARK lookup TABLE` and the route `local default dev lo table TABLE`.
/// They deliver packets with the mark locally, for any destination (the kernel's
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
    /// Finds the routing of a mark from the first policy rule for it in each family.
    ///
    /// # Errors
    /// The kernel does not list the policy rules.
    pub fn of_mark(mark: u32) -> Result<BTreeSet<Self>, Error> {
        let find = || {
            let (mut socket, mut found) = (open()?, BTreeSet::new());
            for family in [IpFamily::Ip, IpFamily::Ip6] {
                let rules = socket.list(RTM_GETRULE, &rule_header(family))?;
                let mut tables = rules.iter().filter_map(|body| by_mark(body).filter(|(other, _)| *other == mark));
                found.extend(tables.next().map(|(mark, table)| Self { mark, table, ip6: true }));
            }
            Ok(found)
        };
        find().map_err(|e: Errno| failed("can't list the pod's policy rules", &e))
    }

    /// Returns the route and the policy rule of each family.
    fn parts(self) -> impl Iterator<Item = (LocalRoute, PolicyRule)> {
        let families = [Some(IpFamily::Ip), self.ip6.then_some(IpFamily::Ip6)];
        let Self { mark, table, .. } = self;
        families
            .into_iter()
            .flatten()
            .map(move |family| (LocalRoute { family, table }, PolicyRule { family, table, mark }))
    }
}

/// An address family with the kernel's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum IpFamily {
    Ip = 2,
    Ip6 = 10,
}

impl fmt::Display for IpFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ip => "IPv4",
            Self::Ip6 => "IPv6",
        })
    }
}

/// A route `local default dev lo table TABLE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LocalRoute {
    pub(super) family: IpFamily,
    table: u32,
}

impl fmt::Display for LocalRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} route local default dev lo table {}", self.family, self.table)
    }
}

impl LocalRoute {
    /// Reports whether this is the first default route of the table; a later one has no effect.
    ///
    /// # Errors
    /// The kernel does not list the routes.
    pub(super) fn is_in_effect(self, socket: &mut NetlinkSocket) -> Result<bool, Errno> {
        let first = self.defaults(socket)?.into_iter().next();
        Ok(first.is_some_and(|body| is_local(&body)))
    }

    /// Adds the route, and removes default routes of the table that precede it or have its metric.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn add(self, socket: &mut NetlinkSocket) -> Result<(), Errno> {
        let header = self.header();
        let flags = NLM_F_CREATE | NLM_F_REPLACE;
        socket.request(RTM_NEWROUTE, flags, &header, self.attributes().as_bytes())?;
        for other in self.defaults(socket)?.into_iter().take_while(|body| !is_local(body)) {
            accept_missing(socket.request(RTM_DELROUTE, 0, &other, &[]))?;
        }
        Ok(())
    }

    /// Removes the route; a missing one is no error.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn remove(self, socket: &mut NetlinkSocket) -> Result<(), Errno> {
        accept_missing(socket.request(RTM_DELROUTE, 0, &self.header(), self.attributes().as_bytes()))
    }

    /// Returns the table's default routes as the kernel lists them, in the order in which the kernel prefers them:
    /// routes for a type of service first, then by metric.
    fn defaults(self, socket: &mut NetlinkSocket) -> Result<Vec<Vec<u8>>, Errno> {
        let rank = |body: &Vec<u8>| {
            let ([family, to, from, tos, table, ..], attributes) = body.split_first_chunk::<HEADER>()?;
            let is_default = (*family, *to, *from) == (self.family as u8, 0, 0)
                && number(attributes, RTA_TABLE).unwrap_or_else(|| (*table).into()) == self.table;
            is_default.then(|| (*tos == 0, number(attributes, RTA_PRIORITY).unwrap_or_default()))
        };
        let mut defaults = socket.list(RTM_GETROUTE, &self.header())?;
        defaults.retain(|body| rank(body).is_some());
        defaults.sort_by_key(rank);
        Ok(defaults)
    }

    /// Returns the `struct rtmsg` of the route.
    const fn header(self) -> [u8; HEADER] {
        [self.family as u8, 0, 0, 0, 0, RTPROT_BOOT, RT_SCOPE_HOST, RTN_LOCAL, 0, 0, 0, 0]
    }

    fn attributes(self) -> Attributes {
        Attributes::of(|list| {
            list.ne32(RTA_OIF, LO).ne32(RTA_TABLE, self.table);
            // Without a metric, a removal for IPv6 matches any route of the table over lo.
            if self.family == IpFamily::Ip6 { list.ne32(RTA_PRIORITY, IP6_METRIC) } else { list }
        })
    }
}

/// Reports whether a default route delivers packets locally.
fn is_local(body: &[u8]) -> bool {
    let Some(([.., kind, _, _, _, _], attributes)) = body.split_first_chunk::<HEADER>() else { return false };
    *kind == RTN_LOCAL && number(attributes, RTA_OIF) == Some(LO)
}

/// A policy rule `fwmark MARK lookup TABLE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PolicyRule {
    pub(super) family: IpFamily,
    table: u32,
    mark: u32,
}

impl fmt::Display for PolicyRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} policy rule fwmark {:#x} lookup {}", self.family, self.mark, self.table)
    }
}

impl PolicyRule {
    /// Reports whether the policy rule exists.
    ///
    /// # Errors
    /// The kernel does not list the rules.
    pub(super) fn exists(self, socket: &mut NetlinkSocket) -> Result<bool, Errno> {
        self.find(socket).map(|found| found.is_some())
    }

    /// Adds the policy rule; an existing one is no error.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn add(self, socket: &mut NetlinkSocket) -> Result<(), Errno> {
        let attributes = Attributes::of(|list| list.ne32(FRA_FWMARK, self.mark).ne32(FRA_TABLE, self.table));
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        accept_existing(socket.request(RTM_NEWRULE, flags, &rule_header(self.family), attributes.as_bytes()))
    }

    /// Removes the policy rule; a missing one is no error.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn remove(self, socket: &mut NetlinkSocket) -> Result<(), Errno> {
        match self.find(socket)? {
            Some(rule) => accept_missing(socket.request(RTM_DELRULE, 0, &rule, &[])),
            None => Ok(()),
        }
    }

    /// Returns the policy rule as the kernel lists it.
    fn find(self, socket: &mut NetlinkSocket) -> Result<Option<Vec<u8>>, Errno> {
        let rules = socket.list(RTM_GETRULE, &rule_header(self.family))?;
        Ok(rules.into_iter().find(|body| by_mark(body) == Some((self.mark, self.table))))
    }
}

/// Returns the `struct fib_rule_hdr` of a policy rule.
const fn rule_header(family: IpFamily) -> [u8; HEADER] {
    [family as u8, 0, 0, 0, 0, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0]
}

/// Returns mark and table of a policy rule whose only condition is a mark.
fn by_mark(body: &[u8]) -> Option<(u32, u32)> {
    let (header, attributes) = body.split_first_chunk::<HEADER>()?;
    let [_, to, from, tos, _, _, _, action, flags, ..] = *header;
    let is_narrower = [FRA_IIFNAME, FRA_OIFNAME].iter().any(|kind| find(attributes, *kind).is_some());
    let has_only_mark = (to, from, tos, action, flags & FIB_RULE_INVERT) == (0, 0, 0, FR_ACT_TO_TBL, 0)
        && number(attributes, FRA_FWMASK).is_none_or(|mask| mask == u32::MAX)
        && !is_narrower;
    Some((number(attributes, FRA_FWMARK)?, number(attributes, FRA_TABLE)?)).filter(|_| has_only_mark)
}

fn number(attributes: &[u8], kind: u16) -> Option<u32> {
    find(attributes, kind).and_then(|value| value.try_into().ok()).map(u32::from_ne_bytes)
}
