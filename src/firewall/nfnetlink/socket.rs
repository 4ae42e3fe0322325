//! A socket to nf_tables: dumps, and transactions bound to a generation of the rules (linux/netfilter/nfnetlink.h,
//! linux/netfilter/nf_tables.h).

use crate::netlink::attributes::{Attributes, find_be32};
use crate::netlink::{
    self, DumpLimit, EXCEEDED, NLM_F_ACK, NLM_F_REQUEST, NLMSG_ERROR, NetlinkSocket, Received, is_lack_of_resources,
};
use nix::errno::Errno;
use nix::sys::socket::SockProtocol;

/// `ERESTART` (linux/errno.h): nfnetlink returns it if the generation has changed.
const ERESTART: i32 = 85;
/// `NFTA_GEN_ID`.
const GENERATION_ID: u16 = 1;

/// The errors of the nf_tables socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NfError {
    /// The socket failed. A transaction that was sent may have taken effect or not.
    #[error("netlink socket: {0}")]
    Socket(#[from] Errno),
    /// Dumps returned more than the allowance.
    #[error("expected {0} (tables, chains, rules, sets and their elements), got more")]
    TooMany(DumpLimit),
    /// A transaction would delete so many rules one by one that it would block the kernel.
    #[error("expected at most {limit} rules of another tool that jump to detour's chains, got {count}")]
    TooManyDeletions {
        /// The number of rules of one chain to be deleted one by one.
        count: usize,
        /// The maximum.
        limit: usize,
    },
    /// Another process changed the rules in between; read them again.
    #[error("another process changed the rules while they were read")]
    Changed,
    /// The kernel refused one message of a transaction, and thereby all of it.
    #[error("the kernel refused the transaction: {errno}")]
    Refused {
        /// The index of the message, from 0; `None` if the error is about the transaction as a whole.
        index: Option<usize>,
        /// The kernel's error.
        errno: Errno,
    },
}

impl NfError {
    /// Returns whether the node lacks memory or file descriptors, which is temporary. `ENFILE` in an answer is none of
    /// these: a set is full.
    #[must_use]
    pub fn is_lack_of_resources(&self) -> bool {
        match self {
            Self::Socket(errno) => is_lack_of_resources(*errno),
            Self::Refused { errno, .. } => matches!(errno, Errno::ENOBUFS | Errno::ENOMEM),
            _ => false,
        }
    }
}

/// A socket to nf_tables.
#[derive(Debug)]
pub struct NfSocket(NetlinkSocket);

impl NfSocket {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel does not support nfnetlink, or no file descriptor is left.
    pub fn open() -> Result<Self, NfError> {
        Ok(Self(NetlinkSocket::open(SockProtocol::NetlinkNetFilter)?))
    }

