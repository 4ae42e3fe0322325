//! Sets of constants that a rule brings with it: as messages, and as the kernel lists them.
//!
//! Sets of numbers as spans: what a condition accepts, whatever the numbers stand for.

use super::rule::Key;
use super::wire::number;
use super::wire::{network_order, register};
use crate::firewall::nfnetlink::attributes;
use crate::firewall::nfnetlink::attributes::{Attributes, find, find_be32};
use crate::firewall::rule::Family;

/// The kernel puts the first free number for the pattern (`nf_tables_set_alloc_name`).
pub(super) const NEW_SET: &str = "__set%d";

/// `NFT_SET_ANONYMOUS`, `NFT_SET_CONSTANT`, `NFT_SET_INTERVAL`.
const ANONYMOUS: u32 = 1;
const CONSTANT: u32 = 2;
const INTERVAL: u32 = 4;
/// `NFTA_LIST_ELEM`.
const LIST_ELEMENT: u16 = 1;
/// `NFTA_SET_ELEM_KEY` and within it `NFTA_DATA_VALUE`; `NFTA_SET_ELEM_FLAGS`.
const ELEMENT_KEY: u16 = 1;
const VALUE: u16 = 1;
const ELEMENT_FLAGS: u16 = 3;
/// `NFT_SET_ELEM_INTERVAL_END`.
const INTERVAL_END: u32 = 1;
/// An attribute ends at 64 KiB, and the longest element takes 36 bytes.
const ELEMENTS_A_MESSAGE: usize = 1000;

/// A set of constants that is looked up in one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Set {
    /// Which of a transaction's sets.
    pub id: u32,
    /// What its elements are.
    pub key: Key,
    /// Whether elements are spans.
    pub interval: bool,
    /// The elements.
    pub spans: Vec<Span>,
}

/// What `nft` keeps of a set for itself: type, length and value of `NFTNL_UDATA_SET_KEYBYTEORDER`
/// (libnftnl, udata.h), without which it prints names as nothing and UIDs back to front.
const KEY_BYTE_ORDER: [u8; 2] = [0, 4];
const HOST_ENDIAN: u32 = 1;
const BIG_ENDIAN: u32 = 2;

impl Key {
    fn byte_order(self) -> u32 {
        let is_in_packet =
            matches!(self, Self::Source(_) | Self::Destination(_) | Self::SourcePort | Self::DestinationPort);
        if is_in_packet { BIG_ENDIAN } else { HOST_ENDIAN }
    }

    /// By which `nft` knows how to print an element (`enum datatypes`, include/datatype.h).
    const fn data_type(self) -> u32 {
        match self {
            Self::Source(Family::Ip) | Self::Destination(Family::Ip) => 7,
            Self::Source(_) | Self::Destination(_) => 8,
            Self::Protocol => 12,
            Self::SourcePort | Self::DestinationPort => 13,
            Self::Mark | Self::CtMark => 19,
            Self::Uid => 24,
            Self::Gid => 25,
            Self::CtState => 26,
            Self::InInterface | Self::OutInterface => 41,
        }
    }
}

impl Set {
    /// What makes the set (`NFTA_SET_…`).
    pub(super) fn write(&self, table: &str) -> Attributes {
        let flags = ANONYMOUS | CONSTANT | if self.interval { INTERVAL } else { 0 };
        let count = u32::try_from(self.elements().len()).unwrap_or(u32::MAX);
        let width = u32::try_from(self.key.width()).unwrap_or_default();
        let all = Attributes::new().text(1, table).text(2, NEW_SET).be32(3, flags);
        let all = all.be32(4, self.key.data_type()).be32(5, width);
        let order = [&KEY_BYTE_ORDER[..], &self.key.byte_order().to_ne_bytes()].concat();
        all.nested(9, &Attributes::new().be32(1, count)).be32(10, self.id).bytes(13, &order)
    }

    /// What fills it, in as many messages as it takes (`NFTA_SET_ELEM_LIST_…`).
    pub(super) fn write_elements(&self, table: &str) -> Vec<Attributes> {
        let elements = self.elements();
        let message = |elements: &[Attributes]| {
            let list = elements.iter().fold(Attributes::new(), |list, element| list.nested(LIST_ELEMENT, element));
            Attributes::new().text(1, table).text(2, NEW_SET).be32(4, self.id).nested(3, &list)
        };
        elements.chunks(ELEMENTS_A_MESSAGE).map(message).collect()
    }

