//! Netlink attributes: type, length, value, padded to four bytes (linux/netlink.h, `struct nlattr`).

/// The bit that marks an attribute that holds attributes.
const NESTED: u16 = 0x8000;
/// The attribute's type without the bits that say how it is encoded.
const TYPE_MASK: u16 = 0x3fff;
const HEADER: usize = 4;

/// Attributes being written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// As they go into a message.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// A value as it is.
    #[must_use]
    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        // A value of 64 KiB can't be written; the kernel then refuses the message for its length.
        let length = u16::try_from(HEADER + value.len()).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// A string with its end marked.
    #[must_use]
    pub fn text(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.bytes(kind, &bytes)
    }

    /// A number in the machine's order.
    #[must_use]
    pub fn ne32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// A number in network order.
    #[must_use]
    pub fn be32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// A long number in network order.
    #[must_use]
    pub fn be64(self, kind: u16, value: u64) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// Attributes within.
    #[must_use]
    pub fn nested(self, kind: u16, inner: &Self) -> Self {
        self.bytes(kind | NESTED, &inner.0)
    }
}

/// The attributes in `bytes`, as type and value; ends at the first that is malformed.
pub fn parse(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (length, rest) = bytes.split_first_chunk::<2>()?;
        let (kind, _) = rest.split_first_chunk::<2>()?;
        let length = usize::from(u16::from_ne_bytes(*length));
        let value = bytes.get(HEADER..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes(*kind) & TYPE_MASK, value))
    })
}

/// The value of the first attribute of a type.
#[must_use]
pub fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    parse(bytes).find(|(k, _)| *k == kind).map(|(_, value)| value)
}

/// A number in network order.
#[must_use]
pub fn find_be32(bytes: &[u8], kind: u16) -> Option<u32> {
    find(bytes, kind)?.try_into().ok().map(u32::from_be_bytes)
}

/// A long number in network order.
#[must_use]
pub fn find_be64(bytes: &[u8], kind: u16) -> Option<u64> {
    find(bytes, kind)?.try_into().ok().map(u64::from_be_bytes)
}

/// A string, up to its end mark.
#[must_use]
pub fn find_text(bytes: &[u8], kind: u16) -> Option<&str> {
    std::str::from_utf8(find(bytes, kind)?).ok().map(|s| s.trim_end_matches('\0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let inner = Attributes::new().text(1, "ab").be32(2, 7);
        let outer = Attributes::new().nested(3, &inner).be64(4, 1 << 40).bytes(5, &[9]);
        let bytes = outer.as_bytes();
        assert_eq!(bytes.len() % 4, 0);
        let within = find(bytes, 3).expect("nested");
        assert_eq!(find_text(within, 1), Some("ab"));
        assert_eq!(find_be32(within, 2), Some(7));
        assert_eq!(find_be64(bytes, 4), Some(1 << 40));
        assert_eq!(find(bytes, 5), Some(&[9_u8][..]));
        assert_eq!(find(bytes, 6), None);
    }

    #[test]
    fn a_malformed_length_ends_the_reading() {
        assert_eq!(parse(&[2, 0, 1, 0]).count(), 0);
        assert_eq!(parse(&[200, 0, 1, 0, 5]).count(), 0);
        assert_eq!(parse(&[5]).count(), 0);
    }
}
