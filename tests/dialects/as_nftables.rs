//! What native rules do to a packet (nft(8)).

use crate::packet::{Fate, Packet};
use detour_cni::firewall::native::NativeTables;
use detour_cni::firewall::native::rule::{Condition, Key, NativeAction, NativeChain, NativeRule};
use detour_cni::firewall::rule::{Family, Hook};
use std::collections::BTreeMap;
use std::net::IpAddr;

pub(crate) fn fate(tables: &NativeTables, packet: &Packet) -> Fate {
    let mut fate = Fate::of(packet);
    for chains in tables.values() {
        for base in chains.values().filter(|chain| chain.hook == Some(packet.hook)) {
            pass(chains, base, packet, &mut fate);
        }
        if fate.dropped {
            break;
        }
    }
    fate.settled()
}

/// Whether a verdict ended the base chain.
fn pass(chains: &BTreeMap<String, NativeChain>, chain: &NativeChain, packet: &Packet, fate: &mut Fate) -> bool {
    for rule in &chain.rules {
        if !meets(rule, packet, fate) {
            continue;
        }
        match &rule.action {
            NativeAction::Return => return false,
            NativeAction::Accept | NativeAction::KeepDestination => return true,
            NativeAction::Drop => {
                fate.dropped = true;
                return true;
            }
            NativeAction::Redirect(port) => {
                fate.redirected_to = Some(*port);
                return true;
            }
            NativeAction::Tproxy { port, mark } if packet.is_listened_for => {
                (fate.handed_to, fate.mark) = (Some(*port), *mark);
                return true;
            }
            NativeAction::Tproxy { .. } => {}
            NativeAction::Jump(to) => {
                if pass(chains, &chains[to], packet, fate) {
                    return true;
                }
            }
            NativeAction::Zone(zone) => drop(fate.zone.get_or_insert(*zone)),
            NativeAction::SetMark(mark) => fate.mark = *mark,
            NativeAction::SaveMark => fate.connection_mark = fate.mark,
            NativeAction::RestoreMark => fate.mark = fate.connection_mark,
        }
    }
    false
}

fn meets(rule: &NativeRule, packet: &Packet, fate: &Fate) -> bool {
    rule.family.is_none_or(|family| family == packet.family)
        && rule.conditions.iter().all(|condition| holds(condition, packet, fate))
}

/// What can't be loaded meets no condition, turned round or not (`NFT_BREAK`).
fn holds(condition: &Condition, packet: &Packet, fate: &Fate) -> bool {
    let Some(value) = loaded(condition.key, packet, fate) else { return false };
    let spans = condition.values.as_slice();
    if condition.key == Key::CtState {
        return spans.iter().any(|span| span.first & value != 0) != condition.not;
    }
    spans.iter().any(|span| span.first <= value && value <= span.last) != condition.not
}

fn loaded(key: Key, packet: &Packet, fate: &Fate) -> Option<u128> {
    let has_ports = packet.protocol == 6 || packet.protocol == 17;
    let address = |family: Family, address: IpAddr| match address {
        IpAddr::V4(a) => (family == Family::Ip).then_some(u128::from(u32::from(a))),
        IpAddr::V6(a) => (family == Family::Ip6).then_some(u128::from(a)),
    };
    // Without an interface the name is empty (`nft_meta_store_ifname`).
    let name = |has_one: bool| {
        let mut bytes = [0; 16];
        let name = if has_one { packet.interface } else { "" };
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        u128::from_be_bytes(bytes)
    };
    Some(match key {
        Key::InInterface => name(packet.hook == Hook::Prerouting),
        Key::OutInterface => name(packet.hook == Hook::Output),
        Key::Source(family) => address(family, packet.source)?,
        Key::Destination(family) => address(family, packet.destination)?,
        Key::Protocol => packet.protocol.into(),
        Key::SourcePort => has_ports.then_some(packet.source_port.into())?,
        Key::DestinationPort => has_ports.then_some(packet.destination_port.into())?,
        Key::Uid => (packet.uid != u32::MAX).then_some(packet.uid.into())?,
        Key::Gid => (packet.gid != u32::MAX).then_some(packet.gid.into())?,
        Key::CtState => packet.state.into(),
        Key::Mark => fate.mark.into(),
        Key::CtMark => fate.connection_mark.into(),
    })
}