    /// Each span as its first number and the first behind it, which the last of all has none of.
    fn elements(&self) -> Vec<Attributes> {
        let value = |bytes: &[u8]| Attributes::new().nested(ELEMENT_KEY, &Attributes::new().bytes(VALUE, bytes));
        let mut all = Vec::new();
        for span in &self.spans {
            if !self.interval {
                all.push(value(&register(self.key, span.first)));
                continue;
            }
            all.push(value(&network_order(span.first, self.key.width())));
            if span.last < self.key.greatest() {
                let end = value(&network_order(span.last + 1, self.key.width()));
                all.push(end.be32(ELEMENT_FLAGS, INTERVAL_END));
            }
        }
        all
    }
}

/// A set in the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct LiveSet {
    interval: bool,
    /// Each a number's bytes, and whether a span ends before it.
    elements: Vec<(Vec<u8>, bool)>,
}

impl LiveSet {
    /// A set as it is listed, without its elements; `None` if it may belong to several rules.
    pub(super) fn of(set: &[u8]) -> Option<Self> {
        let flags = find_be32(set, 3).unwrap_or_default();
        (flags & ANONYMOUS != 0).then(|| Self { interval: flags & INTERVAL != 0, elements: Vec::new() })
    }

    /// Adds a part of its elements as they are listed, up to `most`; returns how many.
    pub(super) fn read_elements(&mut self, message: &[u8], most: usize) -> usize {
        let before = self.elements.len();
        let list = find(message, 3).unwrap_or_default();
        for (_, element) in attributes::parse(list).filter(|(kind, _)| *kind == LIST_ELEMENT).take(most) {
            let ends = find_be32(element, ELEMENT_FLAGS).unwrap_or_default() & INTERVAL_END != 0;
            if let Some(value) = find(element, ELEMENT_KEY).and_then(|key| find(key, VALUE)) {
                self.elements.push((value.to_vec(), ends));
            }
        }
        self.elements.len() - before
    }

    /// What is in it.
    pub(super) fn spans(&self, key: Key, in_host_order: bool) -> Option<Spans> {
        let values = self.elements.iter().map(|(value, ends)| Some((number(value, in_host_order)?, *ends)));
        let mut values: Vec<(u128, bool)> = values.collect::<Option<_>>()?;
        if !self.interval {
            // Spans that are added in order are added at the end.
            values.sort_unstable();
            return Some(values.into_iter().map(|(value, _)| Span::one(value)).collect());
        }
        // Where one span ends, the next one may begin.
        values.sort_unstable_by_key(|(value, ends)| (*value, !ends));
        let mut spans = Spans::default();
        let mut open = None;
        for (value, ends) in values {
            match (open, ends) {
                (None, false) => open = Some(value),
                (Some(first), true) => {
                    spans.insert(Span { first, last: value.checked_sub(1)? });
                    open = None;
                }
                // `nft` has every set begin with an end.
                (None, true) => {}
                (Some(_), false) => return None,
            }
        }
        spans.extend(&open.map(|first| Spans::of(first, key.greatest())).unwrap_or_default());
        Some(spans)
    }
}

/// Numbers, first and last included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    /// The first that belongs to it.
    pub first: u128,
    /// The last that belongs to it.
    pub last: u128,
}

impl Span {
    /// The span of one.
    #[must_use]
    pub const fn one(number: u128) -> Self {
        Self { first: number, last: number }
    }

    /// Whether it is of one.
    #[must_use]
    pub const fn is_one(self) -> bool {
        self.first == self.last
    }

    /// The length of the prefix that it is, among numbers of so many bits, where it is one.
    #[must_use]
    pub const fn prefix(self, bits: u32) -> Option<u32> {
        let differing = self.first ^ self.last;
        let host_bits = u128::BITS - differing.leading_zeros();
        let is_prefix = differing.count_ones() == host_bits && self.first & differing == 0;
        if is_prefix { bits.checked_sub(host_bits) } else { None }
    }
}

