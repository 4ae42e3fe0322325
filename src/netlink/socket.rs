//! A netlink socket of the network namespace in which it is opened.
//!
//! How much is read of what a network namespace holds: a process with `CAP_NET_ADMIN` in it decides that.

use super::attributes::Attributes;
use super::message::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, Received, put, split,
};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, recv, send, setsockopt, socket,
    sockopt,
};
use nix::sys::time::TimeVal;
use std::fmt;
use std::fmt::{Display, Formatter};
use std::os::fd::{AsRawFd, OwnedFd};

/// More than the largest part of a dump (linux/netlink.c sends 32 KiB at most).
const READ_BUFFER: usize = 1 << 16;
/// The kernel answers during the call that sends the request; this is only a guard against waiting forever.
const ANSWER_SECONDS: i64 = 10;
/// How often a dump is repeated because the objects changed while they were listed.
const DUMPS: usize = 10;

/// Repeats a system call that a signal interrupted before it did anything.
///
/// # Errors
/// Those of `call`, except `EINTR`.
pub fn again<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            other => return other,
        }
    }
}

/// A socket that is connected to the kernel: no process of the network namespace can send to it, not even
/// with `CAP_NET_ADMIN` (`netlink_getsockbyportid` of linux/netlink.c).
#[derive(Debug)]
pub struct NetlinkSocket {
    fd: OwnedFd,
    protocol: SockProtocol,
    sequence: u32,
    buffer: Vec<u8>,
    allowance: Allowance,
    left: Allowance,
}

impl NetlinkSocket {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel does not have the protocol, or no file descriptor is left.
    pub fn open(protocol: SockProtocol) -> Result<Self, Errno> {
        let (allowance, left) = (Allowance::USUAL, Allowance::USUAL);
        Ok(Self { fd: to_kernel(protocol)?, protocol, sequence: 0, buffer: Vec::new(), allowance, left })
    }

    /// Limits what the next dumps may return, all together; without it, [`Allowance::USUAL`].
    pub fn allow(&mut self, allowance: Allowance) {
        (self.allowance, self.left) = (allowance, allowance);
    }

    /// What the dumps may return.
    #[must_use]
    pub fn allowance(&self) -> Allowance {
        self.allowance
    }

    /// The number of the next message.
    pub fn next_sequence(&mut self) -> u32 {
        self.sequence += 1;
        self.sequence
    }

    /// Sends one datagram, however long (the default buffer ends at 200 KiB).
    ///
    /// # Errors
    /// The socket fails.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        const USUAL: usize = 64 * 1024;
        if bytes.len() > USUAL {
            setsockopt(&self.fd, sockopt::SndBufForce, &(2 * bytes.len()))?;
            setsockopt(&self.fd, sockopt::RcvBufForce, &(2 * bytes.len()))?;
        }
        again(|| send(self.fd.as_raw_fd(), bytes, MsgFlags::empty())).map(drop)
    }

    /// The messages of the next datagram.
    ///
    /// # Errors
    /// The socket fails; `EAGAIN` if no datagram arrives within 10 s.
    pub fn receive(&mut self) -> Result<impl Iterator<Item = Received<'_>>, Errno> {
        self.buffer.resize(READ_BUFFER, 0);
        let read = again(|| recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::empty()))?;
        Ok(split(self.buffer.get(..read).unwrap_or_default()))
    }

    /// Sends a request and waits until the kernel has done it.
    ///
    /// # Errors
    /// The kernel's refusal, or the socket fails: without an acknowledgement nothing counts as done.
    pub fn request(&mut self, kind: u16, flags: u16, header: &[u8], attributes: &[u8]) -> Result<(), Errno> {
        let sequence = self.next_sequence();
        let mut request = Vec::new();
        put(&mut request, kind, NLM_F_REQUEST | NLM_F_ACK | flags, sequence, [header, attributes]);
        self.send(&request)?;
        loop {
            let mut answers = self.receive()?.filter(|m| m.sequence == sequence && m.kind == NLMSG_ERROR);
            match answers.next().map(|answer| answer.errno()) {
                None => {}
                Some(0) => return Ok(()),
                Some(errno) => return Err(Errno::from_raw(errno)),
            }
        }
    }

    /// Lists objects; `each` gets the body of a message. Returns whether the list is of one moment.
    ///
    /// # Errors
    /// The kernel's refusal, or the socket fails; [`TOO_MANY`] if there are more than is allowed.
    pub fn dump(
        &mut self,
        kind: u16,
        header: &[u8],
        attributes: &Attributes,
        mut each: impl FnMut(&[u8]),
    ) -> Result<bool, Errno> {
        let sequence = self.next_sequence();
        let mut request = Vec::new();
        put(&mut request, kind, NLM_F_REQUEST | NLM_F_DUMP, sequence, [header, attributes.as_bytes()]);
        self.send(&request)?;
        let (mut consistent, mut left) = (true, self.left);
        let ended = loop {
            let mut ended = None;
            for message in self.receive()?.filter(|m| m.sequence == sequence) {
                consistent &= message.flags & NLM_F_DUMP_INTR == 0;
                ended = match (message.kind, message.errno(), left.less(1, message.body.len())) {
                    (NLMSG_DONE, 0, _) => Some(Ok(consistent)),
                    // A dump that fails halfway ends with its error (`netlink_dump_done` of linux/netlink.c).
                    (NLMSG_DONE | NLMSG_ERROR, errno, _) => Some(Err(Errno::from_raw(errno))),
                    (_, _, None) => Some(Err(TOO_MANY)),
                    (_, _, Some(rest)) => {
                        left = rest;
                        each(message.body);
                        continue;
                    }
                };
                break;
            }
            if let Some(ended) = ended {
                break ended;
            }
        };
        self.left = left;
        if ended == Err(TOO_MANY) {
            // The kernel ends a dump that is not read to its end when the socket is closed.
            self.fd = to_kernel(self.protocol)?;
        }
        ended
    }

    /// The bodies of all objects of one kind at one moment.
    ///
    /// # Errors
    /// As [`Self::dump`]; `EBUSY` if they keep changing.
    pub fn list(&mut self, kind: u16, header: &[u8]) -> Result<Vec<Vec<u8>>, Errno> {
        for _ in 0..DUMPS {
            self.left = self.allowance;
            let mut bodies = Vec::new();
            if self.dump(kind, header, &Attributes::new(), |body| bodies.push(body.to_vec()))? {
                return Ok(bodies);
            }
        }
        Err(Errno::EBUSY)
    }
}

