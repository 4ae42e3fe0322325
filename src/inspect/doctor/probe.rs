//! Checks with real packets (`--probe`): a few are sent in the pod's network namespace to addresses that are reserved for
//! documentation, and the real destination of each is compared with the policy.
//!
//! The application receives nothing. A connection that the proxy accepts is closed without a byte. If no process listens
//! on the proxy's port, the doctor listens there for the moment.

use super::findings::Findings;
use super::report::CheckVerdict;
use super::rules::{NO_ATTACHMENT, root_of_pod};
use crate::cni::{DEFAULT_INTERFACE, Error};
use crate::firewall::nfnetlink::{Connection, NfSocket};
use crate::firewall::rule::protocol_number;
use crate::firewall::{Arrival, Destination, Packet, RuleFormat, RulesetView, Sender};
use crate::inspect::rules::LOCK_TIMEOUT;
use crate::netns::own_addresses;
use crate::pod::Pod;
use crate::policy::{DnsCapture, Ipv6, Policy, Protocol, TrafficOwner};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};

const DNS_PORT: u16 = 53;
/// A DNS query for the address of `detour.invalid` (RFC 1035, section 4.1; RFC 2606).
const QUERY: &[u8] = b"\0\x01\x01\0\0\x01\0\0\0\0\0\0\x06detour\x07invalid\0\0\x01\0\x01";
/// UIDs that no container uses: `nobody`, and one above OpenShift's ranges.
const UNUSED_UIDS: [u32; 2] = [65534, 2_000_000_001];
const DETOURED: &str = "follow such a packet rule by rule with detour trace; see rules-first and rules-equal";

/// The number of UIDs and GIDs of a pod with `hostUsers: false`, from 0 (KEP-127).
const OWN_IDS: u32 = 65536;

/// The UID and GID that a probe is sent as, as the pod knows them.
#[derive(Debug, Clone, Copy)]
struct ProbeUser {
    uid: u32,
    gid: u32,
}

/// What the probes need: policy, rules and users.
struct Probes<'a> {
    policy: &'a Policy,
    view: RulesetView,
    own: Vec<IpAddr>,
    /// Users of the pod's containers, and users without a container.
    users: Vec<ProbeUser>,
    /// Users that exclusions name.
    owners: Vec<ProbeUser>,
    /// The pod's root user, as this process knows it.
    root: u32,
    /// Addresses and ports of two runs differ.
    random: u64,
}

/// Sends a connection and a DNS query that the policy sends to the sidecar.
pub(super) fn captured(findings: &Findings<'_>) -> CheckVerdict {
    probe(findings, |probes| probes.run(&probes.users, |arrival| matches!(arrival, Arrival::Sidecar(_))))
}

/// Sends a connection and a DNS query of users that exclusions name.
pub(super) fn excluded(findings: &Findings<'_>) -> CheckVerdict {
    probe(findings, |probes| probes.run(&probes.owners, |arrival| arrival == Arrival::Direct))
}

/// Sends probes from the pod's network namespace.
fn probe(findings: &Findings<'_>, send: fn(&Probes<'_>) -> CheckVerdict) -> CheckVerdict {
    let (Some(found), Some(policy)) = (findings.found(), findings.policy()) else {
        return CheckVerdict::not_checked(NO_ATTACHMENT);
    };
    let work = || Probes::of(policy, findings.pod()).map(|probes| send(&probes));
    let verdict = found.open().and_then(|netns| netns.enter(LOCK_TIMEOUT, work));
    verdict.unwrap_or_else(|error| CheckVerdict::not_checked(error.to_string()))
}

