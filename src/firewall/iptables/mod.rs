//! The rule format `iptables`: a rule as the nf_tables expressions that iptables-nft itself would write, in its order,
//! and back.
//!
//! * `xt`: xtables matches and targets as C structures
//! * `text`: rules as `iptables-save` prints them

mod text;
mod xt;

use super::expression::{Base, Expression, Meta, NftVerdict};
use super::rule::{Family, Is, Match, Name, Rule, Target, protocol_number};
use crate::netlink::attributes::Attributes;
use crate::policy::{PortRange, Protocol};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::net::{Ipv4Addr, Ipv6Addr};

/// `NFTA_RULE_COMPAT_PROTO`, `NFTA_RULE_COMPAT_FLAGS`.
const COMPAT_PROTOCOL: u16 = 1;
const COMPAT_FLAGS: u16 = 2;

/// The number of expressions for which a list has room at once; a usual rule has fewer.
const USUAL_EXPRESSIONS: usize = 16;

/// Appends a rule's `NFTA_RULE_EXPRESSIONS`.
#[must_use]
pub(super) fn expressions(list: Attributes, rule: &Rule, family: Family) -> Attributes {
    encode(rule, family).iter().fold(list, |list, expression| expression.write(list))
}

/// Appends a rule's `NFTA_RULE_COMPAT`: extensions check that they support the protocol.
#[must_use]
pub(super) fn compat(list: Attributes, protocol: Protocol) -> Attributes {
    list.be32(COMPAT_PROTOCOL, protocol_number(protocol).into()).be32(COMPAT_FLAGS, 0)
}

/// Decodes a rule as the kernel lists it.
///
/// # Errors
/// Detour would not write such a rule; the error is the chain that it jumps to, if any.
pub(super) fn decode(list: &[u8], family: Family) -> Result<Rule, Option<String>> {
    let (mut known, mut is_complete) = (Vec::with_capacity(USUAL_EXPRESSIONS), true);
    Expression::read_all(list).for_each(|expression| match expression {
        Some(expression) => known.push(expression),
        None => is_complete = false,
    });
    let rule = Decoder { family, left: &known }.rule().filter(|_| is_complete);
    // Rules that are equal as values must be equal in the kernel.
    rule.filter(|rule| encode(rule, family) == known).ok_or_else(|| {
        known.into_iter().find_map(|expression| match expression {
            Expression::Verdict(NftVerdict::Jump(chain) | NftVerdict::Goto(chain)) => Some(chain),
            _ => None,
        })
    })
}

fn encode(rule: &Rule, family: Family) -> Vec<Expression> {
    let mut out = Vec::with_capacity(USUAL_EXPRESSIONS);
    interface(&mut out, Meta::InInterface, rule.in_interface.as_ref());
    interface(&mut out, Meta::OutInterface, rule.out_interface.as_ref());
    if let Some(protocol) = rule.protocol {
        let value = vec![protocol_number(protocol)];
        out.extend([Expression::Meta(Meta::Protocol), Expression::Compare { not: false, value }]);
    }
    address(&mut out, Side::Source, rule.source.as_ref(), family);
    address(&mut out, Side::Destination, rule.destination.as_ref(), family);
    for condition in &rule.matches {
        match condition {
            Match::SourcePort(ports) => port(&mut out, 0, ports),
            Match::DestinationPort(ports) => port(&mut out, 2, ports),
            Match::Mark(Is { not, value }) => {
                let value = value.to_ne_bytes().to_vec();
                out.extend([Expression::Meta(Meta::Mark), Expression::Compare { not: *not, value }]);
            }
            other => out.extend(xt::of_match(other).map(Expression::Match)),
        }
    }
    out.push(Expression::Counter);
    out.push(match &rule.target {
        Target::Accept => Expression::Verdict(NftVerdict::Accept),
        Target::Drop => Expression::Verdict(NftVerdict::Drop),
        Target::Return => Expression::Verdict(NftVerdict::Return),
        Target::Jump(chain) => Expression::Verdict(NftVerdict::Jump(chain.to_string())),
        other => match xt::of_target(other, family) {
            Some(extension) => Expression::Target(extension),
            None => return out,
        },
    });
    out
}

