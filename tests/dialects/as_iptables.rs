//! What iptables' rules do to a packet (iptables(8), iptables-extensions(8)).

use crate::packet::{Fate, Packet};
use detour_cni::firewall::rule::{CtState, Is, Match, Rule, Table, Target};
use detour_cni::firewall::{Ruleset, TableRules};
use detour_cni::policy::{IdRange, PortRange, Protocol};
use ipnet::IpNet;
use std::net::IpAddr;

pub(crate) fn fate(ruleset: &Ruleset, packet: &Packet) -> Fate {
    let mut fate = Fate::of(packet);
    for table in Table::ALL {
        if let Some(rules) = ruleset.tables.get(&(packet.family, table)) {
            let entered = rules.hooks.get(&packet.hook).map_or(&[][..], Vec::as_slice);
            pass(rules, entered, packet, &mut fate);
            if fate.dropped {
                break;
            }
        }
    }
    fate.settled()
}

/// Whether a verdict ended the table.
fn pass(table: &TableRules, rules: &[Rule], packet: &Packet, fate: &mut Fate) -> bool {
    for rule in rules {
        if !meets(rule, packet, fate) {
            continue;
        }
        match &rule.target {
            Target::Return => return false,
            Target::Accept => return true,
            Target::Drop => fate.dropped = true,
            Target::Redirect(port) => fate.redirected_to = Some(*port),
            Target::Tproxy { port, mark } if packet.is_listened_for => {
                (fate.handed_to, fate.mark) = (Some(*port), *mark);
            }
            Target::Tproxy { .. } => fate.dropped = true,
            Target::Jump(chain) => {
                let rules = table.chains.iter().find(|(name, _)| name == chain).map_or(&[][..], |(_, rules)| rules);
                if pass(table, rules, packet, fate) {
                    return true;
                }
                continue;
            }
            Target::Zone(zone) => {
                fate.zone.get_or_insert(*zone);
                continue;
            }
            Target::SetMark(mark) => {
                fate.mark = *mark;
                continue;
            }
            Target::SaveMark => {
                fate.connection_mark = fate.mark;
                continue;
            }
            Target::RestoreMark => {
                fate.mark = fate.connection_mark;
                continue;
            }
        }
        return true;
    }
    false
}

fn meets(rule: &Rule, packet: &Packet, fate: &Fate) -> bool {
    let net = |condition: &Option<Is<IpNet>>, address: IpAddr| {
        condition.as_ref().is_none_or(|is| is.value.contains(&address) != is.not)
    };
    let interface = |condition: &Option<Is<String>>, at_hook: bool| {
        let named = |name: &str| match name.strip_suffix('+') {
            Some(prefix) => packet.interface.starts_with(prefix),
            None => packet.interface == name,
        };
        condition.as_ref().is_none_or(|is| (at_hook && named(&is.value)) != is.not)
    };
    let outgoing = packet.hook == detour_cni::firewall::rule::Hook::Output;
    let protocol = rule.protocol.is_none_or(|protocol| match protocol {
        Protocol::Tcp => packet.protocol == 6,
        Protocol::Udp => packet.protocol == 17,
    });
    net(&rule.source, packet.source)
        && net(&rule.destination, packet.destination)
        && interface(&rule.in_interface, !outgoing)
        && interface(&rule.out_interface, outgoing)
        && protocol
        && rule.matches.iter().all(|condition| holds(condition, packet, fate))
}

fn holds(condition: &Match, packet: &Packet, fate: &Fate) -> bool {
    let port = |range: &PortRange, port: u16| range.first <= port && port <= range.last;
    // Nobody sends what comes in: then no owner is met, and `!` does not help (owner_mt).
    let id = |is: &Is<IdRange>, id: u32| id != u32::MAX && (is.value.first <= id && id <= is.value.last) != is.not;
    match condition {
        Match::DestinationPort(is) => port(&is.value, packet.destination_port) != is.not,
        Match::SourcePort(is) => port(&is.value, packet.source_port) != is.not,
        Match::DestinationPorts(is) => is.value.iter().any(|range| port(range, packet.destination_port)) != is.not,
        Match::Uid(is) => id(is, packet.uid),
        Match::Gid(is) => id(is, packet.gid),
        Match::CtState(CtState::Invalid) => packet.state == 1,
        Match::CtState(CtState::RelatedOrEstablished) => [2, 4].contains(&packet.state),
        Match::Mark(is) => (fate.mark == is.value) != is.not,
        Match::Connmark(mark) => fate.connection_mark == *mark,
    }
}
