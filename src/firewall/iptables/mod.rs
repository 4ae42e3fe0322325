//! The rule format `iptables`: a rule as the nf_tables expressions that iptables-nft itself would write, in its order,
//! and back; and its text, as `iptables-save` prints it without `-A CHAIN` and as `iptables-restore` reads it.
//!
//! * `xt`: xtables matches and targets as C structures

use crate::firewall::expression::{Expression, NftVerdict, encodes_as};
use crate::firewall::native::rule::{address, interface, protocol_name, span_text};
use crate::firewall::native::wire::{ExpressionReader, compare};
use crate::firewall::rule::{Condition, Family, Hook, INVALID, Key, Rule, Table, Target};
use crate::firewall::ruleset::Ruleset;
use crate::firewall::set::Span;
use crate::netlink::attributes::Attributes;
use crate::trusted_file::read_text;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use xt::Info;

mod xt;

/// `NFTA_RULE_COMPAT_PROTO`, `NFTA_RULE_COMPAT_FLAGS`.
const COMPAT_PROTOCOL: u16 = 1;
const COMPAT_FLAGS: u16 = 2;

/// Appends a rule's `NFTA_RULE_EXPRESSIONS`.
pub(super) fn expressions<'l>(list: &'l mut Attributes, rule: &Rule, family: Family) -> &'l mut Attributes {
    encode(rule, family, &mut |expression| _ = expression.write(list));
    list
}

/// Appends a rule's `NFTA_RULE_COMPAT`: extensions check that they support the protocol.
pub(super) fn compat(list: &mut Attributes, protocol: u32) -> &mut Attributes {
    list.be32(COMPAT_PROTOCOL, protocol).be32(COMPAT_FLAGS, 0)
}

/// Decodes a rule as the kernel lists it; `None` if detour would not write such a rule.
pub(super) fn decode(list: &[u8], family: Family) -> Option<Rule> {
    let all: Vec<Expression<'_>> = Expression::read_all(list).collect::<Option<_>>()?;
    let counter = all.iter().position(|expression| *expression == Expression::Counter)?;
    let target = match all[counter + 1..] {
        [Expression::Verdict(verdict)] => verdict.target().filter(|target| !matches!(target, Target::Goto(_)))?,
        [Expression::Target(extension)] => xt::to_target(extension, family)?,
        _ => return None,
    };
    let (mut rule, no_sets) = (Rule::new(target), BTreeMap::new());
    let mut reader = ExpressionReader::new(&all[..counter], Some(family), &no_sets);
    let mut multiports = Vec::new();
    while let Some(first) = reader.next() {
        match first {
            Expression::Match(ports) if ports.name == xt::MULTIPORT => {
                multiports.push((rule.conditions.len() + multiports.len(), xt::to_multiport(ports)?));
            }
            Expression::Match(extension) => rule.conditions.push(xt::to_match(*extension)?),
            load => rule.conditions.push(reader.condition(load)?),
        }
    }
    // Rules that are equal as values must be equal in the kernel, except for the order of ports in `-m multiport`: other
    // tools write any order, and the rules must be evaluated.
    let is_multiport = |one: &&Expression<'_>| matches!(one, Expression::Match(ports) if ports.name == xt::MULTIPORT);
    let others: Vec<Expression<'_>> = all.iter().filter(|one| !is_multiport(one)).copied().collect();
    let is_same = encodes_as(&others, |out| encode(&rule, family, out));
    multiports.into_iter().for_each(|(at, ports)| rule.conditions.insert(at, ports));
    is_same.then_some(rule)
}

