//! Native rules as nf_tables expressions and anonymous sets, and back. Decoding also accepts what `nft -f` writes
//! differently for the same rule: a range as two comparisons, a prefix as its first bytes.

use super::nft_set::{LiveSet, NEW_SET, Set, network_order, number, register};
use super::rule::{Condition, InCgroup, Key, NativeAction, NativeRule};
use super::set::Spans;
use crate::firewall::containers::{scope_of_set, set_name};
use crate::firewall::expression::{Base, Ct, Expression, Meta, NftVerdict, SetName};
use crate::firewall::rule::Family;
use std::collections::BTreeMap;

/// An encoded rule: its expressions, and the sets that must be created before it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Encoded {
    pub expressions: Vec<Expression>,
    pub sets: Vec<Set>,
}

impl Key {
    fn load(self) -> Expression {
        let payload = |base, offset: u32| Expression::Payload {
            base,
            offset,
            length: u32::try_from(self.width()).unwrap_or_default(),
        };
        match self {
            Self::InInterface => Expression::Meta(Meta::InInterface),
            Self::OutInterface => Expression::Meta(Meta::OutInterface),
            Self::Source(Family::Ip) => payload(Base::Network, SOURCE_V4),
            Self::Source(Family::Ip6) => payload(Base::Network, SOURCE_V6),
            Self::Destination(Family::Ip) => payload(Base::Network, DESTINATION_V4),
            Self::Destination(Family::Ip6) => payload(Base::Network, DESTINATION_V6),
            Self::Protocol => Expression::Meta(Meta::Protocol),
            Self::SourcePort => payload(Base::Transport, SOURCE_PORT),
            Self::DestinationPort => payload(Base::Transport, DESTINATION_PORT),
            Self::Uid => Expression::Meta(Meta::Uid),
            Self::Gid => Expression::Meta(Meta::Gid),
            Self::CtState => Expression::Ct(Ct::State),
            Self::Mark => Expression::Meta(Meta::Mark),
            Self::CtMark => Expression::Ct(Ct::Mark),
        }
    }
}

/// Offsets in the IP and transport headers.
const SOURCE_V4: u32 = 12;
const DESTINATION_V4: u32 = 16;
const SOURCE_V6: u32 = 8;
const DESTINATION_V6: u32 = 24;
const SOURCE_PORT: u32 = 0;
const DESTINATION_PORT: u32 = 2;

/// Encodes `rule`; numbers its sets from `first_set`.
pub(super) fn encode(rule: &NativeRule, first_set: u32) -> Encoded {
    let mut out = Encoded::default();
    if let Some(family) = rule.family {
        let value = vec![family.number()];
        out.expressions.extend([Expression::Meta(Meta::Family), Expression::Compare { not: false, value }]);
    }
    for condition in &rule.conditions {
        write_condition(condition, first_set, &mut out);
    }
    if let Some(InCgroup { level, set }) = rule.cgroup {
        let set = SetName { id: 0, name: set_name(set).to_owned() };
        out.expressions.extend([Expression::CgroupAt(level), Expression::Lookup { not: false, set }]);
    }
    out.expressions.push(Expression::Counter);
    out.expressions.extend(action(&rule.action, rule.family));
    out
}

fn write_condition(condition: &Condition, first_set: u32, out: &mut Encoded) {
    let Condition { key, not, values } = condition;
    let (key, not) = (*key, *not);
    let is_name = matches!(key, Key::InInterface | Key::OutInterface);
    out.expressions.push(key.load());
    match values.single() {
        Some(bits) if key == Key::CtState => {
            let no_bit = vec![0; key.width()];
            out.expressions.push(Expression::Mask(register(key, bits.first)));
            out.expressions.push(Expression::Compare { not: !not, value: no_bit });
        }
        Some(span) if span.is_one() => {
            out.expressions.push(Expression::Compare { not, value: register(key, span.first) });
        }
        Some(span) if is_name => {
            let value: Vec<u8> = span.first.to_be_bytes().into_iter().take_while(|byte| *byte != 0).collect();
            out.expressions.push(Expression::Compare { not, value });
        }
        Some(span) => match key {
            Key::Source(family) | Key::Destination(family) if span.prefix(family.bits()).is_some() => {
                let mask = key.greatest() ^ (span.first ^ span.last);
                out.expressions.push(Expression::Mask(network_order(mask, key.width())));
                out.expressions.push(Expression::Compare { not, value: network_order(span.first, key.width()) });
            }
            _ => {
                out.expressions.extend(key.in_host_order().then_some(Expression::NetworkOrder));
                let bytes = |number| network_order(number, key.width());
                out.expressions.push(Expression::Range { not, from: bytes(span.first), to: bytes(span.last) });
            }
        },
        None => {
            let spans = values.as_slice().to_vec();
            let interval = spans.iter().any(|span| !span.is_one());
            out.expressions.extend((interval && key.in_host_order()).then_some(Expression::NetworkOrder));
            let id = first_set + u32::try_from(out.sets.len()).unwrap_or_default();
            let set = SetName { id, name: NEW_SET.to_owned() };
            out.expressions.push(Expression::Lookup { not, set });
            out.sets.push(Set { id, key, interval, spans });
        }
    }
}

