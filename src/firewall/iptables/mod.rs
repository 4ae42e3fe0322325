//! The rule format `iptables`: a rule as the nf_tables expressions that iptables-nft itself would write, in its order,
//! and back; and its text, as `iptables-save` prints it without `-A CHAIN` and as `iptables-restore` reads it.
//!
//! * `xt`: xtables matches and targets as C structures

use crate::firewall::expression::{Base, Expression, Meta, encodes_as};
use crate::firewall::rule::{CtState, Family, Hook, Is, Match, Name, Rule, Ruleset, Table, protocol_number};
use crate::firewall::target::Target;
use crate::netlink::attributes::Attributes;
use crate::policy::{PortRange, Protocol};
use crate::trusted_file::read_text;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use xt::Info;

mod xt;

/// `NFTA_RULE_COMPAT_PROTO`, `NFTA_RULE_COMPAT_FLAGS`.
const COMPAT_PROTOCOL: u16 = 1;
const COMPAT_FLAGS: u16 = 2;

/// The number of expressions for which a list has room at once; a usual rule has fewer.
const USUAL_EXPRESSIONS: usize = 16;

/// Appends a rule's `NFTA_RULE_EXPRESSIONS`.
pub(super) fn expressions<'l>(list: &'l mut Attributes, rule: &Rule, family: Family) -> &'l mut Attributes {
    encode(rule, family, &mut |expression| _ = expression.write(list));
    list
}

/// Appends a rule's `NFTA_RULE_COMPAT`: extensions check that they support the protocol.
pub(super) fn compat(list: &mut Attributes, protocol: Protocol) -> &mut Attributes {
    list.be32(COMPAT_PROTOCOL, protocol_number(protocol).into()).be32(COMPAT_FLAGS, 0)
}

/// Decodes a rule as the kernel lists it; `None` if detour would not write such a rule.
pub(super) fn decode(list: &[u8], family: Family) -> Option<Rule> {
    let (mut known, mut is_complete) = (Vec::with_capacity(USUAL_EXPRESSIONS), true);
    Expression::read_all(list).for_each(|expression| match expression {
        Some(expression) => known.push(expression),
        None => is_complete = false,
    });
    let rule = Decoder { family, left: &known }.rule().filter(|_| is_complete);
    // Rules that are equal as values must be equal in the kernel.
    rule.filter(|rule| encodes_as(&known, |out| encode(rule, family, out)))
}

