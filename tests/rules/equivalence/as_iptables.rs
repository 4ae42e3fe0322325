//! Evaluates the exclusions and iptables rules for a packet (iptables(8), iptables-extensions(8)).

use crate::equivalence::as_nftables;
use crate::equivalence::packet::{Outcome, Packet};
use detour_cni::firewall::rule::{CtState, Is, Match, Name, Rule, Table};
use detour_cni::firewall::target::Target;
use detour_cni::firewall::{RuleFormat, Ruleset, TableRules};
use detour_cni::policy::{IdRange, PortRange, Protocol};
use ipnet::IpNet;
use std::net::IpAddr;

pub(crate) fn outcome(ruleset: &Ruleset, packet: &Packet) -> Outcome {
    let mut outcome = Outcome::of(packet);
    as_nftables::pass_tables(&RuleFormat::Iptables.native(ruleset), packet, &mut outcome);
    for table in Table::ALL {
        if let Some(rules) = ruleset.tables.get(&(packet.family, table)) {
            let entered = rules.hooks.get(&packet.hook).map_or(&[][..], Vec::as_slice);
            pass(rules, entered, packet, &mut outcome);
            if outcome.dropped {
                break;
            }
        }
    }
    outcome.normalized()
}

/// Evaluates a chain; returns whether a verdict ended the table.
fn pass(table: &TableRules, rules: &[Rule], packet: &Packet, outcome: &mut Outcome) -> bool {
    for rule in rules {
        if !meets(rule, packet, outcome) {
            continue;
        }
        match &rule.target {
            Target::Return => return false,
            Target::Accept => return true,
            Target::Drop => outcome.dropped = true,
            Target::Redirect(port) => outcome.redirected_to = Some(*port),
            Target::Tproxy { port, mark } if packet.has_listener => {
                (outcome.assigned_to, outcome.mark) = (Some(*port), *mark);
            }
            Target::Tproxy { .. } => outcome.dropped = true,
            Target::Jump(chain) => {
                let rules = table.chains.iter().find(|(name, _)| name == chain).map_or(&[][..], |(_, rules)| rules);
                if pass(table, rules, packet, outcome) {
                    return true;
                }
                continue;
            }
            Target::Zone(zone) => {
                outcome.zone.get_or_insert(*zone);
                continue;
            }
            Target::SetMark(mark) => {
                outcome.mark = *mark;
                continue;
            }
            Target::SaveMark => {
                outcome.connection_mark = outcome.mark;
                continue;
            }
            Target::RestoreMark => {
                outcome.mark = outcome.connection_mark;
                continue;
            }
            native => panic!("{native:?} in the rules of a redirection"),
        }
        return true;
    }
    false
}

fn meets(rule: &Rule, packet: &Packet, outcome: &Outcome) -> bool {
    let net = |condition: &Option<Is<IpNet>>, address: IpAddr| {
        condition.as_ref().is_none_or(|is| is.value.contains(&address) != is.not)
    };
    let interface = |condition: &Option<Is<Name>>, at_hook: bool| {
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
        && rule.matches.iter().all(|condition| holds(condition, packet, outcome))
}

fn holds(condition: &Match, packet: &Packet, outcome: &Outcome) -> bool {
    let port = |range: &PortRange, port: u16| range.first <= port && port <= range.last;
    // An incoming packet has no owner: the match fails, negated or not (owner_mt).
    let id = |is: &Is<IdRange>, id: u32| id != u32::MAX && (is.value.first <= id && id <= is.value.last) != is.not;
    match condition {
        Match::DestinationPort(is) => port(&is.value, packet.destination_port) != is.not,
        Match::SourcePort(is) => port(&is.value, packet.source_port) != is.not,
        Match::DestinationPorts(is) => is.value.iter().any(|range| port(range, packet.destination_port)) != is.not,
        Match::Uid(is) => id(is, packet.uid),
        Match::Gid(is) => id(is, packet.gid),
        Match::CtState(CtState::Invalid) => packet.state == 1,
        Match::CtState(CtState::RelatedOrEstablished) => [2, 4].contains(&packet.state),
        Match::Mark(is) => (outcome.mark == is.value) != is.not,
        Match::Connmark(mark) => outcome.connection_mark == *mark,
    }
}