/// Passes the expressions of `rule` to `out`, one after another.
fn encode(rule: &Rule, family: Family, out: &mut dyn FnMut(Expression<'_>)) {
    for condition in &rule.conditions {
        match xt::of_match(condition, &mut Info::new()) {
            Some(extension) => out(Expression::Match(extension)),
            None => encode_condition(condition, out),
        }
    }
    out(Expression::Counter);
    if let Some(verdict) = NftVerdict::of(&rule.target) {
        out(Expression::Verdict(verdict));
    } else if let Some(extension) = xt::of_target(&rule.target, family, &mut Info::new()) {
        out(Expression::Target(extension));
    }
}

/// Encodes a condition for which iptables uses no extension.
fn encode_condition(condition: &Condition, out: &mut dyn FnMut(Expression<'_>)) {
    let (Condition { key, not, .. }, Some(span)) = (condition, condition.values.single()) else { return };
    let bytes = span.first.to_be_bytes();
    let value = match key {
        // With its zero byte, unless it is a prefix.
        Key::InInterface | Key::OutInterface => {
            let length = bytes.iter().take_while(|byte| **byte != 0).count();
            &bytes[..bytes.len().min(length + usize::from(span.is_one()))]
        }
        // A prefix of whole bytes is compared directly, any other prefix needs a mask.
        Key::Source(family) | Key::Destination(family) => match span.prefix(family.bits()) {
            Some(0) | None => return,
            Some(prefix) if prefix.is_multiple_of(8) => {
                let start = bytes.len() - key.width();
                &bytes[start..start + (prefix / 8) as usize]
            }
            Some(_) => return compare(condition, span, out),
        },
        Key::Protocol | Key::SourcePort | Key::DestinationPort | Key::Mark => return compare(condition, span, out),
        _ => return,
    };
    out(match key.load() {
        Expression::Payload { base, offset, .. } => {
            Expression::Payload { base, offset, length: u32::try_from(value.len()).unwrap_or_default() }
        }
        load => load,
    });
    out(Expression::Compare { not: *not, value });
}

/// The most that is read of a list of table names. There are few tables, with names of at most 32 bytes.
const MAX_NAMES_FILE: u64 = 64 << 10;

/// Returns the tables of iptables-legacy that are active in the calling thread's network namespace; none if the
/// kernel does not support them. The kernel lists only their names (net/netfilter/x_tables.c, `xt_table_seq_ops`).
#[must_use]
pub fn legacy_tables() -> Vec<(Family, String)> {
    let names = |family: Family| {
        let file = match family {
            Family::Ip => "/proc/thread-self/net/ip_tables_names",
            Family::Ip6 => "/proc/thread-self/net/ip6_tables_names",
        };
        let text = read_text(Path::new(file), MAX_NAMES_FILE).unwrap_or_default();
        text.lines().map(|name| (family, name.to_owned())).collect::<Vec<_>>()
    };
    Family::ALL.into_iter().flat_map(names).collect()
}

impl Rule {
    /// Returns the rule as `iptables-save` prints it, without `-A CHAIN`.
    #[must_use]
    pub fn iptables_text(&self) -> String {
        let mut conditions: Vec<&Condition> = self.conditions.iter().collect();
        conditions.sort_by_key(|condition| match condition.key {
            Key::Source(_) => 0,
            Key::Destination(_) => 1,
            Key::InInterface => 2,
            Key::OutInterface => 3,
            Key::Protocol => 4,
            _ => 5,
        });
        let mut words: Vec<String> = conditions.into_iter().map(|condition| self.condition_text(condition)).collect();
        words.push(self.target_text());
        words.join(" ")
    }

    fn condition_text(&self, Condition { key, not, values }: &Condition) -> String {
        let protocol = self.protocol().and_then(protocol_name);
        let (extension, flag) = match key {
            Key::Source(_) => (None, "-s"),
            Key::Destination(_) => (None, "-d"),
            Key::InInterface => (None, "-i"),
            Key::OutInterface => (None, "-o"),
            Key::Protocol => (None, "-p"),
            Key::SourcePort => (protocol, "--sport"),
            Key::DestinationPort if values.single().is_none() => (Some("multiport"), "--dports"),
            Key::DestinationPort => (protocol, "--dport"),
            Key::Uid => (Some("owner"), "--uid-owner"),
            Key::Gid => (Some("owner"), "--gid-owner"),
            Key::CtState => (Some("conntrack"), "--ctstate"),
            Key::Mark => (Some("mark"), "--mark"),
            Key::CtMark => (Some("connmark"), "--mark"),
            Key::TcpFlags | Key::DestinationType => return "(native)".to_owned(),
        };
        let extension = extension.map(|name| format!("-m {name} ")).unwrap_or_default();
        let values: Vec<String> = values.as_slice().iter().map(|span| value_text(*key, *span)).collect();
        format!("{extension}{}{flag} {}", if *not { "! " } else { "" }, values.join(","))
    }

    fn target_text(&self) -> String {
        match &self.target {
            Target::Accept => "-j ACCEPT".to_owned(),
            Target::Return => "-j RETURN".to_owned(),
            Target::Drop => "-j DROP".to_owned(),
            Target::Jump(chain) => format!("-j {chain}"),
            Target::Redirect(port) => format!("-j REDIRECT --to-ports {port}"),
            Target::Zone(zone) => format!("-j CT --zone {zone}"),
            Target::Tproxy { port, mark } => {
                let is_ip6 = |c: &Condition| matches!(c.key, Key::Source(Family::Ip6) | Key::Destination(Family::Ip6));
                let any = if self.conditions.iter().any(is_ip6) { "::" } else { "0.0.0.0" };
                format!("-j TPROXY --on-port {port} --on-ip {any} --tproxy-mark {mark:#x}/0xffffffff")
            }
            Target::SetMark(mark) => format!("-j MARK --set-xmark {mark:#x}/0xffffffff"),
            Target::SaveMark => "-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff".to_owned(),
            Target::RestoreMark => "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff".to_owned(),
            Target::Goto(_) | Target::KeepDestination | Target::Reset | Target::Reject => "(native)".to_owned(),
        }
    }
}

fn value_text(key: Key, span: Span) -> String {
    match key {
        Key::Source(family) | Key::Destination(family) => {
            format!("{}/{}", address(family, span.first), span.prefix(family.bits()).unwrap_or_default())
        }
        Key::InInterface | Key::OutInterface => interface(span) + if span.is_one() { "" } else { "+" },
        Key::SourcePort | Key::DestinationPort if !span.is_one() => format!("{}:{}", span.first, span.last),
        Key::CtState => if span.first == INVALID { "INVALID" } else { "RELATED,ESTABLISHED" }.to_owned(),
        _ => span_text(key, span),
    }
}

/// Returns the rules as text that `iptables-restore` and `ip6tables-restore` both accept.
///
/// A rule for only one of them starts with `-4` or `-6`, and the other tool skips it (iptables(8)). A rule for both is
/// listed once.
#[must_use]
pub fn restore_text(ruleset: &Ruleset) -> String {
    let tables: BTreeSet<Table> = ruleset.tables.keys().map(|(_, table)| *table).collect();
    let mut text = String::new();
    for table in tables {
        let mut chains: Vec<(String, bool)> = Vec::new();
        let mut add = |name: &str, built_in| {
            if !chains.iter().any(|(known, _)| known == name) {
                chains.push((name.to_owned(), built_in));
            }
        };
        let both = || Family::ALL.into_iter().filter_map(|family| ruleset.tables.get(&(family, table)));
        both().for_each(|rules| rules.hooks.keys().for_each(|hook| add(hook.chain(), true)));
        both().for_each(|rules| rules.chains.iter().for_each(|(name, _)| add(name, false)));
        let _ = writeln!(text, "*{}", table.name());
        for (name, built_in) in &chains {
            let _ = writeln!(text, ":{name} {} [0:0]", if *built_in { "ACCEPT" } else { "-" });
        }
        for (name, _) in &chains {
            let rules = |family| chain_rules(ruleset, family, table, name);
            chain_text(&mut text, name, rules(Family::Ip), rules(Family::Ip6));
        }
        text += "COMMIT\n";
    }
    text
}

fn chain_rules<'a>(ruleset: &'a Ruleset, family: Family, table: Table, chain: &str) -> &'a [Rule] {
    let Some(rules) = ruleset.tables.get(&(family, table)) else { return &[] };
    let hook = Hook::ALL.into_iter().find(|hook| hook.chain() == chain).and_then(|hook| rules.hooks.get(&hook));
    let own = || rules.chains.iter().find(|(name, _)| name == chain).map(|(_, rules)| rules);
    hook.or_else(own).map_or(&[], Vec::as_slice)
}

