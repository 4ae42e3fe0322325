//! Netlink attributes: type, length, value, padded to four bytes (linux/netlink.h, `struct nlattr`).

/// `NLA_F_NESTED`: the value is a list of attributes.
const NESTED: u16 = 0x8000;
/// `NLA_TYPE_MASK`: the type without the flags for nesting and byte order.
const TYPE_MASK: u16 = 0x3fff;
const HEADER: usize = 4;

/// A list of attributes being written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    /// Returns an empty list.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Returns an empty list with room for `capacity` bytes.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self(Vec::with_capacity(capacity))
    }

    /// Returns the list as bytes of a message.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Appends an attribute with these bytes as its value.
    #[must_use]
    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        self.put_header(kind, length_field(HEADER + value.len()));
        self.0.extend_from_slice(value);
        self.pad();
        self
    }

    /// Appends a string that ends with a zero byte.
    #[must_use]
    pub fn text(mut self, kind: u16, value: &str) -> Self {
        self.put_header(kind, length_field(HEADER + value.len() + 1));
        self.0.extend_from_slice(value.as_bytes());
        self.0.push(0);
        self.pad();
        self
    }

    /// Appends a 32-bit number in host byte order.
    #[must_use]
    pub fn ne32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// Appends a 32-bit number in network byte order.
    #[must_use]
    pub fn be32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// Appends a 64-bit number in network byte order.
    #[must_use]
    pub fn be64(self, kind: u16, value: u64) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// Appends an attribute whose value is the list that `write` appends.
    #[must_use]
    pub fn nested(mut self, kind: u16, write: impl FnOnce(Self) -> Self) -> Self {
        let start = self.0.len();
        self.put_header(kind | NESTED, 0);
        let mut all = write(self);
        let length = length_field(all.0.len() - start);
        all.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        all
    }

    fn put_header(&mut self, kind: u16, length: u16) {
        let ([a, b], [c, d]) = (length.to_ne_bytes(), kind.to_ne_bytes());
        self.0.extend_from_slice(&[a, b, c, d]);
    }

    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

/// Returns the length of an attribute as its header contains it. An attribute ends at 64 KiB; the kernel refuses a
/// message with a wrong length.
fn length_field(length: usize) -> u16 {
    u16::try_from(length).unwrap_or(u16::MAX)
}

/// Returns the attributes in `bytes` as (type, value); stops at the first malformed one.
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

/// Returns the value of the first attribute of type `kind`.
#[must_use]
pub fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    parse(bytes).find(|(k, _)| *k == kind).map(|(_, value)| value)
}

/// Returns the first attribute of type `kind` as a 32-bit number in network byte order.
#[must_use]
pub fn find_be32(bytes: &[u8], kind: u16) -> Option<u32> {
    find(bytes, kind)?.try_into().ok().map(u32::from_be_bytes)
}

/// Returns the first attribute of type `kind` as a 64-bit number in network byte order.
#[must_use]
pub fn find_be64(bytes: &[u8], kind: u16) -> Option<u64> {
    find(bytes, kind)?.try_into().ok().map(u64::from_be_bytes)
}

/// Returns the first attribute of type `kind` as a string without the zero byte at its end.
#[must_use]
pub fn find_text(bytes: &[u8], kind: u16) -> Option<&str> {
    let value = find(bytes, kind)?;
    std::str::from_utf8(value.strip_suffix(&[0]).unwrap_or(value)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_attributes_are_read_back() {
        let outer = Attributes::new().nested(3, |list| list.text(1, "ab").be32(2, 7)).be64(4, 1 << 40).bytes(5, &[9]);
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
    fn parsing_stops_at_a_malformed_length() {
        assert_eq!(parse(&[2, 0, 1, 0]).count(), 0);
        assert_eq!(parse(&[200, 0, 1, 0, 5]).count(), 0);
        assert_eq!(parse(&[5]).count(), 0);
    }
}
