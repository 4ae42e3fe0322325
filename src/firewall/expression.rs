//! The nf_tables expressions that the two rule formats use (linux/netfilter/nf_tables.h), written as netlink attributes
//! and read back. Reading is strict: an expression with any other field than detour writes is unknown, because rules
//! that are equal as values must be equal in the kernel.

use super::rule::Target;
use crate::netlink::attributes::{self, Attributes, find, find_be32, find_be64, find_text};

/// `NFTA_LIST_ELEM`.
pub(super) const LIST_ELEMENT: u16 = 1;
/// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`.
pub(super) const NAME: u16 = 1;
pub(super) const DATA: u16 = 2;
/// `NFTA_DATA_VALUE`, `NFTA_DATA_VERDICT`; within the latter `NFTA_VERDICT_CODE`, `_CHAIN`.
const VALUE: u16 = 1;
pub(super) const VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;
/// The register that all expressions of a rule use.
const REGISTER: u32 = 1;
pub(super) const VERDICT_REGISTER: u32 = 0;
/// `NFT_CMP_GTE`, `NFT_CMP_LTE`.
const AT_LEAST: u32 = 5;
const AT_MOST: u32 = 3;
/// `NFT_BYTEORDER_HTON`, `NFT_LOOKUP_F_INV`, `NFT_NAT_DNAT`.
const HOST_TO_NETWORK: u32 = 1;
const LOOKUP_INVERTED: u32 = 1;
pub(super) const DESTINATION_NAT: u32 = 1;
/// `NFT_FIB_RESULT_ADDRTYPE`, `NFTA_FIB_F_DADDR`.
const FIB_TYPE: u32 = 3;
const FIB_DESTINATION: u32 = 2;
/// `NFT_REJECT_TCP_RST`, which has no code.
const REJECT_WITH_RESET: u32 = 1;
/// `NFT_SOCKET_CGROUPV2`.
const SOCKET_CGROUP: u32 = 3;
/// `NF_NAT_RANGE_MAP_IPS`, `NF_NAT_RANGE_PROTO_SPECIFIED` (linux/netfilter/nf_nat.h): the kernel sets these flags
/// itself if a register is given, and lists them.
const ADDRESS_GIVEN: u32 = 1;
const PORT_GIVEN: u32 = 2;

/// Verdicts (linux/netfilter.h, linux/netfilter/nf_tables.h).
pub(super) const NF_DROP: u32 = 0;
pub(super) const NF_ACCEPT: u32 = 1;
const NFT_JUMP: u32 = -3_i32 as u32;
const NFT_GOTO: u32 = -4_i32 as u32;
const NFT_RETURN: u32 = -5_i32 as u32;

/// Packet metadata (`enum nft_meta_keys`). UID and GID are those of the sending process, in the user namespace that owns
/// the network namespace.
pub(super) mod meta {
    pub(crate) const MARK: u32 = 3;
    pub(crate) const IN_INTERFACE: u32 = 6;
    pub(crate) const OUT_INTERFACE: u32 = 7;
    pub(crate) const UID: u32 = 10;
    pub(crate) const GID: u32 = 11;
    pub(crate) const FAMILY: u32 = 15;
    pub(crate) const PROTOCOL: u32 = 16;
}

/// A packet's connection tracking data (`enum nft_ct_keys`): the state, one bit for each; the mark of the connection;
/// the zone in which the connection is looked up.
pub(super) mod ct {
    pub(crate) const STATE: u32 = 0;
    pub(crate) const MARK: u32 = 3;
    pub(crate) const ZONE: u32 = 17;
}

/// The header from which an offset counts (`enum nft_payload_bases`): the IP header; the TCP or UDP header.
pub(super) mod base {
    pub(crate) const NETWORK: u32 = 1;
    pub(crate) const TRANSPORT: u32 = 2;
}

/// A reference to a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SetName<'a> {
    /// The number of an anonymous set within a transaction; 0 in rules that the kernel lists, and for a named set.
    pub id: u32,
    /// The name; for an anonymous set in a transaction, the pattern for it.
    pub name: &'a str,
}

