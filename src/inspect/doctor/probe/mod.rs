//! Checks with real packets (`--probe`): a few are sent in the pod's network namespace to addresses that are reserved for
//! documentation, and the real destination of each is compared with the policy.
//!
//! The application receives nothing. A connection that the proxy accepts is closed without a byte. If no process
//! listens on the proxy's port, the doctor listens there for the moment, and a random token is sent through the
//! redirection and echoed.

mod socket;

use crate::inspect::doctor::checks::{self, Check};
use crate::inspect::doctor::listeners::{Listener, ProbeUser, Users};
use socket::{ProbeResult, send_as};

use crate::cni::{Code, DEFAULT_INTERFACE, Error};
use crate::firewall::{Arrival, Destination, Packet, RuleFormat, RulesetView, Sender};
use crate::inspect::doctor::report::{CheckVerdict, Results};
use crate::inspect::doctor::rules::LOCK_TIMEOUT;
use crate::inspect::explain::covers_everything;
use crate::netns::find::FoundNetns;
use crate::netns::own_addresses;
use crate::pod::Facts;
use crate::policy::{DnsCapture, Exclusion, Ipv6, Policy, Protocol, Ranges, Redirect, TrafficOwner};
use ipnet::IpNet;
use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

const DNS_PORT: u16 = 53;
/// UIDs that no container uses: `nobody`, and one above OpenShift's ranges.
const UNUSED_UIDS: [u32; 2] = [65534, 2_000_000_001];
const DETOURED: &str = "follow such a packet rule by rule with detour trace; see rules-first and rules-equal";

/// The means of the probes: policy, rules, users and the token.
struct Range<'a> {
    policy: &'a Policy,
    view: RulesetView,
    own: Vec<IpAddr>,
    /// UIDs whose traffic may be captured.
    users: Vec<ProbeUser>,
    known_as: Users,
    token: [u8; 16],
}

