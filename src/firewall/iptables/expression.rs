//! nf_tables expressions (linux/netfilter/nf_tables.h) as far as iptables-nft uses them for the
//! rules of this crate, between values and attributes.

use super::xt::Extension;
use crate::firewall::nfnetlink::attributes::{self, Attributes, find, find_be32, find_be64, find_text};

/// `NFTA_LIST_ELEM`.
const LIST_ELEMENT: u16 = 1;
/// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`.
const NAME: u16 = 1;
const DATA: u16 = 2;
/// `NFTA_DATA_VALUE`, `NFTA_DATA_VERDICT`; within the latter `NFTA_VERDICT_CODE`, `_CHAIN`.
const VALUE: u16 = 1;
const VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;
/// The one register that all expressions of a rule use.
const REGISTER: u32 = 1;
const VERDICT_REGISTER: u32 = 0;

/// What is loaded from beside the packet (`enum nft_meta_keys`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Meta {
    /// The packet's mark.
    Mark = 3,
    /// The interface that it came in by.
    InInterface = 6,
    /// The interface that it goes out by.
    OutInterface = 7,
    /// TCP, UDP, …
    Protocol = 16,
}

/// Where in the packet the offset counts from (`enum nft_payload_bases`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Base {
    /// The IP header.
    Network = 1,
    /// The TCP or UDP header.
    Transport = 2,
}

/// What ends a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// `NF_DROP`.
    Drop,
    /// `NF_ACCEPT`.
    Accept,
    /// `NFT_JUMP`.
    Jump(String),
    /// `NFT_GOTO`.
    Goto(String),
    /// `NFT_RETURN`.
    Return,
}

/// One expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Expression {
    /// Loads metadata.
    Meta(Meta),
    /// Loads bytes of the packet.
    Payload {
        /// From where.
        base: Base,
        /// How far behind.
        offset: u32,
        /// How many.
        length: u32,
    },
    /// Clears bits of what was loaded.
    Mask(Vec<u8>),
    /// Goes on only if what was loaded is this, or is not.
    Compare {
        /// Is not.
        not: bool,
        /// This.
        value: Vec<u8>,
    },
    /// Goes on only if what was loaded lies between, or does not.
    Range {
        /// Does not.
        not: bool,
        /// The first that does.
        from: Vec<u8>,
        /// The last that does.
        to: Vec<u8>,
    },
    /// Counts packets and bytes.
    Counter,
    /// Ends the rule.
    Verdict(Verdict),
    /// An xtables match.
    Match(Extension),
    /// An xtables target.
    Target(Extension),
}

impl Expression {
    /// Appends it to a rule's list.
    #[must_use]
    pub(super) fn write(&self, list: Attributes) -> Attributes {
        let new = Attributes::new;
        let value = |bytes: &[u8]| new().bytes(VALUE, bytes);
        let (name, data) = match self {
            Self::Meta(key) => ("meta", new().be32(2, *key as u32).be32(1, REGISTER)),
            Self::Payload { base, offset, length } => {
                ("payload", new().be32(1, REGISTER).be32(2, *base as u32).be32(3, *offset).be32(4, *length))
            }
            Self::Mask(mask) => {
                let length = u32::try_from(mask.len()).unwrap_or_default();
                let data = new().be32(1, REGISTER).be32(2, REGISTER).be32(3, length);
                ("bitwise", data.nested(4, &value(mask)).nested(5, &value(&vec![0; mask.len()])))
            }
            Self::Compare { not, value: bytes } => {
                ("cmp", new().be32(1, REGISTER).be32(2, u32::from(*not)).nested(3, &value(bytes)))
            }
            Self::Range { not, from, to } => {
                let data = new().be32(1, REGISTER).be32(2, u32::from(*not));
                ("range", data.nested(3, &value(from)).nested(4, &value(to)))
            }
            Self::Counter => ("counter", new().be64(1, 0).be64(2, 0)),
            Self::Verdict(verdict) => {
                let data = new().nested(VERDICT, &verdict.write());
                ("immediate", new().be32(1, VERDICT_REGISTER).nested(2, &data))
            }
            Self::Match(extension) => ("match", extension.write()),
            Self::Target(extension) => ("target", extension.write()),
        };
        list.nested(LIST_ELEMENT, &new().text(NAME, name).nested(DATA, &data))
    }

