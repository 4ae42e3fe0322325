//! The netlink socket of the network namespace in which it is opened: dumps and transactions.

use super::attributes::{Attributes, find_be32};
use super::message::{
    Message, NFNL_BATCH_GENID, NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END, NFNL_SUBSYS_NFTABLES, NLM_F_ACK, NLM_F_DUMP,
    NLM_F_DUMP_INTR, Verb, put, split,
};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use std::os::fd::{AsRawFd, OwnedFd};

/// linux/errno.h; only the kernel and netlink use it.
const ERESTART: i32 = 85;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `NFTA_GEN_ID`.
const GENERATION_ID: u16 = 1;
/// More than the largest part of a dump (linux/netlink.c sends 32 KiB at most).
const READ_BUFFER: usize = 1 << 16;
/// The kernel answers within the call that asks; this only guards against waiting for ever.
const ANSWER_SECONDS: i64 = 10;

/// What can go wrong between us and the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The socket itself failed.
    #[error("netlink socket: {0}")]
    Socket(#[from] Errno),
    /// Dumps returned more than they may.
    #[error(
        "expected at most {} tables, chains, rules and sets, in {} MiB of netlink messages; got more",
        .0.objects,
        .0.bytes >> 20
    )]
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

/// How much a socket's dumps may return, all together: the network namespace decides what there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Messages, each of one object.
    pub objects: usize,
    /// Bytes.
    pub bytes: usize,
}

impl Allowance {
    /// Subtracts what was received; `None` if that is more than is left.
    fn less(self, objects: usize, bytes: usize) -> Option<Self> {
        Some(Self { objects: self.objects.checked_sub(objects)?, bytes: self.bytes.checked_sub(bytes)? })
    }
}

/// A socket to nf_tables.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
    allowance: Allowance,
    left: Allowance,
}

impl Socket {
    /// Opens one in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel has no nfnetlink or no descriptor is left.
    pub fn open() -> Result<Self, Error> {
        let unlimited = Allowance { objects: usize::MAX, bytes: usize::MAX };
        Ok(Self { fd: connect()?, sequence: 0, allowance: unlimited, left: unlimited })
    }

    /// Limits what the next dumps may return, all together.
    pub fn allow(&mut self, allowance: Allowance) {
        (self.allowance, self.left) = (allowance, allowance);
    }

    fn send(&self, bytes: &[u8]) -> Result<(), Error> {
        sendto(self.fd.as_raw_fd(), bytes, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
        Ok(())
    }

    pub(super) fn next_sequence(&mut self) -> u32 {
        self.sequence += 1;
        self.sequence
    }

    /// The generation of all rules of the namespace: it grows with each transaction.
    ///
    /// # Errors
    /// The socket fails or the kernel answers without one.
    pub fn generation(&mut self) -> Result<u32, Error> {
        let sequence = self.next_sequence();
        let mut request = Vec::new();
        let ask = Message { verb: Verb::GetGeneration, flags: 0, family: 0, attributes: Attributes::new() };
        ask.write(0, sequence, &mut request);
        self.send(&request)?;
        let mut buffer = vec![0; 512];
        let read = recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        let answer = split(&buffer[..read]).find(|m| m.sequence == sequence && m.kind != NLMSG_ERROR);
        let generation = answer.and_then(|m| find_be32(m.netfilter()?.1, GENERATION_ID));
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
        let sequence = self.next_sequence();
        let mut request = Vec::new();
        Message { verb, flags: 0, family, attributes }.write(NLM_F_DUMP, sequence, &mut request);
        self.answers(&request, sequence, each)
    }

    /// Sends the request for a dump, and reads that to its end.
    pub(super) fn answers(
        &mut self,
        request: &[u8],
        sequence: u32,
        mut each: impl FnMut(u8, &[u8]),
    ) -> Result<(), Error> {
        self.send(request)?;
        let mut buffer = vec![0; READ_BUFFER];
        let mut interrupted = false;
        loop {
            let read = recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let Some(left) = self.left.less(split(&buffer[..read]).count(), read) else {
                // The kernel ends a dump that is given up only when its socket is closed.
                self.fd = connect()?;
                return Err(Error::TooMany(self.allowance));
            };
            self.left = left;
            for message in split(&buffer[..read]).filter(|m| m.sequence == sequence) {
                interrupted |= message.flags & NLM_F_DUMP_INTR != 0;
                match message.kind {
                    NLMSG_DONE if interrupted => return Err(Error::Changed),
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR => return Err(Error::Socket(Errno::from_raw(message.errno()))),
                    _ => message.netfilter().into_iter().for_each(|(family, body)| each(family, body)),
                }
            }
        }
    }

    /// Sends all messages as one transaction: the kernel does all of it or nothing, and nothing
    /// where the rules are no longer of `generation`.
    ///
    /// # Errors
    /// The kernel refuses it, or the rules have changed since `generation`.
    pub fn transact(&mut self, messages: &[Message], generation: u32) -> Result<(), Error> {
        let Some(last) = messages.len().checked_sub(1) else { return Ok(()) };
        let begin = self.next_sequence();
        let mut batch = Vec::new();
        let genid = Attributes::new().be32(NFNL_BATCH_GENID, generation);
        put(&mut batch, NFNL_MSG_BATCH_BEGIN, 1, begin, 0, NFNL_SUBSYS_NFTABLES, genid.as_bytes());
        let first = self.sequence + 1;
        for (index, message) in messages.iter().enumerate() {
            let sequence = self.next_sequence();
            // The last one's acknowledgement tells that the kernel has done with all of them.
            message.write(if index == last { NLM_F_ACK } else { 0 }, sequence, &mut batch);
        }
        let acknowledged = self.sequence;
        let end = self.next_sequence();
        put(&mut batch, NFNL_MSG_BATCH_END, 1, end, 0, NFNL_SUBSYS_NFTABLES, &[]);
        self.make_room(batch.len())?;
        self.send(&batch)?;
        let mut buffer = vec![0; READ_BUFFER];
        let mut refused = None;
        loop {
            let read = recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            for message in split(&buffer[..read]).filter(|m| m.kind == NLMSG_ERROR && m.sequence >= begin) {
                let errno = message.errno();
                if errno == ERESTART {
                    return Err(Error::Changed);
                }
                let index = message.sequence.checked_sub(first).and_then(|i| usize::try_from(i).ok());
                let index = index.filter(|i| *i <= last);
                if errno != 0 && refused.is_none() {
                    refused = Some(Error::Refused { index, errno: Errno::from_raw(errno) });
                }
                if message.sequence == acknowledged || index.is_none() {
                    return refused.map_or(Ok(()), Err);
                }
            }
        }
    }

    /// A transaction goes out in one piece, however long (the default buffer ends at 200 KiB).
    fn make_room(&self, needed: usize) -> Result<(), Error> {
        const USUAL: usize = 64 * 1024;
        if needed > USUAL {
            setsockopt(&self.fd, sockopt::SndBufForce, &(2 * needed))?;
            setsockopt(&self.fd, sockopt::RcvBufForce, &(2 * needed))?;
        }
        Ok(())
    }
}

fn connect() -> Result<OwnedFd, Error> {
    let protocol = SockProtocol::NetlinkNetFilter;
    let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::new(ANSWER_SECONDS, 0))?;
    Ok(fd)
}
