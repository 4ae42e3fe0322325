//! Whether a packet meets what a rule asks, in either vocabulary.

use super::packet::{Origin, Packet};
use crate::firewall::native::rule::{self as native, Condition, Key};
use crate::firewall::native::spans::Spans;
use crate::firewall::rule::{CtState, Family, Is, Match, Rule};
use crate::policy::{IdRange, PortRange, Protocol};
use ipnet::IpNet;
use std::net::IpAddr;

/// `NF_CT_STATE_BIT` of a new connection (linux/netfilter/nf_conntrack_common.h).
const NEW: u32 = 8;

/// Whether the packet meets all conditions of a rule of iptables'.
pub(super) fn meets(packet: &Packet, rule: &Rule) -> bool {
    let net =
        |net: &Option<Is<IpNet>>, address: IpAddr| net.as_ref().is_none_or(|is| is.value.contains(&address) != is.not);
    net(&rule.source, packet.source.ip())
        && net(&rule.destination, packet.destination.ip())
        && interface(rule.in_interface.as_ref(), packet.in_interface.as_deref())
        && interface(rule.out_interface.as_ref(), packet.out_interface.as_deref())
        && rule.protocol.is_none_or(|protocol| protocol == packet.protocol)
        && rule.matches.iter().all(|condition| holds(packet, condition))
}

/// A `+` at the end stands for whatever follows.
fn interface(wanted: Option<&Is<String>>, name: Option<&str>) -> bool {
    wanted.is_none_or(|Is { not, value }| {
        let name = name.unwrap_or_default();
        let same = match value.strip_suffix('+') {
            Some(prefix) => name.starts_with(prefix),
            None => name == value,
        };
        same != *not
    })
}

/// The UID and GID of the socket that a packet leaves by; what comes in has none.
fn owner_condition(packet: &Packet) -> Option<(u32, u32)> {
    match packet.origin {
        Origin::Process { uid, gid } if packet.out_interface.is_some() => Some((uid, gid)),
        Origin::Process { .. } | Origin::Outside => None,
    }
}

/// A first packet is of a new connection: neither known nor out of place, its connection without a mark.
fn holds(packet: &Packet, condition: &Match) -> bool {
    let within = |range: PortRange, port: u16| (range.first..=range.last).contains(&port);
    let id = |is: &Is<IdRange>, id: Option<u32>| {
        // Without a socket neither the condition nor its opposite holds (xt_owner.c).
        id.is_some_and(|id| (is.value.first..=is.value.last).contains(&id) != is.not)
    };
    match condition {
        Match::DestinationPort(is) => within(is.value, packet.destination.port()) != is.not,
        Match::SourcePort(is) => within(is.value, packet.source.port()) != is.not,
        Match::DestinationPorts(is) => is.value.iter().any(|range| within(*range, packet.destination.port())) != is.not,
        Match::Uid(is) => id(is, owner_condition(packet).map(|(uid, _)| uid)),
        Match::Gid(is) => id(is, owner_condition(packet).map(|(_, gid)| gid)),
        Match::CtState(CtState::Invalid | CtState::RelatedOrEstablished) => false,
        Match::Mark(is) => (packet.mark == is.value) != is.not,
        Match::Connmark(mark) => *mark == 0,
    }
}

/// Whether the packet meets all conditions of a native rule.
pub(super) fn meets_native(packet: &Packet, rule: &native::NativeRule) -> bool {
    rule.family.is_none_or(|family| family == packet.family())
        && rule.conditions.iter().all(|condition| holds_native(packet, condition))
}

/// What can't be loaded ends the rule, whichever way round the condition is (`NFT_BREAK`).
fn holds_native(packet: &Packet, condition: &Condition) -> bool {
    if condition.key == Key::CtState {
        let asked = condition.values.as_slice().iter().any(|span| span.first & u128::from(NEW) != 0);
        return asked != condition.not;
    }
    loaded(packet, condition.key).is_some_and(|value| among(value, &condition.values) != condition.not)
}

fn among(value: u128, spans: &Spans) -> bool {
    spans.as_slice().iter().any(|span| (span.first..=span.last).contains(&value))
}

fn loaded(packet: &Packet, key: Key) -> Option<u128> {
    let address = |family: Family, address: IpAddr| match (family, address) {
        (Family::Ip, IpAddr::V4(address)) => Some(u32::from(address).into()),
        (Family::Ip6, IpAddr::V6(address)) => Some(address.into()),
        _ => None,
    };
    match key {
        // Where there is none, the name is empty (nft_meta.c, `nft_meta_store_ifname`).
        Key::InInterface => Some(filled(packet.in_interface.as_deref().unwrap_or_default())),
        Key::OutInterface => Some(filled(packet.out_interface.as_deref().unwrap_or_default())),
        Key::Source(family) => address(family, packet.source.ip()),
        Key::Destination(family) => address(family, packet.destination.ip()),
        // IPPROTO_TCP, IPPROTO_UDP.
        Key::Protocol => Some(match packet.protocol {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
        }),
        Key::SourcePort => Some(packet.source.port().into()),
        Key::DestinationPort => Some(packet.destination.port().into()),
        Key::Uid => owner_condition(packet).map(|(uid, _)| uid.into()),
        Key::Gid => owner_condition(packet).map(|(_, gid)| gid.into()),
        Key::Mark => Some(packet.mark.into()),
        Key::CtMark => Some(0),
        Key::CtState => None,
    }
}

/// A name as native rules compare it: sixteen bytes, filled with zeros, as a number.
fn filled(name: &str) -> u128 {
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte);
    u128::from_be_bytes(bytes)
}
