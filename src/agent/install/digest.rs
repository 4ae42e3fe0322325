//! Whether a file is still the one that was written.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;
use std::io::{self, Read};

/// Length and hash of a content (FNV-1a, eight bytes a step): enough to see that somebody changed
/// it, no protection against one who hides it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(String);

impl Digest {
    /// Of these bytes.
    #[must_use]
    pub fn of(contents: &[u8]) -> Self {
        Self::new(contents.len() as u64, hash(START, contents))
    }

    /// Of all that comes from there, a piece at a time: an agent must not hold a program in memory.
    ///
    /// # Errors
    /// It can't be read.
    pub fn read(mut from: impl Read) -> io::Result<Self> {
        let (mut length, mut so_far) = (0, START);
        let mut piece = Vec::with_capacity(PIECE);
        loop {
            piece.clear();
            if from.by_ref().take(PIECE as u64).read_to_end(&mut piece)? == 0 {
                return Ok(Self::new(length, so_far));
            }
            length += piece.len() as u64;
            so_far = hash(so_far, &piece);
        }
    }

    fn new(length: u64, hash: u64) -> Self {
        Self(format!("{length}-{hash:016x}"))
    }

    /// Of this value, however it is written: who writes a list anew may sort its keys, as Go does.
    #[must_use]
    pub fn of_value(value: &Value) -> Self {
        let mut sorted = value.clone();
        sorted.sort_all_objects();
        Self::of(sorted.to_string().as_bytes())
    }
}

const START: u64 = 0xcbf2_9ce4_8422_2325;
/// A multiple of the step.
const PIECE: usize = 1 << 16;

fn hash(start: u64, contents: &[u8]) -> u64 {
    contents.chunks(8).fold(start, |hash, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_keys_does_not_count() {
        let of = |text: &str| Digest::of_value(&serde_json::from_str(text).expect("JSON"));
        assert_eq!(of(r#"{"a": {"b": 1, "c": [1, 2]}, "d": 2}"#), of(r#"{"d":2,"a":{"c":[1,2],"b":1}}"#));
        assert_ne!(of(r#"{"a": [1, 2]}"#), of(r#"{"a": [2, 1]}"#));
    }

    #[test]
    fn what_is_read_in_pieces_is_the_same() {
        for length in [0, 1, 8, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5] {
            let contents: Vec<u8> = (0..length).map(|at| u8::try_from(at % 251).expect("small")).collect();
            assert_eq!(Digest::read(&contents[..]).expect("readable"), Digest::of(&contents), "{length}");
        }
    }

    #[test]
    fn each_byte_and_the_length_count() {
        let of = |text: &[u8]| Digest::of(text).to_string();
        assert_eq!(of(b"12345678"), of(b"12345678"));
        for other in [&b""[..], b"12345679", b"22345678", b"1234567", b"12345678\0", b"123456781"] {
            assert_ne!(of(other), of(b"12345678"));
        }
    }
}
