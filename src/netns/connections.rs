//! The TCP sockets of the calling thread's network namespace (sock_diag(7), linux/inet_diag.h): established connections,
//! and the ports that listen.

use super::rtnetlink::failed;
use crate::cni::Error;
use crate::netlink::NetlinkSocket;
use crate::netlink::attributes::Attributes;
use nix::errno::Errno;
use nix::sys::socket::SockProtocol;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
/// `TCPF_ESTABLISHED` and `TCPF_LISTEN` (net/tcp_states.h).
const ESTABLISHED: u32 = 1 << 1;
const LISTEN: u32 = 1 << 10;

/// An established TCP connection of a process in the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenConnection {
    /// The address and port of the pod.
    pub local: SocketAddr,
    /// The address and port of the peer.
    pub remote: SocketAddr,
    /// The UID of the process that created the socket.
    pub uid: u32,
}

/// Lists the established TCP connections over IPv4 and IPv6.
///
/// # Errors
/// The request fails; [`Code::ForeignRules`](crate::cni::Code::ForeignRules) if there are too many connections.
pub fn open_connections() -> Result<Vec<OpenConnection>, Error> {
    sockets(ESTABLISHED)
}

/// Lists the ports on which processes listen over IPv4 or IPv6, each with the UID of the process.
///
/// # Errors
/// As [`open_connections`].
pub fn listening_ports() -> Result<Vec<(u16, u32)>, Error> {
    Ok(sockets(LISTEN)?.iter().map(|socket| (socket.local.port(), socket.uid)).collect())
}

fn sockets(states: u32) -> Result<Vec<OpenConnection>, Error> {
    let list = || -> Result<Vec<OpenConnection>, Errno> {
        let mut socket = NetlinkSocket::open(SockProtocol::NetlinkSockDiag)?;
        let mut found = Vec::new();
        for family in [AF_INET, AF_INET6] {
            let each = |body: &[u8]| found.extend(connection(body));
            socket.dump(SOCK_DIAG_BY_FAMILY, &request(family, states), &Attributes::new(), each)?;
        }
        Ok(found)
    };
    list().map_err(|errno| failed("can't list the pod's TCP connections", errno, ""))
}

/// Returns a `struct inet_diag_req_v2` that selects all TCP sockets of a family in these states.
fn request(family: u8, states: u32) -> [u8; 56] {
    let mut request = [0; 56];
    request[..4].copy_from_slice(&[family, IPPROTO_TCP, 0, 0]);
    request[4..8].copy_from_slice(&states.to_ne_bytes());
    request
}

/// Returns whether a process accepts TCP connections to a port of 127.0.0.1 or `::1`.
///
/// # Errors
/// The kernel does not list the sockets.
pub fn listens(port: u16) -> Result<bool, Error> {
    let accepts =
        |ip: IpAddr| ip.is_unspecified() || [IpAddr::V4(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()].contains(&ip);
    Ok(sockets(LISTEN)?.iter().any(|socket| socket.local.port() == port && accepts(socket.local.ip())))
}

/// Parses a `struct inet_diag_msg`; `None` if it is truncated.
pub(crate) fn connection(body: &[u8]) -> Option<OpenConnection> {
    let port = |at: usize| body.get(at..at + 2)?.try_into().ok().map(u16::from_be_bytes);
    let address = |at: usize| match *body.first()? {
        AF_INET => <[u8; 4]>::try_from(body.get(at..at + 4)?).ok().map(IpAddr::from),
        // A dual-stack socket has IPv4-mapped IPv6 addresses.
        _ => <[u8; 16]>::try_from(body.get(at..at + 16)?).ok().map(|octets| IpAddr::from(octets).to_canonical()),
    };
    Some(OpenConnection {
        local: SocketAddr::new(address(8)?, port(4)?),
        remote: SocketAddr::new(address(24)?, port(6)?),
        uid: body.get(64..68)?.try_into().ok().map(u32::from_ne_bytes)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    #[test]
    fn connections_of_both_families_are_listed_with_their_uid() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(host).expect("a listener");
            let own = TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
            let expected = OpenConnection {
                local: own.local_addr().expect("an address"),
                remote: own.peer_addr().expect("an address"),
                uid: nix::unistd::geteuid().as_raw(),
            };
            assert!(open_connections().expect("listed").contains(&expected), "{expected:?}");
        }
    }

    #[test]
    fn a_port_listens_as_long_as_a_socket_accepts_connections_to_the_loopback_address() {
        for host in ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0", "[::]:0"] {
            let listener = TcpListener::bind(host).expect("a listener");
            let port = listener.local_addr().expect("an address").port();
            assert!(listens(port).expect("answered"), "{host}");
            let own = (port, nix::unistd::geteuid().as_raw());
            assert!(listening_ports().expect("listed").contains(&own), "{host}");
            // A connection from this port is no listener.
            let client = TcpStream::connect(("localhost", port)).or_else(|_| TcpStream::connect(("::1", port)));
            let client = client.expect("connected").local_addr().expect("an address").port();
            assert!(!listens(client).expect("answered"), "{host}");
            drop(listener);
            // Another test may have forked a process that still has the socket.
            let deadline = Instant::now() + Duration::from_secs(60);
            while listens(port).expect("answered") {
                assert!(Instant::now() < deadline, "{host}: the socket is closed");
                std::thread::park_timeout(Duration::from_millis(1));
            }
        }
        let elsewhere = TcpListener::bind("127.0.0.2:0").expect("a listener").local_addr().expect("an address");
        assert!(!listens(elsewhere.port()).expect("answered"));
    }

    #[test]
    fn a_truncated_message_is_ignored() {
        assert_eq!(connection(&[AF_INET; 40]), None);
        assert_eq!(connection(&[]), None);
    }
}
