//! Sets of numbers as spans: the values that a condition accepts.

use crate::policy::{IdRange, PortRange};
use ipnet::IpNet;
use std::net::IpAddr;

/// A range of numbers, first and last included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// The first number.
    pub first: u128,
    /// The last number.
    pub last: u128,
}

impl Span {
    /// Returns the span of one number.
    #[must_use]
    pub const fn one(number: u128) -> Self {
        Self { first: number, last: number }
    }

    /// Reports whether the span is of one number.
    #[must_use]
    pub const fn is_one(self) -> bool {
        self.first == self.last
    }

    /// Returns the length of the network prefix that equals the span, for numbers of `bits` bits; `None` if the span is
    /// not a prefix.
    #[must_use]
    pub const fn prefix(self, bits: u32) -> Option<u32> {
        let differing = self.first ^ self.last;
        let host_bits = u128::BITS - differing.leading_zeros();
        let is_prefix = differing.count_ones() == host_bits && self.first & differing == 0;
        if is_prefix { bits.checked_sub(host_bits) } else { None }
    }
}

/// Up to this many spans are added one by one, which costs less than sorting everything.
const MAX_SINGLE_INSERTS: usize = 4;

/// A set of numbers as sorted spans that neither overlap nor touch, so that equal sets are equal values.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Spans(Vec<Span>);

impl Spans {
    /// Returns the set of one span.
    #[must_use]
    pub fn of(first: impl Into<u128>, last: impl Into<u128>) -> Self {
        Self(vec![Span { first: first.into(), last: last.into() }])
    }

    /// Returns the set of one number.
    #[must_use]
    pub fn one(number: impl Into<u128>) -> Self {
        Self(vec![Span::one(number.into())])
    }

    /// Returns the spans in order.
    #[must_use]
    pub fn as_slice(&self) -> &[Span] {
        &self.0
    }

    /// Returns the span if there is exactly one.
    #[must_use]
    pub fn single(&self) -> Option<Span> {
        if let [span] = self.0[..] { Some(span) } else { None }
    }

    /// Adds a span; merges it with the spans that it overlaps or touches.
    pub fn insert(&mut self, mut span: Span) {
        let from = self.0.partition_point(|other| other.last.saturating_add(1) < span.first);
        let to = self.0.partition_point(|other| other.first <= span.last.saturating_add(1));
        // Saturation: the number after u128::MAX is u128::MAX itself.
        let to = to.max(from);
        if let [lowest, .., highest] | [lowest @ highest] = &self.0[from..to] {
            span = Span { first: span.first.min(lowest.first), last: span.last.max(highest.last) };
        }
        self.0.splice(from..to, [span]);
    }

    /// Adds all spans of `other`.
    pub fn extend(&mut self, other: &Self) {
        if other.as_slice().len() <= MAX_SINGLE_INSERTS {
            other.as_slice().iter().for_each(|span| self.insert(*span));
        } else {
            *self = self.as_slice().iter().chain(other.as_slice()).copied().collect();
        }
    }

    /// Returns the numbers of this set that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let (mut rest, others) = (Vec::new(), other.as_slice());
        for span in self.as_slice() {
            let mut next = Some(span.first);
            for cut in &others[others.partition_point(|cut| cut.last < span.first)..] {
                let Some(first) = next.filter(|_| cut.first <= span.last) else { break };
                rest.extend((first < cut.first).then(|| Span { first, last: cut.first - 1 }));
                next = cut.last.checked_add(1).filter(|next| *next <= span.last);
            }
            rest.extend(next.map(|first| Span { first, last: span.last }));
        }
        Self(rest)
    }

    /// Reports whether no number is in both sets.
    #[must_use]
    pub fn is_disjoint_from(&self, other: &Self) -> bool {
        let (a, b) = (self.as_slice(), other.as_slice());
        let (few, many) = if a.len() < b.len() { (a, b) } else { (b, a) };
        few.iter().all(|span| {
            let next = many.get(many.partition_point(|theirs| theirs.last < span.first));
            next.is_none_or(|theirs| span.last < theirs.first)
        })
    }
}

impl FromIterator<Span> for Spans {
    fn from_iter<I: IntoIterator<Item = Span>>(spans: I) -> Self {
        let mut all: Vec<Span> = spans.into_iter().collect();
        all.sort_unstable();
        all.dedup_by(|next, span| {
            let touches = next.first <= span.last.saturating_add(1);
            if touches {
                span.last = span.last.max(next.last);
            }
            touches
        });
        Self(all)
    }
}