/// The verdict of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NftVerdict<'a> {
    /// `NF_…` or `NFT_…`.
    pub code: u32,
    /// The chain in which the evaluation continues.
    pub chain: Option<&'a str>,
}

/// An xtables match or target (linux/netfilter/nf_tables_compat.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extension<'a> {
    /// The name: `owner`, `REDIRECT`, …
    pub name: &'a str,
    /// The version of the structure.
    pub revision: u32,
    /// The C structure of the extension.
    pub info: &'a [u8],
}

/// An nf_tables expression. It borrows its values from the message in which the kernel lists it, or from the rule that
/// is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expression<'a> {
    /// Loads this [`meta`]data.
    Meta(u32),
    /// Loads bytes of the packet.
    Payload {
        /// The header that contains the bytes, a [`base`].
        base: u32,
        /// The offset of the first byte in the header.
        offset: u32,
        /// The number of bytes.
        length: u32,
    },
    /// Keeps these bits of the register and clears the others.
    Mask(&'a [u8]),
    /// Continues only if the register equals a value, or does not.
    Compare {
        /// Whether the comparison is negated.
        not: bool,
        /// The value.
        value: &'a [u8],
    },
    /// Continues only if the register is within a range, or is not.
    Range {
        /// Whether the comparison is negated.
        not: bool,
        /// The first value of the range.
        from: &'a [u8],
        /// The last value of the range.
        to: &'a [u8],
    },
    /// Continues only if the register is at least this value; `nft` writes a range as this and [`Self::AtMost`].
    AtLeast(&'a [u8]),
    /// Continues only if the register is at most this value.
    AtMost(&'a [u8]),
    /// Loads this connection tracking data ([`ct`]).
    Ct(u32),
    /// Loads the ID of the sending socket's control group at this level: the socket's own one or an ancestor.
    CgroupAt(u8),
    /// Converts the four bytes of the register to network byte order.
    NetworkOrder,
    /// Continues only if the register is in a set, or is not.
    Lookup {
        /// Whether the lookup is negated.
        not: bool,
        /// The set.
        set: SetName<'a>,
    },
    /// Counts packets and bytes.
    Counter,
    /// Loads a constant.
    Constant(&'a [u8]),
    /// Sets metadata to the register.
    SetMeta(u32),
    /// Sets connection tracking data to the register.
    SetCt(u32),
    /// Redirects the packet to the local port in the register.
    Redirect,
    /// Assigns the packet to the listener on the port in the register, for one family (`NFPROTO_…`) or both (0).
    Tproxy(u32),
    /// Changes the destination to the address in the register, of this family (`NFPROTO_…`).
    DestinationNat(u32),
    /// Loads the type of the route to the destination (`RTN_…`).
    DestinationType,
    /// Drops the packet and answers with an error of this type (`NFT_REJECT_…`) and code.
    Reject(u32, u8),
    /// Ends the rule with a verdict.
    Verdict(NftVerdict<'a>),
    /// An xtables match.
    Match(Extension<'a>),
    /// An xtables target.
    Target(Extension<'a>),
}

impl<'a> Expression<'a> {
    /// Appends the expression to a rule's list.
    pub(super) fn write<'l>(&self, list: &'l mut Attributes) -> &'l mut Attributes {
        list.nested(LIST_ELEMENT, |element| element.text(NAME, self.name()).nested(DATA, |data| self.write_data(data)))
    }

    const fn name(&self) -> &'static str {
        match self {
            Self::Meta(_) | Self::SetMeta(_) => "meta",
            Self::Payload { .. } => "payload",
            Self::Mask(_) => "bitwise",
            Self::Compare { .. } | Self::AtLeast(_) | Self::AtMost(_) => "cmp",
            Self::Range { .. } => "range",
            Self::Ct(_) | Self::SetCt(_) => "ct",
            Self::CgroupAt(_) => "socket",
            Self::NetworkOrder => "byteorder",
            Self::Lookup { .. } => "lookup",
            Self::Counter => "counter",
            Self::Constant(_) | Self::Verdict(_) => "immediate",
            Self::Redirect => "redir",
            Self::Tproxy(_) => "tproxy",
            Self::DestinationNat(_) => "nat",
            Self::DestinationType => "fib",
            Self::Reject(..) => "reject",
            Self::Match(_) => "match",
            Self::Target(_) => "target",
        }
    }

    fn write_data<'l>(&self, data: &'l mut Attributes) -> &'l mut Attributes {
        match self {
            Self::Meta(key) => data.be32(2, *key).be32(1, REGISTER),
            Self::Payload { base, offset, length } => {
                data.be32(1, REGISTER).be32(2, *base).be32(3, *offset).be32(4, *length)
            }
            Self::Mask(mask) => {
                let length = u32::try_from(mask.len()).unwrap_or_default();
                let data = data.be32(1, REGISTER).be32(2, REGISTER).be32(3, length);
                put_value(data, 4, mask).nested(5, |data| data.zeros(VALUE, mask.len()))
            }
            Self::Compare { not, value: bytes } => put_compare(data, u32::from(*not), bytes),
            Self::AtLeast(bytes) => put_compare(data, AT_LEAST, bytes),
            Self::AtMost(bytes) => put_compare(data, AT_MOST, bytes),
            Self::Range { not, from, to } => {
                put_value(put_value(data.be32(1, REGISTER).be32(2, u32::from(*not)), 3, from), 4, to)
            }
            Self::Ct(key) => data.be32(2, *key).be32(1, REGISTER),
            Self::CgroupAt(level) => data.be32(1, SOCKET_CGROUP).be32(2, REGISTER).be32(3, (*level).into()),
            Self::NetworkOrder => {
                data.be32(1, REGISTER).be32(2, REGISTER).be32(3, HOST_TO_NETWORK).be32(4, 4).be32(5, 4)
            }
            Self::Lookup { not, set } => {
                let data = data.text(1, set.name).be32(2, REGISTER).be32(4, set.id);
                if *not { data.be32(5, LOOKUP_INVERTED) } else { data }
            }
            Self::Counter => data.be64(1, 0).be64(2, 0),
            Self::Constant(bytes) => put_value(data.be32(1, REGISTER), 2, bytes),
            Self::SetMeta(key) => data.be32(2, *key).be32(3, REGISTER),
            Self::SetCt(key) => data.be32(2, *key).be32(4, REGISTER),
            Self::Redirect => data.be32(1, REGISTER).be32(3, PORT_GIVEN),
            Self::Tproxy(family) => data.be32(1, *family).be32(3, REGISTER),
            Self::DestinationNat(family) => data.be32(1, DESTINATION_NAT).be32(2, *family).be32(3, REGISTER),
            Self::DestinationType => data.be32(1, REGISTER).be32(2, FIB_TYPE).be32(3, FIB_DESTINATION),
            Self::Reject(kind, code) => {
                let data = data.be32(1, *kind);
                if *kind == REJECT_WITH_RESET { data } else { data.bytes(2, &[*code]) }
            }
            Self::Verdict(verdict) => {
                let data = data.be32(1, VERDICT_REGISTER);
                data.nested(2, |data| data.nested(VERDICT, |data| verdict.write(data)))
            }
            Self::Match(extension) | Self::Target(extension) => extension.write(data),
        }
    }

    /// Reads the expressions of a rule as the kernel lists them; `None` for an unknown expression.
    pub(super) fn read_all(list: &'a [u8]) -> impl Iterator<Item = Option<Self>> {
        attributes::parse(list).filter(|(kind, _)| *kind == LIST_ELEMENT).map(|(_, element)| Self::read(element))
    }

    fn read(element: &'a [u8]) -> Option<Self> {
        let data = find(element, DATA).unwrap_or_default();
        let number = |kind| find_be32(data, kind);
        let value = |kind| find(find(data, kind)?, VALUE);
        let is_absent = |kind| find(data, kind).is_none().then_some(());
        let absent_or = |kind, value: u32| (number(kind).unwrap_or(value) == value).then_some(());
        let in_register = |kind| (number(kind)? == REGISTER).then_some(());
        let not = |operation| match operation {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        };
        Some(match find_text(element, NAME)? {
            "meta" if find(data, 3).is_none() => in_register(1).and(number(2)).map(Self::Meta)?,
            "meta" => in_register(3).and(number(2)).map(Self::SetMeta)?,
            "ct" => {
                is_absent(3)?;
                match find(data, 4) {
                    None => in_register(1).and(number(2)).map(Self::Ct)?,
                    Some(_) => in_register(4).and(number(2)).map(Self::SetCt)?,
                }
            }
            "socket" => {
                let level = in_register(2).and(number(3)).and_then(|level| u8::try_from(level).ok())?;
                (number(1)? == SOCKET_CGROUP).then_some(Self::CgroupAt(level))?
            }
            "byteorder" => {
                let rest = in_register(1).and(in_register(2)).and(Some([number(3)?, number(4)?, number(5)?]))?;
                (rest == [HOST_TO_NETWORK, 4, 4]).then_some(Self::NetworkOrder)?
            }
            "lookup" => {
                in_register(2).and(is_absent(3))?;
                let not = not(number(5).unwrap_or_default())?;
                Self::Lookup { not, set: SetName { id: 0, name: find_text(data, 1)? } }
            }
            "redir" => {
                in_register(1).and(absent_or(2, REGISTER)).and(absent_or(3, PORT_GIVEN)).map(|()| Self::Redirect)?
            }
            "tproxy" => in_register(3).and(is_absent(2)).and(number(1)).map(Self::Tproxy)?,
            "nat" => {
                in_register(3).and(absent_or(4, REGISTER)).and(absent_or(7, ADDRESS_GIVEN))?;
                is_absent(5).and(is_absent(6))?;
                (number(1)? == DESTINATION_NAT).then_some(Self::DestinationNat(number(2)?))?
            }
            "payload" => {
                in_register(1)?;
                Self::Payload { base: number(2)?, offset: number(3)?, length: number(4)? }
            }
            "bitwise" => {
                let xor = in_register(1).and(in_register(2)).and(value(5))?;
                Self::Mask(value(4).filter(|_| xor.iter().all(|b| *b == 0))?)
            }
            "cmp" => {
                let value = in_register(1).and(value(3))?;
                match number(2)? {
                    AT_LEAST => Self::AtLeast(value),
                    AT_MOST => Self::AtMost(value),
                    operation => Self::Compare { not: not(operation)?, value },
                }
            }
            "range" => {
                in_register(1)?;
                Self::Range { not: not(number(2)?)?, from: value(3)?, to: value(4)? }
            }
            "fib" => {
                in_register(1).and(absent_or(2, FIB_TYPE)).and(absent_or(3, FIB_DESTINATION))?;
                Self::DestinationType
            }
            "reject" => {
                let kind = number(1)?;
                let code = find(data, 2).and_then(|code| code.first().copied()).unwrap_or_default();
                Self::Reject(kind, if kind == REJECT_WITH_RESET { 0 } else { code })
            }
            "counter" => Self::Counter,
            "immediate" => match find(find(data, 2)?, VERDICT) {
                Some(verdict) => Self::Verdict(NftVerdict::read(verdict)?),
                None => in_register(1).and(value(2)).map(Self::Constant)?,
            },
            "match" => Self::Match(Extension::read(data)?),
            "target" => Self::Target(Extension::read(data)?),
            _ => return None,
        })
    }
}

/// Appends a value of type `kind`.
fn put_value<'l>(data: &'l mut Attributes, kind: u16, bytes: &[u8]) -> &'l mut Attributes {
    data.nested(kind, |data| data.bytes(VALUE, bytes))
}

