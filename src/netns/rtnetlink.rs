//! The kernel's routing socket (rtnetlink(7)) of the calling thread's network namespace: messages of the library
//! `netlink-packet-route` over the synchronous socket, and which errors count as success; and the addresses and interfaces
//! that it lists.

use crate::cni::{Code, DEFAULT_INTERFACE, Error, is_matchable_interface};
use crate::netlink::attributes::find_text;
use crate::netlink::{Attributes, DumpLimit, EXCEEDED, NetlinkSocket, is_lack_of_resources};
use crate::wait;
use netlink_packet_core::{Emitable, Parseable};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressHeader, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::rule::{RuleAction, RuleHeader};
use nix::errno::Errno;
pub(super) use nix::libc::{
    RTM_DELADDR, RTM_DELROUTE, RTM_DELRULE, RTM_GETADDR, RTM_GETLINK, RTM_GETROUTE, RTM_GETRULE, RTM_NEWADDR,
    RTM_NEWROUTE, RTM_NEWRULE,
};
use nix::sys::socket::SockProtocol;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

/// The index of the interface lo: the kernel creates it first in every namespace (net/core/dev.c).
pub(super) const LO: u32 = 1;

/// The address families of a pod.
pub(super) const FAMILIES: [AddressFamily; 2] = [AddressFamily::Inet, AddressFamily::Inet6];

/// The next step after IPv6 is refused on lo.
pub(super) const IP6_HINT: &str = "; check that sysctl does not disable IPv6 on lo";

/// Returns the header of a policy rule that selects a routing table.
pub(super) fn rule_header(family: AddressFamily) -> RuleHeader {
    RuleHeader { family, action: RuleAction::ToTable, ..RuleHeader::default() }
}

/// Opens a routing socket in the calling thread's network namespace.
pub(super) fn open() -> Result<NetlinkSocket, Errno> {
    NetlinkSocket::open(SockProtocol::NetlinkRoute)
}

/// Returns a message as the kernel reads it.
pub(super) fn bytes(message: &impl Emitable) -> Vec<u8> {
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(&mut bytes);
    bytes
}

/// Sends a request and waits for the kernel's acknowledgement.
pub(super) fn request(socket: &mut NetlinkSocket, kind: u16, flags: u16, message: &impl Emitable) -> Result<(), Errno> {
    socket.request(kind, flags, &bytes(message), &[])
}

/// Lists the objects that `header` selects. Objects that the library can't parse are skipped: detour does not make
/// such objects.
pub(super) fn list<M: Parseable<[u8]>>(
    socket: &mut NetlinkSocket,
    kind: u16,
    header: &impl Emitable,
) -> Result<Vec<M>, Errno> {
    Ok(socket.list(kind, &bytes(header))?.iter().filter_map(|body| M::parse(body).ok()).collect())
}

/// Passes the objects that `header` selects to `each`, which may be inconsistent if they change meanwhile.
pub(super) fn dump<M: Parseable<[u8]>>(
    socket: &mut NetlinkSocket,
    kind: u16,
    header: &impl Emitable,
    mut each: impl FnMut(M),
) -> Result<(), Errno> {
    let each = |body: &[u8]| M::parse(body).into_iter().for_each(&mut each);
    socket.dump(kind, &bytes(header), &Attributes::new(), each).map(drop)
}

/// The error if an added object exists already.
pub(super) const EXISTS: &[Errno] = &[Errno::EEXIST];
/// The errors if a removed object does not exist, also because IPv6 is disabled.
pub(super) const MISSING: &[Errno] =
    &[Errno::ENOENT, Errno::ESRCH, Errno::EADDRNOTAVAIL, Errno::ENXIO, Errno::EOPNOTSUPP, Errno::EAFNOSUPPORT];

/// Treats these errors as success.
pub(super) fn accept(result: Result<(), Errno>, accepted: &[Errno]) -> Result<(), Errno> {
    match result {
        Err(errno) if accepted.contains(&errno) => Ok(()),
        other => other,
    }
}

