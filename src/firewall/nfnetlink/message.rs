//! Messages of the nf_tables subsystem (linux/netfilter/nfnetlink.h, nf_tables.h).

use super::attributes::Attributes;

/// `struct nlmsghdr`.
pub(super) const NLMSG_HEADER: usize = 16;
/// `struct nfgenmsg`, which every netfilter message starts with.
const NFGEN_HEADER: usize = 4;

pub(super) const NLM_F_REQUEST: u16 = 1;
pub(super) const NLM_F_ACK: u16 = 4;
pub(super) const NLM_F_DUMP: u16 = 0x300;
/// On a dump's answers: the rules changed while they were read.
pub(super) const NLM_F_DUMP_INTR: u16 = 0x10;
/// On NEW: make it.
pub const NLM_F_CREATE: u16 = 0x400;
/// On NEW: behind the others.
pub const NLM_F_APPEND: u16 = 0x800;

pub(super) const NFNL_MSG_BATCH_BEGIN: u16 = 16;
pub(super) const NFNL_MSG_BATCH_END: u16 = 17;
pub(super) const NFNL_BATCH_GENID: u16 = 1;
pub(super) const NFNL_SUBSYS_NFTABLES: u16 = 10;

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
        let kind = (NFNL_SUBSYS_NFTABLES << 8) | self.verb as u16;
        put(out, kind, NLM_F_REQUEST | self.flags | flags, sequence, self.family, 0, self.attributes.as_bytes());
    }
}

/// Writes one message with both headers.
pub(super) fn put(out: &mut Vec<u8>, kind: u16, flags: u16, sequence: u32, family: u8, resource: u16, body: &[u8]) {
    let length = u32::try_from(NLMSG_HEADER + NFGEN_HEADER + body.len()).unwrap_or(u32::MAX);
    out.extend(length.to_ne_bytes());
    out.extend(kind.to_ne_bytes());
    out.extend(flags.to_ne_bytes());
    out.extend(sequence.to_ne_bytes());
    out.extend(0_u32.to_ne_bytes());
    out.extend([family, 0]);
    out.extend(resource.to_be_bytes());
    out.extend(body);
}

/// A message as it came.
#[derive(Debug)]
pub(super) struct Received<'a> {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) sequence: u32,
    pub(super) body: &'a [u8],
}

impl Received<'_> {
    /// The address family and the attributes behind it.
    pub(super) fn netfilter(&self) -> Option<(u8, &[u8])> {
        Some((*self.body.first()?, self.body.get(NFGEN_HEADER..)?))
    }

    /// `NLMSG_ERROR`: the error's number, 0 where it is an acknowledgement.
    pub(super) fn errno(&self) -> i32 {
        self.body.first_chunk::<4>().map_or(0, |b| -i32::from_ne_bytes(*b))
    }
}

/// The messages in what one read returned.
pub(super) fn split(mut bytes: &[u8]) -> impl Iterator<Item = Received<'_>> {
    std::iter::from_fn(move || {
        let header = bytes.get(..NLMSG_HEADER)?;
        let u16_at = |at: usize| Some(u16::from_ne_bytes(header.get(at..at + 2)?.try_into().ok()?));
        let u32_at = |at: usize| Some(u32::from_ne_bytes(header.get(at..at + 4)?.try_into().ok()?));
        let length = usize::try_from(u32_at(0)?).ok()?;
        let body = bytes.get(NLMSG_HEADER..length)?;
        let received = Received { kind: u16_at(4)?, flags: u16_at(6)?, sequence: u32_at(8)?, body };
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(received)
    })
}
