//! Evaluates native rules for a packet (nft(8)).

use crate::equivalence::packet::{Outcome, Packet};
use detour_cni::firewall::native::NativeTables;
use detour_cni::firewall::native::rule::{Condition, Key, NativeChain, NativeRule};
use detour_cni::firewall::rule::{Family, Hook, Name};
use detour_cni::firewall::target::Target;
use std::collections::BTreeMap;
use std::net::IpAddr;

pub(crate) fn outcome(tables: &NativeTables, packet: &Packet) -> Outcome {
    let mut outcome = Outcome::of(packet);
    pass_tables(tables, packet, &mut outcome);
    outcome.normalized()
}

/// Evaluates the base chains of all tables.
pub(crate) fn pass_tables(tables: &NativeTables, packet: &Packet, outcome: &mut Outcome) {
    for chains in tables.values() {
        for base in chains.values().filter(|chain| chain.hook.is_some_and(|base| base.hook == packet.hook)) {
            pass(chains, base, packet, outcome);
        }
        if outcome.dropped {
            break;
        }
    }
}

/// Evaluates a chain; returns whether a verdict ended the base chain.
fn pass(chains: &BTreeMap<Name, NativeChain>, chain: &NativeChain, packet: &Packet, outcome: &mut Outcome) -> bool {
    for rule in &chain.rules {
        if !meets(rule, packet, outcome) {
            continue;
        }
        match &rule.target {
            Target::Return => return false,
            Target::Accept => return true,
            Target::KeepDestination => {
                outcome.fixed = true;
                return true;
            }
            Target::Drop | Target::Reset | Target::Reject => {
                outcome.dropped = true;
                return true;
            }
            Target::Redirect(port) => {
                outcome.redirected_to = Some(*port);
                return true;
            }
            Target::Tproxy { port, mark } if packet.has_listener => {
                (outcome.assigned_to, outcome.mark) = (Some(*port), *mark);
                return true;
            }
            Target::Tproxy { .. } => {}
            Target::Jump(to) => {
                if pass(chains, &chains[to], packet, outcome) {
                    return true;
                }
            }
            Target::Goto(to) => return pass(chains, &chains[to], packet, outcome),
            Target::Zone(zone) => drop(outcome.zone.get_or_insert(*zone)),
            Target::SetMark(mark) => outcome.mark = *mark,
            Target::SaveMark => outcome.connection_mark = outcome.mark,
            Target::RestoreMark => outcome.mark = outcome.connection_mark,
        }
    }
    false
}

fn meets(rule: &NativeRule, packet: &Packet, outcome: &Outcome) -> bool {
    // The packets come from no control group of a set.
    rule.cgroup.is_none()
        && rule.family.is_none_or(|family| family == packet.family)
        && rule.conditions.iter().all(|condition| holds(condition, packet, outcome))
}

/// A property that can't be loaded meets no condition, negated or not (`NFT_BREAK`).
fn holds(condition: &Condition, packet: &Packet, outcome: &Outcome) -> bool {
    let Some(value) = loaded(condition.key, packet, outcome) else { return false };
    let spans = condition.values.as_slice();
    if condition.key == Key::CtState {
        return spans.iter().any(|span| span.first & value != 0) != condition.not;
    }
    spans.iter().any(|span| span.first <= value && value <= span.last) != condition.not
}

fn loaded(key: Key, packet: &Packet, outcome: &Outcome) -> Option<u128> {
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
        Key::Mark => outcome.mark.into(),
        Key::CtMark => outcome.connection_mark.into(),
        // Only the guard has these conditions.
        Key::TcpFlags | Key::DestinationType => return None,
    })
}