/// Returns the error of a failed request: [`Code::ForeignRules`] if the namespace contains too many objects,
/// [`Code::TryAgain`] if the node lacks memory, otherwise [`Code::KernelRefused`] with a hint at the next step.
pub(super) fn failed(what: &str, errno: Errno, hint: &str) -> Error {
    let (code, cause) = match errno {
        EXCEEDED => (Code::ForeignRules, format!("expected {}, got more; delete the pod", DumpLimit::USUAL)),
        errno if is_lack_of_resources(errno) => {
            (Code::TryAgain, format!("{errno}: the node lacks memory or file descriptors; the runtime should retry"))
        }
        errno => (Code::KernelRefused, errno.to_string()),
    };
    Error::new(code, format!("{what}: {cause}{hint}"))
}

/// The IPv6 source address of inbound connections that the proxy forwards unchanged (Istio's passthrough cluster).
/// For IPv4 it is 127.0.0.6, which belongs to lo's 127.0.0.0/8; for IPv6 lo has only `::1`.
pub const PROXY_LOOPBACK: Ipv6Addr = Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6);

/// How long to wait for lo to be set up by the container runtime.
const LO_TIMEOUT: Duration = Duration::from_secs(2);
const LO_POLL_INTERVALS: wait::Intervals = [Duration::from_millis(1); 2];
/// How long the loopback plugin may take to list the addresses of lo after it has set lo up: less than 1 ms on an idle
/// node, but several time slices of other processes on a busy one.
const LO_CHECK_TIME: Duration = Duration::from_millis(100);
/// linux/if_link.h.
const IFLA_IFNAME: u16 = 3;

/// What the pod's addresses tell: the families in which it has an address that is neither loopback nor link-local, and
/// the state of lo.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OwnFamilies {
    /// The pod has an IPv4 address.
    pub ip: bool,
    /// The pod has an IPv6 address.
    pub ip6: bool,
    /// An interface has the address [`PROXY_LOOPBACK`].
    pub proxy_loopback: bool,
    /// lo has been set up: the kernel then gives it 127.0.0.1, and `::1` unless IPv6 is disabled.
    pub lo_was_up: bool,
}

/// Lists the pod's addresses that are neither loopback nor link-local.
///
/// # Errors
/// The request fails; [`Code::ForeignRules`](crate::cni::Code::ForeignRules) if there are too many addresses.
pub fn own_addresses() -> Result<Vec<IpAddr>, Error> {
    let mut own = Vec::new();
    each_address(|interface, address, _| own.extend(Some(address).filter(|address| is_own(interface, *address))))?;
    Ok(own)
}

/// Lists the pod's IPv6 addresses that are neither loopback nor link-local, with their interfaces, sorted by
/// interface name. It includes tentative addresses, which the kernel uses after duplicate address detection
/// (about a second), but not addresses that failed it, which the kernel never uses.
///
/// # Errors
/// As [`own_addresses`].
pub fn own_ip6_addresses() -> Result<Vec<(String, Ipv6Addr)>, Error> {
    let mut found = Vec::new();
    each_address(|interface, address, flags| match address {
        IpAddr::V6(ip6) if is_own(interface, address) && !flags.contains(AddressHeaderFlags::Dadfailed) => {
            found.push((interface, ip6));
        }
        _ => {}
    })?;
    let links = links()?;
    // If the interface was deleted after the first dump, so were its addresses.
    let named = found.into_iter().filter_map(|(index, address)| Some((links.get(&index)?.clone(), address)));
    Ok(named.collect::<BTreeSet<_>>().into_iter().collect())
}

/// Returns the address families in which the pod has addresses.
///
/// # Errors
/// As [`own_addresses`].
pub fn own_families() -> Result<OwnFamilies, Error> {
    let mut found = OwnFamilies::default();
    each_address(|interface, address, _| {
        match address {
            IpAddr::V4(_) => found.ip |= is_own(interface, address),
            IpAddr::V6(_) => found.ip6 |= is_own(interface, address),
        }
        found.proxy_loopback |= address == PROXY_LOOPBACK;
        found.lo_was_up |= interface == LO && address.is_loopback();
    })?;
    Ok(found)
}

fn is_own(interface: u32, address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    interface != LO && !address.is_loopback() && !link_local
}