/// Appends the data of a comparison.
fn put_compare<'l>(data: &'l mut Attributes, operation: u32, bytes: &[u8]) -> &'l mut Attributes {
    put_value(data.be32(1, REGISTER).be32(2, operation), 3, bytes)
}

/// Returns whether `encode` passes exactly the expressions in `expected` to its argument.
pub(super) fn encodes_as(expected: &[Expression<'_>], encode: impl FnOnce(&mut dyn FnMut(Expression<'_>))) -> bool {
    let (mut left, mut is_same) = (expected.iter(), true);
    encode(&mut |expression| is_same &= left.next() == Some(&expression));
    is_same && left.next().is_none()
}

impl<'a> NftVerdict<'a> {
    /// Returns the verdict of a target; `None` for a target that is not a verdict.
    pub(super) fn of(target: &'a Target) -> Option<Self> {
        let (code, chain) = match target {
            Target::Accept => (NF_ACCEPT, None),
            Target::Return => (NFT_RETURN, None),
            Target::Drop => (NF_DROP, None),
            Target::Jump(chain) => (NFT_JUMP, Some(chain.as_ref())),
            Target::Goto(chain) => (NFT_GOTO, Some(chain.as_ref())),
            _ => return None,
        };
        Some(Self { code, chain })
    }

