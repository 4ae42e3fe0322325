//! One packet through one hook of one table, as the kernel goes (nf_tables_core.c, `nft_do_chain`;
//! xtables targets by their own sources).

use super::packet::{Origin, Packet};
use super::rulebook::{Line, Rulebook};
use crate::firewall::rule::{CtState, Hook, Is, Match, Rule, Table, Target};
use ipnet::IpNet;
use serde::Serialize;
use std::net::IpAddr;

/// A rule that the packet met.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hop {
    /// `raw`, `mangle` or `nat`.
    pub table: &'static str,
    /// `OUTPUT` or `PREROUTING`: where the kernel entered the table.
    pub hook: &'static str,
    /// The chain that the rule stands in.
    pub chain: String,
    /// The rule, as `iptables-save` prints it, without `-A CHAIN`.
    pub rule: String,
    /// What it did: `goes to CHAIN`, `returns`, `accepted`, `to port 15001`, ….
    pub then: String,
}

/// How the packet left the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// On to the next table.
    PassedOn,
    /// `DROP`.
    Dropped,
    /// `REDIRECT` to this port.
    Redirected(u16),
    /// `TPROXY` to this port.
    Tproxied(u16),
}

/// A walk through several tables.
pub(super) struct Walk<'a> {
    pub book: &'a Rulebook,
    pub packet: Packet,
    /// The rules that it met, in their order.
    pub hops: Vec<Hop>,
    /// Foreign rules that it came by and that are not understood, as `CHAIN rule`.
    pub unknown: Vec<String>,
}

/// What a rule, or a chain, means for the packet.
enum Verdict {
    /// The next rule.
    Continue,
    /// Back to the chain that jumped here.
    Return,
    /// Out of the table.
    End(End),
}

impl Walk<'_> {
    /// Through one hook of one table.
    pub(super) fn pass(&mut self, table: Table, hook: Hook) -> End {
        match self.chain((table, hook), hook.chain()) {
            Verdict::End(end) => end,
            Verdict::Continue | Verdict::Return => End::PassedOn,
        }
    }

    fn chain(&mut self, at: (Table, Hook), name: &str) -> Verdict {
        let book = self.book;
        for line in book.chain(self.packet.family(), at.0, name) {
            match self.line(at, name, line) {
                Verdict::Continue => {}
                // The caller goes on behind the rule that jumped here.
                Verdict::Return => return Verdict::Continue,
                end @ Verdict::End(_) => return end,
            }
        }
        Verdict::Continue
    }

    fn line(&mut self, at: (Table, Hook), chain: &str, line: &Line) -> Verdict {
        let Some(rule) = &line.rule else {
            self.unknown.push(format!("{chain} {}", line.text));
            return Verdict::Continue;
        };
        if !meets(&self.packet, rule) {
            return Verdict::Continue;
        }
        let packet = &mut self.packet;
        let mut jump = None;
        let (then, verdict) = match &rule.target {
            Target::Accept => ("accepted".to_owned(), Verdict::End(End::PassedOn)),
            Target::Return => ("returns".to_owned(), Verdict::Return),
            Target::Drop => ("dropped".to_owned(), Verdict::End(End::Dropped)),
            Target::Jump(to) => {
                jump = Some(to);
                (format!("goes to {to}"), Verdict::Continue)
            }
            Target::Redirect(port) => (format!("to port {port}"), Verdict::End(End::Redirected(*port))),
            Target::Tproxy { port, mark } => {
                packet.mark = *mark;
                (format!("to port {port} as it is"), Verdict::End(End::Tproxied(*port)))
            }
            // What has a zone, or came over lo and so has been tracked, keeps it (xt_CT.c).
            Target::Zone(_) if packet.zone.is_some() => ("has a zone already".to_owned(), Verdict::Continue),
            Target::Zone(zone) => {
                packet.zone = Some(*zone);
                (format!("zone {zone}"), Verdict::Continue)
            }
            Target::SetMark(mark) => {
                packet.mark = *mark;
                (format!("mark {mark:#x}"), Verdict::Continue)
            }
            Target::SaveMark => ("the connection keeps the mark".to_owned(), Verdict::Continue),
            Target::RestoreMark => ("the connection's mark".to_owned(), Verdict::Continue),
        };
        self.hops.push(Hop {
            table: at.0.name(),
            hook: at.1.chain(),
            chain: chain.to_owned(),
            rule: line.text.clone(),
            then,
        });
        match jump {
            Some(to) => self.chain(at, to),
            None => verdict,
        }
    }
}

/// Whether the packet meets all conditions of a rule.
fn meets(packet: &Packet, rule: &Rule) -> bool {
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

/// A first packet is of a new connection: neither known nor out of place, its connection without a mark.
fn holds(packet: &Packet, condition: &Match) -> bool {
    let port =
        |is: &Is<crate::policy::PortRange>, port: u16| (is.value.first..=is.value.last).contains(&port) != is.not;
    let owner = |is: &Is<crate::policy::IdRange>, id: Option<u32>| {
        // A packet without a socket has no owner, and meets neither the condition nor its opposite (xt_owner.c).
        id.is_some_and(|id| (is.value.first..=is.value.last).contains(&id) != is.not)
    };
    let (uid, gid) = match packet.origin {
        Origin::Process { uid, gid } if packet.out_interface.is_some() => (Some(uid), Some(gid)),
        Origin::Process { .. } | Origin::Outside => (None, None),
    };
    match condition {
        Match::DestinationPort(is) => port(is, packet.destination.port()),
        Match::SourcePort(is) => port(is, packet.source.port()),
        Match::DestinationPorts(is) => {
            let to = packet.destination.port();
            is.value.iter().any(|range| (range.first..=range.last).contains(&to)) != is.not
        }
        Match::Uid(is) => owner(is, uid),
        Match::Gid(is) => owner(is, gid),
        Match::CtState(CtState::Invalid | CtState::RelatedOrEstablished) => false,
        Match::Mark(is) => (packet.mark == is.value) != is.not,
        Match::Connmark(mark) => *mark == 0,
    }
}