fn action(action: &NativeAction, family: Option<Family>) -> Vec<Expression> {
    let port = |port: u16| Expression::Constant(port.to_be_bytes().to_vec());
    let mark = |mark: u32| [Expression::Constant(mark.to_ne_bytes().to_vec()), Expression::SetMeta(Meta::Mark)];
    let number = family.map_or(0, |family| family.number().into());
    match action {
        NativeAction::Accept => vec![Expression::Verdict(NftVerdict::Accept)],
        NativeAction::Return => vec![Expression::Verdict(NftVerdict::Return)],
        NativeAction::Drop => vec![Expression::Verdict(NftVerdict::Drop)],
        NativeAction::Jump(chain) => vec![Expression::Verdict(NftVerdict::Jump(chain.to_string()))],
        NativeAction::Goto(chain) => vec![Expression::Verdict(NftVerdict::Goto(chain.to_string()))],
        NativeAction::Redirect(to) => vec![port(*to), Expression::Redirect],
        NativeAction::Zone(zone) => {
            vec![Expression::Constant(zone.to_ne_bytes().to_vec()), Expression::SetCt(Ct::Zone)]
        }
        NativeAction::Tproxy { port: to, mark: with } => {
            let mut all = vec![port(*to), Expression::Tproxy(number)];
            all.extend(mark(*with));
            all.push(Expression::Verdict(NftVerdict::Accept));
            all
        }
        NativeAction::SetMark(value) => mark(*value).into(),
        NativeAction::SaveMark => vec![Expression::Meta(Meta::Mark), Expression::SetCt(Ct::Mark)],
        NativeAction::RestoreMark => vec![Expression::Ct(Ct::Mark), Expression::SetMeta(Meta::Mark)],
        NativeAction::KeepDestination => {
            vec![Key::Destination(family.unwrap_or(Family::Ip)).load(), Expression::DestinationNat(number)]
        }
    }
}

/// Decodes the action of a rule for `family`.
fn read_action(expressions: &[Expression], family: Option<Family>) -> Option<NativeAction> {
    let short = |bytes: &[u8]| <[u8; 2]>::try_from(bytes).ok();
    let long = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).ok();
    let found = match expressions {
        [Expression::Verdict(NftVerdict::Accept)] => NativeAction::Accept,
        [Expression::Verdict(NftVerdict::Return)] => NativeAction::Return,
        [Expression::Verdict(NftVerdict::Drop)] => NativeAction::Drop,
        [Expression::Verdict(NftVerdict::Jump(chain))] => NativeAction::Jump(chain.clone().into()),
        [Expression::Verdict(NftVerdict::Goto(chain))] => NativeAction::Goto(chain.clone().into()),
        [Expression::Constant(port), Expression::Redirect] => NativeAction::Redirect(u16::from_be_bytes(short(port)?)),
        [Expression::Constant(zone), Expression::SetCt(Ct::Zone)] => {
            NativeAction::Zone(u16::from_ne_bytes(short(zone)?))
        }
        [Expression::Constant(mark), Expression::SetMeta(Meta::Mark)] => {
            NativeAction::SetMark(u32::from_ne_bytes(long(mark)?))
        }
        [Expression::Constant(port), Expression::Tproxy(_), Expression::Constant(mark), ..] => {
            NativeAction::Tproxy { port: u16::from_be_bytes(short(port)?), mark: u32::from_ne_bytes(long(mark)?) }
        }
        [Expression::Meta(Meta::Mark), ..] => NativeAction::SaveMark,
        [Expression::Ct(Ct::Mark), ..] => NativeAction::RestoreMark,
        [.., Expression::DestinationNat(_)] => NativeAction::KeepDestination,
        _ => return None,
    };
    (action(&found, family) == expressions).then_some(found)
}

/// Decodes a rule as the kernel lists it; `None` if detour would not write it.
pub(super) fn decode(list: &[u8], sets: &BTreeMap<String, LiveSet>) -> Option<NativeRule> {
    let expressions: Vec<Expression> = Expression::read_all(list).collect::<Option<_>>()?;
    let counter = expressions.iter().position(|e| *e == Expression::Counter)?;
    let mut reader = ExpressionReader { left: &expressions[..counter], family: None, sets };
    let (mut conditions, mut cgroup) = (Vec::new(), None);
    while let Some(first) = reader.next() {
        match first {
            Expression::Meta(Meta::Family) => reader.read_family()?,
            Expression::CgroupAt(level) if cgroup.is_none() => cgroup = Some(reader.cgroup(*level)?),
            _ => conditions.push(reader.condition(first)?),
        }
    }
    Condition::sort(&mut conditions);
    let family = reader.family;
    let action = read_action(&expressions[counter + 1..], family)?;
    Some(NativeRule { family, conditions, cgroup, action })
}