    /// Returns a socket whose other end, which is not the kernel, the caller has.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn of(fd: std::os::fd::OwnedFd) -> Self {
        Self(NetlinkSocket::of(fd))
    }

    /// Limits how much all following dumps together may return.
    pub fn allow(&mut self, allowance: DumpLimit) {
        self.0.allow(allowance);
    }

    /// Returns the generation of the namespace's rules, which grows with each transaction.
    ///
    /// # Errors
    /// The socket fails, or the kernel does not report a generation.
    pub fn generation(&mut self) -> Result<u32, NfError> {
        let sequence = self.0.next_sequence();
        let mut request = Vec::new();
        let message = Message { verb: Verb::GetGeneration, flags: 0, family: 0, attributes: Attributes::new() };
        message.write(0, sequence, &mut request);
        self.0.send(&request)?;
        let reply = self.0.receive()?.find(|m| m.sequence == sequence);
        if let Some(error) = reply.as_ref().filter(|m| m.kind == NLMSG_ERROR && m.errno() != 0) {
            return Err(NfError::Socket(Errno::from_raw(error.errno())));
        }
        let generation = reply.and_then(|m| find_be32(parts(m.body)?.1, GENERATION_ID));
        generation.ok_or(NfError::Socket(Errno::ENOTSUP))
    }

    /// Lists all objects of one kind in all families; passes family and attributes of each to `each`.
    ///
    /// # Errors
    /// The socket fails, the rules change during the dump, or the dump exceeds [`Self::allow`].
    pub fn dump(&mut self, verb: Verb, each: impl FnMut(u8, &[u8])) -> Result<(), NfError> {
        self.dump_of(verb, 0, Attributes::new(), each)
    }

    /// Lists the objects of one kind and family that `attributes` select; passes family and attributes of each to
    /// `each`.
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
        self.dump_kind(verb.kind(), family, &attributes, each)
    }

    /// Lists objects of a message type of any netfilter subsystem.
    pub(super) fn dump_kind(
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
            Err(EXCEEDED) => Err(NfError::TooMany(self.0.allowance())),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sends a request to a subsystem other than nf_tables and waits for the acknowledgement.
    pub(super) fn request(&mut self, kind: u16, family: u8, attributes: &Attributes) -> Result<(), NfError> {
        Ok(self.0.request(kind, 0, &header(family, 0), attributes.as_bytes())?)
    }

    /// Commits all messages as one atomic transaction, provided that the rules are still of `generation`. Each message
    /// is made when it is written, because a transaction can have thousands of them.
    ///
    /// # Errors
    /// The kernel refuses it, or the rules have changed since `generation`: nothing took effect. After
    /// [`NfError::Socket`], read the rules again to learn whether it took effect.
    pub fn transact(&mut self, messages: impl IntoIterator<Item = Message>, generation: u32) -> Result<(), NfError> {
        let mut messages = messages.into_iter().peekable();
        if messages.peek().is_none() {
            return Ok(());
        }
        let begin = self.0.next_sequence();
        let mut batch = Vec::new();
        let genid = Attributes::new().be32(NFNL_BATCH_GENID, generation);
        put_batch_mark(&mut batch, NFNL_MSG_BATCH_BEGIN, begin, &genid);
        let first = begin + 1;
        let (mut acknowledged, mut count) = (begin, 0);
        while let Some(message) = messages.next() {
            (acknowledged, count) = (self.0.next_sequence(), count + 1);
            // The acknowledgement of the last message ends the replies.
            let flags = if messages.peek().is_none() { NLM_F_ACK } else { 0 };
            message.write(flags, acknowledged, &mut batch);
        }
        put_batch_mark(&mut batch, NFNL_MSG_BATCH_END, self.0.next_sequence(), &Attributes::new());
        self.0.send(&batch)?;
        let mut refused = None;
        loop {
            for message in self.0.receive()?.filter(|m| m.kind == NLMSG_ERROR && m.sequence >= begin) {
                let errno = message.errno();
                if errno == ERESTART {
                    return Err(NfError::Changed);
                }
                let index = message_index(&message, first, count);
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

const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;
const NFNL_BATCH_GENID: u16 = 1;
const NFNL_SUBSYS_NFTABLES: u16 = 10;

/// The length of `struct nfgenmsg`, with which every netfilter message starts.
const HEADER: usize = 4;

/// On a request that adds an object: append it to the others.
pub const NLM_F_APPEND: u16 = 0x800;

/// The number of bytes that the attributes of a usual message need; a longer message grows.
pub const USUAL_LENGTH: usize = 512;

/// The type of a message (`enum nf_tables_msg_types`).
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
    DelSetElements = 14,
    GetGeneration = 16,
}

impl Verb {
    const fn kind(self) -> u16 {
        (NFNL_SUBSYS_NFTABLES << 8) | self as u16
    }
}

/// A message of the nf_tables subsystem, without its sequence number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The message type.
    pub verb: Verb,
    /// The flags `NLM_F_CREATE` and `NLM_F_APPEND`.
    pub flags: u16,
    /// The family (`NFPROTO_…`).
    pub family: u8,
    /// The attributes of the object.
    pub attributes: Attributes,
}

impl Message {
    fn write(&self, flags: u16, sequence: u32, out: &mut Vec<u8>) {
        let flags = NLM_F_REQUEST | self.flags | flags;
        netlink::put(out, self.verb.kind(), flags, sequence, [&header(self.family, 0), self.attributes.as_bytes()]);
    }
}

/// Returns the `struct nfgenmsg` of a message.
const fn header(family: u8, resource: u16) -> [u8; HEADER] {
    let [high, low] = resource.to_be_bytes();
    [family, 0, high, low]
}

/// Appends the message that begins or ends a transaction.
fn put_batch_mark(out: &mut Vec<u8>, kind: u16, sequence: u32, attributes: &Attributes) {
    netlink::put(out, kind, NLM_F_REQUEST, sequence, [&header(0, NFNL_SUBSYS_NFTABLES), attributes.as_bytes()]);
}

/// Splits the body of a message into family and attributes.
fn parts(body: &[u8]) -> Option<(u8, &[u8])> {
    Some((*body.first()?, body.get(HEADER..)?))
}

/// Returns the index of the message that a reply is about; `None` if it is about the transaction as a whole.
fn message_index(reply: &Received<'_>, first: u32, count: usize) -> Option<usize> {
    let index = reply.sequence.checked_sub(first).and_then(|i| usize::try_from(i).ok());
    index.filter(|index| *index < count)
}