impl From<PortRange> for Span {
    fn from(ports: PortRange) -> Self {
        Self { first: ports.first.into(), last: ports.last.into() }
    }
}

impl From<PortRange> for Spans {
    fn from(ports: PortRange) -> Self {
        Self(vec![ports.into()])
    }
}

impl From<IdRange> for Spans {
    fn from(ids: IdRange) -> Self {
        Self::of(ids.first, ids.last)
    }
}

/// The addresses of a network.
impl From<IpNet> for Spans {
    fn from(net: IpNet) -> Self {
        let number = |address| match address {
            IpAddr::V4(address) => u128::from(u32::from(address)),
            IpAddr::V6(address) => u128::from(address),
        };
        Self::of(number(net.network()), number(net.broadcast()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn numbers(spans: &Spans) -> BTreeSet<u128> {
        spans.as_slice().iter().flat_map(|span| span.first..=span.last).collect()
    }

    #[test]
    fn adjacent_spans_are_merged() {
        let spans: Spans =
            [(5, 5), (7, 9), (6, 6), (20, 30), (1, 2)].into_iter().map(|(first, last)| Span { first, last }).collect();
        let expected = [(1, 2), (5, 9), (20, 30)].map(|(first, last)| Span { first, last });
        assert_eq!(spans.as_slice(), expected);
    }

    proptest! {
        #[test]
        fn the_difference_contains_the_numbers_of_the_first_set_only(
            a in prop::collection::vec((0_u128..30, 0_u128..6), 0..6),
            b in prop::collection::vec((0_u128..30, 0_u128..6), 0..6),
        ) {
            let set = |spans: Vec<(u128, u128)>| -> Spans {
                spans.into_iter().map(|(first, more)| Span { first, last: first + more }).collect()
            };
            let (a, b) = (set(a), set(b));
            let rest = a.without(&b);
            prop_assert_eq!(numbers(&rest), &numbers(&a) - &numbers(&b));
            prop_assert_eq!(&rest.as_slice().iter().copied().collect::<Spans>(), &rest);
        }
    }

    #[test]
    fn the_greatest_number_can_be_removed() {
        let all = Spans::of(0_u8, u128::MAX);
        assert_eq!(all.without(&Spans::one(u128::MAX)), Spans::of(0_u8, u128::MAX - 1));
        assert_eq!(all.without(&all), Spans::default());
    }

    #[test]
    fn the_greatest_number_can_be_inserted() {
        let mut spans = Spans::one(u128::MAX);
        spans.insert(Span { first: 3, last: u128::MAX });
        spans.insert(Span::one(u128::MAX));
        assert_eq!(spans.single(), Some(Span { first: 3, last: u128::MAX }));
    }

    #[test]
    fn a_span_is_a_prefix_only_if_it_is_aligned() {
        let of = |first, last| Span { first, last }.prefix(32);
        assert_eq!((of(8, 15), of(7, 7), of(0, u32::MAX.into())), (Some(29), Some(32), Some(0)));
        assert_eq!((of(4, 11), of(8, 14)), (None, None));
    }

    proptest! {
        #[test]
        fn a_set_contains_the_inserted_numbers(list in prop::collection::vec((0_u128..60, 0_u128..8), 0..20), more in prop::collection::vec((0_u128..60, 0_u128..3), 0..4)) {
            let of = |list: &[(u128, u128)]| list.iter().map(|(first, length)| Span { first: *first, last: first + length }).collect::<Spans>();
            let (a, b) = (of(&list), of(&more));
            let expected: BTreeSet<u128> = list.iter().flat_map(|(first, length)| *first..=first + length).collect();
            prop_assert_eq!(numbers(&a), expected);
            prop_assert!(a.as_slice().windows(2).all(|w| w[0].last + 1 < w[1].first));
            prop_assert_eq!(a.is_disjoint_from(&b), numbers(&a).is_disjoint(&numbers(&b)));
            prop_assert_eq!(b.is_disjoint_from(&a), a.is_disjoint_from(&b));
            let (mut ab, mut ba) = (a.clone(), b.clone());
            ab.extend(&b);
            ba.extend(&a);
            prop_assert_eq!(&ab, &ba);
            prop_assert_eq!(numbers(&ab), numbers(&a).union(&numbers(&b)).copied().collect::<BTreeSet<u128>>());
        }
    }
}
