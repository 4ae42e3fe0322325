//! The netlink socket of the network namespace in which it is opened: dumps and transactions.

use super::message::{Message, NFNL_BATCH_GENID, NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END, Verb};
use super::message::{header, index, parts, put_mark};
use crate::netlink::attributes::{Attributes, find_be32};
use crate::netlink::{self, Allowance, NLM_F_ACK, NLMSG_ERROR, TOO_MANY};
use nix::errno::Errno;
use nix::sys::socket::SockProtocol;

/// linux/errno.h; only the kernel and netlink use it.
const ERESTART: i32 = 85;
/// `NFTA_GEN_ID`.
const GENERATION_ID: u16 = 1;

/// What can go wrong between us and the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
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
pub struct Socket(netlink::Socket);

impl Socket {
    /// Opens one in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel has no nfnetlink or no descriptor is left.
    pub fn open() -> Result<Self, Error> {
        Ok(Self(netlink::Socket::open(SockProtocol::NetlinkNetFilter)?))
    }

    /// Limits what the next dumps may return, all together.
    pub fn allow(&mut self, allowance: Allowance) {
        self.0.allow(allowance);
    }

    /// The generation of all rules of the namespace: it grows with each transaction.
    ///
    /// # Errors
    /// The socket fails or the kernel answers without one.
    pub fn generation(&mut self) -> Result<u32, Error> {
        let sequence = self.0.next_sequence();
        let mut request = Vec::new();
        let ask = Message { verb: Verb::GetGeneration, flags: 0, family: 0, attributes: Attributes::new() };
        ask.write(0, sequence, &mut request);
        self.0.send(&request)?;
        let answer = self.0.receive()?.find(|m| m.sequence == sequence && m.kind != NLMSG_ERROR);
        let generation = answer.and_then(|m| find_be32(parts(m.body)?.1, GENERATION_ID));
        generation.ok_or(Error::Socket(Errno::ENOTSUP))
    }

    /// Everything of one kind, of all families; `each` gets the family and the attributes.
    ///
    /// # Errors
    /// The socket fails, the rules change while they are read, or there are more than [`Self::allow`]
    /// allows.
    pub fn dump(&mut self, verb: Verb, each: impl FnMut(u8, &[u8])) -> Result<(), Error> {
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
    ) -> Result<(), Error> {
        self.answers(verb.kind(), family, &attributes, each)
    }

    pub(super) fn answers(
        &mut self,
        kind: u16,
        family: u8,
        attributes: &Attributes,
        mut each: impl FnMut(u8, &[u8]),
    ) -> Result<(), Error> {
        let dumped = self.0.dump(kind, &header(family, 0), attributes, |body| {
            if let Some((family, attributes)) = parts(body) {
                each(family, attributes);
            }
        });
        match dumped {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::Changed),
            Err(TOO_MANY) => Err(Error::TooMany(self.0.allowance())),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sends a request of another subsystem than nf_tables, and waits until the kernel has done it.
    pub(super) fn request(&mut self, kind: u16, family: u8, attributes: &Attributes) -> Result<(), Error> {
        Ok(self.0.request(kind, 0, &header(family, 0), attributes.as_bytes())?)
    }

    /// Sends all messages as one transaction: the kernel does all of it or nothing, and nothing
    /// where the rules are no longer of `generation`.
    ///
    /// # Errors
    /// The kernel refuses it, or the rules have changed since `generation`: then nothing of it was done.
    /// After [`Error::Socket`], the generation and the rules tell whether it was done.
    pub fn transact(&mut self, messages: &[Message], generation: u32) -> Result<(), Error> {
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
                    return Err(Error::Changed);
                }
                let index = index(&message, first, messages.len());
                if errno != 0 && refused.is_none() {
                    refused = Some(Error::Refused { index, errno: Errno::from_raw(errno) });
                }
                if message.sequence == acknowledged || index.is_none() {
                    return refused.map_or(Ok(()), Err);
                }
            }
        }
    }
}