impl<'a> Probes<'a> {
    fn of(policy: &'a Policy, pod: Option<&Pod>) -> Result<Self, Error> {
        let known = pod.into_iter().flat_map(|pod| pod.all_containers().map(move |container| (pod, container)));
        let known = known.filter_map(|(pod, container)| {
            let uid = u32::try_from(pod.user_of(container)?).ok()?;
            let gid = pod.group_of(container).and_then(|gid| u32::try_from(gid).ok());
            Some(ProbeUser { uid, gid: gid.unwrap_or(uid) })
        });
        let strangers = UNUSED_UIDS.map(|id| ProbeUser { uid: id, gid: id });
        let root = root_of_pod()?;
        let is_own = |user: &ProbeUser| root == 0 || user.uid.max(user.gid) < OWN_IDS;
        let users: Vec<ProbeUser> = known.chain(strangers).filter(is_own).collect();
        let owners = policy.exclusions.iter().filter_map(|exclusion| match exclusion.owner {
            TrafficOwner::Any => users.first().copied(),
            TrafficOwner::Uid(range) => Some(ProbeUser { uid: range.first, gid: UNUSED_UIDS[0] }),
            TrafficOwner::Gid(range) => Some(ProbeUser { uid: UNUSED_UIDS[0], gid: range.first }),
        });
        // Packets arrive at the same destinations in both rule formats.
        let view = RulesetView::of_policy(policy, RuleFormat::default());
        let (owners, random) = (owners.filter(is_own).collect(), RandomState::new().hash_one(0));
        Ok(Self { policy, view, own: own_addresses()?, users, owners, root, random })
    }

    /// Returns an address that is reserved for documentation (RFC 5737, RFC 3849), for each address family of the pod
    /// that has rules.
    fn nowhere(&self) -> Vec<IpAddr> {
        let [last, ..] = self.random.to_be_bytes().map(|byte| byte.clamp(1, 254));
        let v6 = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into());
        let both = [IpAddr::V4(Ipv4Addr::new(192, 0, 2, last)), v6.into()];
        both.into_iter().filter(|ip| self.serves(*ip)).collect()
    }

    fn serves(&self, ip: IpAddr) -> bool {
        let off = ip.is_ipv6() && self.policy.redirect().is_some_and(|redirect| redirect.ipv6 == Ipv6::Off);
        !off && self.own.iter().any(|own| own.is_ipv4() == ip.is_ipv4())
    }

    /// Returns the destination according to the policy.
    fn wanted(&self, user: ProbeUser, to: SocketAddr, protocol: Protocol) -> Arrival {
        let from = Sender::Process { uid: user.uid, gid: Some(user.gid), set: None };
        let packet = Packet::first(from, Destination { address: to, protocol }, &self.own, DEFAULT_INTERFACE);
        self.view.evaluate(packet).arrival
    }

    /// Sends a connection and a DNS query of each address family whose destination, according to the policy, `is_wanted`.
    fn run(&self, users: &[ProbeUser], is_wanted: fn(Arrival) -> bool) -> CheckVerdict {
        let to = |ips: Vec<IpAddr>, port| ips.into_iter().map(move |ip| SocketAddr::new(ip, port));
        let tcp = to(self.nowhere(), 20_000 + (self.random % 10_000) as u16).map(|to| (to, Protocol::Tcp));
        let dns = to(self.resolvers(), DNS_PORT).map(|to| (to, Protocol::Udp));
        let (mut sent, mut verdicts) = (Vec::new(), Vec::new());
        for (to, protocol) in tcp.chain(dns) {
            let is_wanted = |user: &&ProbeUser| is_wanted(self.wanted(**user, to, protocol));
            let user = users.iter().find(is_wanted).filter(|_| !sent.contains(&(protocol, to.is_ipv4())));
            if let Some(user) = user {
                sent.push((protocol, to.is_ipv4()));
                verdicts.push(self.send(*user, to, protocol));
            }
        }
        CheckVerdict::merged(verdicts)
    }

    /// Returns the resolvers whose queries may be captured or excluded.
    fn resolvers(&self) -> Vec<IpAddr> {
        let captured = match self.policy.redirect().map(|redirect| &redirect.dns) {
            Some(DnsCapture::Servers { v4, v6 }) => (v4.as_slice(), v6.as_slice()),
            _ => Default::default(),
        };
        let captured = captured.0.iter().map(|ip| IpAddr::V4(*ip)).chain(captured.1.iter().map(|ip| IpAddr::V6(*ip)));
        let excluded = self.policy.exclusions.iter().filter_map(|one| one.destination).map(|net| net.addr());
        let named = captured.chain(excluded).filter(|ip| self.serves(*ip));
        self.nowhere().into_iter().chain(named).collect()
    }

    /// Sends a probe, and compares its destination with the policy. The answers to a query that is tracked twice are lost.
    fn send(&self, user: ProbeUser, to: SocketAddr, protocol: Protocol) -> CheckVerdict {
        let ProbeUser { uid, gid } = user;
        let outside = ProbeUser { uid: self.root.saturating_add(uid), gid: self.root.saturating_add(gid) };
        let proxy_port = self.policy.redirect().map_or(0, |redirect| redirect.proxy_port);
        let loopback: IpAddr = if to.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
        // Connection tracking forgets a connection that is refused. The port is in use if the proxy listens.
        let _in_its_place = TcpListener::bind((loopback, proxy_port));
        let (at, entries) = match send_as(outside, protocol, to) {
            Ok(fate) => fate,
            Err(error) => return CheckVerdict::not_checked(format!("{to}/{protocol}: {error}")),
        };
        let wanted = self.wanted(user, to, protocol);
        let is_there = match wanted {
            Arrival::Sidecar(port) | Arrival::Ztunnel(port) | Arrival::Redirected(port) => {
                at != to && at.port() == port
            }
            Arrival::Direct | Arrival::Dropped | Arrival::Rejected | Arrival::Unknown => at == to && entries == 1,
        };
        let went = if at == to { "directly".to_owned() } else { format!("to {at}") };
        let entries = if entries == 1 { "1 entry".to_owned() } else { format!("{entries} entries") };
        let found =
            format!("UID {uid}, GID {gid} to {to}/{protocol} went {went} (connection tracking, with {entries})");
        match is_there {
            true => CheckVerdict::pass(found),
            false => CheckVerdict::fail(format!("{found}; expected {wanted}"), DETOURED),
        }
    }
}

