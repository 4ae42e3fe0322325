//! Messages of the nf_tables subsystem (linux/netfilter/nfnetlink.h, nf_tables.h).

use crate::netlink::{self, Attributes, NLM_F_REQUEST, Received};

pub(super) const NFNL_MSG_BATCH_BEGIN: u16 = 16;
pub(super) const NFNL_MSG_BATCH_END: u16 = 17;
pub(super) const NFNL_BATCH_GENID: u16 = 1;
pub(super) const NFNL_SUBSYS_NFTABLES: u16 = 10;

/// `struct nfgenmsg`, which every netfilter message starts with.
const HEADER: usize = 4;

/// On NEW: behind the others.
pub const NLM_F_APPEND: u16 = 0x800;

/// What a message does (`enum nf_tables_msg_types`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
#[allow(missing_docs)]
pub enum Verb {
    NewTable = 0,
    GetTable = 1,
    DelTable = 2,
    NewChain = 3,
    GetChain = 4,
    DelChain = 5,
    NewRule = 6,
    GetRule = 7,
    DelRule = 8,
    NewSet = 9,
    GetSet = 10,
    NewSetElements = 12,
    GetSetElements = 13,
    GetGeneration = 16,
}

impl Verb {
    pub(super) const fn kind(self) -> u16 {
        (NFNL_SUBSYS_NFTABLES << 8) | self as u16
    }
}

/// A message of the nf_tables subsystem, without its sequence number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// What it does.
    pub verb: Verb,
    /// `NLM_F_CREATE`, `NLM_F_APPEND`.
    pub flags: u16,
    /// `NFPROTO_IPV4` and so on.
    pub family: u8,
    /// What it is about.
    pub attributes: Attributes,
}

impl Message {
    pub(super) fn write(&self, flags: u16, sequence: u32, out: &mut Vec<u8>) {
        let flags = NLM_F_REQUEST | self.flags | flags;
        netlink::put(out, self.verb.kind(), flags, sequence, [&header(self.family, 0), self.attributes.as_bytes()]);
    }
}

/// `struct nfgenmsg` of this family.
pub(super) const fn header(family: u8, resource: u16) -> [u8; HEADER] {
    let [high, low] = resource.to_be_bytes();
    [family, 0, high, low]
}

/// The mark at the beginning or the end of a transaction.
pub(super) fn put_mark(out: &mut Vec<u8>, kind: u16, sequence: u32, attributes: &Attributes) {
    netlink::put(out, kind, NLM_F_REQUEST, sequence, [&header(0, NFNL_SUBSYS_NFTABLES), attributes.as_bytes()]);
}

/// The address family and the attributes of a message's body.
pub(super) fn parts(body: &[u8]) -> Option<(u8, &[u8])> {
    Some((*body.first()?, body.get(HEADER..)?))
}

/// Which message of a transaction an answer is about, from 0; `None` for the transaction as a whole.
pub(super) fn index(answer: &Received<'_>, first: u32, count: usize) -> Option<usize> {
    let index = answer.sequence.checked_sub(first).and_then(|i| usize::try_from(i).ok());
    index.filter(|index| *index < count)
}