/// Calls `each` with the interface index, the address and its flags.
fn each_address(mut each: impl FnMut(u32, IpAddr, AddressHeaderFlags)) -> Result<(), Error> {
    let mut list = || {
        let mut socket = open()?;
        // One dump for both families would wait for the RTNL mutex of the whole node, which is contended while many pods
        // start. Since Linux 6.9, a dump of one family does not take it (`inet_dump_ifaddr`, `inet6_dump_addr`).
        for family in FAMILIES {
            let header = AddressHeader { family, ..AddressHeader::default() };
            dump(&mut socket, RTM_GETADDR, &header, |listed: AddressMessage| {
                // A kernel without IPv6 lists the addresses of all families instead.
                if listed.header.family == family
                    && let Some(address) = address(&listed.attributes)
                {
                    each(listed.header.index, address, listed.header.flags);
                }
            })?;
        }
        Ok(())
    };
    list().map_err(|errno| failed("can't list the pod's addresses", errno, ""))
}

/// Returns the interface that has `address`; `None` if none has.
///
/// # Errors
/// As [`own_addresses`].
pub fn interface_with(address: IpAddr) -> Result<Option<String>, Error> {
    let mut found = None;
    each_address(|interface, own, _| found = found.or((own == address).then_some(interface)))?;
    Ok(found.map(|index| links().map(|mut links| links.remove(&index))).transpose()?.flatten())
}

/// Returns the interface's own address. On a point-to-point interface, the other one is the peer's.
fn address(attributes: &[AddressAttribute]) -> Option<IpAddr> {
    let (mut local, mut peer) = (None, None);
    for attribute in attributes {
        match attribute {
            AddressAttribute::Local(address) => local = Some(*address),
            AddressAttribute::Address(address) => peer = Some(*address),
            _ => {}
        }
    }
    local.or(peer)
}

/// Returns the interfaces other than lo and [`DEFAULT_INTERFACE`] whose names can be used in rules.
///
/// # Errors
/// As [`own_addresses`].
pub fn secondary_interfaces() -> Result<BTreeSet<String>, Error> {
    let is_other =
        |(index, name): &(u32, String)| *index != LO && name != DEFAULT_INTERFACE && is_matchable_interface(name);
    Ok(links()?.into_iter().filter(is_other).map(|(_, name)| name).collect())
}

/// Returns the names of all interfaces by index. Aliases such as `eth0:7` are not included: they are labels of
/// addresses, not interfaces.
pub(super) fn links() -> Result<BTreeMap<u32, String>, Error> {
    let mut links = BTreeMap::new();
    let each = |body: &[u8]| {
        // struct ifinfomsg { family, type, index, flags, change }
        let Some((header, attributes)) = body.split_first_chunk::<16>() else { return };
        let [_, _, _, _, a, b, c, d, ..] = *header;
        let name = find_text(attributes, IFLA_IFNAME).map(str::to_owned);
        links.extend(name.map(|name| (u32::from_ne_bytes([a, b, c, d]), name)));
    };
    // Interfaces that are added or removed during the dump may be included or missing.
    let listed = open().and_then(|mut socket| socket.dump(RTM_GETLINK, &[0; 16], &Attributes::new(), each));
    listed.map_err(|errno| failed("can't list the pod's interfaces", errno, ""))?;
    Ok(links)
}

/// Waits until lo has been set up and the runtime's loopback plugin has checked its addresses, if lo was not up when
/// `addresses` were listed.
///
/// Only in containerd's namespaces ([`NetNs::is_of_containerd`](super::NetNs::is_of_containerd)): containerd calls the
/// loopback plugin at the same time as the plugins of the pod's network (`attachNetworks` in go-cni). That plugin sets lo
/// up, lists its addresses and fails if one is not a loopback address (plugins/main/loopback), so fixtures must not exist
/// before.
///
/// If `addresses` were listed after that plugin had set lo up, but before it listed them, this does not wait: the kernel
/// does not report since when lo has been up.
///
/// # Errors
/// As [`own_addresses`].
pub fn wait_for_lo(addresses: OwnFamilies) -> Result<(), Error> {
    if addresses.lo_was_up {
        return Ok(());
    }
    let is_up = || Ok::<_, Error>(own_families()?.lo_was_up.then_some(()));
    if wait::until(LO_TIMEOUT, LO_POLL_INTERVALS, is_up)?.is_none() {
        tracing::warn!("lo is still down after {} s; the container runtime should set it up", LO_TIMEOUT.as_secs());
        return Ok(());
    }
    // The end of the loopback plugin's check can't be observed.
    wait::until(LO_CHECK_TIME, [LO_CHECK_TIME; 2], || Ok::<Option<()>, Error>(None)).map(drop)
}
