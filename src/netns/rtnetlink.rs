//! The kernel's routing socket (rtnetlink(7)) of the calling thread's network namespace: message types, and which
//! errors count as success.

use crate::cni::{Code, Error};
use crate::netlink::{DumpLimit, EXCEEDED, NetlinkSocket, is_lack_of_resources};
use nix::errno::Errno;
use nix::sys::socket::SockProtocol;

/// The index of the interface lo: the kernel creates it first in every namespace (net/core/dev.c).
pub(super) const LO: u32 = 1;

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

/// Address families (linux/socket.h).
pub(super) const AF_INET: u8 = 2;
pub(super) const AF_INET6: u8 = 10;

/// The length of `struct rtmsg` and of `struct fib_rule_hdr` (linux/rtnetlink.h, linux/fib_rules.h).
pub(super) const HEADER: usize = 12;

/// The next step after IPv6 is refused on lo.
pub(super) const IP6_HINT: &str = "; check that sysctl does not disable IPv6 on lo";

/// Opens a routing socket in the calling thread's network namespace.
pub(super) fn open() -> Result<NetlinkSocket, Errno> {
    NetlinkSocket::open(SockProtocol::NetlinkRoute)
}

/// Accepts the error that an added object exists already.
pub(super) fn accept_existing(result: Result<(), Errno>) -> Result<(), Errno> {
    accept(result, &[Errno::EEXIST])
}

/// Accepts the errors that a removed object does not exist.
pub(super) fn accept_missing(result: Result<(), Errno>) -> Result<(), Errno> {
    accept(result, &[Errno::ENOENT, Errno::ESRCH, Errno::EADDRNOTAVAIL])
}

fn accept(result: Result<(), Errno>, accepted: &[Errno]) -> Result<(), Errno> {
    match result {
        Err(errno) if accepted.contains(&errno) => Ok(()),
        other => other,
    }
}

/// Returns the error of a failed request, like [`failed`], with a hint at the next step.
pub(super) fn failed_with_hint(what: &str, errno: &Errno, hint: &str) -> Error {
    let mut error = failed(what, errno);
    error.msg.push_str(hint);
    error
}

/// Returns the error of a failed request: [`Code::ForeignRules`] if the namespace contains too many objects,
/// [`Code::TryAgain`] if the node lacks memory, otherwise [`Code::KernelRefused`].
pub(super) fn failed(what: &str, errno: &Errno) -> Error {
    if *errno == EXCEEDED {
        let msg = format!("{what}: expected {}, got more; delete the pod", DumpLimit::USUAL);
        return Error::new(Code::ForeignRules, msg);
    }
    if is_lack_of_resources(*errno) {
        let msg = format!("{what}: {errno}: the node lacks memory or file descriptors; the runtime should retry");
        return Error::new(Code::TryAgain, msg);
    }
    Error::new(Code::KernelRefused, format!("{what}: {errno}"))
}
