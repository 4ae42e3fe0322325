//! Fixtures: what firewall rules need in the network namespace besides themselves, that is an address on lo and
//! TPROXY's policy routing. Fixtures are added before the rules, have no effect without them, and are removed when
//! no attachment needs them.

use super::routes::{deletion, message, out_interface, table};
use super::rtnetlink::{
    EXISTS, FAMILIES, IP6_HINT, LO, MISSING, RTM_DELADDR, RTM_DELROUTE, RTM_DELRULE, RTM_GETROUTE, RTM_GETRULE,
    RTM_NEWADDR, RTM_NEWROUTE, RTM_NEWRULE, accept, failed, list, open, request, rule_header,
};
use super::rtnetlink::{OwnFamilies, PROXY_LOOPBACK, own_families};
use crate::cni::Error;
use crate::netlink::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NetlinkSocket};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressHeader, AddressHeaderFlags, AddressMessage};
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
                    (Fixture::Route { .. } | Fixture::Rule { .. }, Some(socket)) => fixture.is_in_effect(socket)?,
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

    /// Removes the objects of these fixtures that `needed` does not have, and keeps only the fixtures that have an object in
    /// common with it.
    ///
    /// # Errors
    /// The kernel refuses a removal; all fixtures are kept.
    pub fn reduce(&mut self, needed: &Self) -> Result<(), Error> {
        let own = self.objects();
        remove_fixtures(&(&own - &needed.objects()))?;
        *self = needed.those_with(&own);
        Ok(())
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
    /// TPROXY's route `local default dev lo table TABLE`.
    Route {
        /// Whether it is for IPv6.
        ip6: bool,
        /// The routing table.
        table: u32,
    },
    /// TPROXY's policy rule `fwmark MARK lookup TABLE`.
    Rule {
        /// Whether it is for IPv6.
        ip6: bool,
        /// The routing table.
        table: u32,
        /// The firewall mark.
        mark: u32,
    },
}

impl fmt::Display for Fixture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = if self.is_ip6() { "IPv6" } else { "IPv4" };
        match self {
            Self::ProxyLoopback => f.write_str("address ::6/128 on lo"),
            Self::Route { table, .. } => write!(f, "{family} route local default dev lo table {table}"),
            Self::Rule { table, mark, .. } => write!(f, "{family} policy rule fwmark {mark:#x} lookup {table}"),
        }
    }
}

impl Fixture {
    const fn is_ip6(self) -> bool {
        match self {
            Self::ProxyLoopback => true,
            Self::Route { ip6, .. } | Self::Rule { ip6, .. } => ip6,
        }
    }

    const fn family(self) -> AddressFamily {
        if self.is_ip6() { AddressFamily::Inet6 } else { AddressFamily::Inet }
    }

    /// Returns whether the namespace has this policy rule, or this route as the first default route of its table; a later
    /// one has no effect.
    fn is_in_effect(self, socket: &mut NetlinkSocket) -> Result<bool, Errno> {
        match self {
            Self::Route { table, .. } => Ok(self.default_routes(socket, table)?.first().is_some_and(is_local)),
            _ => Ok(self.find_rule(socket)?.is_some()),
        }
    }

    /// Returns the default routes of a table in the order in which the kernel prefers them: routes for a type of service
    /// first, then by metric.
    fn default_routes(self, socket: &mut NetlinkSocket, own: u32) -> Result<Vec<RouteMessage>, Errno> {
        let mut routes: Vec<RouteMessage> = list(socket, RTM_GETROUTE, &self.route(own).header)?;
        routes.retain(|route| {
            let RouteHeader { address_family, destination_prefix_length, source_prefix_length, .. } = route.header;
            (address_family, destination_prefix_length, source_prefix_length) == (self.family(), 0, 0)
                && table(route) == own
        });
        let metric = |route: &RouteMessage| {
            route.attributes.iter().find_map(|attribute| match attribute {
                RouteAttribute::Priority(metric) => Some(*metric),
                _ => None,
            })
        };
        routes.sort_by_key(|route| (route.header.tos == 0, metric(route).unwrap_or_default()));
        Ok(routes)
    }