/// Passes the expressions of `rule` to `out`, one after another.
fn encode(rule: &Rule, family: Family, out: &mut dyn FnMut(Expression<'_>)) {
    interface(out, Meta::InInterface, rule.in_interface.as_ref());
    interface(out, Meta::OutInterface, rule.out_interface.as_ref());
    if let Some(protocol) = rule.protocol {
        out(Expression::Meta(Meta::Protocol));
        out(Expression::Compare { not: false, value: &[protocol_number(protocol)] });
    }
    address(out, Side::Source, rule.source.as_ref(), family);
    address(out, Side::Destination, rule.destination.as_ref(), family);
    for condition in &rule.matches {
        match condition {
            Match::SourcePort(ports) => port(out, 0, ports),
            Match::DestinationPort(ports) => port(out, 2, ports),
            Match::Mark(Is { not, value }) => {
                out(Expression::Meta(Meta::Mark));
                out(Expression::Compare { not: *not, value: &value.to_ne_bytes() });
            }
            other => {
                if let Some(extension) = xt::of_match(other, &mut Info::new()) {
                    out(Expression::Match(extension));
                }
            }
        }
    }
    out(Expression::Counter);
    if let Some(verdict) = rule.target.verdict() {
        out(Expression::Verdict(verdict));
    } else if let Some(extension) = xt::of_target(&rule.target, family, &mut Info::new()) {
        out(Expression::Target(extension));
    }
}

/// Encodes an interface name with its zero byte; a name that ends in `+` is a prefix and has none.
fn interface(out: &mut dyn FnMut(Expression<'_>), key: Meta, name: Option<&Is<Name>>) {
    let Some(Is { not, value }) = name else { return };
    out(Expression::Meta(key));
    match value.strip_suffix('+') {
        Some(prefix) => out(Expression::Compare { not: *not, value: prefix.as_bytes() }),
        None => out(Expression::Compare { not: *not, value: &[value.as_bytes(), &[0]].concat() }),
    }
}

#[derive(Clone, Copy)]
enum Side {
    Source,
    Destination,
}

/// Returns offset and length of an address in the IP header.
const fn place(side: Side, family: Family) -> (u32, usize) {
    match (family, side) {
        (Family::Ip, Side::Source) => (12, 4),
        (Family::Ip, Side::Destination) => (16, 4),
        (Family::Ip6, Side::Source) => (8, 16),
        (Family::Ip6, Side::Destination) => (24, 16),
    }
}

/// Encodes a network: a prefix of whole bytes is compared directly, any other prefix needs a mask.
fn address(out: &mut dyn FnMut(Expression<'_>), side: Side, net: Option<&Is<IpNet>>, family: Family) {
    let Some(Is { not, value: net }) = net else { return };
    let prefix = usize::from(net.prefix_len());
    let (offset, whole) = place(side, family);
    let length = if prefix.is_multiple_of(8) { prefix / 8 } else { whole };
    if length == 0 {
        return;
    }
    out(Expression::Payload { base: Base::Network, offset, length: u32::try_from(length).unwrap_or_default() });
    if !prefix.is_multiple_of(8) {
        with_octets(net.netmask(), |mask| out(Expression::Mask(mask)));
    }
    with_octets(net.network(), |octets| {
        out(Expression::Compare { not: *not, value: octets.get(..length).unwrap_or(octets) });
    });
}

fn with_octets(address: IpAddr, work: impl FnOnce(&[u8])) {
    match address {
        IpAddr::V4(address) => work(&address.octets()),
        IpAddr::V6(address) => work(&address.octets()),
    }
}

fn port(out: &mut dyn FnMut(Expression<'_>), offset: u32, ports: &Is<PortRange>) {
    out(Expression::Payload { base: Base::Transport, offset, length: 2 });
    let Is { not, value: PortRange { first, last } } = *ports;
    let (from, to) = (&first.to_be_bytes(), &last.to_be_bytes());
    out(if first == last { Expression::Compare { not, value: from } } else { Expression::Range { not, from, to } });
}

/// Decodes a rule from its expressions, front to back.
struct Decoder<'a> {
    family: Family,
    left: &'a [Expression<'a>],
}

impl<'a> Decoder<'a> {
    fn rule(mut self) -> Option<Rule> {
        let mut rule = Rule::new(Target::Accept);
        loop {
            let (first, rest) = self.left.split_first()?;
            self.left = rest;
            match first {
                Expression::Meta(Meta::InInterface) => rule.in_interface = Some(self.interface()?),
                Expression::Meta(Meta::OutInterface) => rule.out_interface = Some(self.interface()?),
                Expression::Meta(Meta::Protocol) => rule.protocol = Some(self.protocol()?),
                Expression::Meta(Meta::Mark) => {
                    let Is { not, value } = self.compare()?;
                    let value = u32::from_ne_bytes(value.try_into().ok()?);
                    rule.matches.push(Match::Mark(Is { not, value }));
                }
                Expression::Payload { base: Base::Transport, offset, length: 2 } => {
                    let ports = self.ports()?;
                    rule.matches.push(match offset {
                        0 => Match::SourcePort(ports),
                        2 => Match::DestinationPort(ports),
                        _ => return None,
                    });
                }
                Expression::Payload { base: Base::Network, offset, length } => {
                    let net = self.address(usize::try_from(*length).ok()?)?;
                    if *offset == place(Side::Source, self.family).0 {
                        rule.source = Some(net);
                    } else if *offset == place(Side::Destination, self.family).0 {
                        rule.destination = Some(net);
                    } else {
                        return None;
                    }
                }
                Expression::Match(extension) => rule.matches.push(xt::to_match(*extension)?),
                Expression::Counter => {
                    rule.target = self.target()?;
                    return Some(rule);
                }
                _ => return None,
            }
        }
    }

    fn next(&mut self) -> Option<&'a Expression<'a>> {
        let (first, rest) = self.left.split_first()?;
        self.left = rest;
        Some(first)
    }

    fn compare(&mut self) -> Option<Is<&'a [u8]>> {
        match self.next()? {
            Expression::Compare { not, value } => Some(Is { not: *not, value }),
            _ => None,
        }
    }

    fn interface(&mut self) -> Option<Is<Name>> {
        let Is { not, value } = self.compare()?;
        // Other tools pad the name with zero bytes.
        let name = match value.iter().position(|byte| *byte == 0).map(|end| &value[..end]) {
            Some(name) => std::str::from_utf8(name).ok()?.to_owned(),
            None => std::str::from_utf8(value).ok()?.to_owned() + "+",
        };
        Some(Is { not, value: name.into() })
    }

    fn protocol(&mut self) -> Option<Protocol> {
        let found = self.compare().filter(|c| !c.not)?.value;
        [Protocol::Tcp, Protocol::Udp].into_iter().find(|p| found == [protocol_number(*p)])
    }

    fn ports(&mut self) -> Option<Is<PortRange>> {
        let number = |bytes: &[u8]| bytes.try_into().ok().map(u16::from_be_bytes);
        match self.next()? {
            Expression::Compare { not, value } => Some(Is { not: *not, value: PortRange::one(number(value)?) }),
            Expression::Range { not, from, to } => {
                Some(Is { not: *not, value: PortRange { first: number(from)?, last: number(to)? } })
            }
            _ => None,
        }
    }

    fn address(&mut self, length: usize) -> Option<Is<IpNet>> {
        let mut prefix = u8::try_from(8 * length).ok()?;
        if let Some(Expression::Mask(mask)) = self.left.first() {
            prefix = u8::try_from(mask.iter().map(|b| b.count_ones()).sum::<u32>()).ok()?;
            self.left = &self.left[1..];
        }
        let Is { not, value } = self.compare()?;
        let net = match self.family {
            Family::Ip => Ipv4Net::new(Ipv4Addr::from(padded(value)), prefix).ok()?.into(),
            Family::Ip6 => Ipv6Net::new(Ipv6Addr::from(padded(value)), prefix).ok()?.into(),
        };
        Some(Is { not, value: net })
    }

    fn target(&mut self) -> Option<Target> {
        let family = self.family;
        let target = match self.next()? {
            Expression::Verdict(verdict) => Target::of_verdict(*verdict).filter(|of| !matches!(of, Target::Goto(_)))?,
            Expression::Target(extension) => xt::to_target(*extension, family)?,
            _ => return None,
        };
        self.left.is_empty().then_some(target)
    }
}

/// Returns the first bytes of `value`, followed by zeros if there are fewer.
fn padded<const N: usize>(value: &[u8]) -> [u8; N] {
    std::array::from_fn(|at| value.get(at).copied().unwrap_or_default())
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

impl Display for Rule {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        let mut option = |flag: &str, value: Option<Is<Name>>| {
            if let Some(Is { not, value }) = value {
                words.push(format!("{}{flag} {value}", bang(not)));
            }
        };
        let net = |n: &Option<Is<IpNet>>| n.as_ref().map(|n| Is { not: n.not, value: n.value.to_string().into() });
        option("-s", net(&self.source));
        option("-d", net(&self.destination));
        option("-i", self.in_interface.clone());
        option("-o", self.out_interface.clone());
        if let Some(protocol) = self.protocol {
            words.push(format!("-p {protocol}"));
        }
        words.extend(self.matches.iter().map(|m| self.match_text(m)));
        words.push(self.target_text());
        f.write_str(&words.join(" "))
    }
}

const fn bang(not: bool) -> &'static str {
    if not { "! " } else { "" }
}

