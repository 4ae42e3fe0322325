//! A packet, how users describe it, and whether it matches a rule.

use crate::cni::{Code, Error};
use crate::firewall::native::rule as native;
use crate::firewall::native::rule::{Condition, InCgroup, Key};
use crate::firewall::native::set::Spans;
use crate::firewall::rule::{CtState, Family, Is, Match, Name, Rule};
use crate::pod::Pod;
use crate::policy::{ContainerScope, IdRange, PortRange, Protocol};
use ipnet::IpNet;
use serde::Serialize;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// The sender of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sender {
    /// A process of the pod.
    Process {
        /// Its effective UID.
        uid: u32,
        /// Its effective GID, if the user gave one.
        gid: Option<u32>,
        /// Its place in the sets of excluded containers; `None` if it is in no excluded container.
        set: Option<InSet>,
    },
    /// A client outside of the pod, at this address if the user gave one.
    Inbound(Option<IpAddr>),
}

/// The place of a process in the sets of excluded containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InSet {
    /// The set that has the control group of its container.
    pub scope: ContainerScope,
    /// The level of this control group, if known.
    pub level: Option<u8>,
}

impl Sender {
    /// Returns the sender as a process in another set, or in none.
    pub(super) fn in_set(self, set: Option<InSet>) -> Self {
        match self {
            Self::Process { uid, gid, .. } => Self::Process { uid, gid, set },
            inbound @ Self::Inbound(_) => inbound,
        }
    }
}

/// The inverse of parsing.
impl fmt::Display for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { uid, gid: None, .. } => write!(f, "uid={uid}"),
            Self::Process { uid, gid: Some(gid), .. } => write!(f, "uid={uid},gid={gid}"),
            Self::Inbound(None) => f.write_str("inbound"),
            Self::Inbound(Some(address)) => write!(f, "inbound:{address}"),
        }
    }
}

/// A sender as the user gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SenderArgument {
    /// A sender by its IDs or address.
    Sender(Sender),
    /// The processes of a container.
    Container {
        /// The name of the container.
        name: String,
        /// The UID that the user gave; `None` to use the UID of the pod's manifest.
        uid: Option<u32>,
        /// The GID that the user gave.
        gid: Option<u32>,
    },
}

impl FromStr for SenderArgument {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = || {
            let expected = "expected uid=UID, uid=UID,gid=GID, container=NAME, container=NAME,uid=UID, inbound or \
                            inbound:ADDRESS";
            Error::new(Code::InvalidConfig, format!("from: invalid value {text:?}; {expected}"))
        };
        if text == "inbound" {
            return Ok(Self::Sender(Sender::Inbound(None)));
        }
        if let Some(address) = text.strip_prefix("inbound:") {
            let address = address.trim_start_matches('[').trim_end_matches(']');
            let address = address.parse().map_err(|_| invalid())?;
            return Ok(Self::Sender(Sender::Inbound(Some(address))));
        }
        let (mut name, mut uid, mut gid) = (None, None, None);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(invalid)?;
            let id = || value.trim().parse::<u32>().ok().filter(|id| *id != u32::MAX).ok_or_else(invalid);
            match key.trim() {
                "container" if name.is_none() && !value.is_empty() => name = Some(value.to_owned()),
                "uid" if uid.is_none() => uid = Some(id()?),
                "gid" if gid.is_none() => gid = Some(id()?),
                _ => return Err(invalid()),
            }
        }
        match (name, uid) {
            (_, None) if gid.is_some() => Err(invalid()),
            (Some(name), uid) => Ok(Self::Container { name, uid, gid }),
            (None, Some(uid)) => Ok(Self::Sender(Sender::Process { uid, gid, set: None })),
            (None, None) => Err(invalid()),
        }
    }
}

impl SenderArgument {
    /// Returns the name of the container, if the sender is one.
    #[must_use]
    pub fn container(&self) -> Option<&str> {
        match self {
            Self::Sender(_) => None,
            Self::Container { name, .. } => Some(name),
        }
    }

