//! The kernel's answer to which interface traffic leaves through.

use super::rtnetlink::{AF_INET, AF_INET6, HEADER, RTM_GETROUTE, RTM_NEWROUTE, failed, open};
use crate::cni::Error;
use crate::netlink::attributes::{Attributes, find};
use crate::netlink::{Messages, NLM_F_REQUEST, NLMSG_ERROR};
use nix::errno::Errno;
use nix::net::if_::if_indextoname;
use std::net::IpAddr;

/// linux/rtnetlink.h.
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;

/// Returns the interface through which the calling thread's network namespace sends packets to `address`; `None` without
/// a route.
///
/// # Errors
/// The kernel refuses the request.
pub fn outgoing_interface(address: IpAddr) -> Result<Option<String>, Error> {
    match lookup(address) {
        Ok(name) => Ok(Some(name)),
        Err(
            Errno::ENETUNREACH | Errno::EHOSTUNREACH | Errno::ENONET | Errno::EACCES | Errno::EINVAL | Errno::ENXIO,
        ) => Ok(None),
        Err(errno) => Err(failed(&format!("can't look up the route to {address}"), &errno)),
    }
}

fn lookup(address: IpAddr) -> Result<String, Errno> {
    let (family, bytes) = match address {
        IpAddr::V4(address) => (AF_INET, address.octets().to_vec()),
        IpAddr::V6(address) => (AF_INET6, address.octets().to_vec()),
    };
    // struct rtmsg { family, dst_len, … }
    let mut header = [0; HEADER];
    header[..2].copy_from_slice(&[family, u8::try_from(8 * bytes.len()).unwrap_or(u8::MAX)]);
    let destination = Attributes::of(|list| list.bytes(RTA_DST, &bytes));
    let mut socket = open()?;
    let sequence = socket.next_sequence();
    socket.send(Messages::one(RTM_GETROUTE, NLM_F_REQUEST, sequence, &header, destination.as_bytes()).as_bytes())?;
    loop {
        for reply in socket.receive()?.filter(|reply| reply.sequence == sequence) {
            match reply.kind {
                NLMSG_ERROR => return Err(Errno::from_raw(reply.errno())),
                RTM_NEWROUTE => {
                    let index = reply.body.get(HEADER..).and_then(|attributes| find(attributes, RTA_OIF));
                    let index = index.and_then(|bytes| Some(u32::from_ne_bytes(bytes.try_into().ok()?)));
                    let name = if_indextoname(index.ok_or(Errno::ENONET)?)?;
                    return Ok(name.to_string_lossy().into_owned());
                }
                _ => {}
            }
        }
    }
}
