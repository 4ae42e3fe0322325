//! Native rules as `nft list ruleset` prints them, less the counters; `nft -f` reads it.

use super::rule::{NativeAction, NativeChain, Condition, Key, NativeRule, NativeTables, chain_type, priority, table_name};
use super::spans::Span;
use crate::firewall::rule::{Family, Hook, Table};
use std::fmt::{self, Display, Formatter};
use std::net::{Ipv4Addr, Ipv6Addr};

/// The tables in the form that `nft -f` reads.
#[must_use]
pub fn text(tables: &NativeTables) -> String {
    tables
        .iter()
        .map(|(table, chains)| {
            let (base, others): (Vec<_>, Vec<_>) = chains.iter().partition(|(_, chain)| chain.hook.is_some());
            let chains: Vec<String> =
                base.into_iter().chain(others).map(|(name, chain)| chain_text(*table, name, chain)).collect();
            format!("table inet {} {{\n{}}}\n", table_name(*table), chains.join("\n"))
        })
        .collect()
}

fn chain_text(table: Table, name: &str, chain: &NativeChain) -> String {
    let hook = chain.hook.map(|hook| {
        let (kind, priority) = (chain_type(table, hook), priority(table));
        let point = match hook {
            Hook::Prerouting => "prerouting",
            Hook::Output => "output",
        };
        format!("\t\ttype {kind} hook {point} priority {priority}; policy accept;\n")
    });
    let rules: String = chain.rules.iter().map(|rule| format!("\t\t{rule}\n")).collect();
    format!("\tchain {name} {{\n{}{rules}\t}}\n", hook.unwrap_or_default())
}

impl Display for NativeRule {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let is_address = |c: &Condition| matches!(c.key, Key::Source(_) | Key::Destination(_));
        // An address says of which family it is.
        if let Some(family) = self.family.filter(|_| !self.conditions.iter().any(is_address)) {
            write!(f, "meta nfproto {} ", family_name(family))?;
        }
        let protocol = self.protocol();
        let looks_at_ports = |c: &Condition| matches!(c.key, Key::SourcePort | Key::DestinationPort);
        let implied = protocol.is_some() && self.conditions.iter().any(looks_at_ports);
        for condition in self.conditions.iter().filter(|c| !(implied && c.key == Key::Protocol)) {
            write!(f, "{} ", condition_text(condition, protocol))?;
        }
        write!(f, "counter {}", self.action_text())
    }
}

const fn family_name(family: Family) -> &'static str {
    match family {
        Family::Ip => "ipv4",
        Family::Ip6 => "ipv6",
    }
}

impl NativeRule {
    /// The protocol, where it must be one.
    fn protocol(&self) -> Option<&'static str> {
        let span = self.condition(Key::Protocol).filter(|c| !c.not)?.values.single()?;
        protocol_name(span.first).filter(|_| span.is_one())
    }

    fn action_text(&self) -> String {
        let family = self.family.map_or("", Family::name);
        match &self.action {
            NativeAction::Accept => "accept".to_owned(),
            NativeAction::Return => "return".to_owned(),
            NativeAction::Drop => "drop".to_owned(),
            NativeAction::Jump(chain) => format!("jump {chain}"),
            NativeAction::Redirect(port) => format!("redirect to :{port}"),
            NativeAction::Zone(zone) => format!("ct zone set {zone}"),
            NativeAction::Tproxy { port, mark } if family.is_empty() => {
                format!("tproxy to :{port} meta mark set {mark:#x} accept")
            }
            NativeAction::Tproxy { port, mark } => format!("tproxy {family} to :{port} meta mark set {mark:#x} accept"),
            NativeAction::SetMark(mark) => format!("meta mark set {mark:#x}"),
            NativeAction::SaveMark => "ct mark set meta mark".to_owned(),
            NativeAction::RestoreMark => "meta mark set ct mark".to_owned(),
            NativeAction::KeepDestination => format!("dnat {family} to {family} daddr"),
        }
    }
}

fn protocol_name(number: u128) -> Option<&'static str> {
    match number {
        6 => Some("tcp"),
        17 => Some("udp"),
        _ => None,
    }
}

fn condition_text(condition: &Condition, protocol: Option<&str>) -> String {
    let transport = protocol.unwrap_or("th");
    let key = match condition.key {
        Key::InInterface => "iifname".to_owned(),
        Key::OutInterface => "oifname".to_owned(),
        Key::Source(family) => format!("{} saddr", family.name()),
        Key::Destination(family) => format!("{} daddr", family.name()),
        Key::Protocol => "meta l4proto".to_owned(),
        Key::SourcePort => format!("{transport} sport"),
        Key::DestinationPort => format!("{transport} dport"),
        Key::Uid => "meta skuid".to_owned(),
        Key::Gid => "meta skgid".to_owned(),
        Key::CtState => "ct state".to_owned(),
        Key::Mark => "meta mark".to_owned(),
        Key::CtMark => "ct mark".to_owned(),
    };
    let values: Vec<String> = condition.values.as_slice().iter().map(|span| span_text(condition.key, *span)).collect();
    let values = match values.as_slice() {
        [one] => one.clone(),
        several => format!("{{ {} }}", several.join(", ")),
    };
    format!("{key} {}{values}", if condition.not { "!= " } else { "" })
}

fn span_text(key: Key, span: Span) -> String {
    let one = |number: u128| match key {
        Key::Source(family) | Key::Destination(family) => address(family, number),
        Key::Protocol => protocol_name(number).map_or_else(|| number.to_string(), str::to_owned),
        Key::Mark | Key::CtMark => format!("{number:#x}"),
        _ => number.to_string(),
    };
    match key {
        Key::InInterface | Key::OutInterface => interface(span),
        Key::CtState => state(span.first),
        Key::Source(family) | Key::Destination(family) => match span.prefix(family.bits()) {
            Some(length) if !span.is_one() => format!("{}/{length}", one(span.first)),
            _ => range(span, one),
        },
        _ => range(span, one),
    }
}

fn range(span: Span, one: impl Fn(u128) -> String) -> String {
    if span.is_one() { one(span.first) } else { format!("{}-{}", one(span.first), one(span.last)) }
}

fn address(family: Family, number: u128) -> String {
    match family {
        Family::Ip => Ipv4Addr::from(u32::try_from(number).unwrap_or_default()).to_string(),
        Family::Ip6 => Ipv6Addr::from(number).to_string(),
    }
}

fn interface(span: Span) -> String {
    let name: Vec<u8> = span.first.to_be_bytes().into_iter().take_while(|byte| *byte != 0).collect();
    let star = if span.is_one() { "" } else { "*" };
    format!("\"{}{star}\"", String::from_utf8_lossy(&name))
}

/// `NF_CT_STATE_BIT`, with nft's names, in the order in which it prints them.
fn state(bits: u128) -> String {
    let names = [(1, "invalid"), (2, "established"), (4, "related"), (8, "new"), (64, "untracked")];
    let set: Vec<&str> = names.into_iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| name).collect();
    set.join(",")
}