/// Encodes an interface name with its zero byte; a name that ends in `+` is a prefix and has none.
fn interface(out: &mut Vec<Expression>, key: Meta, name: Option<&Is<Name>>) {
    if let Some(Is { not, value }) = name {
        let bytes = match value.strip_suffix('+') {
            Some(prefix) => prefix.as_bytes().to_vec(),
            None => [value.as_bytes(), &[0]].concat(),
        };
        out.extend([Expression::Meta(key), Expression::Compare { not: *not, value: bytes }]);
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
fn address(out: &mut Vec<Expression>, side: Side, net: Option<&Is<IpNet>>, family: Family) {
    let Some(Is { not, value: net }) = net else { return };
    let octets = match net.network() {
        std::net::IpAddr::V4(a) => a.octets().to_vec(),
        std::net::IpAddr::V6(a) => a.octets().to_vec(),
    };
    let prefix = usize::from(net.prefix_len());
    let (offset, whole) = place(side, family);
    let length = if prefix.is_multiple_of(8) { prefix / 8 } else { whole };
    if length == 0 {
        return;
    }
    out.push(Expression::Payload { base: Base::Network, offset, length: u32::try_from(length).unwrap_or_default() });
    if !prefix.is_multiple_of(8) {
        let mask = match net.netmask() {
            std::net::IpAddr::V4(a) => a.octets().to_vec(),
            std::net::IpAddr::V6(a) => a.octets().to_vec(),
        };
        out.push(Expression::Mask(mask));
    }
    out.push(Expression::Compare { not: *not, value: octets.into_iter().take(length).collect() });
}

fn port(out: &mut Vec<Expression>, offset: u32, ports: &Is<PortRange>) {
    out.push(Expression::Payload { base: Base::Transport, offset, length: 2 });
    let PortRange { first, last } = ports.value;
    let bytes = |port: u16| port.to_be_bytes().to_vec();
    out.push(if first == last {
        Expression::Compare { not: ports.not, value: bytes(first) }
    } else {
        Expression::Range { not: ports.not, from: bytes(first), to: bytes(last) }
    });
}

/// Decodes a rule from its expressions, front to back.
struct Decoder<'a> {
    family: Family,
    left: &'a [Expression],
}

impl Decoder<'_> {
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
                    let value = u32::from_ne_bytes(value.as_slice().try_into().ok()?);
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
                Expression::Match(extension) => rule.matches.push(xt::to_match(extension)?),
                Expression::Counter => {
                    rule.target = self.target()?;
                    return Some(rule);
                }
                _ => return None,
            }
        }
    }

    fn next(&mut self) -> Option<&Expression> {
        let (first, rest) = self.left.split_first()?;
        self.left = rest;
        Some(first)
    }

    fn compare(&mut self) -> Option<Is<Vec<u8>>> {
        match self.next()? {
            Expression::Compare { not, value } => Some(Is { not: *not, value: value.clone() }),
            _ => None,
        }
    }

    fn interface(&mut self) -> Option<Is<Name>> {
        let Is { not, value } = self.compare()?;
        let name = match value.strip_suffix(&[0]) {
            Some(name) => String::from_utf8(name.to_vec()).ok()?,
            None => String::from_utf8(value).ok()? + "+",
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
        let Is { not, mut value } = self.compare()?;
        value.resize(place(Side::Source, self.family).1, 0);
        let net = match self.family {
            Family::Ip => {
                let octets: [u8; 4] = value.try_into().ok()?;
                Ipv4Net::new(Ipv4Addr::from(octets), prefix).ok()?.into()
            }
            Family::Ip6 => {
                let octets: [u8; 16] = value.try_into().ok()?;
                Ipv6Net::new(Ipv6Addr::from(octets), prefix).ok()?.into()
            }
        };
        Some(Is { not, value: net })
    }

    fn target(&mut self) -> Option<Target> {
        let family = self.family;
        let target = match self.next()? {
            Expression::Verdict(NftVerdict::Accept) => Target::Accept,
            Expression::Verdict(NftVerdict::Drop) => Target::Drop,
            Expression::Verdict(NftVerdict::Return) => Target::Return,
            Expression::Verdict(NftVerdict::Jump(chain)) => Target::Jump(chain.clone().into()),
            Expression::Target(extension) => xt::to_target(extension, family)?,
            _ => return None,
        };
        self.left.is_empty().then_some(target)
    }
}
