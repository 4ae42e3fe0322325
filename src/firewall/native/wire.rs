//! Native rules as nf_tables expressions and anonymous sets, and back. Decoding also accepts what `nft -f` writes
//! differently for the same rule: a range as two comparisons, a prefix as its first bytes.

use super::nft_set::{LiveSet, NEW_SET, Set, lowest, number};
use crate::firewall::containers::{scope_of_set, set_name};
use crate::firewall::expression::{Expression, NftVerdict, SetName, base, ct, encodes_as, meta};
use crate::firewall::rule::{Condition, Family, InCgroup, Key, Rule, Target};
use crate::firewall::set::{Span, Spans};
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
    pub(in crate::firewall) fn load(self) -> Expression<'static> {
        let payload = |base, offset: u32| Expression::Payload {
            base,
            offset,
            length: u32::try_from(self.width()).unwrap_or_default(),
        };
        match self {
            Self::InInterface => Expression::Meta(meta::IN_INTERFACE),
            Self::OutInterface => Expression::Meta(meta::OUT_INTERFACE),
            Self::Source(Family::Ip) => payload(base::NETWORK, 12),
            Self::Source(Family::Ip6) => payload(base::NETWORK, 8),
            Self::Destination(Family::Ip) => payload(base::NETWORK, 16),
            Self::Destination(Family::Ip6) => payload(base::NETWORK, 24),
            Self::Protocol => Expression::Meta(meta::PROTOCOL),
            Self::SourcePort => payload(base::TRANSPORT, 0),
            Self::DestinationPort => payload(base::TRANSPORT, 2),
            Self::Uid => Expression::Meta(meta::UID),
            Self::Gid => Expression::Meta(meta::GID),
            Self::CtState => Expression::Ct(ct::STATE),
            Self::Mark => Expression::Meta(meta::MARK),
            Self::CtMark => Expression::Ct(ct::MARK),
            Self::TcpFlags => payload(base::TRANSPORT, 13),
            Self::DestinationType => Expression::DestinationType,
        }
    }
}

/// Returns the sets that must be created before `rule`, numbered from `first_set`.
pub(in crate::firewall) fn sets(rule: &Rule, first_set: u32) -> impl Iterator<Item = Set<'_>> {
    let with_set = rule.conditions.iter().filter(|condition| condition.values.single().is_none());
    (first_set..).zip(with_set).map(|(id, condition)| Set::of(condition, id))
}