/// Writes a chain: rule by rule if both families have the same number of rules, otherwise family by family.
fn chain_text(text: &mut String, chain: &str, v4: &[Rule], v6: &[Rule]) {
    let mut line = |prefix: &str, rule: &Rule| {
        let _ = writeln!(text, "{prefix}-A {chain} {}", rule.iptables_text());
    };
    if v4.len() != v6.len() {
        v4.iter().for_each(|rule| line("-4 ", rule));
        v6.iter().for_each(|rule| line("-6 ", rule));
        return;
    }
    for (four, six) in v4.iter().zip(v6) {
        if four == six {
            line("", four);
        } else {
            line("-4 ", four);
            line("-6 ", six);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::expression::Extension;
    use crate::firewall::set::Spans;
    use crate::policy::{IdRange, Interception, Policy, PortRange};

    #[test]
    fn conditions_are_printed_in_the_order_of_iptables_save() {
        let lo = "127.0.0.1/32".parse().expect("a CIDR");
        let ports = [PortRange::one(53), PortRange { first: 8000, last: 8010 }].map(Span::from);
        let ports = ports.into_iter().collect::<Spans>();
        let rule = Rule::jump("ISTIO_IN_REDIRECT")
            .on(Condition::interface(Key::OutInterface, "lo"))
            .on(!Condition::to(lo))
            .tcp()
            .on(!Condition::is(Key::DestinationPort, ports))
            .on(Condition::is(Key::Uid, IdRange { first: 5, last: 9 }));
        assert_eq!(
            rule.iptables_text(),
            "! -d 127.0.0.1/32 -o lo -p tcp -m multiport ! --dports 53,8000:8010 -m owner --uid-owner 5-9 -j ISTIO_IN_REDIRECT"
        );
        let port = Condition::is(Key::DestinationPort, PortRange::one(15008));
        let rule = Rule::new(Target::Return).tcp().on(!port);
        assert_eq!(rule.iptables_text(), "-p tcp -m tcp ! --dport 15008 -j RETURN");
        // A rule of another tool, for SCTP.
        let rule = Rule::new(Target::Return).on(Condition::is(Key::Protocol, Spans::one(132_u8)));
        assert_eq!(rule.to_port(PortRange::one(80)).iptables_text(), "-p 132 --dport 80 -j RETURN");
    }

    /// Other tools write them in the order in which the user gave them.
    #[test]
    fn ports_of_multiport_are_decoded_in_any_order() {
        let decoded = |which: u8, ports: &[u16]| {
            let mut info = [0_u8; 48];
            (info[0], info[1]) = (which, ports.len() as u8);
            let bytes = ports.iter().flat_map(|port| port.to_ne_bytes());
            info[2..].iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
            let mut list = Attributes::new();
            Expression::Match(Extension { name: xt::MULTIPORT, revision: 1, info: &info }).write(&mut list);
            Expression::Counter.write(&mut list);
            let verdict = NftVerdict::of(&Target::Return).expect("a verdict");
            decode(Expression::Verdict(verdict).write(&mut list).as_bytes(), Family::Ip)
                .map(|rule| rule.iptables_text())
        };
        assert_eq!(decoded(1, &[443, 80]).as_deref(), Some("-m multiport --dports 80,443 -j RETURN"));
        assert_eq!(decoded(1, &[8200, 8201]).as_deref(), Some("--dport 8200:8201 -j RETURN"));
        assert_eq!(decoded(0, &[80, 443]), None);
    }

    #[test]
    fn rules_of_both_families_are_listed_once() {
        let on = Policy { interception: Interception::On(Box::default()), ..Policy::default() };
        let text = restore_text(&Ruleset::of(&on, &Family::ALL));
        let lines = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
        assert_eq!(lines("-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN"), 1);
        assert_eq!((lines("-4 -A ISTIO_OUTPUT -d 127.0.0.1/32"), lines("-6 -A ISTIO_OUTPUT -d ::1/128")), (1, 1));
        assert_eq!(lines("-4"), lines("-6"));
        assert!(text.starts_with("*nat\n:PREROUTING ACCEPT [0:0]\n") && text.ends_with("COMMIT\n"), "{text}");
        let one = restore_text(&Ruleset::of(&on, &[Family::Ip]));
        assert!(one.lines().all(|line| !line.starts_with("-6") && !line.starts_with("-A")), "{one}");
    }
}