    /// Returns the sender. A container's IDs are those of the argument or, as fallback, of the manifest of `pod`. Without
    /// a pod, the name of the container is not checked.
    ///
    /// # Errors
    /// The pod does not have the container, or its UID is unknown.
    pub fn resolve(&self, pod: Option<&Pod>) -> Result<Sender, Error> {
        let (name, uid, gid) = match self {
            Self::Sender(sender) => return Ok(*sender),
            Self::Container { name, uid, gid } => (name, *uid, *gid),
        };
        let failed = |why: String| Error::new(Code::InvalidConfig, format!("from: container {name:?}: {why}"));
        let Some(pod) = pod else {
            let msg = || {
                failed(format!("unknown pod; use container={name},uid=UID, or select the pod: --live -n NAMESPACE POD"))
            };
            return Ok(Sender::Process { uid: uid.ok_or_else(msg)?, gid, set: None });
        };
        let names: Vec<&str> = pod.all_containers().map(|container| container.name.as_str()).collect();
        let container = pod.all_containers().find(|container| container.name == *name).ok_or_else(|| {
            failed(format!("pod {}/{}: expected one of {}", pod.namespace, pod.name, names.join(", ")))
        })?;
        if let Some(uid) = uid {
            return Ok(Sender::Process { uid, gid, set: None });
        }
        let id = |id: i64| u32::try_from(id).ok();
        let uid = pod.user_of(container).and_then(id).ok_or_else(|| {
            let why = "unknown UID: runAsUser is not set, and the image decides";
            failed(format!("pod {}/{}: {why}; use container={name},uid=UID", pod.namespace, pod.name))
        })?;
        Ok(Sender::Process { uid, gid: pod.group_of(container).and_then(id), set: None })
    }
}

/// The destination of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// The address and port.
    pub address: SocketAddr,
    /// The transport protocol.
    pub protocol: Protocol,
}

impl FromStr for Destination {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parse = || {
            let (address, protocol) = text.rsplit_once('/')?;
            let protocol = match protocol {
                "tcp" => Protocol::Tcp,
                "udp" => Protocol::Udp,
                _ => return None,
            };
            Some(Self { address: address.parse().ok()?, protocol })
        };
        parse().ok_or_else(|| {
            let expected = "expected ADDRESS:PORT/tcp or ADDRESS:PORT/udp, with an IPv6 address in brackets";
            Error::new(Code::InvalidConfig, format!("to: invalid value {text:?}; {expected}"))
        })
    }
}

/// The origin of a packet as rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A process of the pod.
    Process {
        /// Its effective UID.
        uid: u32,
        /// Its effective GID.
        gid: u32,
    },
    /// A client outside of the pod.
    Outside,
}

/// A packet in transit: the properties that rules match and change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Packet {
    pub origin: Origin,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub protocol: Protocol,
    /// The interface at which it arrived; `None` while it is outgoing.
    pub in_interface: Option<String>,
    /// The outgoing interface; `None` for an incoming packet.
    pub out_interface: Option<String>,
    /// The packet mark.
    pub mark: u32,
    /// The connection tracking zone; the first rule that sets one takes effect.
    pub zone: Option<u16>,
    /// The sender's place in the sets of excluded containers.
    pub set: Option<InSet>,
}

/// The source port of all packets: one that no rule matches.
const EPHEMERAL_PORT: u16 = 40000;

impl Packet {
    /// Returns the first packet of a connection.
    ///
    /// A process's traffic to loopback and to the addresses in `pod_addresses` uses lo, all other traffic `interface`. A
    /// process without a GID has GID 0, as in container runtimes.
    pub(super) fn first(from: Sender, to: Destination, pod_addresses: &[IpAddr], interface: &str) -> Self {
        let address = to.address.ip();
        let of_family = |ip: &&IpAddr| ip.is_ipv4() == address.is_ipv4();
        let unspecified: IpAddr =
            if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let own_address = pod_addresses.iter().find(of_family).copied().unwrap_or(unspecified);
        let over_lo = address.is_loopback() || pod_addresses.contains(&address);
        let link = if over_lo { "lo" } else { interface };
        let (origin, source, in_interface, out_interface) = match from {
            Sender::Process { uid, gid, .. } => {
                let source = if over_lo { address } else { own_address };
                (Origin::Process { uid, gid: gid.unwrap_or_default() }, source, None, Some(link.to_owned()))
            }
            Sender::Inbound(source) => {
                (Origin::Outside, source.unwrap_or(unspecified), Some(interface.to_owned()), None)
            }
        };
        let source = SocketAddr::new(source, EPHEMERAL_PORT);
        let set = if let Sender::Process { set, .. } = from { set } else { None };
        let (destination, protocol) = (to.address, to.protocol);
        Self { origin, source, destination, protocol, in_interface, out_interface, mark: 0, zone: None, set }
    }

    pub(super) const fn family(&self) -> Family {
        if self.destination.is_ipv4() { Family::Ip } else { Family::Ip6 }
    }

