//! The encoding of Protocol Buffers, as far as messages of NRI need it: variable-length integers and bytes
//! (protobuf.dev, "Encoding").

use std::fmt;

/// The error for bytes that are not a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("malformed message")
    }
}

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Value<'a> {
    /// An integer, a boolean or an enumeration.
    Number(u64),
    /// A text, bytes, or an embedded message.
    Bytes(&'a [u8]),
    /// A value of fixed size; NRI uses none.
    Fixed,
}

/// The fields of a message, in the order in which they were written, with their numbers. A repeated field occurs
/// several times. Nothing is copied.
#[derive(Debug, Clone)]
pub(super) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// Reads a message.
    pub(super) fn of(message: &'a [u8]) -> Self {
        Self(message)
    }

    fn field(&mut self) -> Result<(u64, Value<'a>), Malformed> {
        let tag = self.number()?;
        let value = match tag & 7 {
            0 => Value::Number(self.number()?),
            1 => self.bytes(8).map(|_| Value::Fixed)?,
            2 => {
                let length = self.number()?;
                Value::Bytes(self.bytes(length)?)
            }
            5 => self.bytes(4).map(|_| Value::Fixed)?,
            // Groups are deprecated.
            _ => return Err(Malformed),
        };
        if tag >> 3 == 0 { Err(Malformed) } else { Ok((tag >> 3, value)) }
    }

    fn number(&mut self) -> Result<u64, Malformed> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.bytes(1)?[0];
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Malformed)
    }

    fn bytes(&mut self, length: u64) -> Result<&'a [u8], Malformed> {
        let length = usize::try_from(length).map_err(|_| Malformed)?;
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(bytes)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Value<'a>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

/// A message that is written.
#[derive(Debug, Clone, Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// Appends an integer; the default, 0, is omitted.
    pub(super) fn number(mut self, field: u64, number: u64) -> Self {
        if number != 0 {
            self.push(field << 3);
            self.push(number);
        }
        self
    }

    /// Appends a text or an embedded message; an empty one is omitted.
    pub(super) fn bytes(mut self, field: u64, bytes: &[u8]) -> Self {
        if !bytes.is_empty() {
            self.push(field << 3 | 2);
            self.push(bytes.len() as u64);
            self.0.extend_from_slice(bytes);
        }
        self
    }

    /// Returns the encoded message.
    pub(super) fn encoded(self) -> Vec<u8> {
        self.0
    }

    fn push(&mut self, mut number: u64) {
        while number > 0x7f {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }
}
