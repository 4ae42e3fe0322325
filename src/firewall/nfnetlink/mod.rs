//! The netlink protocol of netfilter (linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h): dumps, transactions
//! bound to a generation of the rules, and tracked connections. It knows nothing about rules.
//!
//! The encoding is our own code: no library encodes the expressions `redir`, `match` and `target`, unless it links C or
//! starts `nft`.

mod conntrack;

pub use conntrack::Connection;

use crate::netlink::attributes::{Attributes, find_be32};
use crate::netlink::{
    DumpLimit, EXCEEDED, Messages, NLM_F_ACK, NLM_F_REQUEST, NLMSG_ERROR, NetlinkSocket, Received, is_lack_of_resources,
};
use crate::wait;
use nix::errno::Errno;
use nix::sys::socket::SockProtocol;
use std::time::Duration;

/// The attribute types of tables, chains, rules and sets (`NFTA_…`, linux/netfilter/nf_tables.h).
pub(crate) mod nfta {
    /// `NFTA_TABLE_NAME`, `NFTA_CHAIN_TABLE`, `NFTA_RULE_TABLE`, `NFTA_SET_TABLE`, `NFTA_SET_ELEM_LIST_TABLE`.
    pub(crate) const TABLE: u16 = 1;

    /// `NFTA_TABLE_FLAGS`, and its flag `NFT_TABLE_F_DORMANT`: the table has no effect.
    pub(crate) const TABLE_FLAGS: u16 = 2;
    pub(crate) const DORMANT: u32 = 1;

    /// `NFTA_CHAIN_…`.
    pub(crate) const CHAIN_NAME: u16 = 3;
    pub(crate) const CHAIN_HOOK: u16 = 4;
    pub(crate) const CHAIN_POLICY: u16 = 5;
    pub(crate) const CHAIN_TYPE: u16 = 7;
    /// `NFTA_HOOK_…`, within `CHAIN_HOOK`.
    pub(crate) const HOOK_NUMBER: u16 = 1;
    pub(crate) const HOOK_PRIORITY: u16 = 2;

    /// `NFTA_RULE_…`; `RULE_POSITION` is the handle of the rule before which another one is inserted.
    pub(crate) const RULE_CHAIN: u16 = 2;
    pub(crate) const RULE_HANDLE: u16 = 3;
    pub(crate) const RULE_EXPRESSIONS: u16 = 4;
    pub(crate) const RULE_COMPAT: u16 = 5;
    pub(crate) const RULE_POSITION: u16 = 6;

    /// `NFTA_SET_…`.
    pub(crate) const SET_NAME: u16 = 2;
    pub(crate) const SET_FLAGS: u16 = 3;
    pub(crate) const SET_KEY_TYPE: u16 = 4;
    pub(crate) const SET_KEY_LENGTH: u16 = 5;
    pub(crate) const SET_DESCRIPTION: u16 = 9;
    pub(crate) const SET_ID: u16 = 10;
    pub(crate) const SET_USER_DATA: u16 = 13;
    /// `NFTA_SET_DESC_SIZE`, within `SET_DESCRIPTION`.
    pub(crate) const SET_SIZE: u16 = 1;
    /// `NFTA_SET_ELEM_LIST_…`.
    pub(crate) const ELEMENTS_SET: u16 = 2;
    pub(crate) const ELEMENTS: u16 = 3;
    pub(crate) const ELEMENTS_SET_ID: u16 = 4;
    /// `NFTA_LIST_ELEM`.
    pub(crate) const LIST_ELEMENT: u16 = 1;
    /// `NFTA_SET_ELEM_…`; `ELEMENT_VALUE` is `NFTA_DATA_VALUE`, within `ELEMENT_KEY`.
    pub(crate) const ELEMENT_KEY: u16 = 1;
    pub(crate) const ELEMENT_VALUE: u16 = 1;
    pub(crate) const ELEMENT_FLAGS: u16 = 3;
    pub(crate) const ELEMENT_USER_DATA: u16 = 6;

    /// Type and length of `NFTNL_UDATA_SET_KEYBYTEORDER` (libnftnl, udata.h), which `nft` stores with a set. Without it,
    /// `nft` prints interface names as empty strings and UIDs in the wrong byte order.
    pub(crate) const KEY_BYTE_ORDER: [u8; 2] = [0, 4];
    pub(crate) const HOST_ENDIAN: u32 = 1;
    pub(crate) const BIG_ENDIAN: u32 = 2;
}

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