/// Sends a probe from the thread's network namespace: a DNS query, or a connection without a byte. Returns its
/// real destination and the number of its connection tracking entries.
///
/// # Errors
/// The probe can't be sent, or connection tracking has no entry for it.
fn send_as(user: ProbeUser, protocol: Protocol, to: SocketAddr) -> io::Result<(SocketAddr, usize)> {
    let socket = owned_by(user, protocol, to)?;
    match socket.connect(to) {
        Err(error) if error.raw_os_error() != Some(Errno::EINPROGRESS as i32) => return Err(error),
        _ => {}
    }
    if protocol == Protocol::Udp {
        socket.send(QUERY)?;
    }
    fate(protocol, socket.local_addr()?, to)
}

/// Opens a socket of `protocol` as `user`; the standard library's type has the calls that both protocols need. Rules match
/// the fsuid and fsgid of the thread that opened the socket (xt_owner.c, nft_meta.c).
fn owned_by(user: ProbeUser, protocol: Protocol, to: SocketAddr) -> io::Result<UdpSocket> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let kind = if protocol == Protocol::Tcp { SockType::Stream } else { SockType::Datagram };
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    let before = (setfsgid(gid), setfsuid(uid));
    // setfsuid(2) reports no error: only a second call shows whether the first one took effect ("BUGS").
    let is_user = (setfsgid(gid), setfsuid(uid)) == (gid, uid);
    let socket = match is_user {
        true => socket(family, kind, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None).map_err(io::Error::from),
        false => Err(io::Error::other("sending as another user needs CAP_SETUID and CAP_SETGID")),
    };
    setfsuid(before.1);
    setfsgid(before.0);
    socket.map(UdpSocket::from)
}

/// Returns the real destination and the number of connection tracking entries.
fn fate(protocol: Protocol, from: SocketAddr, to: SocketAddr) -> io::Result<(SocketAddr, usize)> {
    let unread = |error| io::Error::other(format!("can't read connection tracking: {error}"));
    let is_it = |c: &Connection| (c.protocol, c.source, c.destination) == (protocol_number(protocol), from, to);
    let own = NfSocket::open().and_then(|mut socket| socket.connections(is_it)).map_err(unread)?;
    let elsewhere = own.iter().find(|connection| connection.replies_from != to);
    let landed = elsewhere.or(own.first()).map(|connection| connection.replies_from);
    let none = || io::Error::other(format!("connection tracking has no entry for {from}"));
    Ok((landed.ok_or_else(none)?, own.len()))
}
