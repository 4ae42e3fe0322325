//! Native rules as nf_tables expressions and anonymous sets, and back. Decoding also accepts what `nft -f` writes
//! differently for the same rule: a range as two comparisons, a prefix as its first bytes.

use super::nft_set::{LiveSet, NEW_SET, Set, lowest, number};
use super::rule::{Condition, InCgroup, Key, NativeRule};
use super::set::{Span, Spans};
use crate::firewall::containers::{scope_of_set, set_name};
use crate::firewall::expression::{Base, Ct, Expression, Meta, SetName, encodes_as};
use crate::firewall::rule::Family;
use crate::firewall::target::Target;
use std::collections::BTreeMap;

/// The TCP flags `fin`, `syn`, `rst` and `ack`, which distinguish the first packet of a connection.
const FLAGS: u8 = 0x17;
/// `NFT_REJECT_TCP_RST`, `NFT_REJECT_ICMPX_UNREACH` and, for the latter, `NFT_REJECT_ICMPX_PORT_UNREACH`.
const TCP_RESET: u32 = 1;
const ICMPX: u32 = 2;
const PORT_UNREACHABLE: u8 = 1;

impl Key {
    /// The keys that don't depend on the family.
    const OF_BOTH_FAMILIES: [Self; 12] = [
        Self::InInterface,
        Self::OutInterface,
        Self::Protocol,
        Self::SourcePort,
        Self::DestinationPort,
        Self::Uid,
        Self::Gid,
        Self::CtState,
        Self::Mark,
        Self::CtMark,
        Self::TcpFlags,
        Self::DestinationType,
    ];

    /// Returns the expression that loads the value, with the offset in the IP or transport header.
    fn load(self) -> Expression<'static> {
        let payload = |base, offset: u32| Expression::Payload {
            base,
            offset,
            length: u32::try_from(self.width()).unwrap_or_default(),
        };
        match self {
            Self::InInterface => Expression::Meta(Meta::InInterface),
            Self::OutInterface => Expression::Meta(Meta::OutInterface),
            Self::Source(Family::Ip) => payload(Base::Network, 12),
            Self::Source(Family::Ip6) => payload(Base::Network, 8),
            Self::Destination(Family::Ip) => payload(Base::Network, 16),
            Self::Destination(Family::Ip6) => payload(Base::Network, 24),
            Self::Protocol => Expression::Meta(Meta::Protocol),
            Self::SourcePort => payload(Base::Transport, 0),
            Self::DestinationPort => payload(Base::Transport, 2),
            Self::Uid => Expression::Meta(Meta::Uid),
            Self::Gid => Expression::Meta(Meta::Gid),
            Self::CtState => Expression::Ct(Ct::State),
            Self::Mark => Expression::Meta(Meta::Mark),
            Self::CtMark => Expression::Ct(Ct::Mark),
            Self::TcpFlags => payload(Base::Transport, 13),
            Self::DestinationType => Expression::DestinationType,
        }
    }
}

/// Returns the sets that must be created before `rule`, numbered from `first_set`.
pub(in crate::firewall) fn sets(rule: &NativeRule, first_set: u32) -> impl Iterator<Item = Set<'_>> {
    let with_set = rule.conditions.iter().filter(|condition| condition.values.single().is_none());
    (first_set..).zip(with_set).map(|(id, condition)| Set::of(condition, id))
}

