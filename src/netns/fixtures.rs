//! Fixtures: what firewall rules need in the network namespace besides themselves, that is an address on lo and
//! TPROXY's policy routing. Fixtures are added before the rules, have no effect without them, and are removed when
//! no attachment needs them.

use super::addresses::{OwnFamilies, add_proxy_loopback, own_families, remove_proxy_loopback};
use super::routes::{deletion, message, out_interface, table};
use super::rtnetlink::{
    FAMILIES, IP6_HINT, LO, RTM_DELROUTE, RTM_DELRULE, RTM_GETROUTE, RTM_GETRULE, RTM_NEWROUTE, RTM_NEWRULE,
    accept_existing, accept_missing, failed, list, open, request, rule_header,
};
use crate::cni::Error;
use crate::netlink::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NetlinkSocket};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleHeader, RuleMessage};
use nix::errno::Errno;
use std::collections::BTreeSet;
use std::fmt;

/// linux/ipv6_route.h, `IP6_RT_PRIO_USER`: the metric of an IPv6 route that is added without one.
const IP6_METRIC: u32 = 1024;

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
        let has = |routing: &Routing| routing.objects().any(|fixture| fixtures.contains(&fixture));
        Self {
            proxy_loopback: self.proxy_loopback && fixtures.contains(&Fixture::ProxyLoopback),
            routing: self.routing.iter().copied().filter(has).collect(),
        }
    }

    /// Returns the objects of the fixtures.
    fn objects(&self) -> BTreeSet<Fixture> {
        let routing = self.routing.iter().flat_map(|routing| routing.objects());
        routing.chain(self.proxy_loopback.then_some(Fixture::ProxyLoopback)).collect()
    }

    /// Returns the objects that are missing in the namespace, or have no effect.
    ///
    /// # Errors
    /// The kernel does not list policy rules or routes.
    pub fn missing(&self, addresses: OwnFamilies) -> Result<BTreeSet<Fixture>, Error> {
        let find = || {
            // Most pods need no routing, and therefore no socket.
            let mut socket = if self.routing.is_empty() { None } else { Some(open()?) };
            let mut missing = BTreeSet::new();
            for fixture in self.objects() {
                let exists = match (fixture, &mut socket) {
                    (Fixture::Route(route), Some(socket)) => route.is_in_effect(socket)?,
                    (Fixture::Rule(rule), Some(socket)) => rule.find(socket)?.is_some(),
                    _ => addresses.proxy_loopback,
                };
                if !exists {
                    missing.insert(fixture);
                }
            }
            Ok(missing)
        };
        find().map_err(|errno| failed("can't list the pod's policy rules and routes", errno, ""))
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
pub enum Fixture {
    /// The address [`super::PROXY_LOOPBACK`] on lo.
    ProxyLoopback,
    /// A route of TPROXY.
    Route(LocalRoute),
    /// A policy rule of TPROXY.
    Rule(PolicyRule),
}

impl fmt::Display for Fixture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ProxyLoopback => f.write_str("address ::6/128 on lo"),
            Self::Route(route) => route.fmt(f),
            Self::Rule(rule) => rule.fmt(f),
        }
    }
}

impl Fixture {
    const fn is_ip6(self) -> bool {
        match self {
            Self::ProxyLoopback => true,
            Self::Route(LocalRoute { ip6, .. }) | Self::Rule(PolicyRule { ip6, .. }) => ip6,
        }
    }

    fn add(self, socket: &mut NetlinkSocket) -> Result<(), Error> {
        let added = match self {
            Self::ProxyLoopback => return add_proxy_loopback(socket),
            Self::Route(route) => route.add(socket),
            Self::Rule(rule) => rule.add(socket),
        };
        added.map_err(|e| {
            let hint = match e {
                Errno::EACCES | Errno::EAFNOSUPPORT | Errno::EOPNOTSUPP if self.is_ip6() => IP6_HINT,
                Errno::ENETDOWN => "; check that lo is up",
                _ => "",
            };
            failed(&format!("can't add the {self}"), e, hint)
        })
    }

    fn remove(self, socket: &mut NetlinkSocket) -> Result<(), Error> {
        let removed = match self {
            Self::ProxyLoopback => return remove_proxy_loopback(socket),
            Self::Route(route) => route.remove(socket),
            Self::Rule(rule) => rule.remove(socket),
        };
        removed.map_err(|errno| failed(&format!("can't remove the {self}"), errno, ""))
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
    open().map_err(|errno| failed("can't open a routing socket in the pod", errno, ""))
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
            for family in FAMILIES {
                let rules: Vec<RuleMessage> = list(&mut socket, RTM_GETRULE, &rule_header(family))?;
                let table = rules.iter().filter_map(by_mark).find(|(other, _)| *other == mark);
                found.extend(table.map(|(mark, table)| Self { mark, table, ip6: true }));
            }
            Ok(found)
        };
        find().map_err(|errno: Errno| failed("can't list the pod's policy rules", errno, ""))
    }

    /// Returns the route and the policy rule of each family.
    fn objects(self) -> impl Iterator<Item = Fixture> {
        let Self { mark, table, .. } = self;
        let families = [Some(false), self.ip6.then_some(true)].into_iter().flatten();
        families.flat_map(move |ip6| {
            [Fixture::Route(LocalRoute { ip6, table }), Fixture::Rule(PolicyRule { ip6, table, mark })]
        })
    }
}