/// Adding so many spans costs less one by one than all in one pass.
const FEW: usize = 4;

/// A set of numbers: spans in order, none overlapping or adjacent, so that equal sets are equal
/// values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spans(Vec<Span>);

impl Spans {
    /// The set of one span.
    #[must_use]
    pub fn of(first: impl Into<u128>, last: impl Into<u128>) -> Self {
        Self(vec![Span { first: first.into(), last: last.into() }])
    }

    /// The set of one number.
    #[must_use]
    pub fn one(number: impl Into<u128>) -> Self {
        Self(vec![Span::one(number.into())])
    }

    /// The spans in order.
    #[must_use]
    pub fn as_slice(&self) -> &[Span] {
        &self.0
    }

    /// The span, where there is only one.
    #[must_use]
    pub fn single(&self) -> Option<Span> {
        match self.0.as_slice() {
            [span] => Some(*span),
            _ => None,
        }
    }

    /// Adds one span; those that it overlaps or touches become one with it.
    pub fn insert(&mut self, mut span: Span) {
        let from = self.0.partition_point(|other| other.last.saturating_add(1) < span.first);
        let to = self.0.partition_point(|other| other.first <= span.last.saturating_add(1));
        // At the top of all numbers the neighbour of the last is the last itself.
        let to = to.max(from);
        if let (Some(lowest), Some(highest)) = (self.0.get(from), self.0[..to].last())
            && from < to
        {
            span = Span { first: span.first.min(lowest.first), last: span.last.max(highest.last) };
        }
        self.0.splice(from..to, [span]);
    }

    /// Adds all of `other`: a few one by one, as many as there are in one pass.
    pub fn extend(&mut self, other: &Self) {
        if other.0.len() <= FEW {
            other.0.iter().for_each(|span| self.insert(*span));
        } else {
            *self = self.0.iter().chain(&other.0).copied().collect();
        }
    }

    /// Whether no number is in both.
    #[must_use]
    pub fn is_disjoint_from(&self, other: &Self) -> bool {
        let (few, many) = if self.0.len() < other.0.len() { (self, other) } else { (other, self) };
        few.0.iter().all(|span| {
            let next = many.0.get(many.0.partition_point(|theirs| theirs.last < span.first));
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn numbers(spans: &Spans) -> BTreeSet<u128> {
        spans.0.iter().flat_map(|span| span.first..=span.last).collect()
    }

    #[test]
    fn what_touches_becomes_one() {
        let spans: Spans =
            [(5, 5), (7, 9), (6, 6), (20, 30), (1, 2)].into_iter().map(|(first, last)| Span { first, last }).collect();
        let expected = [(1, 2), (5, 9), (20, 30)].map(|(first, last)| Span { first, last });
        assert_eq!(spans.as_slice(), expected);
    }

    #[test]
    fn the_last_number_of_all_has_no_neighbour() {
        let mut spans = Spans::one(u128::MAX);
        spans.insert(Span { first: 3, last: u128::MAX });
        spans.insert(Span::one(u128::MAX));
        assert_eq!(spans.single(), Some(Span { first: 3, last: u128::MAX }));
    }

    #[test]
    fn a_span_is_a_prefix_only_where_it_begins_at_one() {
        let of = |first, last| Span { first, last }.prefix(32);
        assert_eq!((of(8, 15), of(7, 7), of(0, u32::MAX.into())), (Some(29), Some(32), Some(0)));
        assert_eq!((of(4, 11), of(8, 14)), (None, None));
    }

    proptest! {
        #[test]
        fn a_set_holds_what_was_put_in(list in prop::collection::vec((0_u128..60, 0_u128..8), 0..20), more in prop::collection::vec((0_u128..60, 0_u128..3), 0..4)) {
            let of = |list: &[(u128, u128)]| list.iter().map(|(first, length)| Span { first: *first, last: first + length }).collect::<Spans>();
            let (a, b) = (of(&list), of(&more));
            let expected: BTreeSet<u128> = list.iter().flat_map(|(first, length)| *first..=first + length).collect();
            prop_assert_eq!(numbers(&a), expected);
            prop_assert!(a.0.windows(2).all(|w| w[0].last + 1 < w[1].first));
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