/// Passes the expressions of `rule` to `out`, one after another. They look up its [`sets`].
pub(in crate::firewall) fn encode(rule: &NativeRule, first_set: u32, out: &mut dyn FnMut(Expression<'_>)) {
    if let Some(family) = rule.family {
        out(Expression::Meta(Meta::Family));
        out(Expression::Compare { not: false, value: &[family.number()] });
    }
    let mut sets = sets(rule, first_set);
    for Condition { key, not, values } in &rule.conditions {
        out(key.load());
        match values.single() {
            Some(span) => compare(*key, *not, span, out),
            None => sets.by_ref().take(1).for_each(|set| {
                if set.interval && key.in_host_order() {
                    out(Expression::NetworkOrder);
                }
                out(Expression::Lookup { not: *not, set: SetName { id: set.id, name: NEW_SET } });
            }),
        }
    }
    if let Some(InCgroup { level, set }) = rule.cgroup {
        out(Expression::CgroupAt(level));
        out(Expression::Lookup { not: false, set: SetName { id: 0, name: set_name(set) } });
    }
    out(Expression::Counter);
    target(&rule.target, rule.family, out);
}

/// Encodes the comparison of a key with a single span.
fn compare(key: Key, not: bool, span: Span, out: &mut dyn FnMut(Expression<'_>)) {
    let (mut first, mut last) = (span.first.to_be_bytes(), span.last.to_be_bytes());
    let width = key.width();
    let is_prefix = match key {
        Key::Source(family) | Key::Destination(family) => span.prefix(family.bits()).is_some(),
        _ => false,
    };
    if key == Key::TcpFlags {
        out(Expression::Mask(&[FLAGS]));
        out(Expression::Compare { not, value: lowest(&mut first, width, false) });
    } else if key == Key::CtState {
        out(Expression::Mask(lowest(&mut first, width, key.in_host_order())));
        out(Expression::Compare { not: !not, value: lowest(&mut [0; 16], width, false) });
    } else if span.is_one() {
        out(Expression::Compare { not, value: lowest(&mut first, width, key.in_host_order()) });
    } else if matches!(key, Key::InInterface | Key::OutInterface) {
        let name = first.split(|byte| *byte == 0).next().unwrap_or_default();
        out(Expression::Compare { not, value: name });
    } else if is_prefix {
        let mask = key.greatest() ^ (span.first ^ span.last);
        out(Expression::Mask(lowest(&mut mask.to_be_bytes(), width, false)));
        out(Expression::Compare { not, value: lowest(&mut first, width, false) });
    } else {
        if key.in_host_order() {
            out(Expression::NetworkOrder);
        }
        let (from, to) = (lowest(&mut first, width, false), lowest(&mut last, width, false));
        out(Expression::Range { not, from, to });
    }
}

fn target(target: &Target, family: Option<Family>, out: &mut dyn FnMut(Expression<'_>)) {
    let number = family.map_or(0, |family| family.number().into());
    match target {
        Target::Accept | Target::Return | Target::Drop | Target::Jump(_) | Target::Goto(_) => {
            target.verdict().map(Expression::Verdict).into_iter().for_each(out);
        }
        Target::Redirect(to) => {
            out(Expression::Constant(&to.to_be_bytes()));
            out(Expression::Redirect);
        }
        Target::Zone(zone) => {
            out(Expression::Constant(&zone.to_ne_bytes()));
            out(Expression::SetCt(Ct::Zone));
        }
        Target::Tproxy { port, mark } => {
            out(Expression::Constant(&port.to_be_bytes()));
            out(Expression::Tproxy(number));
            out(Expression::Constant(&mark.to_ne_bytes()));
            out(Expression::SetMeta(Meta::Mark));
            Target::Accept.verdict().map(Expression::Verdict).into_iter().for_each(out);
        }
        Target::SetMark(mark) => {
            out(Expression::Constant(&mark.to_ne_bytes()));
            out(Expression::SetMeta(Meta::Mark));
        }
        Target::SaveMark => {
            out(Expression::Meta(Meta::Mark));
            out(Expression::SetCt(Ct::Mark));
        }
        Target::RestoreMark => {
            out(Expression::Ct(Ct::Mark));
            out(Expression::SetMeta(Meta::Mark));
        }
        Target::Reset => out(Expression::Reject(TCP_RESET, 0)),
        Target::Reject => out(Expression::Reject(ICMPX, PORT_UNREACHABLE)),
        Target::KeepDestination => {
            out(Key::Destination(family.unwrap_or(Family::Ip)).load());
            out(Expression::DestinationNat(number));
        }
    }
}

/// Decodes the target of a rule for `family`.
fn read_target(expressions: &[Expression<'_>], family: Option<Family>) -> Option<Target> {
    let short = |bytes: &[u8]| <[u8; 2]>::try_from(bytes).ok();
    let long = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).ok();
    let found = match expressions {
        [Expression::Verdict(verdict)] => Target::of_verdict(*verdict)?,
        [Expression::Constant(port), Expression::Redirect] => Target::Redirect(u16::from_be_bytes(short(port)?)),
        [Expression::Constant(zone), Expression::SetCt(Ct::Zone)] => Target::Zone(u16::from_ne_bytes(short(zone)?)),
        [Expression::Constant(mark), Expression::SetMeta(Meta::Mark)] => {
            Target::SetMark(u32::from_ne_bytes(long(mark)?))
        }
        [Expression::Constant(port), Expression::Tproxy(_), Expression::Constant(mark), ..] => {
            Target::Tproxy { port: u16::from_be_bytes(short(port)?), mark: u32::from_ne_bytes(long(mark)?) }
        }
        [Expression::Meta(Meta::Mark), ..] => Target::SaveMark,
        [Expression::Ct(Ct::Mark), ..] => Target::RestoreMark,
        [.., Expression::DestinationNat(_)] => Target::KeepDestination,
        [Expression::Reject(TCP_RESET, _)] => Target::Reset,
        [Expression::Reject(ICMPX, _)] => Target::Reject,
        _ => return None,
    };
    encodes_as(expressions, |out| target(&found, family, out)).then_some(found)
}

/// Decodes a rule as the kernel lists it; `None` if detour would not write it.
pub(super) fn decode(list: &[u8], sets: &BTreeMap<String, LiveSet>) -> Option<NativeRule> {
    let expressions: Vec<Expression<'_>> = Expression::read_all(list).collect::<Option<_>>()?;
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
    let target = read_target(&expressions[counter + 1..], family)?;
    Some(NativeRule { family, conditions, cgroup, target })
}

struct ExpressionReader<'a> {
    left: &'a [Expression<'a>],
    family: Option<Family>,
    sets: &'a BTreeMap<String, LiveSet>,
}

impl<'a> ExpressionReader<'a> {
    fn next(&mut self) -> Option<&'a Expression<'a>> {
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
        let is_known = self.sets.contains_key(set.name);
        scope_of_set(set.name).filter(|_| is_known).map(|set| InCgroup { level, set })
    }

    fn key(&self, load: &Expression<'_>) -> Option<Key> {
        let addresses = self.family.map(|family| [Key::Source(family), Key::Destination(family)]);
        Key::OF_BOTH_FAMILIES.into_iter().chain(addresses.into_iter().flatten()).find(|key| match (key.load(), load) {
            // `nft` loads only the first bytes of an address to compare a prefix.
            (
                Expression::Payload { base: Base::Network, offset: own, .. },
                Expression::Payload { base: Base::Network, offset, .. },
            ) => own == *offset,
            (own, load) => own == *load,
        })
    }

    fn condition(&mut self, load: &Expression<'_>) -> Option<Condition> {
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
            Expression::Mask([FLAGS]) if key == Key::TcpFlags => {
                let Some(Expression::Compare { not, value }) = self.next() else { return None };
                of(*not, Spans::one(number(value, false)?))
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
                    let mut bytes = value.to_vec();
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
            Expression::Lookup { not, set } => of(*not, self.sets.get(set.name)?.spans(key, in_host_order)?),
            _ => None,
        }
    }
}
