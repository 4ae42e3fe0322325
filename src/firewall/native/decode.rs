//! Expressions as the kernel lists them, back to a rule. What `nft -f` makes of the same text is
//! written a little differently in places (a range as two comparisons, a prefix as its first
//! bytes); it is the same rule.

use super::encode::{DESTINATION_PORT, DESTINATION_V4, DESTINATION_V6, SOURCE_PORT, SOURCE_V4, SOURCE_V6, read_action};
use super::rule::{Condition, Key, NativeRule};
use super::set::LiveSet;
use super::spans::Spans;
use crate::firewall::expression::{Base, Ct, Expression, Meta};
use crate::firewall::rule::Family;
use std::collections::BTreeMap;

/// The rule that a list of expressions is; `None` where it is none that this crate would write.
pub(super) fn decode(list: &[u8], sets: &BTreeMap<String, LiveSet>) -> Option<NativeRule> {
    let expressions: Vec<Expression> = Expression::read_all(list).collect::<Option<_>>()?;
    let counter = expressions.iter().position(|e| *e == Expression::Counter)?;
    let mut reader = ExpressionReader { left: &expressions[..counter], family: None, sets };
    let mut conditions = Vec::new();
    while let Some(first) = reader.next() {
        if *first == Expression::Meta(Meta::Family) {
            reader.read_family()?;
        } else {
            conditions.push(reader.condition(first)?);
        }
    }
    conditions.sort_by_key(|condition: &Condition| condition.key);
    let family = reader.family;
    let action = read_action(&expressions[counter + 1..], family)?;
    Some(NativeRule { family, conditions, action })
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
        let turned = self.left.first() == Some(&Expression::NetworkOrder);
        if turned {
            self.next();
        }
        let in_host_order = key.in_host_order() && !turned;
        match self.next()? {
            Expression::Mask(bits) if key == Key::CtState => {
                let Some(Expression::Compare { not, value }) = self.next() else { return None };
                let none = value.iter().all(|byte| *byte == 0);
                of(!not, Spans::one(number(bits, in_host_order)?)).filter(|_| none)
            }
            Expression::Mask(mask) => {
                let Some(Expression::Compare { not, value }) = self.next() else { return None };
                let (mask, first) = (number(mask, false)?, number(value, false)?);
                let last = first | (key.greatest() ^ mask);
                let is_prefix = (key.greatest() ^ mask).count_ones() == (key.greatest() ^ mask).trailing_ones();
                of(*not, Spans::of(first, last)).filter(|_| is_prefix && value.len() == key.width())
            }
            // The first bytes alone are a prefix, or how a name starts.
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

/// The number that the bytes of a register are.
pub(super) fn number(bytes: &[u8], in_host_order: bool) -> Option<u128> {
    let mut bytes = bytes.to_vec();
    if in_host_order && cfg!(target_endian = "little") {
        bytes.reverse();
    }
    let mut all = [0; 16];
    all.get_mut(16_usize.checked_sub(bytes.len())?..)?.copy_from_slice(&bytes);
    Some(u128::from_be_bytes(all))
}