    /// Applies `REDIRECT` (nf_nat_redirect.c): an outgoing packet goes to the port at loopback, an incoming packet to
    /// the port at its destination address.
    pub(super) fn redirect(&mut self, port: u16) {
        let address = match (self.origin, self.destination) {
            (Origin::Outside, destination) => destination.ip(),
            (_, SocketAddr::V4(_)) => Ipv4Addr::LOCALHOST.into(),
            (_, SocketAddr::V6(_)) => Ipv6Addr::LOCALHOST.into(),
        };
        self.destination = SocketAddr::new(address, port);
        if self.out_interface.is_some() {
            self.out_interface = Some("lo".to_owned());
        }
    }

    /// Returns whether the packet stays in the pod.
    pub(super) fn is_over_lo(&self) -> bool {
        self.out_interface.as_deref() == Some("lo")
    }

    /// Turns a packet that was sent over lo into an incoming one.
    pub(super) fn receive_over_lo(&mut self) {
        self.in_interface = self.out_interface.take();
    }
}

/// The connection tracking state bit of a new connection (`NF_CT_STATE_BIT`, linux/netfilter/nf_conntrack_common.h).
const CT_STATE_NEW: u32 = 8;

/// Returns whether the packet matches all conditions of an iptables rule.
pub(super) fn matches_iptables(packet: &Packet, rule: &Rule) -> bool {
    let net =
        |net: &Option<Is<IpNet>>, address: IpAddr| net.as_ref().is_none_or(|is| is.value.contains(&address) != is.not);
    net(&rule.source, packet.source.ip())
        && net(&rule.destination, packet.destination.ip())
        && interface(rule.in_interface.as_ref(), packet.in_interface.as_deref())
        && interface(rule.out_interface.as_ref(), packet.out_interface.as_deref())
        && rule.protocol.is_none_or(|protocol| protocol == packet.protocol)
        && rule.matches.iter().all(|condition| matches(packet, condition))
}

/// Compares an interface name with a pattern, in which `+` at the end matches any suffix.
fn interface(pattern: Option<&Is<Name>>, name: Option<&str>) -> bool {
    pattern.is_none_or(|Is { not, value }| {
        let name = name.unwrap_or_default();
        let same = match value.strip_suffix('+') {
            Some(prefix) => name.starts_with(prefix),
            None => name == value,
        };
        same != *not
    })
}

/// Returns the UID and GID of the sending socket; an incoming packet has none.
fn socket_owner(packet: &Packet) -> Option<(u32, u32)> {
    match packet.origin {
        Origin::Process { uid, gid } if packet.out_interface.is_some() => Some((uid, gid)),
        Origin::Process { .. } | Origin::Outside => None,
    }
}

/// Evaluates one match of an iptables rule for the first packet of a connection, whose state is NEW and whose
/// connection mark is 0.
fn matches(packet: &Packet, condition: &Match) -> bool {
    let within = |range: PortRange, port: u16| (range.first..=range.last).contains(&port);
    let id = |is: &Is<IdRange>, id: Option<u32>| {
        // Without a socket, neither the condition nor its negation matches (xt_owner.c).
        id.is_some_and(|id| (is.value.first..=is.value.last).contains(&id) != is.not)
    };
    match condition {
        Match::DestinationPort(is) => within(is.value, packet.destination.port()) != is.not,
        Match::SourcePort(is) => within(is.value, packet.source.port()) != is.not,
        Match::DestinationPorts(is) => is.value.iter().any(|range| within(*range, packet.destination.port())) != is.not,
        Match::Uid(is) => id(is, socket_owner(packet).map(|(uid, _)| uid)),
        Match::Gid(is) => id(is, socket_owner(packet).map(|(_, gid)| gid)),
        Match::CtState(CtState::Invalid | CtState::RelatedOrEstablished) => false,
        Match::Mark(is) => (packet.mark == is.value) != is.not,
        Match::Connmark(mark) => *mark == 0,
    }
}

/// Returns whether the packet matches all conditions of a native rule.
pub(super) fn matches_native(packet: &Packet, rule: &native::NativeRule) -> bool {
    rule.family.is_none_or(|family| family == packet.family())
        && rule.cgroup.is_none_or(|cgroup| is_in(packet, cgroup))
        && rule.conditions.iter().all(|condition| matches_condition(packet, condition))
}

/// Returns whether the sender's control group at this level is in the set. With an unknown level, the first rule matches.
fn is_in(packet: &Packet, cgroup: InCgroup) -> bool {
    let set = packet.set.filter(|_| packet.out_interface.is_some());
    set.is_some_and(|set| set.scope == cgroup.set && set.level.is_none_or(|level| level == cgroup.level))
}

/// Evaluates one condition of a native rule. A key that can't be loaded ends the rule, even if the condition is negated
/// (`NFT_BREAK`).
fn matches_condition(packet: &Packet, condition: &Condition) -> bool {
    if condition.key == Key::CtState {
        let is_new = condition.values.as_slice().iter().any(|span| span.first & u128::from(CT_STATE_NEW) != 0);
        return is_new != condition.not;
    }
    load(packet, condition.key).is_some_and(|value| contains(&condition.values, value) != condition.not)
}

