//! A synchronous netlink socket of the network namespace in which it is opened, and the limit on what its dumps
//! may return: a process with `CAP_NET_ADMIN` in a pod decides how many objects the pod's namespace contains.

use super::attributes::Attributes;
use super::{
    Messages, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, Received, split,
};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, send, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use rustix::buffer::spare_capacity;
use rustix::net::{RecvFlags, recv};
use std::fmt;
use std::fmt::{Display, Formatter};
use std::os::fd::{AsRawFd, OwnedFd};

/// The size of the receive buffer; one part of a dump has at most 32 KiB (linux/netlink.c).
const READ_BUFFER: usize = 1 << 16;
/// Requests up to this size fit into the default send buffer of about 200 KiB.
const MAX_UNBUFFERED: usize = 64 * 1024;
/// How long to wait for a reply. The kernel replies during the call that sends the request, so this only prevents
/// waiting forever.
const REPLY_TIMEOUT_SECONDS: i64 = 10;
/// How often a dump is repeated because the objects changed during it.
const MAX_DUMP_ATTEMPTS: usize = 10;

/// Repeats a system call that a signal interrupted (`EINTR`).
///
/// # Errors
/// Those of `call`, except `EINTR`.
pub fn retry_interrupted<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            other => return other,
        }
    }
}

/// Returns whether the kernel or this process lacks memory or file descriptors, or a listing that failed still runs on
/// the socket (`EBUSY`); all of these are temporary.
#[must_use]
pub fn is_lack_of_resources(errno: Errno) -> bool {
    matches!(errno, Errno::EAGAIN | Errno::EBUSY | Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)
}

/// A netlink socket that is connected to the kernel. No process of the network namespace can send to it, not even
/// with `CAP_NET_ADMIN` (`netlink_getsockbyportid` in linux/netlink.c).
#[derive(Debug)]
pub struct NetlinkSocket {
    fd: OwnedFd,
    protocol: SockProtocol,
    sequence: u32,
    buffer: Vec<u8>,
    allowance: DumpLimit,
    remaining: DumpLimit,
}

impl NetlinkSocket {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel does not support the protocol, or no file descriptor is left.
    pub fn open(protocol: SockProtocol) -> Result<Self, Errno> {
        let (allowance, remaining) = (DumpLimit::USUAL, DumpLimit::USUAL);
        Ok(Self { fd: connect_to_kernel(protocol)?, protocol, sequence: 0, buffer: Vec::new(), allowance, remaining })
    }

    /// Returns a socket whose other end, which is not the kernel, the caller has.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn of(fd: OwnedFd) -> Self {
        let (protocol, allowance) = (SockProtocol::NetlinkNetFilter, DumpLimit::USUAL);
        Self { fd, protocol, sequence: 0, buffer: Vec::new(), allowance, remaining: allowance }
    }

    /// Limits how much all following dumps together may return; the default is [`DumpLimit::USUAL`].
    pub fn allow(&mut self, allowance: DumpLimit) {
        (self.allowance, self.remaining) = (allowance, allowance);
    }

    /// Returns the limit on dumps.
    #[must_use]
    pub fn allowance(&self) -> DumpLimit {
        self.allowance
    }

    /// Returns the sequence number for the next message.
    pub fn next_sequence(&mut self) -> u32 {
        self.sequence += 1;
        self.sequence
    }

    /// Sends one datagram of any length, with a larger send buffer if needed.
    ///
    /// # Errors
    /// The socket fails.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        if bytes.len() > MAX_UNBUFFERED {
            setsockopt(&self.fd, sockopt::SndBufForce, &(2 * bytes.len()))?;
            setsockopt(&self.fd, sockopt::RcvBufForce, &(2 * bytes.len()))?;
        }
        retry_interrupted(|| send(self.fd.as_raw_fd(), bytes, MsgFlags::empty())).map(drop)
    }

    /// Receives the next datagram and returns its messages.
    ///
    /// # Errors
    /// The socket fails; `EAGAIN` if no datagram arrives within 10 s.
    pub fn receive(&mut self) -> Result<impl Iterator<Item = Received<'_>>, Errno> {
        self.buffer.clear();
        // Only the pages that the kernel fills are touched.
        self.buffer.reserve_exact(READ_BUFFER);
        retry_interrupted(|| {
            recv(&self.fd, spare_capacity(&mut self.buffer), RecvFlags::empty())
                .map_err(|error| Errno::from_raw(error.raw_os_error()))
        })?;
        Ok(split(&self.buffer))
    }

    /// Sends a request and waits for the kernel's acknowledgement.
    ///
    /// # Errors
    /// The kernel refuses the request, or the socket fails before the acknowledgement arrives.
    pub fn request(&mut self, kind: u16, flags: u16, header: &[u8], attributes: &[u8]) -> Result<(), Errno> {
        let sequence = self.next_sequence();
        let request = Messages::one(kind, NLM_F_REQUEST | NLM_F_ACK | flags, sequence, header, attributes);
        self.send(request.as_bytes())?;
        loop {
            let mut replies = self.receive()?.filter(|m| m.sequence == sequence && m.kind == NLMSG_ERROR);
            match replies.next().map(|reply| reply.errno()) {
                None => {}
                Some(0) => return Ok(()),
                Some(errno) => return Err(Errno::from_raw(errno)),
            }
        }
    }

    /// Lists objects and passes the body of each message to `each`. Returns `false` if the objects changed during
    /// the dump.
    ///
    /// # Errors
    /// The kernel refuses the request, or the socket fails; [`EXCEEDED`] if the dump exceeds [`Self::allow`].
    pub fn dump(
        &mut self,
        kind: u16,
        header: &[u8],
        attributes: &Attributes,
        mut each: impl FnMut(&[u8]),
    ) -> Result<bool, Errno> {
        let sequence = self.next_sequence();
        let request = Messages::one(kind, NLM_F_REQUEST | NLM_F_DUMP, sequence, header, attributes.as_bytes());
        self.send(request.as_bytes())?;
        let (mut consistent, mut remaining) = (true, self.remaining);
        let outcome = loop {
            let mut outcome = None;
            for message in self.receive()?.filter(|m| m.sequence == sequence) {
                consistent &= message.flags & NLM_F_DUMP_INTR == 0;
                outcome = match (message.kind, message.errno(), remaining.subtract(1, message.body.len())) {
                    (NLMSG_DONE, 0, _) => Some(Ok(consistent)),
                    // A dump that fails halfway ends with NLMSG_DONE and an error (`netlink_dump_done`).
                    (NLMSG_DONE | NLMSG_ERROR, errno, _) => Some(Err(Errno::from_raw(errno))),
                    (_, _, None) => Some(Err(EXCEEDED)),
                    (_, _, Some(rest)) => {
                        remaining = rest;
                        each(message.body);
                        continue;
                    }
                };
                break;
            }
            if let Some(outcome) = outcome {
                break outcome;
            }
        };
        self.remaining = remaining;
        if outcome == Err(EXCEEDED) {
            // Closing the socket makes the kernel abandon the unread rest of the dump.
            self.fd = connect_to_kernel(self.protocol)?;
        }
        outcome
    }

    /// Lists all objects of one kind as a consistent snapshot; repeats the dump while they change.
    ///
    /// # Errors
    /// As [`Self::dump`]; `EBUSY` if they keep changing.
    pub fn list(&mut self, kind: u16, header: &[u8]) -> Result<Vec<Vec<u8>>, Errno> {
        for _ in 0..MAX_DUMP_ATTEMPTS {
            self.remaining = self.allowance;
            let mut bodies = Vec::new();
            if self.dump(kind, header, &Attributes::new(), |body| bodies.push(body.to_vec()))? {
                return Ok(bodies);
            }
        }
        Err(Errno::EBUSY)
    }
}

