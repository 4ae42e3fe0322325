//! One connection or datagram of a user's, and where it went by the kernel's own account.

use crate::cni::{Code, Error};
use crate::firewall::nfnetlink::{Connection, NfSocket};
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

/// How long a handshake over lo, or an answer, is waited for, in milliseconds.
const PROBE_TIMEOUT: u16 = 1000;

/// A process that sends, or a user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProbeUser {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// Where something that was sent went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProbeResult {
    /// Whose replies are its, as connection tracking has it: where its packets really go.
    pub(super) at: SocketAddr,
    /// Whether somebody took the connection, or answered.
    pub(super) taken: bool,
    /// Whether the token came back.
    pub(super) token: bool,
    /// How many entries connection tracking has for it.
    pub(super) entries: usize,
}

/// Sends `token` from the thread's network namespace. A datagram carries it at once; a connection only
/// where it is `listener` that takes it, lest somebody else's program is fed with it.
///
/// # Errors
/// It can't be sent, or the kernel says nothing of it.
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
            format!("uid {}, gid {}: sending as others needs CAP_SETUID and CAP_SETGID", user.uid, user.gid),
        ),
        errno => failed("no socket", errno),
    })?;
    let outcome = connect(socket.as_raw_fd(), &SockaddrStorage::from(to));
    if let Err(errno) = outcome
        && errno != Errno::EINPROGRESS
    {
        return Err(failed("it can't be sent there", errno));
    }
    let from = local(&socket).ok_or_else(|| failed("no address of its own", Errno::EINVAL))?;
    if protocol == Protocol::Udp {
        send(socket.as_raw_fd(), token, MsgFlags::empty()).map_err(|errno| failed("it can't be sent", errno))?;
    }
    let direction = if protocol == Protocol::Udp { PollFlags::POLLIN } else { PollFlags::POLLOUT };
    let (at, entries) = landing(protocol, from, to)?;
    // What leaves for an address that nobody has is not answered.
    let came = at != to && ready(&socket, direction);
    let taken = came && getsockopt(&socket, sockopt::SocketError).is_ok_and(|error| error == 0);
    let returned = match listener {
        Some(listener) if taken => echoed(TcpStream::from(socket), listener, token).unwrap_or(false),
        _ => false,
    };
    Ok(ProbeResult { at, taken, token: returned, entries })
}

/// The owner of a packet, for rules, is who opened its socket (xt_owner.c, nft_meta.c: the fsuid and
/// fsgid of the file), and those of a thread are its own.
fn owned_by(user: ProbeUser, protocol: Protocol, to: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let kind = if protocol == Protocol::Tcp { SockType::Stream } else { SockType::Datagram };
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    let before = (setfsgid(gid), setfsuid(uid));
    // A refusal is told by nothing but the value before that a second call gives (setfsuid(2), "BUGS").
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

/// What connection tracking has of it.
fn landing(protocol: Protocol, from: SocketAddr, to: SocketAddr) -> Result<(SocketAddr, usize), Error> {
    let number = if protocol == Protocol::Tcp { 6 } else { 17 };
    let unread = |error| Error::new(Code::KernelRefused, format!("connection tracking can't be read: {error}"));
    let is_it = |c: &Connection| (c.protocol, c.source, c.destination) == (number, from, to);
    let own = NfSocket::open().and_then(|mut socket| socket.connections(is_it)).map_err(unread)?;
    let elsewhere = own.iter().find(|connection| connection.answers != to);
    let landed = elsewhere.or(own.first()).map(|connection| connection.answers);
    let none = || Error::new(Code::KernelRefused, format!("connection tracking knows nothing of {from} to {to}"));
    Ok((landed.ok_or_else(none)?, own.len()))
}

/// Sends the token through, and has it sent back by who is behind `listener`.
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
