//! Single probes: a connection or a datagram that is sent as a given user, and its fate according to connection tracking.

use crate::cni::{Code, Error};
use crate::firewall::nfnetlink::{Connection, NfSocket};
use crate::firewall::rule::protocol_number;
use crate::inspect::doctor::listeners::ProbeUser;
use crate::policy::Protocol;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, connect, getsockname, getsockopt, send, socket,
    sockopt,
};
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

/// The timeout for a handshake over lo, and for an answer, in milliseconds.
const PROBE_TIMEOUT: u16 = 1000;

/// The fate of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProbeResult {
    /// The source of the replies according to connection tracking: the real destination of the packets.
    pub(super) at: SocketAddr,
    /// Whether the connection was accepted, or the datagram answered.
    pub(super) taken: bool,
    /// Whether the token was echoed.
    pub(super) token: bool,
    /// The number of connection tracking entries.
    pub(super) entries: usize,
}

/// Sends a probe with `token` from the thread's network namespace. A datagram carries the token at once; a connection
/// only if `listener` accepts it, so that no other program receives the token.
///
/// # Errors
/// The probe can't be sent, or connection tracking has no entry for it.
pub(super) fn send_as(
    user: ProbeUser,
    protocol: Protocol,
    to: SocketAddr,
    token: &[u8],
    listener: Option<&TcpListener>,
) -> Result<ProbeResult, Error> {
    let failed = |what: &str, errno: Errno| Error::new(Code::Io, format!("{to}/{protocol}: {what}: {errno}"));
    let socket = owned_by(user, protocol, to).map_err(|errno| match errno {
        Errno::EPERM => Error::new(
            Code::Io,
            format!("UID {}, GID {}: sending as another user needs CAP_SETUID and CAP_SETGID", user.uid, user.gid),
        ),
        errno => failed("can't open a socket", errno),
    })?;
    let outcome = connect(socket.as_raw_fd(), &SockaddrStorage::from(to));
    if let Err(errno) = outcome
        && errno != Errno::EINPROGRESS
    {
        return Err(failed("can't connect", errno));
    }
    let from = local(&socket).ok_or_else(|| failed("the socket has no local address", Errno::EINVAL))?;
    if protocol == Protocol::Udp {
        send(socket.as_raw_fd(), token, MsgFlags::empty()).map_err(|errno| failed("can't send", errno))?;
    }
    let direction = if protocol == Protocol::Udp { PollFlags::POLLIN } else { PollFlags::POLLOUT };
    let (at, entries) = fate(protocol, from, to)?;
    // The destination is reserved for documentation: only a redirected probe is answered.
    let came = at != to && ready(&socket, direction);
    let taken = came && getsockopt(&socket, sockopt::SocketError).is_ok_and(|error| error == 0);
    let returned = match listener {
        Some(listener) if taken => echoed(TcpStream::from(socket), listener, token).unwrap_or(false),
        _ => false,
    };
    Ok(ProbeResult { at, taken, token: returned, entries })
}

/// Opens a socket as `user`. Rules match the fsuid and fsgid of the thread that opened the socket (xt_owner.c,
/// nft_meta.c).
fn owned_by(user: ProbeUser, protocol: Protocol, to: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let kind = if protocol == Protocol::Tcp { SockType::Stream } else { SockType::Datagram };
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    let before = (setfsgid(gid), setfsuid(uid));
    // setfsuid(2) reports no error: only a second call shows whether the first one took effect ("BUGS").
    let is_user = (setfsgid(gid), setfsuid(uid)) == (gid, uid);
    let socket = match is_user {
        true => socket(family, kind, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None),
        false => Err(Errno::EPERM),
    };
    setfsuid(before.1);
    setfsgid(before.0);
    socket
}

fn local(socket: &OwnedFd) -> Option<SocketAddr> {
    let address: SockaddrStorage = getsockname(socket.as_raw_fd()).ok()?;
    let v4 = address.as_sockaddr_in().map(|a| SocketAddr::from((a.ip(), a.port())));
    v4.or_else(|| address.as_sockaddr_in6().map(|a| SocketAddr::from((a.ip(), a.port()))))
}

fn ready(socket: &OwnedFd, flags: PollFlags) -> bool {
    let mut fds = [PollFd::new(socket.as_fd(), flags)];
    poll(&mut fds, PollTimeout::from(PROBE_TIMEOUT)).is_ok_and(|ready| ready > 0)
}

/// Returns the real destination and the number of connection tracking entries.
fn fate(protocol: Protocol, from: SocketAddr, to: SocketAddr) -> Result<(SocketAddr, usize), Error> {
    let unread = |error| Error::new(Code::KernelRefused, format!("can't read connection tracking: {error}"));
    let is_it = |c: &Connection| (c.protocol, c.source, c.destination) == (protocol_number(protocol), from, to);
    let own = NfSocket::open().and_then(|mut socket| socket.connections(is_it)).map_err(unread)?;
    let elsewhere = own.iter().find(|connection| connection.replies_from != to);
    let landed = elsewhere.or(own.first()).map(|connection| connection.replies_from);
    let none = || Error::new(Code::KernelRefused, format!("connection tracking has no entry for {from} to {to}"));
    Ok((landed.ok_or_else(none)?, own.len()))
}

/// Sends the token to `listener` and returns whether the echo is equal.
fn echoed(mut own: TcpStream, listener: &TcpListener, token: &[u8]) -> std::io::Result<bool> {
    let patience = Some(Duration::from_millis(PROBE_TIMEOUT.into()));
    let (mut other, _) = listener.accept()?;
    let mut text = vec![0; token.len()];
    for stream in [&own, &other] {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(patience)?;
        stream.set_write_timeout(patience)?;
    }
    own.write_all(token)?;
    other.read_exact(&mut text)?;
    other.write_all(&text)?;
    let mut back = vec![0; token.len()];
    own.read_exact(&mut back)?;
    Ok(back == token)
}