struct ExpressionReader<'a> {
    left: &'a [Expression],
    family: Option<Family>,
    sets: &'a BTreeMap<String, LiveSet>,
}

impl<'a> ExpressionReader<'a> {
    fn next(&mut self) -> Option<&'a Expression> {
        let (first, rest) = self.left.split_first()?;
        self.left = rest;
        Some(first)
    }

    fn read_family(&mut self) -> Option<()> {
        let Some(Expression::Compare { not: false, value }) = self.next() else { return None };
        self.family = Family::ALL.into_iter().find(|family| *value == [family.number()]);
        self.family.map(|_| ())
    }

    fn cgroup(&mut self, level: u8) -> Option<InCgroup> {
        let Some(Expression::Lookup { not: false, set }) = self.next() else { return None };
        let is_known = self.sets.contains_key(&set.name);
        scope_of_set(&set.name).filter(|_| is_known).map(|set| InCgroup { level, set })
    }

    fn key(&self, load: &Expression) -> Option<Key> {
        Some(match load {
            Expression::Meta(Meta::InInterface) => Key::InInterface,
            Expression::Meta(Meta::OutInterface) => Key::OutInterface,
            Expression::Meta(Meta::Protocol) => Key::Protocol,
            Expression::Meta(Meta::Uid) => Key::Uid,
            Expression::Meta(Meta::Gid) => Key::Gid,
            Expression::Meta(Meta::Mark) => Key::Mark,
            Expression::Ct(Ct::State) => Key::CtState,
            Expression::Ct(Ct::Mark) => Key::CtMark,
            Expression::Payload { base: Base::Transport, offset: SOURCE_PORT, length: 2 } => Key::SourcePort,
            Expression::Payload { base: Base::Transport, offset: DESTINATION_PORT, length: 2 } => Key::DestinationPort,
            Expression::Payload { base: Base::Network, offset, .. } => match (self.family?, *offset) {
                (Family::Ip, SOURCE_V4) => Key::Source(Family::Ip),
                (Family::Ip, DESTINATION_V4) => Key::Destination(Family::Ip),
                (Family::Ip6, SOURCE_V6) => Key::Source(Family::Ip6),
                (Family::Ip6, DESTINATION_V6) => Key::Destination(Family::Ip6),
                _ => return None,
            },
            _ => return None,
        })
    }

    fn condition(&mut self, load: &Expression) -> Option<Condition> {
        let key = self.key(load)?;
        let of = |not: bool, values: Spans| Some(Condition { key, not, values });
        let is_converted = self.left.first() == Some(&Expression::NetworkOrder);
        if is_converted {
            self.next();
        }
        let in_host_order = key.in_host_order() && !is_converted;
        match self.next()? {
            Expression::Mask(bits) if key == Key::CtState => {
                let Some(Expression::Compare { not, value }) = self.next() else { return None };
                let is_zero = value.iter().all(|byte| *byte == 0);
                of(!not, Spans::one(number(bits, in_host_order)?)).filter(|_| is_zero)
            }
            Expression::Mask(mask) => {
                let Some(Expression::Compare { not, value }) = self.next() else { return None };
                let (mask, first) = (number(mask, false)?, number(value, false)?);
                let last = first | (key.greatest() ^ mask);
                let is_prefix = (key.greatest() ^ mask).count_ones() == (key.greatest() ^ mask).trailing_ones();
                of(*not, Spans::of(first, last)).filter(|_| is_prefix && value.len() == key.width())
            }
            // A shorter value is an address prefix or the beginning of a name.
            Expression::Compare { not, value } if value.len() < key.width() && !in_host_order => {
                let padded = |with: u8| {
                    let mut bytes = value.clone();
                    bytes.resize(key.width(), with);
                    number(&bytes, false)
                };
                of(*not, Spans::of(padded(0)?, padded(u8::MAX)?))
            }
            Expression::Compare { not, value } if value.len() == key.width() => {
                of(*not, Spans::one(number(value, in_host_order)?))
            }
            Expression::Range { not, from, to } => {
                of(*not, Spans::of(number(from, in_host_order)?, number(to, in_host_order)?))
            }
            Expression::AtLeast(from) => {
                let Some(Expression::AtMost(to)) = self.next() else { return None };
                of(false, Spans::of(number(from, in_host_order)?, number(to, in_host_order)?))
            }
            Expression::Lookup { not, set } => of(*not, self.sets.get(&set.name)?.spans(key, in_host_order)?),
            _ => None,
        }
    }
}
