//! The kernel's routing side (rtnetlink(7)), asked from the thread that is in the namespace.

use crate::cni::{Code, Error};
use crate::netlink::{Allowance, NetlinkSocket, TOO_MANY};
use nix::errno::Errno;
use nix::sys::socket::SockProtocol;

/// The kernel gives lo this index in every namespace (net/core/dev.c: it is made first).
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

/// The length of `struct rtmsg` and of `struct fib_rule_hdr` (linux/rtnetlink.h, fib_rules.h).
pub(super) const HEADER: usize = 12;

/// A socket of the calling thread's namespace.
///
/// # Errors
/// No descriptor is left.
pub(super) fn open() -> Result<NetlinkSocket, Errno> {
    NetlinkSocket::open(SockProtocol::NetlinkRoute)
}

/// Treats an object that already exists as added.
pub(super) fn unless_there(result: Result<(), Errno>) -> Result<(), Errno> {
    unless(result, &[Errno::EEXIST])
}

/// Treats an object that does not exist as removed.
pub(super) fn unless_gone(result: Result<(), Errno>) -> Result<(), Errno> {
    unless(result, &[Errno::ENOENT, Errno::ESRCH, Errno::EADDRNOTAVAIL])
}

fn unless(result: Result<(), Errno>, fine: &[Errno]) -> Result<(), Errno> {
    match result {
        Err(errno) if fine.contains(&errno) => Ok(()),
        other => other,
    }
}

/// The error of a request: [`Code::ForeignRules`] if the namespace holds more than is read.
pub(super) fn failed(what: &str, why: &Errno) -> Error {
    if *why == TOO_MANY {
        let msg = format!("{what}: expected {}; got more; delete the pod", Allowance::USUAL);
        return Error::new(Code::ForeignRules, msg);
    }
    Error::new(Code::KernelRefused, format!("{what}: {why}"))
}
