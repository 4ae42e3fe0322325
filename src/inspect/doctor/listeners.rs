//! Whether the proxy listens where the rules send traffic, and as whom.
//!
//! One connection or datagram of a user's, and where it went by the kernel's own account.

use super::pod::Users;
use super::report::CheckGroup;
use super::report::{Check, CheckVerdict, Results};
use super::rules::NETNS;
use super::rules::RULES;
use crate::cni::{Code, Error};
use crate::firewall::nfnetlink::{Connection, NfSocket};
use crate::netns::find::FoundNetns;
use crate::policy::{DnsCapture, Policy, Protocol, Redirect};
use crate::trusted_file::follow;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, connect, getsockname, getsockopt, send, socket,
    sockopt,
};
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

pub(super) const LISTENING: Check =
    Check::of(CheckGroup::Sandbox, "proxy-listening", "the proxy listens where traffic is sent to");
const USER: Check = Check::of(CheckGroup::Sandbox, "proxy-user", "it runs as the UID that the rules spare");

/// How long to wait for a call of the plugin that is at work in the namespace.
const LISTENER_TIMEOUT: Duration = Duration::from_secs(10);
/// How much of a table of sockets is read: a pod can open any number.
const READ_LIMIT: u64 = 16 << 20;
/// Where the proxy takes captured DNS (pilot-agent, `DNS_PROXY_ADDR`).
const DNS_PORT: u16 = 15053;
/// `TCP_LISTEN` (include/net/tcp_states.h), in hexadecimal.
const LISTEN: &str = "0A";

/// A socket that waits for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Listener {
    pub(super) port: u16,
    /// As the pod knows it.
    pub(super) uid: u32,
    pub(super) tcp: bool,
}

/// Looks. Who listens; `None` where that can't be known.
pub(super) fn examine(
    found: Option<&FoundNetns>,
    policy: Option<&Policy>,
    checkup: &mut Results,
) -> Option<Vec<Listener>> {
    let listeners = found.map(|found| found.open()?.enter(LISTENER_TIMEOUT, listeners));
    let redirect = policy.and_then(Policy::redirect);
    checkup.after(&[&NETNS], &LISTENING, || match (&listeners, redirect) {
        (Some(Ok(listeners)), Some(redirect)) => listening(listeners, redirect),
        (Some(Err(error)), _) => CheckVerdict::not_checked(error.to_string()),
        _ => CheckVerdict::not_checked("nothing is redirected by this plugin"),
    });
    let listeners = listeners.and_then(Result::ok);
    checkup.after(&[&NETNS, &RULES, &LISTENING], &USER, || match (&listeners, redirect) {
        (Some(listeners), Some(redirect)) => user(listeners, redirect),
        _ => CheckVerdict::not_checked("nothing is redirected by this plugin"),
    });
    listeners
}

fn wanted(redirect: &Redirect) -> Vec<(u16, bool)> {
    let dns = (redirect.dns != DnsCapture::Off).then_some([(DNS_PORT, true), (DNS_PORT, false)]);
    let tcp = [(redirect.proxy_port, true), (redirect.inbound_capture_port, true)];
    tcp.into_iter().chain(dns.into_iter().flatten()).collect()
}

fn listening(listeners: &[Listener], redirect: &Redirect) -> CheckVerdict {
    let spelled = |(port, tcp): &(u16, bool)| format!("{port}/{}", if *tcp { "tcp" } else { "udp" });
    let wanted = wanted(redirect);
    let is_there = |(port, tcp): &&(u16, bool)| listeners.iter().any(|l| (l.port, l.tcp) == (*port, *tcp));
    let missing: Vec<String> = wanted.iter().filter(|one| !is_there(one)).map(spelled).collect();
    if missing.is_empty() {
        return CheckVerdict::pass(wanted.iter().map(spelled).collect::<Vec<_>>().join(", "));
    }
    CheckVerdict::fail(
        format!("nobody listens on {}: what is sent there is refused", missing.join(", ")),
        "see kubectl logs -c istio-proxy of the pod; while init containers run it is not there yet, and what they send \
         must be excluded (detour explain says which)",
    )
}