/// For how long work is repeated because other processes change the rules during it.
const RETRY_TIMEOUT: Duration = Duration::from_secs(1);

/// Repeats `work` while other processes change the rules during it, at most for a second.
///
/// # Errors
/// Those of `work`; [`NfError::Changed`] if they keep changing the rules.
pub(crate) fn retry_changed<T>(mut work: impl FnMut() -> Result<T, NfError>) -> Result<T, NfError> {
    let done = wait::until(RETRY_TIMEOUT, wait::AT_ONCE, || match work() {
        Err(NfError::Changed) => Ok(None),
        other => other.map(Some),
    });
    done?.ok_or(NfError::Changed)
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
        let request = Messages::one(Verb::GetGeneration.kind(), NLM_F_REQUEST, sequence, &header(0, 0), &[]);
        self.0.send(request.as_bytes())?;
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

    /// Commits the messages that `write` appends as one atomic transaction, provided that the rules are still of
    /// `generation`.
    ///
    /// # Errors
    /// The kernel refuses it, or the rules have changed since `generation`: nothing took effect. After
    /// [`NfError::Socket`], read the rules again to learn whether it took effect.
    pub fn transact(&mut self, generation: u32, write: impl FnOnce(&mut Batch<'_>)) -> Result<(), NfError> {
        let mut batch = Batch::begin(&mut self.0, generation);
        let begin = batch.sequence;
        write(&mut batch);
        if batch.is_empty() {
            return Ok(());
        }
        let (count, acknowledged) = (batch.len(), batch.sequence);
        batch.send()?;
        self.outcome(begin, count, acknowledged)
    }

    /// Reads the replies to a transaction of `count` messages, from its beginning to the acknowledged message.
    fn outcome(&mut self, begin: u32, count: usize, acknowledged: u32) -> Result<(), NfError> {
        let mut refused = None;
        loop {
            for message in self.0.receive()?.filter(|m| m.kind == NLMSG_ERROR && m.sequence >= begin) {
                let errno = message.errno();
                if errno == ERESTART {
                    return Err(NfError::Changed);
                }
                let index = message_index(&message, begin + 1, count);
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
    DelSet = 11,
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

/// A transaction being written: messages of the nf_tables subsystem, one after another in the datagram that is sent.
#[derive(Debug)]
pub struct Batch<'a> {
    socket: &'a mut NetlinkSocket,
    messages: Messages,
    count: usize,
    /// Sequence number and flags of the last message.
    sequence: u32,
    flags: u16,
}

impl<'a> Batch<'a> {
    fn begin(socket: &'a mut NetlinkSocket, generation: u32) -> Self {
        let sequence = socket.next_sequence();
        let mut batch = Self { socket, messages: Messages::new(), count: 0, sequence, flags: NLM_F_REQUEST };
        batch.mark(NFNL_MSG_BATCH_BEGIN, sequence, |list| list.be32(NFNL_BATCH_GENID, generation));
        batch
    }

    /// Appends a message about an object of a family (`NFPROTO_…`) with the attributes that `write` appends. The flags
    /// are `NLM_F_CREATE` and `NLM_F_APPEND`.
    pub fn message(
        &mut self,
        verb: Verb,
        flags: u16,
        family: u8,
        write: impl FnOnce(&mut Attributes) -> &mut Attributes,
    ) {
        self.count += 1;
        (self.sequence, self.flags) = (self.socket.next_sequence(), NLM_F_REQUEST | flags);
        self.messages.put(verb.kind(), self.flags, self.sequence, &header(family, 0), write);
    }

    /// Returns the number of messages.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Reports whether there is no message.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Ends the transaction and sends it. The acknowledgement of the last message ends the replies.
    fn send(mut self) -> Result<(), Errno> {
        self.messages.set_flags(self.flags | NLM_F_ACK);
        let end = self.socket.next_sequence();
        self.mark(NFNL_MSG_BATCH_END, end, |list| list);
        self.socket.send(self.messages.as_bytes())
    }

    /// Appends the message that begins or ends a transaction.
    fn mark(&mut self, kind: u16, sequence: u32, write: impl FnOnce(&mut Attributes) -> &mut Attributes) {
        self.messages.put(kind, NLM_F_REQUEST, sequence, &header(0, NFNL_SUBSYS_NFTABLES), write);
    }
}

/// Returns the `struct nfgenmsg` of a message.
const fn header(family: u8, resource: u16) -> [u8; HEADER] {
    let [high, low] = resource.to_be_bytes();
    [family, 0, high, low]
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
