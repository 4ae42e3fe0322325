//! Echo requests of ICMP and ICMPv6.

use crate::support::new_netns::in_netns;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::time::Duration;

/// Returns whether `to` answers an echo request from a network namespace.
pub(super) fn is_answered(netns: &Path, to: IpAddr) -> bool {
    let (family, protocol, kind) = match to {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp, 8),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6, 128),
    };
    in_netns(netns, || {
        // For both families (icmp(7)). The kernel fills in the identifier and the checksum.
        std::fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0").expect("writable");
        let socket = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, protocol).expect("a socket for ICMP");
        let socket = UdpSocket::from(socket);
        socket.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
        let sent = socket.send_to(&[kind, 0, 0, 0, 0, 0, 0, 1], (to, 0));
        sent.is_ok() && socket.recv(&mut [0; 64]).is_ok()
    })
}