    /// The expressions of a rule as the kernel lists them; `None` stands for one that is not
    /// used here.
    pub(super) fn read_all(list: &[u8]) -> impl Iterator<Item = Option<Self>> {
        attributes::parse(list).filter(|(kind, _)| *kind == LIST_ELEMENT).map(|(_, element)| Self::read(element))
    }

    /// Packets and bytes of a rule's first counter (`NFTA_COUNTER_PACKETS`, `NFTA_COUNTER_BYTES`).
    pub(super) fn counted(list: &[u8]) -> Option<(u64, u64)> {
        let elements = attributes::parse(list).filter(|(kind, _)| *kind == LIST_ELEMENT);
        let mut counters = elements.filter(|(_, element)| find_text(element, NAME) == Some("counter"));
        let data = find(counters.next()?.1, DATA)?;
        Some((find_be64(data, 2)?, find_be64(data, 1)?))
    }

    fn read(element: &[u8]) -> Option<Self> {
        let data = find(element, DATA).unwrap_or_default();
        let value = |kind| find(find(data, kind)?, VALUE).map(<[u8]>::to_vec);
        let not = || match find_be32(data, 2) {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => None,
        };
        let in_register = |kind| (find_be32(data, kind)? == REGISTER).then_some(());
        Some(match find_text(element, NAME)? {
            "meta" => {
                in_register(1)?;
                let key = find_be32(data, 2)?;
                let known = [Meta::Mark, Meta::InInterface, Meta::OutInterface, Meta::Protocol];
                Self::Meta(known.into_iter().find(|m| *m as u32 == key)?)
            }
            "payload" => {
                in_register(1)?;
                let base = find_be32(data, 2)?;
                let base = [Base::Network, Base::Transport].into_iter().find(|b| *b as u32 == base)?;
                Self::Payload { base, offset: find_be32(data, 3)?, length: find_be32(data, 4)? }
            }
            "bitwise" => {
                let xor = value(5)?;
                in_register(1).and_then(|()| in_register(2))?;
                Self::Mask(value(4).filter(|_| xor.iter().all(|b| *b == 0))?)
            }
            "cmp" => {
                in_register(1)?;
                Self::Compare { not: not()?, value: value(3)? }
            }
            "range" => {
                in_register(1)?;
                Self::Range { not: not()?, from: value(3)?, to: value(4)? }
            }
            "counter" => Self::Counter,
            "immediate" => Self::Verdict(Verdict::read(find(find(data, 2)?, VERDICT)?)?),
            "match" => Self::Match(Extension::read(data)?),
            "target" => Self::Target(Extension::read(data)?),
            _ => return None,
        })
    }
}

const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;
const NFT_JUMP: u32 = -3_i32 as u32;
const NFT_GOTO: u32 = -4_i32 as u32;
const NFT_RETURN: u32 = -5_i32 as u32;

impl Verdict {
    fn write(&self) -> Attributes {
        let code = |code| Attributes::new().be32(VERDICT_CODE, code);
        match self {
            Self::Drop => code(NF_DROP),
            Self::Accept => code(NF_ACCEPT),
            Self::Return => code(NFT_RETURN),
            Self::Jump(chain) => code(NFT_JUMP).text(VERDICT_CHAIN, chain),
            Self::Goto(chain) => code(NFT_GOTO).text(VERDICT_CHAIN, chain),
        }
    }

    fn read(data: &[u8]) -> Option<Self> {
        let chain = || find_text(data, VERDICT_CHAIN).map(str::to_owned);
        match find_be32(data, VERDICT_CODE)? {
            NF_DROP => Some(Self::Drop),
            NF_ACCEPT => Some(Self::Accept),
            NFT_RETURN => Some(Self::Return),
            NFT_JUMP => chain().map(Self::Jump),
            NFT_GOTO => chain().map(Self::Goto),
            _ => None,
        }
    }
}

impl Extension {
    fn write(&self) -> Attributes {
        Attributes::new().text(1, &self.name).be32(2, self.revision).bytes(3, &self.info)
    }

    fn read(data: &[u8]) -> Option<Self> {
        let name = find_text(data, 1)?.to_owned();
        Some(Self { name, revision: find_be32(data, 2)?, info: find(data, 3)?.to_vec() })
    }
}