/// A socket that only the kernel can send to.
fn to_kernel(protocol: SockProtocol) -> Result<OwnedFd, Errno> {
    let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::new(ANSWER_SECONDS, 0))?;
    again(|| connect(fd.as_raw_fd(), &NetlinkAddr::new(0, 0)))?;
    Ok(fd)
}

/// The error of a dump that returns more than is allowed.
pub const TOO_MANY: Errno = Errno::E2BIG;

/// How much the dumps of a socket may return, all together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Messages; each is about one object.
    pub objects: usize,
    /// Bytes.
    pub bytes: usize,
}

impl Allowance {
    /// Enough for any network namespace that is not meant to be costly. The kernel walks its lists from the
    /// start for each 32 KiB of a dump, so that the cost of more is quadratic.
    pub const USUAL: Self = Self { objects: 20_000, bytes: 16 << 20 };
    /// For what the kernel limits itself.
    pub const UNLIMITED: Self = Self { objects: usize::MAX, bytes: usize::MAX };

    /// What is left after this many objects and bytes; `None` if they are more.
    pub(super) fn less(self, objects: usize, bytes: usize) -> Option<Self> {
        Some(Self { objects: self.objects.checked_sub(objects)?, bytes: self.bytes.checked_sub(bytes)? })
    }
}

impl Display for Allowance {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "at most {} objects and {} MiB", self.objects, self.bytes >> 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{getsockname, sendto};

    /// A process in a pod can have `CAP_NET_ADMIN` there, and port and sequence numbers can be guessed.
    #[test]
    fn only_the_kernel_can_send_to_it() {
        let own = NetlinkSocket::open(SockProtocol::NetlinkNetFilter).expect("needs root");
        let other = NetlinkSocket::open(SockProtocol::NetlinkNetFilter).expect("needs root");
        let address: NetlinkAddr = getsockname(own.fd.as_raw_fd()).expect("it is bound");
        assert_ne!(address.pid(), 0);
        let sent = sendto(other.fd.as_raw_fd(), b"forged", &address, MsgFlags::empty());
        assert_eq!(sent, Err(Errno::ECONNREFUSED));
    }

    #[test]
    fn an_interrupted_call_is_repeated() {
        let mut answers = [Err(Errno::EINTR), Err(Errno::EINTR), Ok(7)].into_iter();
        assert_eq!(again(|| answers.next().expect("no fourth call")), Ok(7));
        assert_eq!(again(|| Err::<(), _>(Errno::EIO)), Err(Errno::EIO));
    }

    #[test]
    fn a_dump_that_ends_with_an_error_is_no_list() {
        let mut bytes = Vec::new();
        put(&mut bytes, NLMSG_DONE, 0, 1, [&(-(Errno::ENOMEM as i32)).to_ne_bytes(), &[]]);
        let errno = split(&bytes).next().expect("a message").errno();
        assert_eq!(errno, Errno::ENOMEM as i32);
    }
}