/// Opens a socket to which only the kernel can send.
fn connect_to_kernel(protocol: SockProtocol) -> Result<OwnedFd, Errno> {
    let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::new(REPLY_TIMEOUT_SECONDS, 0))?;
    retry_interrupted(|| connect(fd.as_raw_fd(), &NetlinkAddr::new(0, 0)))?;
    Ok(fd)
}

/// The error of a dump that exceeds its [`DumpLimit`].
pub const EXCEEDED: Errno = Errno::E2BIG;

/// How much all dumps of a socket together may return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DumpLimit {
    /// The number of messages; each describes one object.
    pub objects: usize,
    /// The number of bytes in all messages.
    pub bytes: usize,
}

impl DumpLimit {
    /// The default, enough for every ordinary network namespace. For each 32 KiB of a dump, the kernel walks its
    /// lists from the start, so the cost of a dump is quadratic.
    pub const USUAL: Self = Self { objects: 20_000, bytes: 16 << 20 };
    /// No limit, for objects whose number the kernel itself limits.
    pub const UNLIMITED: Self = Self { objects: usize::MAX, bytes: usize::MAX };

    /// Subtracts objects and bytes from the allowance; `None` if it is exceeded.
    fn subtract(self, objects: usize, bytes: usize) -> Option<Self> {
        Some(Self { objects: self.objects.checked_sub(objects)?, bytes: self.bytes.checked_sub(bytes)? })
    }
}

impl Display for DumpLimit {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "at most {} objects and {} MiB", self.objects, self.bytes >> 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{getsockname, sendto};

    /// A process in a pod can have `CAP_NET_ADMIN` there and guess port and sequence numbers.
    #[test]
    fn only_the_kernel_can_send_to_the_socket() {
        let own = NetlinkSocket::open(SockProtocol::NetlinkNetFilter).expect("needs root");
        let other = NetlinkSocket::open(SockProtocol::NetlinkNetFilter).expect("needs root");
        let address: NetlinkAddr = getsockname(own.fd.as_raw_fd()).expect("it is bound");
        assert_ne!(address.pid(), 0);
        let sent = sendto(other.fd.as_raw_fd(), b"forged", &address, MsgFlags::empty());
        assert_eq!(sent, Err(Errno::ECONNREFUSED));
    }

    #[test]
    fn an_interrupted_system_call_is_repeated() {
        let mut answers = [Err(Errno::EINTR), Err(Errno::EINTR), Ok(7)].into_iter();
        assert_eq!(retry_interrupted(|| answers.next().expect("no fourth call")), Ok(7));
        assert_eq!(retry_interrupted(|| Err::<(), _>(Errno::EIO)), Err(Errno::EIO));
    }

    #[test]
    fn the_error_at_the_end_of_a_dump_is_read() {
        let message = Messages::one(NLMSG_DONE, 0, 1, &(-(Errno::ENOMEM as i32)).to_ne_bytes(), &[]);
        let errno = split(message.as_bytes()).next().expect("a message").errno();
        assert_eq!(errno, Errno::ENOMEM as i32);
    }
}
