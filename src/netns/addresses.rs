//! Addresses of the namespace that the calling thread is in.

use super::{LO, RTM_DELADDR, RTM_GETADDR, RTM_GETLINK, RTM_NEWADDR, failed, open, unless_gone, unless_there};
use crate::cni::{DEFAULT_INTERFACE, Error, is_interface_of_rules};
use crate::netlink::attributes::{Attributes, find, find_text};
use crate::netlink::{NLM_F_CREATE, NLM_F_EXCL};
use nix::errno::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};

/// The IPv6 address that the proxy sends from when it passes an inbound connection on as it is.
/// For IPv4 it is 127.0.0.6, which lo has anyway; of IPv6 lo has `::1` only.
pub const PROXY_LOOPBACK: Ipv6Addr = Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6);

const AF_INET6: u8 = 10;
/// linux/if_addr.h.
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_F_NODAD: u8 = 2;
const IFA_F_DADFAILED: u8 = 8;
/// linux/if_link.h.
const IFLA_IFNAME: u16 = 3;

/// Whether the pod has addresses of its own, neither loopback nor link-local, of either family.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct OwnFamilies {
    /// An IPv4 address.
    pub ip: bool,
    /// An IPv6 address.
    pub ip6: bool,
    /// [`PROXY_LOOPBACK`] is there.
    pub proxy_loopback: bool,
}

/// The addresses of the pod's own, neither loopback nor link-local.
///
/// # Errors
/// The kernel does not list them; [`Code::ForeignRules`](crate::cni::Code::ForeignRules) if there are too many.
pub fn own_addresses() -> Result<Vec<IpAddr>, Error> {
    let mut own = Vec::new();
    each_address(|interface, address, _| own.extend(Some(address).filter(|address| is_own(interface, *address))))?;
    Ok(own)
}

/// The pod's own IPv6 addresses, each with the name of its interface, in the order of their names. An address
/// that is still checked for duplicates counts, for the kernel uses it within a second; one that another host
/// has does not, for the kernel never uses it.
///
/// # Errors
/// As [`own_addresses`].
pub fn own_ip6_addresses() -> Result<Vec<(String, Ipv6Addr)>, Error> {
    let mut found = Vec::new();
    each_address(|interface, address, flags| match address {
        IpAddr::V6(ip6) if is_own(interface, address) && flags & IFA_F_DADFAILED == 0 => found.push((interface, ip6)),
        _ => {}
    })?;
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let links = links()?;
    // An interface that is gone took its addresses with it.
    let named = found.into_iter().filter_map(|(index, address)| Some((links.get(&index)?.clone(), address)));
    Ok(named.collect::<BTreeSet<_>>().into_iter().collect())
}

/// Looks at every interface.
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

/// Calls `each` with the index of the interface, the address and its flags.
fn each_address(mut each: impl FnMut(u32, IpAddr, u8)) -> Result<(), Error> {
    list(RTM_GETADDR, &[0; 8], |body| {
        // struct ifaddrmsg { family, prefixlen, flags, scope, index }
        let Some((header, attributes)) = body.split_first_chunk::<8>() else { return };
        let [_, _, flags, _, a, b, c, d] = *header;
        // Where both are given, the other one is the peer's.
        let address = find(attributes, IFA_LOCAL).or_else(|| find(attributes, IFA_ADDRESS)).unwrap_or_default();
        let v4 = <[u8; 4]>::try_from(address).map(IpAddr::from);
        let address = v4.or_else(|_| <[u8; 16]>::try_from(address).map(IpAddr::from));
        address.into_iter().for_each(|address| each(u32::from_ne_bytes([a, b, c, d]), address, flags));
    })
    .map_err(|e| failed("listing the pod's addresses failed", &e))
}

/// The interfaces that are there besides lo and [`DEFAULT_INTERFACE`], as far as rules can name them.
///
/// # Errors
/// As [`own_addresses`].
pub fn secondary_interfaces() -> Result<BTreeSet<String>, Error> {
    let is_other =
        |(index, name): &(u32, String)| *index != LO && name != DEFAULT_INTERFACE && is_interface_of_rules(name);
    Ok(links()?.into_iter().filter(is_other).map(|(_, name)| name).collect())
}

/// The names of all interfaces by index. An alias such as `eth0:7` is a label of an address and no interface,
/// so that it is not among them.
fn links() -> Result<BTreeMap<u32, String>, Error> {
    let mut links = BTreeMap::new();
    let listed = list(RTM_GETLINK, &[0; 16], |body| {
        // struct ifinfomsg { family, type, index, flags, change }
        let Some((header, attributes)) = body.split_first_chunk::<16>() else { return };
        let [_, _, _, _, a, b, c, d, ..] = *header;
        let name = find_text(attributes, IFLA_IFNAME).map(str::to_owned);
        links.extend(name.map(|name| (u32::from_ne_bytes([a, b, c, d]), name)));
    });
    listed.map_err(|e| failed("listing the pod's interfaces failed", &e))?;
    Ok(links)
}

/// Objects that come or go while they are listed may be among them or not.
fn list(kind: u16, header: &[u8], each: impl FnMut(&[u8])) -> Result<(), Errno> {
    open()?.dump(kind, header, &Attributes::new(), each).map(drop)
}

/// Gives lo the address [`PROXY_LOOPBACK`].
///
/// # Errors
/// The kernel refuses; that it has the address already is none.
pub(super) fn add_proxy_loopback() -> Result<(), Error> {
    // Else it can't be bound to for the first milliseconds, until the kernel has thought of duplicates.
    unless_there(proxy_loopback(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, IFA_F_NODAD))
        .map_err(|e| failed("lo can't be given the address ::6 (is IPv6 off by sysctl on lo?)", &e))
}

/// Takes [`PROXY_LOOPBACK`] from lo.
///
/// # Errors
/// The kernel refuses; that there is no such address is none.
pub(super) fn remove_proxy_loopback() -> Result<(), Error> {
    // Where IPv6 is off, lo has no addresses of it at all.
    match proxy_loopback(RTM_DELADDR, 0, 0) {
        Err(Errno::ENXIO | Errno::EOPNOTSUPP | Errno::EAFNOSUPPORT) => Ok(()),
        other => unless_gone(other).map_err(|e| failed("the address ::6 can't be taken from lo", &e)),
    }
}

/// A request for this address, with `struct ifaddrmsg` as its header.
fn proxy_loopback(kind: u16, flags: u16, address_flags: u8) -> Result<(), Errno> {
    let [a, b, c, d] = LO.to_ne_bytes();
    let header = [AF_INET6, 128, address_flags, 0, a, b, c, d];
    let octets = PROXY_LOOPBACK.octets();
    let attributes = Attributes::new().bytes(IFA_ADDRESS, &octets).bytes(IFA_LOCAL, &octets);
    open()?.request(kind, flags, &header, attributes.as_bytes())
}