    /// Adds the object; an existing one is no error. A route replaces default routes of its table that precede it or have
    /// its metric.
    fn add(self, socket: &mut NetlinkSocket) -> Result<(), Error> {
        let added = match self {
            // Without this flag, the proxy can't bind to the address until duplicate address detection has finished.
            Self::ProxyLoopback => {
                let address = proxy_loopback(AddressHeaderFlags::Nodad);
                accept(request(socket, RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, &address), EXISTS)
            }
            Self::Route { table, .. } => self.add_route(socket, table),
            Self::Rule { table, mark, .. } => {
                let mut rule = RuleMessage::default();
                rule.header = rule_header(self.family());
                rule.attributes = vec![RuleAttribute::FwMark(mark), RuleAttribute::Table(table)];
                accept(request(socket, RTM_NEWRULE, NLM_F_CREATE | NLM_F_EXCL, &rule), EXISTS)
            }
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

    fn add_route(self, socket: &mut NetlinkSocket, table: u32) -> Result<(), Errno> {
        request(socket, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, &self.route(table))?;
        let others = self.default_routes(socket, table)?.into_iter().take_while(|route| !is_local(route));
        others.into_iter().try_for_each(|other| accept(request(socket, RTM_DELROUTE, 0, &deletion(other)), MISSING))
    }

    /// Removes the object; a missing one is no error.
    fn remove(self, socket: &mut NetlinkSocket) -> Result<(), Error> {
        let remove = |socket: &mut NetlinkSocket| match self {
            Self::ProxyLoopback => request(socket, RTM_DELADDR, 0, &proxy_loopback(AddressHeaderFlags::empty())),
            Self::Route { table, .. } => request(socket, RTM_DELROUTE, 0, &self.route(table)),
            Self::Rule { .. } => match self.find_rule(socket)? {
                Some(rule) => request(socket, RTM_DELRULE, 0, &rule),
                None => Ok(()),
            },
        };
        accept(remove(socket), MISSING).map_err(|errno| failed(&format!("can't remove the {self}"), errno, ""))
    }

    fn route(self, table: u32) -> RouteMessage {
        let header = RouteHeader {
            address_family: self.family(),
            protocol: RouteProtocol::Boot,
            scope: RouteScope::Host,
            kind: RouteType::Local,
            ..RouteHeader::default()
        };
        let mut attributes = vec![RouteAttribute::Oif(LO), RouteAttribute::Table(table)];
        // Without a metric, a removal for IPv6 matches any route of the table over lo.
        if self.is_ip6() {
            attributes.push(RouteAttribute::Priority(IP6_METRIC));
        }
        message(header, attributes)
    }

    /// Returns the policy rule as the kernel lists it.
    fn find_rule(self, socket: &mut NetlinkSocket) -> Result<Option<RuleMessage>, Errno> {
        let Self::Rule { table, mark, .. } = self else { return Ok(None) };
        let rules: Vec<RuleMessage> = list(socket, RTM_GETRULE, &rule_header(self.family()))?;
        Ok(rules.into_iter().find(|rule| by_mark(rule) == Some((mark, table))))
    }
}

/// Returns whether a default route delivers packets locally.
fn is_local(route: &RouteMessage) -> bool {
    route.header.kind == RouteType::Local && out_interface(route) == Some(LO)
}

fn proxy_loopback(flags: AddressHeaderFlags) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header =
        AddressHeader { family: AddressFamily::Inet6, prefix_len: 128, flags, index: LO, ..AddressHeader::default() };
    let address = PROXY_LOOPBACK.into();
    message.attributes = vec![AddressAttribute::Address(address), AddressAttribute::Local(address)];
    message
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
        families.flat_map(move |ip6| [Fixture::Route { ip6, table }, Fixture::Rule { ip6, table, mark }])
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
