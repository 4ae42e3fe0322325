//! Anonymous nf_tables sets, which hold the values of one condition: as messages, and as the kernel lists them; and how
//! a value is laid out in a register.

use crate::firewall::nfnetlink::{Batch, Verb, nfta};
use crate::firewall::rule::{Condition, Family, Key, NFPROTO_INET};
use crate::firewall::set::{Span, Spans};
use crate::netlink::NLM_F_CREATE;
use crate::netlink::attributes::{self, Attributes, find, find_be32};

/// The name of a new set; the kernel replaces `%d` by the first free number (`nf_tables_set_alloc_name`).
pub(super) const NEW_SET: &str = "__set%d";

/// `NFT_SET_ANONYMOUS`, `NFT_SET_CONSTANT`, `NFT_SET_INTERVAL`.
const ANONYMOUS: u32 = 1;
const CONSTANT: u32 = 2;
const INTERVAL: u32 = 4;
/// `NFT_SET_ELEM_INTERVAL_END`.
const INTERVAL_END: u32 = 1;
/// How many elements a message contains: an attribute has at most 64 KiB.
const MAX_ELEMENTS_PER_MESSAGE: usize = 1000;

/// An anonymous set of constants to be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::firewall) struct Set<'a> {
    /// The number of the set within its transaction.
    pub id: u32,
    /// The key whose values the elements are.
    pub key: Key,
    /// Whether the elements are spans rather than single numbers.
    pub interval: bool,
    spans: &'a [Span],
}

impl Key {
    fn byte_order(self) -> u32 {
        let is_in_packet =
            matches!(self, Self::Source(_) | Self::Destination(_) | Self::SourcePort | Self::DestinationPort);
        if is_in_packet { nfta::BIG_ENDIAN } else { nfta::HOST_ENDIAN }
    }

    /// Returns `enum datatypes` (nftables, include/datatype.h), which `nft` needs to print the elements.
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
            Self::TcpFlags => 15,
            Self::DestinationType => 42,
            Self::InInterface | Self::OutInterface => 41,
        }
    }
}

impl<'a> Set<'a> {
    /// Returns the set of the values of a condition.
    pub(super) fn of(condition: &'a Condition, id: u32) -> Self {
        let spans = condition.values.as_slice();
        Self { id, key: condition.key, interval: spans.iter().any(|span| !span.is_one()), spans }
    }

    /// Appends the messages that create and fill the set.
    pub(in crate::firewall) fn write(&self, batch: &mut Batch<'_>, table: &str) {
        batch.message(Verb::NewSet, NLM_F_CREATE, NFPROTO_INET, |list| self.write_set(list, table));
        let mut elements = self.elements().peekable();
        while elements.peek().is_some() {
            batch.message(Verb::NewSetElements, NLM_F_CREATE, NFPROTO_INET, |list| {
                list.text(nfta::TABLE, table).text(nfta::ELEMENTS_SET, NEW_SET).be32(nfta::ELEMENTS_SET_ID, self.id);
                list.nested(nfta::ELEMENTS, |list| {
                    let elements = elements.by_ref().take(MAX_ELEMENTS_PER_MESSAGE);
                    elements.fold(list, |list, element| self.write_element(list, element))
                })
            });
        }
    }

    /// Appends the attributes that create the set (`NFTA_SET_…`).
    fn write_set<'l>(&self, list: &'l mut Attributes, table: &str) -> &'l mut Attributes {
        let flags = ANONYMOUS | CONSTANT | if self.interval { INTERVAL } else { 0 };
        let count = u32::try_from(self.elements().count()).unwrap_or(u32::MAX);
        let width = u32::try_from(self.key.width()).unwrap_or_default();
        list.text(nfta::TABLE, table).text(nfta::SET_NAME, NEW_SET).be32(nfta::SET_FLAGS, flags);
        list.be32(nfta::SET_KEY_TYPE, self.key.data_type()).be32(nfta::SET_KEY_LENGTH, width);
        list.nested(nfta::SET_DESCRIPTION, |size| size.be32(nfta::SET_SIZE, count));
        let order = [&nfta::KEY_BYTE_ORDER[..], &self.key.byte_order().to_ne_bytes()].concat();
        list.be32(nfta::SET_ID, self.id).bytes(nfta::SET_USER_DATA, &order)
    }

    /// Appends an element (`NFTA_LIST_ELEM`).
    fn write_element<'l>(&self, list: &'l mut Attributes, (number, ends): (u128, bool)) -> &'l mut Attributes {
        let mut bytes = number.to_be_bytes();
        let value = lowest(&mut bytes, self.key.width(), !self.interval && self.key.in_host_order());
        list.nested(nfta::LIST_ELEMENT, |element| {
            element.nested(nfta::ELEMENT_KEY, |key| key.bytes(nfta::ELEMENT_VALUE, value));
            if ends { element.be32(nfta::ELEMENT_FLAGS, INTERVAL_END) } else { element }
        })
    }

    /// Returns each span as its first number and the number after its end, with a flag for the latter; it is absent if
    /// the span ends with the greatest number. Without spans, returns single numbers.
    fn elements(&self) -> impl Iterator<Item = (u128, bool)> {
        self.spans.iter().flat_map(|span| {
            let has_end = self.interval && span.last < self.key.greatest();
            [Some((span.first, false)), has_end.then(|| (span.last + 1, true))].into_iter().flatten()
        })
    }
}

