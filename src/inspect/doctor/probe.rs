//! What real packets do: a few are sent in the pod's network namespace, to addresses that nobody has, and
//! where each goes is compared with where the policy wants it.
//!
//! Nothing reaches the application. A connection that the proxy takes is closed without a byte. Where
//! nobody listens on the proxy's port, the doctor does for the moment, and then a random token goes
//! through the redirection and back.

use super::listeners::Listener;
use super::listeners::{ProbeResult, ProbeUser, send_as};
use super::pod::Users;
use super::report::CheckGroup;
use super::report::{Check, CheckVerdict, Results};
use super::rules::NETNS;
use super::rules::{self, RULES};
use crate::cni::{Code, Error};
use crate::inspect::packet::{Destination, Sender};
use crate::inspect::rules::Rulebook;
use crate::inspect::rules::RulesReport;
use crate::inspect::trace::trace;
use crate::netns::find::FoundNetns;
use crate::netns::own_addresses;
use crate::pod::Facts;
use crate::policy::{DnsCapture, Exclusion, Ipv6, Policy, Protocol, Ranges, Redirect, TrafficOwner};
use crate::state::Store;
use ipnet::IpNet;
use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

const OUTBOUND: Check = Check::of(CheckGroup::Probe, "probe-outbound", "an application's connection goes to the proxy");
const DNS: Check = Check::of(CheckGroup::Probe, "probe-dns", "an application's query goes to the proxy");
const EXCLUDED: Check = Check::of(CheckGroup::Probe, "probe-excluded", "what an excluded user sends leaves untouched");
const COUNTERS: Check = Check::of(CheckGroup::Probe, "probe-counters", "the rules' counters move");
const EXCLUDED_DNS: Check = Check::of(CheckGroup::Probe, "probe-excluded-dns", "an excluded query leaves untouched");

/// How long to wait for a call of the plugin that is at work in the namespace.
const PATIENCE: Duration = Duration::from_secs(10);
const DNS_PORT: u16 = 53;
/// Users that nobody runs as: `nobody`, and one beyond what OpenShift gives.
const STRANGERS: [u32; 2] = [65534, 2_000_000_001];
const DETOURED: &str = "detour trace follows such a packet rule by rule; see rules-first and rules-equal";

/// Where packets may be sent from, and what with.
struct Range<'a> {
    policy: &'a Policy,
    book: Rulebook,
    own: Vec<IpAddr>,
    /// Users of the pod that might be captured.
    users: Vec<ProbeUser>,
    known_as: Users,
    token: [u8; 16],
}