fn user(listeners: &[Listener], redirect: &Redirect) -> CheckVerdict {
    let own = listeners.iter().filter(|l| l.tcp && l.port == redirect.proxy_port);
    let uids: Vec<u32> = own.map(|listener| listener.uid).collect();
    let spared = redirect.proxy_uid.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match uids.iter().find(|uid| !redirect.proxy_uid.contains(uid)) {
        None => CheckVerdict::pass(format!("uid {spared}")),
        Some(other) => CheckVerdict::fail(
            format!("the proxy listens as uid {other}, the rules spare uid {spared}: what it sends comes back to it"),
            format!(
                "set runAsUser of istio-proxy to {spared}, or proxy_uid of the configuration to {other}, and delete the pod"
            ),
        ),
    }
}

/// Those of the thread's network namespace (proc_net_tcp(5); the file of a thread is that of its
/// namespace).
fn listeners() -> Result<Vec<Listener>, Error> {
    let users = Users::here()?;
    let mut all = Vec::new();
    for (file, tcp) in [("tcp", true), ("tcp6", true), ("udp", false), ("udp6", false)] {
        let path = format!("/proc/thread-self/net/{file}");
        let failed = |error| Error::new(Code::Io, format!("reading the sockets failed: {path}: {error}"));
        let table = match follow(Path::new(&path)) {
            Ok(table) => BufReader::new(table.take(READ_LIMIT)),
            // IPv6 may be off.
            Err(_) if file.ends_with('6') => continue,
            Err(error) => return Err(failed(error)),
        };
        let mut read = 0;
        for line in table.lines() {
            let line = line.map_err(failed)?;
            read += line.len() as u64 + 1;
            all.extend(listener(&line, tcp));
        }
        if read >= READ_LIMIT {
            let mebibytes = READ_LIMIT >> 20;
            let msg = format!("reading the sockets failed: {path}: expected at most {mebibytes} MiB, got more");
            return Err(Error::new(Code::Io, msg));
        }
    }
    all.iter_mut().for_each(|listener: &mut Listener| listener.uid = users.inside(listener.uid));
    Ok(all)
}

fn listener(line: &str, tcp: bool) -> Option<Listener> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (_, port) = fields.get(1)?.split_once(':')?;
    // A socket of UDP that has no peer.
    let waits = if tcp { *fields.get(3)? == LISTEN } else { fields.get(2)?.ends_with(":0000") };
    waits.then_some(Listener { port: u16::from_str_radix(port, 16).ok()?, uid: fields.get(7)?.parse().ok()?, tcp })
}

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

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: &str =
        "   0: 0100007F:3A99 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1337        0 123 1";

    #[test]
    fn listeners_are_read_and_connections_are_not() {
        assert_eq!(listener(TCP, true), Some(Listener { port: 15001, uid: 1337, tcp: true }));
        assert_eq!(listener(&TCP.replace(" 0A ", " 01 "), true), None);
        assert_eq!(listener(&TCP.replace(" 0A ", " 07 "), false).map(|l| l.tcp), Some(false));
        assert_eq!(listener(&TCP.replace("00000000:0000 0A", "0100007F:1234 07"), false), None);
        assert_eq!(listener("garbage", true), None);
    }

    #[test]
    fn each_missing_port_is_named_and_dns_only_where_it_is_captured() {
        let at = |port, tcp| Listener { port, uid: 1337, tcp };
        let redirect = Redirect { dns: DnsCapture::All, ..Redirect::default() };
        let both = [at(15001, true), at(15006, true)];
        assert!(matches!(listening(&both, &Redirect::default()), CheckVerdict::Pass(_)));
        let verdict = listening(&[&both[..], &[at(15053, true)]].concat(), &redirect);
        assert!(
            matches!(verdict, CheckVerdict::Fail(found, _) if found.contains("15053/udp") && !found.contains("15001"))
        );
    }

    #[test]
    fn a_proxy_of_another_uid_is_named() {
        let verdict = user(&[Listener { port: 15001, uid: 7, tcp: true }], &Redirect::default());
        assert!(matches!(verdict, CheckVerdict::Fail(found, _) if found.contains("uid 7") && found.contains("1337")));
    }
}