fn contains(spans: &Spans, value: u128) -> bool {
    spans.as_slice().iter().any(|span| (span.first..=span.last).contains(&value))
}

fn load(packet: &Packet, key: Key) -> Option<u128> {
    let address = |family: Family, address: IpAddr| match (family, address) {
        (Family::Ip, IpAddr::V4(address)) => Some(u32::from(address).into()),
        (Family::Ip6, IpAddr::V6(address)) => Some(address.into()),
        _ => None,
    };
    match key {
        // Without an interface, the name is empty (nft_meta.c, `nft_meta_store_ifname`).
        Key::InInterface => Some(padded(packet.in_interface.as_deref().unwrap_or_default())),
        Key::OutInterface => Some(padded(packet.out_interface.as_deref().unwrap_or_default())),
        Key::Source(family) => address(family, packet.source.ip()),
        Key::Destination(family) => address(family, packet.destination.ip()),
        // IPPROTO_TCP, IPPROTO_UDP.
        Key::Protocol => Some(match packet.protocol {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
        }),
        Key::SourcePort => Some(packet.source.port().into()),
        Key::DestinationPort => Some(packet.destination.port().into()),
        Key::Uid => socket_owner(packet).map(|(uid, _)| uid.into()),
        Key::Gid => socket_owner(packet).map(|(_, gid)| gid.into()),
        Key::Mark => Some(packet.mark.into()),
        Key::CtMark => Some(0),
        Key::CtState => None,
    }
}

/// Returns an interface name as native rules compare it: 16 bytes padded with zeros, as a number.
fn padded(name: &str) -> u128 {
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte);
    u128::from_be_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senders_and_destinations_are_parsed_and_printed() {
        let process = |uid, gid| Sender::Process { uid, gid, set: None };
        let from = |text: &str| match text.parse::<SenderArgument>().expect(text) {
            SenderArgument::Sender(sender) => sender,
            container @ SenderArgument::Container { .. } => panic!("{container:?}"),
        };
        assert_eq!(from("uid=1337"), process(1337, None));
        assert_eq!(from("gid=5,uid=0"), process(0, Some(5)));
        assert_eq!(from("inbound"), Sender::Inbound(None));
        assert_eq!(from("inbound:fd00::1"), Sender::Inbound(Some("fd00::1".parse().expect("v6"))));
        for text in ["uid=1337", "uid=0,gid=5", "inbound", "inbound:fd00::1"] {
            assert_eq!(from(text).to_string(), text);
        }
        let container = |uid, gid| SenderArgument::Container { name: "web".to_owned(), uid, gid };
        assert_eq!("container=web".parse(), Ok(container(None, None)));
        assert_eq!("container=web,uid=7,gid=8".parse(), Ok(container(Some(7), Some(8))));
        for wrong in [
            "",
            "gid=1",
            "uid=",
            "uid=-1",
            "uid=4294967295",
            "uid=1,uid=2",
            "outbound",
            "inbound:x",
            "container=",
            "container=a,container=b",
            "container=a,gid=1",
        ] {
            let error = wrong.parse::<SenderArgument>().expect_err(wrong);
            assert!(error.msg.starts_with(&format!("from: invalid value {wrong:?}; expected uid=UID, ")), "{error}");
        }
        let to = |text: &str| text.parse::<Destination>().expect(text);
        assert_eq!(to("10.0.0.10:53/udp").protocol, Protocol::Udp);
        assert_eq!(to("[fd00::1]:443/tcp").address, "[fd00::1]:443".parse().expect("an address"));
        for wrong in ["10.0.0.10", "10.0.0.10:53", "10.0.0.10:53/sctp", "fd00::1:443/tcp", ":80/tcp"] {
            assert!(wrong.parse::<Destination>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn traffic_to_loopback_and_own_addresses_uses_lo() {
        let own: [IpAddr; 1] = ["10.0.0.2".parse().expect("v4")];
        let from = Sender::Process { uid: 1, gid: None, set: None };
        let link = |to: &str| Packet::first(from, to.parse().expect(to), &own, "eth0").out_interface;
        assert_eq!(link("10.0.0.2:1/tcp").as_deref(), Some("lo"));
        assert_eq!(link("127.8.0.1:1/tcp").as_deref(), Some("lo"));
        assert_eq!(link("[::1]:1/tcp").as_deref(), Some("lo"));
        assert_eq!(link("10.0.0.3:1/tcp").as_deref(), Some("eth0"));
    }
}
