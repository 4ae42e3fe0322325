//! Netlink attributes: type, length, value, padded to four bytes (linux/netlink.h, `struct nlattr`).

/// `NLA_F_NESTED`: the value is a list of attributes.
const NESTED: u16 = 0x8000;
/// `NLA_TYPE_MASK`: the type without the flags for nesting and byte order.
const TYPE_MASK: u16 = 0x3fff;
const HEADER: usize = 4;
/// `NLA_ALIGNTO`, `NLMSG_ALIGNTO`.
const ALIGNMENT: usize = 4;
/// The first size of a buffer, enough for the attributes of a usual message.
const USUAL_LENGTH: usize = 512;

/// A list of attributes being written. The buffer is zero behind the list, so that padding needs no writing. A value of
/// fixed size is one store, because a netlink message consists of hundreds of small values.
#[derive(Debug, Clone, Default)]
pub struct Attributes {
    buffer: Vec<u8>,
    length: usize,
}

impl Attributes {
    /// Returns an empty list.
    #[must_use]
    pub const fn new() -> Self {
        Self { buffer: Vec::new(), length: 0 }
    }

    /// Returns the list that `write` appends.
    #[must_use]
    pub fn of(write: impl FnOnce(&mut Self) -> &mut Self) -> Self {
        let mut list = Self::new();
        write(&mut list);
        list
    }

    /// Returns the list as bytes of a message.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer[..self.length]
    }

    /// Appends an attribute with these bytes as its value.
    pub fn bytes(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        self.value(kind, value.len())[..value.len()].copy_from_slice(value);
        self
    }

    /// Appends an attribute whose value consists of `length` zero bytes.
    pub fn zeros(&mut self, kind: u16, length: usize) -> &mut Self {
        self.value(kind, length);
        self
    }

    /// Appends a string that ends with a zero byte.
    pub fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        self.value(kind, value.len() + 1)[..value.len()].copy_from_slice(value.as_bytes());
        self
    }

    /// Appends a 32-bit number in network byte order.
    pub fn be32(&mut self, kind: u16, value: u32) -> &mut Self {
        self.array(kind, value.to_be_bytes())
    }

    /// Appends a 64-bit number in network byte order.
    pub fn be64(&mut self, kind: u16, value: u64) -> &mut Self {
        self.array(kind, value.to_be_bytes())
    }

    /// Appends an attribute whose value is the list that `write` appends.
    pub fn nested(&mut self, kind: u16, write: impl FnOnce(&mut Self) -> &mut Self) -> &mut Self {
        let start = self.length;
        self.value(kind | NESTED, 0);
        write(self);
        self.overwrite(start, length_field(self.length - start).to_ne_bytes());
        self
    }

    /// Appends attributes that are already written.
    pub fn append(&mut self, written: &[u8]) -> &mut Self {
        self.room(written.len())[..written.len()].copy_from_slice(written);
        self
    }

    /// Returns the number of bytes written.
    pub(super) const fn len(&self) -> usize {
        self.length
    }

    /// Appends `length` zero bytes and their padding; returns them.
    pub(super) fn room(&mut self, length: usize) -> &mut [u8] {
        let start = self.length;
        self.length += length.next_multiple_of(ALIGNMENT);
        if self.length > self.buffer.len() {
            self.grow();
        }
        self.buffer.get_mut(start..self.length).unwrap_or_default()
    }

    /// Replaces the buffer by a larger one. `Vec::resize` would write the new bytes one by one.
    fn grow(&mut self) {
        let mut larger = vec![0; (2 * self.length).max(USUAL_LENGTH)];
        larger[..self.buffer.len()].copy_from_slice(&self.buffer);
        self.buffer = larger;
    }

    /// Overwrites the bytes at `start`.
    pub(super) fn overwrite<const N: usize>(&mut self, start: usize, bytes: [u8; N]) {
        if let Some(written) = self.buffer.get_mut(start..).and_then(<[u8]>::first_chunk_mut) {
            *written = bytes;
        }
    }

    fn array<const N: usize>(&mut self, kind: u16, value: [u8; N]) -> &mut Self {
        if let Some(written) = self.value(kind, N).first_chunk_mut() {
            *written = value;
        }
        self
    }

    /// Appends an attribute of `length` zero bytes; returns them with their padding.
    fn value(&mut self, kind: u16, length: usize) -> &mut [u8] {
        let ([a, b], [c, d]) = (length_field(HEADER + length).to_ne_bytes(), kind.to_ne_bytes());
        let Some((header, value)) = self.room(HEADER + length).split_first_chunk_mut() else { return &mut [] };
        *header = [a, b, c, d];
        value
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
        let ([a, b, c, d], _) = bytes.split_first_chunk::<HEADER>()?;
        let (length, kind) = (usize::from(u16::from_ne_bytes([*a, *b])), u16::from_ne_bytes([*c, *d]));
        let value = bytes.get(HEADER..length)?;
        bytes = bytes.get(length.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
        Some((kind & TYPE_MASK, value))
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
    std::str::from_utf8(value.split(|byte| *byte == 0).next()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_attributes_are_read_back() {
        let outer = Attributes::of(|list| {
            list.nested(3, |list| list.text(1, "ab").be32(2, 7)).be64(4, 1 << 40).bytes(5, &[9]).zeros(7, 3)
        });
        let bytes = outer.as_bytes();
        assert_eq!(bytes.len() % 4, 0);
        let within = find(bytes, 3).expect("nested");
        assert_eq!(find_text(within, 1), Some("ab"));
        assert_eq!(find_be32(within, 2), Some(7));
        assert_eq!(find_be64(bytes, 4), Some(1 << 40));
        assert_eq!(find(bytes, 5), Some(&[9_u8][..]));
        assert_eq!(find(bytes, 6), None);
        assert_eq!(find(bytes, 7), Some(&[0_u8; 3][..]));
    }

    #[test]
    fn parsing_stops_at_a_malformed_length() {
        assert_eq!(parse(&[2, 0, 1, 0]).count(), 0);
        assert_eq!(parse(&[200, 0, 1, 0, 5]).count(), 0);
        assert_eq!(parse(&[5]).count(), 0);
    }
}
