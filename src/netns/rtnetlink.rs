//! The kernel's routing socket (rtnetlink(7)) of the calling thread's network namespace: messages of the library
//! `netlink-packet-route` over the synchronous socket, and which errors count as success.

use crate::cni::{Code, Error};
use crate::netlink::{Attributes, DumpLimit, EXCEEDED, NetlinkSocket, is_lack_of_resources};
use netlink_packet_core::{Emitable, Parseable};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::rule::{RuleAction, RuleHeader};
use nix::errno::Errno;
use nix::sys::socket::SockProtocol;

/// The index of the interface lo: the kernel creates it first in every namespace (net/core/dev.c).
pub(super) const LO: u32 = 1;

/// The message types (linux/rtnetlink.h).
pub(super) const RTM_GETLINK: u16 = 18;
pub(super) const RTM_NEWADDR: u16 = 20;
pub(super) const RTM_DELADDR: u16 = 21;
pub(super) const RTM_GETADDR: u16 = 22;
pub(super) const RTM_NEWROUTE: u16 = 24;
pub(super) const RTM_DELROUTE: u16 = 25;
pub(super) const RTM_GETROUTE: u16 = 26;
pub(super) const RTM_NEWRULE: u16 = 32;
pub(super) const RTM_DELRULE: u16 = 33;
pub(super) const RTM_GETRULE: u16 = 34;

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