/// Passes the expressions of `rule` to `out`, one after another. They look up its [`sets`].
pub(in crate::firewall) fn encode(rule: &Rule, first_set: u32, out: &mut dyn FnMut(Expression<'_>)) {
    if let Some(family) = rule.family {
        out(Expression::Meta(meta::FAMILY));
        out(Expression::Compare { not: false, value: &[family.number()] });
    }
    let mut sets = sets(rule, first_set);
    for condition @ Condition { key, not, values } in &rule.conditions {
        if let Some(span) = values.single() {
            compare(condition, span, out);
            continue;
        }
        for set in sets.by_ref().take(1) {
            out(key.load());
            if set.interval && key.in_host_order() {
                out(Expression::NetworkOrder);
            }
            out(Expression::Lookup { not: *not, set: SetName { id: set.id, name: NEW_SET } });
        }
    }
    if let Some(InCgroup { level, set }) = rule.cgroup {
        out(Expression::CgroupAt(level));
        out(Expression::Lookup { not: false, set: SetName { id: 0, name: set_name(set) } });
    }
    out(Expression::Counter);
    target(&rule.target, rule.family, out);
}

/// Encodes a condition with a single span.
pub(in crate::firewall) fn compare(condition: &Condition, span: Span, out: &mut dyn FnMut(Expression<'_>)) {
    let Condition { key, not, .. } = *condition;
    out(key.load());
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
            NftVerdict::of(target).map(Expression::Verdict).into_iter().for_each(out);
        }
        Target::Redirect(to) => {
            out(Expression::Constant(&to.to_be_bytes()));
            out(Expression::Redirect);
        }
        Target::Zone(zone) => {
            out(Expression::Constant(&zone.to_ne_bytes()));
            out(Expression::SetCt(ct::ZONE));
        }
        Target::Tproxy { port, mark } => {
            out(Expression::Constant(&port.to_be_bytes()));
            out(Expression::Tproxy(number));
            out(Expression::Constant(&mark.to_ne_bytes()));
            out(Expression::SetMeta(meta::MARK));
            NftVerdict::of(&Target::Accept).map(Expression::Verdict).into_iter().for_each(out);
        }
        Target::SetMark(mark) => {
            out(Expression::Constant(&mark.to_ne_bytes()));
            out(Expression::SetMeta(meta::MARK));
        }
        Target::SaveMark => {
            out(Expression::Meta(meta::MARK));
            out(Expression::SetCt(ct::MARK));
        }
        Target::RestoreMark => {
            out(Expression::Ct(ct::MARK));
            out(Expression::SetMeta(meta::MARK));
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
        [Expression::Verdict(verdict)] => verdict.target()?,
        [Expression::Constant(port), Expression::Redirect] => Target::Redirect(u16::from_be_bytes(short(port)?)),
        [Expression::Constant(zone), Expression::SetCt(ct::ZONE)] => Target::Zone(u16::from_ne_bytes(short(zone)?)),
        [Expression::Constant(mark), Expression::SetMeta(meta::MARK)] => {
            Target::SetMark(u32::from_ne_bytes(long(mark)?))
        }
        [Expression::Constant(port), Expression::Tproxy(_), Expression::Constant(mark), ..] => {
            Target::Tproxy { port: u16::from_be_bytes(short(port)?), mark: u32::from_ne_bytes(long(mark)?) }
        }
        [Expression::Meta(meta::MARK), ..] => Target::SaveMark,
        [Expression::Ct(ct::MARK), ..] => Target::RestoreMark,
        [.., Expression::DestinationNat(_)] => Target::KeepDestination,
        [Expression::Reject(TCP_RESET, _)] => Target::Reset,
        [Expression::Reject(ICMPX, _)] => Target::Reject,
        _ => return None,
    };
    encodes_as(expressions, |out| target(&found, family, out)).then_some(found)
}

/// Decodes a rule as the kernel lists it; `None` if detour would not write it.
pub(super) fn decode(list: &[u8], sets: &BTreeMap<String, LiveSet>) -> Option<Rule> {
    let expressions: Vec<Expression<'_>> = Expression::read_all(list).collect::<Option<_>>()?;
    let counter = expressions.iter().position(|e| *e == Expression::Counter)?;
    let mut reader = ExpressionReader::new(&expressions[..counter], None, sets);
    let (mut conditions, mut cgroup) = (Vec::new(), None);
    while let Some(first) = reader.next() {
        match first {
            Expression::Meta(meta::FAMILY) => reader.read_family()?,
            Expression::CgroupAt(level) if cgroup.is_none() => cgroup = Some(reader.cgroup(*level)?),
            _ => conditions.push(reader.condition(first)?),
        }
    }
    Condition::sort(&mut conditions);
    let family = reader.family;
    let target = read_target(&expressions[counter + 1..], family)?;
    Some(Rule { family, conditions, cgroup, target })
}

/// Decodes the conditions of a rule, front to back.
pub(in crate::firewall) struct ExpressionReader<'a> {
    left: &'a [Expression<'a>],
    family: Option<Family>,
    sets: &'a BTreeMap<String, LiveSet>,
}

impl<'a> ExpressionReader<'a> {
    pub(in crate::firewall) const fn new(
        left: &'a [Expression<'a>],
        family: Option<Family>,
        sets: &'a BTreeMap<String, LiveSet>,
    ) -> Self {
        Self { left, family, sets }
    }

    pub(in crate::firewall) fn next(&mut self) -> Option<&'a Expression<'a>> {
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
                Expression::Payload { base: base::NETWORK, offset: own, .. },
                Expression::Payload { base: base::NETWORK, offset, .. },
            ) => own == *offset,
            (own, load) => own == *load,
        })
    }

    /// Decodes the condition on what `load` loads.
    pub(in crate::firewall) fn condition(&mut self, load: &Expression<'_>) -> Option<Condition> {
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
            Expression::Mask(mask) if key.is_address() => {
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
                // The name of an interface ends with a zero, unless it is a prefix.
                let with = if value.last() == Some(&0) && !key.is_address() { 0 } else { u8::MAX };
                of(*not, Spans::of(padded(0)?, padded(with)?))
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