fn ports(range: PortRange) -> String {
    if range.first == range.last { range.first.to_string() } else { format!("{}:{}", range.first, range.last) }
}

impl Rule {
    fn match_text(&self, condition: &Match) -> String {
        let protocol = self.protocol.map(|p| p.to_string()).unwrap_or_default();
        match condition {
            Match::DestinationPort(p) => format!("-m {protocol} {}--dport {}", bang(p.not), ports(p.value)),
            Match::SourcePort(p) => format!("-m {protocol} {}--sport {}", bang(p.not), ports(p.value)),
            Match::DestinationPorts(list) => {
                let all: Vec<String> = list.value.iter().map(|p| ports(*p)).collect();
                format!("-m multiport {}--dports {}", bang(list.not), all.join(","))
            }
            Match::Uid(id) => format!("-m owner {}--uid-owner {}", bang(id.not), id.value),
            Match::Gid(id) => format!("-m owner {}--gid-owner {}", bang(id.not), id.value),
            Match::CtState(CtState::Invalid) => "-m conntrack --ctstate INVALID".to_owned(),
            Match::CtState(CtState::RelatedOrEstablished) => "-m conntrack --ctstate RELATED,ESTABLISHED".to_owned(),
            Match::Mark(mark) => format!("-m mark {}--mark {:#x}", bang(mark.not), mark.value),
            Match::Connmark(mark) => format!("-m connmark --mark {mark:#x}"),
        }
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
                let any = if self.is_ip6() { "::" } else { "0.0.0.0" };
                format!("-j TPROXY --on-port {port} --on-ip {any} --tproxy-mark {mark:#x}/0xffffffff")
            }
            Target::SetMark(mark) => format!("-j MARK --set-xmark {mark:#x}/0xffffffff"),
            Target::SaveMark => "-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff".to_owned(),
            Target::RestoreMark => "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff".to_owned(),
            Target::Goto(_) | Target::KeepDestination | Target::Reset | Target::Reject => "(native)".to_owned(),
        }
    }

    fn is_ip6(&self) -> bool {
        [&self.source, &self.destination].into_iter().flatten().any(|n| n.value.addr().is_ipv6())
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
        let _ = writeln!(text, "{prefix}-A {chain} {rule}");
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
    use crate::firewall::rule::{is, not};
    use crate::policy::{IdRange, Interception, Policy};

    #[test]
    fn conditions_are_printed_in_the_order_of_iptables_save() {
        let lo = "127.0.0.1/32".parse().expect("a CIDR");
        let rule = Rule::jump("ISTIO_IN_REDIRECT")
            .out_interface(is("lo"))
            .destination(not(lo))
            .tcp()
            .matching(Match::DestinationPorts(not(vec![PortRange::one(53), PortRange { first: 8000, last: 8010 }])))
            .matching(Match::Uid(is(IdRange { first: 5, last: 9 })));
        assert_eq!(
            rule.to_string(),
            "! -d 127.0.0.1/32 -o lo -p tcp -m multiport ! --dports 53,8000:8010 -m owner --uid-owner 5-9 -j ISTIO_IN_REDIRECT"
        );
        let rule = Rule::new(Target::Return).tcp().matching(Match::DestinationPort(not(PortRange::one(15008))));
        assert_eq!(rule.to_string(), "-p tcp -m tcp ! --dport 15008 -j RETURN");
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
