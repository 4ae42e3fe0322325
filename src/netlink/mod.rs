//! Netlink, the kernel's socket protocol (netlink(7)): attributes, messages, and a synchronous socket that talks
//! only to the kernel. It knows neither firewall rules nor routes.
//!
//! * `attributes`: writes and reads attributes
//! * this file: writes messages into a datagram, and splits them out of one (linux/netlink.h)
//! * `socket`: sends requests and dumps, and limits how much a dump may return

pub mod attributes;
mod socket;

pub use attributes::Attributes;
pub use socket::{DumpLimit, EXCEEDED, NetlinkSocket, is_lack_of_resources, retry_interrupted};

/// The length of `struct nlmsghdr`.
const HEADER: usize = 16;

/// Marks a request.
pub const NLM_F_REQUEST: u16 = 1;
/// On a request: the kernel acknowledges it.
pub const NLM_F_ACK: u16 = 4;
/// On a request: the kernel lists all objects.
const NLM_F_DUMP: u16 = 0x300;
/// On a reply to a dump: the objects changed while the kernel listed them.
const NLM_F_DUMP_INTR: u16 = 0x10;
/// On a request that adds an object: replace an existing one.
pub const NLM_F_REPLACE: u16 = 0x100;
/// On a request that adds an object: fail if it exists.
pub const NLM_F_EXCL: u16 = 0x200;
/// On a request that adds an object: create it if it does not exist.
pub const NLM_F_CREATE: u16 = 0x400;

/// The type of an acknowledgement or error.
pub const NLMSG_ERROR: u16 = 2;
/// The type of the message that ends a dump.
const NLMSG_DONE: u16 = 3;

/// Offsets in `struct nlmsghdr`, which begins with the length.
const KIND: usize = 4;
const FLAGS: usize = 6;
const SEQUENCE: usize = 8;

/// Messages being written one after another into one datagram.
#[derive(Debug, Default)]
pub struct Messages {
    written: Attributes,
    /// Where the last message starts.
    last: usize,
}

impl Messages {
    /// Returns an empty datagram.
    #[must_use]
    pub const fn new() -> Self {
        Self { written: Attributes::new(), last: 0 }
    }

    /// Returns the datagram of one message.
    #[must_use]
    pub fn one(kind: u16, flags: u16, sequence: u32, header: &[u8], attributes: &[u8]) -> Self {
        let mut messages = Self::new();
        messages.put(kind, flags, sequence, header, |list| list.append(attributes));
        messages
    }

    /// Appends a message: the netlink header, the protocol's own header, and the attributes that `write` appends.
    pub fn put(
        &mut self,
        kind: u16,
        flags: u16,
        sequence: u32,
        header: &[u8],
        write: impl FnOnce(&mut Attributes) -> &mut Attributes,
    ) {
        self.begin(kind, flags, sequence, header);
        write(&mut self.written);
        let length = u32::try_from(self.written.len() - self.last).unwrap_or(u32::MAX);
        self.written.overwrite(self.last, length.to_ne_bytes());
    }

    fn begin(&mut self, kind: u16, flags: u16, sequence: u32, header: &[u8]) {
        self.last = self.written.len();
        self.written.room(HEADER);
        self.written.overwrite(self.last + KIND, kind.to_ne_bytes());
        self.written.overwrite(self.last + FLAGS, flags.to_ne_bytes());
        self.written.overwrite(self.last + SEQUENCE, sequence.to_ne_bytes());
        self.written.append(header);
    }

    /// Replaces the flags of the last message.
    pub fn set_flags(&mut self, flags: u16) {
        self.written.overwrite(self.last + FLAGS, flags.to_ne_bytes());
    }

    /// Returns the datagram.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.written.as_bytes()
    }
}

/// A message from the kernel.
#[derive(Debug)]
pub struct Received<'a> {
    /// The message type.
    pub kind: u16,
    /// The `NLM_F_…` flags.
    pub flags: u16,
    /// The sequence number of the request that it answers.
    pub sequence: u32,
    /// The protocol's own header and the attributes.
    pub body: &'a [u8],
}

impl Received<'_> {
    /// Returns the error number of an [`NLMSG_ERROR`] or of the end of a dump; 0 means success.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.body.first_chunk::<4>().map_or(0, |b| i32::from_ne_bytes(*b).saturating_neg())
    }
}

/// Splits a datagram into its messages.
pub fn split(mut bytes: &[u8]) -> impl Iterator<Item = Received<'_>> {
    std::iter::from_fn(move || {
        let [l0, l1, l2, l3, k0, k1, f0, f1, s0, s1, s2, s3, ..] = *bytes.first_chunk::<HEADER>()?;
        let length = usize::try_from(u32::from_ne_bytes([l0, l1, l2, l3])).ok()?;
        let body = bytes.get(HEADER..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        let (kind, flags) = (u16::from_ne_bytes([k0, k1]), u16::from_ne_bytes([f0, f1]));
        Some(Received { kind, flags, sequence: u32::from_ne_bytes([s0, s1, s2, s3]), body })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::attributes::find_be32;

    #[test]
    fn messages_written_one_after_another_are_split_again() {
        let mut messages = Messages::new();
        messages.put(7, NLM_F_REQUEST, 1, &[1, 2, 3, 4], |list| list.bytes(1, &[0; 1000]));
        messages.put(8, NLM_F_REQUEST, 2, &[], |list| list.be32(3, 9));
        messages.set_flags(NLM_F_REQUEST | NLM_F_ACK);
        let found: Vec<Received<'_>> = split(messages.as_bytes()).collect();
        let headers = [&found[0], &found[1]].map(|message| (message.kind, message.flags, message.sequence));
        assert_eq!((found.len(), headers), (2, [(7, NLM_F_REQUEST, 1), (8, NLM_F_REQUEST | NLM_F_ACK, 2)]));
        assert!(found[0].body.starts_with(&[1, 2, 3, 4]));
        assert_eq!((found[0].body.len(), find_be32(found[1].body, 3)), (4 + 4 + 1000, Some(9)));
    }
}
