//! The rule format `iptables`: a rule as the nf_tables expressions that iptables-nft itself would write, in its order,
//! and back.
//!
//! * `xt`: xtables matches and targets as C structures
//! * `text`: rules as `iptables-save` prints them, and for `iptables-restore`

use super::expression::{Base, Expression, Meta, encodes_as};
use super::rule::{Family, Is, Match, Name, Rule, protocol_number};
use super::target::Target;
use crate::netlink::attributes::Attributes;
use crate::policy::{PortRange, Protocol};
use crate::trusted_file::read_text;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
pub use text::restore_text;
use xt::Info;

mod text;
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