    /// Returns the target with this verdict; `None` if detour does not write it.
    pub(super) fn target(self) -> Option<Target> {
        match (self.code, self.chain.map(|chain| chain.to_owned().into())) {
            (NF_ACCEPT, None) => Some(Target::Accept),
            (NFT_RETURN, None) => Some(Target::Return),
            (NF_DROP, None) => Some(Target::Drop),
            (NFT_JUMP, Some(chain)) => Some(Target::Jump(chain)),
            (NFT_GOTO, Some(chain)) => Some(Target::Goto(chain)),
            _ => None,
        }
    }

    fn write<'l>(&self, data: &'l mut Attributes) -> &'l mut Attributes {
        let data = data.be32(VERDICT_CODE, self.code);
        self.chain.iter().fold(data, |data, chain| data.text(VERDICT_CHAIN, chain))
    }

    pub(super) fn read(data: &'a [u8]) -> Option<Self> {
        Some(Self { code: find_be32(data, VERDICT_CODE)?, chain: find_text(data, VERDICT_CHAIN) })
    }
}

impl<'a> Extension<'a> {
    fn write<'l>(&self, data: &'l mut Attributes) -> &'l mut Attributes {
        data.text(1, self.name).be32(2, self.revision).bytes(3, self.info)
    }

    fn read(data: &'a [u8]) -> Option<Self> {
        Some(Self { name: find_text(data, 1)?, revision: find_be32(data, 2)?, info: find(data, 3)? })
    }
}

/// A rule's counter. All counters compare as equal, because traffic does not make rules different.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counter {
    /// The number of matching packets.
    pub packets: u64,
    /// The number of bytes in them.
    pub bytes: u64,
}

impl Counter {
    /// Returns the sum of two counters.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        let (packets, bytes) = (self.packets.saturating_add(other.packets), self.bytes.saturating_add(other.bytes));
        Self { packets, bytes }
    }

    /// Reads the first counter of a rule's expressions as the kernel lists them (`NFTA_COUNTER_PACKETS`,
    /// `NFTA_COUNTER_BYTES`).
    pub(super) fn read(expressions: &[u8]) -> Self {
        let elements = attributes::parse(expressions).filter(|(kind, _)| *kind == LIST_ELEMENT);
        let mut counters = elements.filter(|(_, element)| find_text(element, NAME) == Some("counter"));
        let data = counters.next().and_then(|(_, counter)| find(counter, DATA)).unwrap_or_default();
        let number = |kind| find_be64(data, kind).unwrap_or_default();
        Self { packets: number(2), bytes: number(1) }
    }
}

impl PartialEq for Counter {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Counter {}
