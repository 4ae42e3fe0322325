//! The netlink socket of the network namespace in which it is opened: dumps and transactions.
//!
//! Messages of the nf_tables subsystem (linux/netfilter/nfnetlink.h, nf_tables.h).

use crate::netlink;
use crate::netlink::attributes::{Attributes, find_be32};
use crate::netlink::{Allowance, NLM_F_ACK, NLM_F_REQUEST, NLMSG_ERROR, Received, TOO_MANY};
use nix::errno::Errno;
use nix::sys::socket::SockProtocol;

/// linux/errno.h; only the kernel and netlink use it.
const ERESTART: i32 = 85;
/// `NFTA_GEN_ID`.
const GENERATION_ID: u16 = 1;

/// What can go wrong between us and the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NfError {
    /// The socket itself failed. A transaction that was sent may have taken effect or not.
    #[error("netlink socket: {0}")]
    Socket(#[from] Errno),
    /// Dumps returned more than they may.
    #[error("expected {0} (tables, chains, rules, sets and their elements); got more")]
    TooMany(Allowance),
    /// A transaction would cost the kernel too much.
    #[error("expected at most {limit} rules of another tool that go to detour's chains, got {count}")]
    TooManyDeletions {
        /// How many rules of one chain it would delete one by one.
        count: usize,
        /// How many it may.
        limit: usize,
    },
    /// Somebody else changed the rules in between; read them again.
    #[error("the rules changed while they were read")]
    Changed,
    /// The kernel refused one message of a transaction, and so all of it.
    #[error("the kernel refused it: {errno}")]
    Refused {
        /// Which, from 0; `None` is the transaction as a whole.
        index: Option<usize>,
        /// Why.
        errno: Errno,
    },
}

/// A socket to nf_tables.
#[derive(Debug)]
pub struct NfSocket(netlink::NetlinkSocket);

impl NfSocket {
    /// Opens one in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel has no nfnetlink or no descriptor is left.
    pub fn open() -> Result<Self, NfError> {
        Ok(Self(netlink::NetlinkSocket::open(SockProtocol::NetlinkNetFilter)?))
    }

    /// Limits what the next dumps may return, all together.
    pub fn allow(&mut self, allowance: Allowance) {
        self.0.allow(allowance);
    }

    /// The generation of all rules of the namespace: it grows with each transaction.
    ///
    /// # Errors
    /// The socket fails or the kernel answers without one.
    pub fn generation(&mut self) -> Result<u32, NfError> {
        let sequence = self.0.next_sequence();
        let mut request = Vec::new();
        let ask = Message { verb: Verb::GetGeneration, flags: 0, family: 0, attributes: Attributes::new() };
        ask.write(0, sequence, &mut request);
        self.0.send(&request)?;
        let answer = self.0.receive()?.find(|m| m.sequence == sequence && m.kind != NLMSG_ERROR);
        let generation = answer.and_then(|m| find_be32(parts(m.body)?.1, GENERATION_ID));
        generation.ok_or(NfError::Socket(Errno::ENOTSUP))
    }

    /// Everything of one kind, of all families; `each` gets the family and the attributes.
    ///
    /// # Errors
    /// The socket fails, the rules change while they are read, or there are more than [`Self::allow`]
    /// allows.
    pub fn dump(&mut self, verb: Verb, each: impl FnMut(u8, &[u8])) -> Result<(), NfError> {
        self.dump_of(verb, 0, Attributes::new(), each)
    }

    /// Everything of one kind that `attributes` speak of, of one family; `each` gets the family
    /// and the attributes.
    ///
    /// # Errors
    /// As [`Self::dump`].
    pub fn dump_of(
        &mut self,
        verb: Verb,
        family: u8,
        attributes: Attributes,
        each: impl FnMut(u8, &[u8]),
    ) -> Result<(), NfError> {
        self.answers(verb.kind(), family, &attributes, each)
    }

    pub(super) fn answers(
        &mut self,
        kind: u16,
        family: u8,
        attributes: &Attributes,
        mut each: impl FnMut(u8, &[u8]),
    ) -> Result<(), NfError> {
        let dumped = self.0.dump(kind, &header(family, 0), attributes, |body| {
            if let Some((family, attributes)) = parts(body) {
                each(family, attributes);
            }
        });
        match dumped {
            Ok(true) => Ok(()),
            Ok(false) => Err(NfError::Changed),
            Err(TOO_MANY) => Err(NfError::TooMany(self.0.allowance())),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sends a request of another subsystem than nf_tables, and waits until the kernel has done it.
    pub(super) fn request(&mut self, kind: u16, family: u8, attributes: &Attributes) -> Result<(), NfError> {
        Ok(self.0.request(kind, 0, &header(family, 0), attributes.as_bytes())?)
    }

    /// Sends all messages as one transaction: the kernel does all of it or nothing, and nothing
    /// where the rules are no longer of `generation`.
    ///
    /// # Errors
    /// The kernel refuses it, or the rules have changed since `generation`: then nothing of it was done.
    /// After [`Error::Socket`], the generation and the rules tell whether it was done.
    pub fn transact(&mut self, messages: &[Message], generation: u32) -> Result<(), NfError> {
        let Some(last) = messages.len().checked_sub(1) else { return Ok(()) };
        let begin = self.0.next_sequence();
        let mut batch = Vec::new();
        let genid = Attributes::new().be32(NFNL_BATCH_GENID, generation);
        put_mark(&mut batch, NFNL_MSG_BATCH_BEGIN, begin, &genid);
        let first = begin + 1;
        let mut acknowledged = begin;
        for (index, message) in messages.iter().enumerate() {
            acknowledged = self.0.next_sequence();
            // The last one's acknowledgement tells that the kernel has done with all of them.
            message.write(if index == last { NLM_F_ACK } else { 0 }, acknowledged, &mut batch);
        }
        put_mark(&mut batch, NFNL_MSG_BATCH_END, self.0.next_sequence(), &Attributes::new());
        self.0.send(&batch)?;
        let mut refused = None;
        loop {
            for message in self.0.receive()?.filter(|m| m.kind == NLMSG_ERROR && m.sequence >= begin) {
                let errno = message.errno();
                if errno == ERESTART {
                    return Err(NfError::Changed);
                }
                let index = index(&message, first, messages.len());
                if errno != 0 && refused.is_none() {
                    refused = Some(NfError::Refused { index, errno: Errno::from_raw(errno) });
                }
                if message.sequence == acknowledged || index.is_none() {
                    return refused.map_or(Ok(()), Err);
                }
            }
        }
    }
}

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