/// Sends the probes and adds the checks.
pub(super) fn examine(
    found: Option<&FoundNetns>,
    policy: Option<&Policy>,
    facts: Option<&Facts>,
    listeners: Option<&[Listener]>,
    results: &mut Results,
) {
    let free = |port: u16| listeners.is_some_and(|all| !all.iter().any(|l| l.tcp && l.port == port));
    let mut shoot = |check: &Check, shot: &(dyn Fn(&Range<'_>) -> CheckVerdict + Sync)| {
        results.run(check, || {
            let (Some(found), Some(policy)) = (found, policy) else {
                return CheckVerdict::not_checked("no attachment has rules in this network namespace");
            };
            let shot = || Range::of(policy, facts).map(|range| shot(&range));
            let verdict = found.open().and_then(|sandbox| sandbox.enter(LOCK_TIMEOUT, shot));
            verdict.unwrap_or_else(|error| CheckVerdict::not_checked(error.to_string()))
        });
    };
    shoot(checks::PROBE_CAPTURED, &|range| CheckVerdict::merged([range.outbound(free), range.dns()]));
    shoot(checks::PROBE_EXCLUDED, &|range| CheckVerdict::merged([range.excluded(), range.excluded_dns()]));
}

impl<'a> Range<'a> {
    fn of(policy: &'a Policy, facts: Option<&Facts>) -> Result<Self, Error> {
        let mut token = [0; 16];
        #[expect(clippy::disallowed_methods, reason = "a device of the kernel's own")]
        let random = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut token));
        random.map_err(|error| Error::new(Code::Io, format!("can't read /dev/urandom: {error}")))?;
        let known = facts.iter().flat_map(|facts| facts.pod.all_containers().map(|c| (&facts.pod, c)));
        let known = known.filter_map(|(pod, container)| {
            let uid = u32::try_from(pod.user_of(container)?).ok()?;
            let gid = pod.group_of(container).and_then(|gid| u32::try_from(gid).ok());
            Some(ProbeUser { uid, gid: gid.unwrap_or(uid) })
        });
        let strangers = UNUSED_UIDS.map(|id| ProbeUser { uid: id, gid: id });
        let known_as = Users::here()?;
        let users = known.chain(strangers).filter(|user| known_as.outside(*user).is_some()).collect();
        // Packets arrive at the same destinations in both rule formats.
        let view = RulesetView::of_policy(policy, RuleFormat::default());
        Ok(Self { policy, view, own: own_addresses()?, users, known_as, token })
    }

    /// Returns an address that is reserved for documentation (RFC 5737, RFC 3849), for each address family of the pod
    /// that has rules.
    fn nowhere(&self) -> Vec<IpAddr> {
        let last = self.token[0].clamp(1, 254);
        let v6 = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into());
        let both = [IpAddr::V4(Ipv4Addr::new(192, 0, 2, last)), v6.into()];
        both.into_iter().filter(|ip| self.serves(*ip)).collect()
    }

    fn serves(&self, ip: IpAddr) -> bool {
        let off = ip.is_ipv6() && self.policy.redirect().is_some_and(|redirect| redirect.ipv6 == Ipv6::Off);
        !off && self.own.iter().any(|own| own.is_ipv4() == ip.is_ipv4())
    }

    fn port(&self) -> u16 {
        20_000 + u16::from_be_bytes([self.token[1], self.token[2]]) % 10_000
    }

    /// Returns the destination according to the policy.
    fn wanted(&self, user: ProbeUser, to: SocketAddr, protocol: Protocol) -> Arrival {
        let from = Sender::Process { uid: user.uid, gid: Some(user.gid), set: None };
        let packet = Packet::first(from, Destination { address: to, protocol }, &self.own, DEFAULT_INTERFACE);
        self.view.evaluate(packet).arrival
    }

    /// Returns, for each address family, a user and an address that the policy redirects.
    fn captured(&self, to: &[SocketAddr], protocol: Protocol) -> Vec<(ProbeUser, SocketAddr)> {
        let of = |v4: bool| {
            let mut pairs =
                to.iter().filter(|to| to.is_ipv4() == v4).flat_map(|to| self.users.iter().map(|user| (*user, *to)));
            pairs.find(|(user, to)| matches!(self.wanted(*user, *to, protocol), Arrival::Sidecar(_)))
        };
        [true, false].into_iter().filter_map(of).collect()
    }

    fn outbound(&self, free: impl Fn(u16) -> bool) -> CheckVerdict {
        let Some(redirect) = self.policy.redirect() else {
            return CheckVerdict::not_checked("this plugin redirects nothing in the pod");
        };
        let to: Vec<_> = self.addresses(redirect).into_iter().map(|ip| SocketAddr::new(ip, self.port())).collect();
        let probes = self.captured(&to, Protocol::Tcp).into_iter().map(|(user, to)| {
            let loopback: IpAddr = if to.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
            let own = free(redirect.proxy_port).then(|| TcpListener::bind((loopback, redirect.proxy_port)));
            let own = own.and_then(Result::ok);
            self.send(user, to, Protocol::Tcp, &self.token, own.as_ref(), |fate| match fate {
                ProbeResult { token: true, .. } => {
                    Ok("a random token was echoed, with the doctor in the proxy's place".to_owned())
                }
                ProbeResult { taken: true, .. } => Ok("the proxy accepted the connection".to_owned()),
                ProbeResult { .. } => Ok("the connection was not accepted".to_owned()),
            })
        });
        CheckVerdict::all(probes.collect(), "no probe address is redirected")
    }

    /// Returns the destinations to try: documentation addresses, or else addresses in the captured ranges.
    fn addresses(&self, redirect: &Redirect) -> Vec<IpAddr> {
        let included = match &redirect.outbound_ip_ranges_include {
            Ranges::All => &[][..],
            Ranges::List(nets) => nets,
        };
        let included = included.iter().map(IpNet::broadcast).filter(|ip| self.serves(*ip));
        self.nowhere().into_iter().chain(included).collect()
    }

    fn dns(&self) -> CheckVerdict {
        let servers: Vec<IpAddr> = match self.policy.redirect().map(|redirect| &redirect.dns) {
            None | Some(DnsCapture::Off) => return CheckVerdict::not_checked("DNS is not captured"),
            Some(DnsCapture::All) => self.nowhere(),
            Some(DnsCapture::Servers { v4, v6 }) => {
                let all = v4.iter().map(|ip| IpAddr::V4(*ip)).chain(v6.iter().map(|ip| IpAddr::V6(*ip)));
                all.filter(|ip| self.serves(*ip)).collect()
            }
        };
        let to: Vec<_> = servers.into_iter().map(|server| SocketAddr::new(server, DNS_PORT)).collect();
        let query = self.query();
        let probes = self.captured(&to, Protocol::Udp).into_iter().map(|(user, to)| {
            let answered = |fate: ProbeResult| Ok(if fate.taken { "answer received" } else { "no answer" }.to_owned());
            self.send(user, to, Protocol::Udp, &query, None, answered)
        });
        CheckVerdict::all(probes.collect(), "no user's DNS query is captured")
    }

    fn excluded(&self) -> CheckVerdict {
        let everything = self.policy.exclusions.iter().filter(|exclusion| covers_everything(exclusion));
        let user = everything.into_iter().find_map(|exclusion| self.user_of(exclusion.owner));
        let probes = user.into_iter().flat_map(|user| self.nowhere().into_iter().map(move |ip| (user, ip)));
        let probes = probes.map(|(user, ip)| {
            let to = SocketAddr::new(ip, self.port());
            self.send(user, to, Protocol::Tcp, &self.token, None, |_| Ok("sent to its destination".to_owned()))
        });
        CheckVerdict::all(probes.collect(), "no user is excluded for all traffic")
    }

    fn excluded_dns(&self) -> CheckVerdict {
        let query = self.query();
        let is_dns = |e: &&Exclusion| {
            let port = e.ports.is_empty() || e.ports.iter().any(|p| p.first <= DNS_PORT && DNS_PORT <= p.last);
            e.protocol != Some(Protocol::Tcp) && port
        };
        let Some(exclusion) = self.policy.exclusions.iter().find(is_dns) else {
            return CheckVerdict::not_checked("no DNS query is excluded");
        };
        let resolvers = match exclusion.destination {
            Some(net) => [net.addr()].into_iter().filter(|ip| self.serves(*ip)).collect(),
            None => self.nowhere(),
        };
        let probes = self.user_of(exclusion.owner).into_iter().flat_map(|user| {
            let query = &query;
            resolvers.iter().map(move |ip| {
                let to = SocketAddr::new(*ip, DNS_PORT);
                self.send(user, to, Protocol::Udp, query, None, |fate| match fate.entries {
                    1 => Ok("tracked once".to_owned()),
                    entries => Err(format!("tracked {entries} times, so that its answers are lost")),
                })
            })
        });
        CheckVerdict::all(probes.collect(), "the pod has no address of the resolver's family")
    }

    /// Returns a user whose traffic the owner covers.
    fn user_of(&self, owner: TrafficOwner) -> Option<ProbeUser> {
        let stranger = UNUSED_UIDS[0];
        match owner {
            TrafficOwner::Any => self.users.first().copied(),
            TrafficOwner::Uid(range) => Some(ProbeUser { uid: range.first, gid: stranger }),
            TrafficOwner::Gid(range) => Some(ProbeUser { uid: stranger, gid: range.first }),
        }
    }

    /// Returns a DNS query for a random name below `invalid` (RFC 1035, section 4.1; RFC 2606).
    fn query(&self) -> Vec<u8> {
        let label: String = self.token.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut query = vec![self.token[0], self.token[1], 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in [label.as_bytes(), b"invalid"] {
            // A label has 63 bytes at the most; these have 32 and 7.
            query.push(label.len() as u8);
            query.extend(label);
        }
        query.extend([0, 0, 1, 0, 1]);
        query
    }

    /// Sends a probe and compares its destination with the policy. `how` adds a detail, or an error.
    fn send(
        &self,
        user: ProbeUser,
        to: SocketAddr,
        protocol: Protocol,
        text: &[u8],
        listener: Option<&TcpListener>,
        how: impl FnOnce(ProbeResult) -> Result<String, String>,
    ) -> CheckVerdict {
        let ProbeUser { uid, gid } = user;
        let Some(outside) = self.known_as.outside(user) else {
            return CheckVerdict::not_checked(format!("the pod has no UID {uid} (hostUsers: false)"));
        };
        let fate = match send_as(outside, protocol, to, text, listener) {
            Ok(fate) => fate,
            Err(error) => return CheckVerdict::not_checked(error.to_string()),
        };
        let wanted = self.wanted(user, to, protocol);
        let is_there = match wanted {
            Arrival::Sidecar(port) | Arrival::Ztunnel(port) | Arrival::Redirected(port) => {
                fate.at != to && fate.at.port() == port
            }
            Arrival::Direct | Arrival::Dropped | Arrival::Rejected | Arrival::Unknown => fate.at == to,
        };
        let at = if fate.at == to { "directly".to_owned() } else { format!("to {}", fate.at) };
        let sent = format!("UID {uid}, GID {gid} to {to}/{protocol} went {at} (according to connection tracking)");
        if !is_there {
            return CheckVerdict::fail(format!("{sent}; expected {wanted}"), DETOURED);
        }
        match how(fate) {
            Ok(how) => CheckVerdict::pass(format!("{sent}; {how}")),
            Err(wrong) => CheckVerdict::fail(format!("{sent}; {wrong}"), DETOURED),
        }
    }
}