/// Sends them.
pub(super) fn examine(
    found: Option<&FoundNetns>,
    policy: Option<&Policy>,
    facts: Option<&Facts>,
    listeners: Option<&[Listener]>,
    (before, store): (Option<&RulesReport>, &Store),
    checkup: &mut Results,
) {
    let nothing = || CheckVerdict::not_checked("nothing is asked for in the namespace");
    let mut shoot = |check: &Check, shot: &(dyn Fn(&Range<'_>) -> CheckVerdict + Sync)| {
        checkup.after(&[&NETNS, &RULES], check, || {
            let (Some(found), Some(policy)) = (found, policy) else { return nothing() };
            let shot = || Range::of(policy, facts).map(|range| shot(&range));
            let verdict = found.open().and_then(|sandbox| sandbox.enter(PATIENCE, shot));
            verdict.unwrap_or_else(|error| CheckVerdict::not_checked(error.to_string()))
        });
    };
    let free = |port: u16| listeners.is_some_and(|all| !all.iter().any(|l| l.tcp && l.port == port));
    shoot(&OUTBOUND, &|range| range.outbound(free));
    shoot(&DNS, &|range| range.dns());
    shoot(&EXCLUDED, &|range| range.excluded());
    shoot(&EXCLUDED_DNS, &|range| range.excluded_dns());
    let was_sent = |check: &&Check| checkup.has_failed(check) || checkup.obstacle(&[*check]).is_none();
    let any_was_sent = [&OUTBOUND, &DNS, &EXCLUDED, &EXCLUDED_DNS].iter().any(was_sent);
    checkup.after(&[&NETNS, &RULES], &COUNTERS, || {
        let (Some(found), Some(before)) = (found, before) else { return nothing() };
        if !any_was_sent {
            return CheckVerdict::not_checked("no packet was sent");
        }
        match rules::read(found, store).map(|(after, _)| counted(&after).saturating_sub(counted(before))) {
            Ok(0) => CheckVerdict::fail("no rule has met any of the packets", DETOURED),
            Ok(_) => CheckVerdict::pass("they rose with what was sent"),
            Err(error) => CheckVerdict::not_checked(error.to_string()),
        }
    });
}

fn counted(report: &RulesReport) -> u64 {
    report.rules.iter().filter_map(|line| line.packets).sum()
}

impl<'a> Range<'a> {
    fn of(policy: &'a Policy, facts: Option<&Facts>) -> Result<Self, Error> {
        let mut token = [0; 16];
        #[expect(clippy::disallowed_methods, reason = "a device of the kernel's own")]
        let random = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut token));
        random.map_err(|error| Error::new(Code::Io, format!("/dev/urandom can't be read: {error}")))?;
        let known = facts.iter().flat_map(|facts| facts.pod.all_containers().map(|c| (&facts.pod, c)));
        let known = known.filter_map(|(pod, container)| {
            let uid = u32::try_from(pod.user_of(container)?).ok()?;
            let gid = pod.group_of(container).and_then(|gid| u32::try_from(gid).ok());
            Some(ProbeUser { uid, gid: gid.unwrap_or(uid) })
        });
        let strangers = STRANGERS.map(|id| ProbeUser { uid: id, gid: id });
        let known_as = Users::here()?;
        let users = known.chain(strangers).filter(|user| known_as.outside(*user).is_some()).collect();
        Ok(Self { policy, book: Rulebook::of_policy(policy), own: own_addresses()?, users, known_as, token })
    }

    /// An address that nobody has (RFC 5737, RFC 3849) of each family that the pod has and rules are for.
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

    /// Where the policy wants it.
    fn wanted(&self, user: ProbeUser, to: SocketAddr, protocol: Protocol) -> String {
        let from = Sender::Process { uid: user.uid, gid: Some(user.gid) };
        trace(&self.book, from, Destination { address: to, protocol }, &self.own, "eth0").arrives_at
    }

    /// For each family, a user and an address for which the policy wants redirection.
    fn captured(&self, to: &[SocketAddr], protocol: Protocol) -> Vec<(ProbeUser, SocketAddr)> {
        let of = |v4: bool| {
            let mut pairs =
                to.iter().filter(|to| to.is_ipv4() == v4).flat_map(|to| self.users.iter().map(|user| (*user, *to)));
            pairs.find(|(user, to)| self.wanted(*user, *to, protocol).starts_with("sidecar:"))
        };
        [true, false].into_iter().filter_map(of).collect()
    }

    fn outbound(&self, free: impl Fn(u16) -> bool) -> CheckVerdict {
        let Some(redirect) = self.policy.redirect() else {
            return CheckVerdict::not_checked("nothing is redirected by this plugin");
        };
        let to: Vec<_> = self.addresses(redirect).into_iter().map(|ip| SocketAddr::new(ip, self.port())).collect();
        let shots = self.captured(&to, Protocol::Tcp).into_iter().map(|(user, to)| {
            let loopback: IpAddr = if to.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
            let own = free(redirect.proxy_port).then(|| TcpListener::bind((loopback, redirect.proxy_port)));
            let own = own.and_then(Result::ok);
            self.shoot(user, to, Protocol::Tcp, &self.token, own.as_ref(), |landing| match landing {
                ProbeResult { token: true, .. } => {
                    Ok("a random token went there and back, with the doctor in the proxy's place".to_owned())
                }
                ProbeResult { taken: true, .. } => Ok("the proxy took the connection".to_owned()),
                ProbeResult { .. } => Ok("nobody took the connection".to_owned()),
            })
        });
        CheckVerdict::all(shots.collect(), "no connection to an address that nobody has would be redirected")
    }

    /// Destinations to try: nowhere, else in the ranges that alone are captured.
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
            None | Some(DnsCapture::Off) => return CheckVerdict::not_checked("queries are not captured"),
            Some(DnsCapture::All) => self.nowhere(),
            Some(DnsCapture::Servers { v4, v6 }) => {
                let all = v4.iter().map(|ip| IpAddr::V4(*ip)).chain(v6.iter().map(|ip| IpAddr::V6(*ip)));
                all.filter(|ip| self.serves(*ip)).collect()
            }
        };
        let to: Vec<_> = servers.into_iter().map(|server| SocketAddr::new(server, DNS_PORT)).collect();
        let query = self.query();
        let shots = self.captured(&to, Protocol::Udp).into_iter().map(|(user, to)| {
            let answered = |landing: ProbeResult| {
                Ok(if landing.taken { "it was answered" } else { "it was not answered" }.to_owned())
            };
            self.shoot(user, to, Protocol::Udp, &query, None, answered)
        });
        CheckVerdict::all(shots.collect(), "no user's query would be captured")
    }

    fn excluded(&self) -> CheckVerdict {
        let everything = |e: &&Exclusion| e.destination.is_none() && e.protocol.is_none() && e.ports.is_empty();
        let user = self.policy.exclusions.iter().filter(everything).find_map(|e| self.user_of(e.owner));
        let shots = user.into_iter().flat_map(|user| self.nowhere().into_iter().map(move |ip| (user, ip)));
        let shots = shots.map(|(user, ip)| {
            let to = SocketAddr::new(ip, self.port());
            self.shoot(user, to, Protocol::Tcp, &self.token, None, |_| Ok("it was sent on".to_owned()))
        });
        CheckVerdict::all(shots.collect(), "no user is excluded as a whole")
    }

    fn excluded_dns(&self) -> CheckVerdict {
        let query = self.query();
        let is_dns = |e: &&Exclusion| {
            let port = e.ports.is_empty() || e.ports.iter().any(|p| p.first <= DNS_PORT && DNS_PORT <= p.last);
            e.protocol != Some(Protocol::Tcp) && port
        };
        let Some(exclusion) = self.policy.exclusions.iter().find(is_dns) else {
            return CheckVerdict::not_checked("no query is excluded");
        };
        let resolvers = match exclusion.destination {
            Some(net) => [net.addr()].into_iter().filter(|ip| self.serves(*ip)).collect(),
            None => self.nowhere(),
        };
        let shots = self.user_of(exclusion.owner).into_iter().flat_map(|user| {
            let query = &query;
            resolvers.iter().map(move |ip| {
                let to = SocketAddr::new(*ip, DNS_PORT);
                self.shoot(user, to, Protocol::Udp, query, None, |landing| match landing.entries {
                    1 => Ok("it is tracked once".to_owned()),
                    entries => Err(format!("it is tracked {entries} times, so that its answers are lost")),
                })
            })
        });
        CheckVerdict::all(shots.collect(), "the pod has no address of the resolver's family")
    }

    /// One that is among the owners.
    fn user_of(&self, owner: TrafficOwner) -> Option<ProbeUser> {
        let stranger = STRANGERS[0];
        match owner {
            TrafficOwner::Any => self.users.first().copied(),
            TrafficOwner::Uid(range) => Some(ProbeUser { uid: range.first, gid: stranger }),
            TrafficOwner::Gid(range) => Some(ProbeUser { uid: stranger, gid: range.first }),
        }
    }

    /// A query for a random name that nobody has (RFC 1035, section 4.1; RFC 2606).
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

    /// Sends, and says whether it went where the policy wants it; `how` is what else is to be said, or
    /// what is wrong all the same.
    fn shoot(
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
            return CheckVerdict::not_checked(format!("the pod has no uid {uid} (hostUsers: false)"));
        };
        let landing = match send_as(outside, protocol, to, text, listener) {
            Ok(landing) => landing,
            Err(error) => return CheckVerdict::not_checked(error.to_string()),
        };
        let wanted = self.wanted(user, to, protocol);
        let port: Option<u16> = wanted.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
        let is_there = match port {
            Some(port) => landing.at != to && landing.at.port() == port,
            None => landing.at == to,
        };
        let at = if landing.at == to { "directly".to_owned() } else { format!("to {}", landing.at) };
        let sent = format!("uid {uid}, gid {gid} to {to}/{protocol} went {at} (by connection tracking)");
        if !is_there {
            return CheckVerdict::fail(format!("{sent}, but should arrive {wanted}"), DETOURED);
        }
        match how(landing) {
            Ok(how) => CheckVerdict::pass(format!("{sent}; {how}")),
            Err(wrong) => CheckVerdict::fail(format!("{sent}; {wrong}"), DETOURED),
        }
    }
}