/// Returns the address family of an object, and its name.
const fn family(ip6: bool) -> (AddressFamily, &'static str) {
    if ip6 { (AddressFamily::Inet6, "IPv6") } else { (AddressFamily::Inet, "IPv4") }
}

/// A route `local default dev lo table TABLE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LocalRoute {
    ip6: bool,
    table: u32,
}

impl fmt::Display for LocalRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} route local default dev lo table {}", family(self.ip6).1, self.table)
    }
}

impl LocalRoute {
    /// Returns whether this is the first default route of the table; a later one has no effect.
    fn is_in_effect(self, socket: &mut NetlinkSocket) -> Result<bool, Errno> {
        Ok(self.defaults(socket)?.first().is_some_and(is_local))
    }

    /// Adds the route, and removes default routes of the table that precede it or have its metric.
    fn add(self, socket: &mut NetlinkSocket) -> Result<(), Errno> {
        request(socket, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, &self.message())?;
        for other in self.defaults(socket)?.into_iter().take_while(|route| !is_local(route)) {
            accept_missing(request(socket, RTM_DELROUTE, 0, &deletion(other)))?;
        }
        Ok(())
    }

    /// Removes the route; a missing one is no error.
    fn remove(self, socket: &mut NetlinkSocket) -> Result<(), Errno> {
        accept_missing(request(socket, RTM_DELROUTE, 0, &self.message()))
    }

    /// Returns the table's default routes in the order in which the kernel prefers them: routes for a type of service
    /// first, then by metric.
    fn defaults(self, socket: &mut NetlinkSocket) -> Result<Vec<RouteMessage>, Errno> {
        let is_default = |route: &RouteMessage| {
            let RouteHeader { address_family, destination_prefix_length, source_prefix_length, .. } = route.header;
            (address_family, destination_prefix_length, source_prefix_length) == (family(self.ip6).0, 0, 0)
                && table(route) == self.table
        };
        let metric = |route: &RouteMessage| {
            route.attributes.iter().find_map(|attribute| match attribute {
                RouteAttribute::Priority(metric) => Some(*metric),
                _ => None,
            })
        };
        let mut defaults: Vec<RouteMessage> = list(socket, RTM_GETROUTE, &self.message().header)?;
        defaults.retain(is_default);
        defaults.sort_by_key(|route| (route.header.tos == 0, metric(route).unwrap_or_default()));
        Ok(defaults)
    }

    fn message(self) -> RouteMessage {
        let header = RouteHeader {
            address_family: family(self.ip6).0,
            protocol: RouteProtocol::Boot,
            scope: RouteScope::Host,
            kind: RouteType::Local,
            ..RouteHeader::default()
        };
        let mut attributes = vec![RouteAttribute::Oif(LO), RouteAttribute::Table(self.table)];
        // Without a metric, a removal for IPv6 matches any route of the table over lo.
        if self.ip6 {
            attributes.push(RouteAttribute::Priority(IP6_METRIC));
        }
        message(header, attributes)
    }
}

/// Returns whether a default route delivers packets locally.
fn is_local(route: &RouteMessage) -> bool {
    route.header.kind == RouteType::Local && out_interface(route) == Some(LO)
}

/// A policy rule `fwmark MARK lookup TABLE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PolicyRule {
    ip6: bool,
    table: u32,
    mark: u32,
}

impl fmt::Display for PolicyRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} policy rule fwmark {:#x} lookup {}", family(self.ip6).1, self.mark, self.table)
    }
}

impl PolicyRule {
    /// Adds the policy rule; an existing one is no error.
    fn add(self, socket: &mut NetlinkSocket) -> Result<(), Errno> {
        let mut rule = RuleMessage::default();
        rule.header = rule_header(family(self.ip6).0);
        rule.attributes = vec![RuleAttribute::FwMark(self.mark), RuleAttribute::Table(self.table)];
        accept_existing(request(socket, RTM_NEWRULE, NLM_F_CREATE | NLM_F_EXCL, &rule))
    }

    /// Removes the policy rule; a missing one is no error.
    fn remove(self, socket: &mut NetlinkSocket) -> Result<(), Errno> {
        match self.find(socket)? {
            Some(rule) => accept_missing(request(socket, RTM_DELRULE, 0, &rule)),
            None => Ok(()),
        }
    }

    /// Returns the policy rule as the kernel lists it.
    fn find(self, socket: &mut NetlinkSocket) -> Result<Option<RuleMessage>, Errno> {
        let rules: Vec<RuleMessage> = list(socket, RTM_GETRULE, &rule_header(family(self.ip6).0))?;
        Ok(rules.into_iter().find(|rule| by_mark(rule) == Some((self.mark, self.table))))
    }
}

/// Returns mark and table of a policy rule whose only condition is a mark.
fn by_mark(rule: &RuleMessage) -> Option<(u32, u32)> {
    let RuleHeader { dst_len, src_len, tos, action, flags, .. } = rule.header;
    let (mut mark, mut table) = (None, None);
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::FwMark(found) => mark = Some(*found),
            RuleAttribute::Table(found) => table = Some(*found),
            RuleAttribute::Iifname(_) | RuleAttribute::Oifname(_) => return None,
            RuleAttribute::FwMask(mask) if *mask != u32::MAX => return None,
            _ => {}
        }
    }
    let has_only_mark =
        (dst_len, src_len, tos, action) == (0, 0, 0, RuleAction::ToTable) && !flags.contains(RuleFlags::Invert);
    mark.zip(table).filter(|_| has_only_mark)
}