/// A live anonymous set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::firewall) struct LiveSet {
    interval: bool,
    /// The bytes of each number, and whether it is the first after the end of a span.
    elements: Vec<(Vec<u8>, bool)>,
}

impl LiveSet {
    /// Parses a set as the kernel lists it, without elements; `None` if it is not anonymous.
    pub(super) fn parse(set: &[u8]) -> Option<Self> {
        let flags = find_be32(set, nfta::SET_FLAGS).unwrap_or_default();
        (flags & ANONYMOUS != 0).then(|| Self { interval: flags & INTERVAL != 0, elements: Vec::new() })
    }

    /// Adds the elements in a message, up to `limit`; returns how many were added.
    pub(super) fn read_elements(&mut self, message: &[u8], limit: usize) -> usize {
        let before = self.elements.len();
        let list = find(message, nfta::ELEMENTS).unwrap_or_default();
        for (_, element) in attributes::parse(list).filter(|(kind, _)| *kind == nfta::LIST_ELEMENT).take(limit) {
            let ends = find_be32(element, nfta::ELEMENT_FLAGS).unwrap_or_default() & INTERVAL_END != 0;
            if let Some(value) = find(element, nfta::ELEMENT_KEY).and_then(|key| find(key, nfta::ELEMENT_VALUE)) {
                self.elements.push((value.to_vec(), ends));
            }
        }
        self.elements.len() - before
    }

    /// Returns the numbers in the set.
    pub(super) fn spans(&self, key: Key, in_host_order: bool) -> Option<Spans> {
        let values = self.elements.iter().map(|(value, ends)| Some((number(value, in_host_order)?, *ends)));
        let mut values: Vec<(u128, bool)> = values.collect::<Option<_>>()?;
        if !self.interval {
            // Sorted, so that each number is appended.
            values.sort_unstable();
            return Some(values.into_iter().map(|(value, _)| Span::one(value)).collect());
        }
        // A span may begin at the number after another one: sort the end before the beginning.
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
                // `nft` starts every interval set with an end mark.
                (None, true) => {}
                (Some(_), false) => return None,
            }
        }
        spans.extend(&open.map(|first| Spans::of(first, key.greatest())).unwrap_or_default());
        Some(spans)
    }
}

/// How the values of a key are laid out in a register.
impl Key {
    /// Returns the number of bytes.
    pub(in crate::firewall) const fn width(self) -> usize {
        match self {
            Self::InInterface | Self::OutInterface => 16,
            Self::Source(Family::Ip) | Self::Destination(Family::Ip) => 4,
            Self::Source(Family::Ip6) | Self::Destination(Family::Ip6) => 16,
            Self::Protocol | Self::TcpFlags => 1,
            Self::SourcePort | Self::DestinationPort => 2,
            Self::Uid | Self::Gid | Self::CtState | Self::Mark | Self::CtMark | Self::DestinationType => 4,
        }
    }

    /// Reports whether the bytes are in host order; spans need network order.
    pub(super) const fn in_host_order(self) -> bool {
        matches!(self, Self::Uid | Self::Gid | Self::CtState | Self::Mark | Self::CtMark | Self::DestinationType)
    }

    /// Returns the greatest value.
    pub(super) const fn greatest(self) -> u128 {
        u128::MAX >> (128 - 8 * self.width())
    }
}

/// Returns the lowest `width` bytes of a number in network order; changes them to host order if required.
pub(super) fn lowest(number: &mut [u8; 16], width: usize, in_host_order: bool) -> &[u8] {
    let bytes = &mut number[16 - width..];
    if in_host_order && cfg!(target_endian = "little") {
        bytes.reverse();
    }
    bytes
}

/// Returns the number that the bytes of a register stand for.
pub(super) fn number(bytes: &[u8], in_host_order: bool) -> Option<u128> {
    let mut all = [0; 16];
    let lowest = all.get_mut(16_usize.checked_sub(bytes.len())?..)?;
    lowest.copy_from_slice(bytes);
    if in_host_order && cfg!(target_endian = "little") {
        lowest.reverse();
    }
    Some(u128::from_be_bytes(all))
}
