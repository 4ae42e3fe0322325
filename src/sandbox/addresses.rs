//! Addresses of the namespace that the calling thread is in.

use super::rtnl::{LO, RTM_DELADDR, RTM_NEWADDR, failed, open, unless_gone, unless_there};
use crate::cni::Error;
use crate::netlink::{Attributes, NLM_F_CREATE, NLM_F_EXCL};
use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr};

/// The IPv6 address that the proxy sends from when it passes an inbound connection on as it is.
/// For IPv4 it is 127.0.0.6, which lo has anyway; of IPv6 lo has `::1` only.
pub const PROXY_LOOPBACK: Ipv6Addr = Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6);

const AF_INET6: u8 = 10;
/// linux/if_addr.h.
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_F_NODAD: u8 = 2;

const UNLISTED: &str = "the pod's addresses can't be listed";

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
/// The kernel does not list them.
pub fn own_addresses() -> Result<Vec<IpAddr>, Error> {
    let interfaces = getifaddrs().map_err(|e| failed(UNLISTED, &e))?;
    let outer = interfaces.filter(|interface| !interface.flags.contains(InterfaceFlags::IFF_LOOPBACK));
    let addresses = outer.filter_map(|interface| {
        let address = interface.address?;
        let ip4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        ip4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))
    });
    let is_own = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    };
    Ok(addresses.filter(is_own).collect())
}

/// Looks at every interface.
///
/// # Errors
/// The kernel does not list them.
pub fn own_families() -> Result<OwnFamilies, Error> {
    let interfaces = getifaddrs().map_err(|e| failed(UNLISTED, &e))?;
    let mut found = OwnFamilies::default();
    for interface in interfaces {
        let Some(address) = interface.address else { continue };
        let ip4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        let Some(ip) = ip4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip()))) else { continue };
        let loopback = ip.is_loopback() || interface.flags.contains(InterfaceFlags::IFF_LOOPBACK);
        match ip {
            IpAddr::V4(ip) => found.ip |= !loopback && !ip.is_link_local(),
            IpAddr::V6(ip) => found.ip6 |= !loopback && !ip.is_unicast_link_local(),
        }
        found.proxy_loopback |= ip == PROXY_LOOPBACK;
    }
    Ok(found)
}

/// The interfaces that are there besides lo and the default network's, `eth0`.
///
/// # Errors
/// The kernel does not list them.
pub fn secondary_interfaces() -> Result<BTreeSet<String>, Error> {
    let interfaces = getifaddrs().map_err(|e| failed("the pod's interfaces can't be listed", &e))?;
    let others = interfaces.filter(|i| !i.flags.contains(InterfaceFlags::IFF_LOOPBACK) && i.interface_name != "eth0");
    Ok(others.map(|interface| interface.interface_name).collect())
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
