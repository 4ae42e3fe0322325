//! Hashes of contents. An installation recognizes the files and list entries that it wrote by their hashes.

use ring::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;
use std::fmt::Write;
use std::io::{self, Read};

/// The SHA-256 of a content, as the installation record stores it: `sha256:` and 64 hexadecimal digits.
///
/// The record of version 0.1.0 has another form (`is_legacy`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(String);

const PREFIX: &str = "sha256:";
/// Bytes read at a time: the agent must not hold a whole program in memory.
const CHUNK_SIZE: usize = 1 << 16;
const LEGACY_START: u64 = 0xcbf2_9ce4_8422_2325;

impl Digest {
    /// Returns the digest of `contents`.
    #[must_use]
    pub fn of(contents: &[u8]) -> Self {
        let mut context = Context::new(&SHA256);
        context.update(contents);
        Self::finish(context)
    }

    /// Returns the digest of everything that `reader` yields.
    ///
    /// # Errors
    /// Reading fails.
    pub fn read(reader: impl Read) -> io::Result<Self> {
        let mut context = Context::new(&SHA256);
        for_each_chunk(reader, |chunk| context.update(chunk))?;
        Ok(Self::finish(context))
    }

    /// Returns the digest of a JSON value, independent of the order of its keys: programs that rewrite a list may
    /// sort them, as Go does.
    #[must_use]
    pub fn of_value(value: &Value) -> Self {
        Self::of(sorted_text(value).as_bytes())
    }

    fn finish(context: Context) -> Self {
        let mut text = PREFIX.to_owned();
        for byte in context.finish().as_ref() {
            // Writing to a String can't fail.
            let _ = write!(text, "{byte:02x}");
        }
        Self(text)
    }

    /// Whether version 0.1.0 wrote this digest: the length of the content and a 64-bit hash,
    /// `8407608-d01187bdfa4082d8`.
    pub(super) fn is_legacy(&self) -> bool {
        !self.0.starts_with(PREFIX)
    }

    /// Returns the digest that version 0.1.0 stored for everything that `reader` yields.
    ///
    /// # Errors
    /// Reading fails.
    pub(super) fn read_legacy(reader: impl Read) -> io::Result<Self> {
        let (mut length, mut hash) = (0, LEGACY_START);
        for_each_chunk(reader, |chunk| {
            length += chunk.len();
            hash = legacy_hash(hash, chunk);
        })?;
        Ok(Self::legacy(length, hash))
    }

    /// Returns the digest that version 0.1.0 stored for a JSON value.
    pub(super) fn legacy_of_value(value: &Value) -> Self {
        let text = sorted_text(value);
        Self::legacy(text.len(), legacy_hash(LEGACY_START, text.as_bytes()))
    }

    fn legacy(length: usize, hash: u64) -> Self {
        Self(format!("{length}-{hash:016x}"))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Version 0.1.0's hash; `contents` has a multiple of eight bytes unless it is the last chunk.
fn legacy_hash(start: u64, contents: &[u8]) -> u64 {
    contents.chunks(8).fold(start, |hash, bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Calls `process` with chunks of [`CHUNK_SIZE`] bytes; only the last one may be shorter.
fn for_each_chunk(mut reader: impl Read, mut process: impl FnMut(&[u8])) -> io::Result<()> {
    let mut chunk = Vec::with_capacity(CHUNK_SIZE);
    loop {
        chunk.clear();
        if reader.by_ref().take(CHUNK_SIZE as u64).read_to_end(&mut chunk)? == 0 {
            return Ok(());
        }
        process(&chunk);
    }
}

fn sorted_text(value: &Value) -> String {
    let mut sorted = value.clone();
    sorted.sort_all_objects();
    sorted.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_digest_is_the_sha256_of_the_content() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
        assert!(!Digest::of(b"").is_legacy());
    }

    #[test]
    fn reading_in_chunks_gives_the_same_digest() {
        for length in [0, 1, 8, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 5] {
            let contents: Vec<u8> = (0..length).map(|at| u8::try_from(at % 251).expect("small")).collect();
            assert_eq!(Digest::read(&contents[..]).expect("readable"), Digest::of(&contents), "{length}");
        }
    }

    #[test]
    fn the_order_of_keys_does_not_change_the_digest_of_a_value() {
        let digest = |text: &str| Digest::of_value(&serde_json::from_str(text).expect("JSON"));
        assert_eq!(digest(r#"{"a": {"b": 1, "c": [1, 2]}, "d": 2}"#), digest(r#"{"d":2,"a":{"c":[1,2],"b":1}}"#));
        assert_ne!(digest(r#"{"a": [1, 2]}"#), digest(r#"{"a": [2, 1]}"#));
    }

    #[test]
    fn legacy_digests_are_those_of_version_0_1_0() {
        for (contents, digest) in [("program", "7-4e2d3c643c61336f"), ("12345678\u{0}", "9-a6cda2d677087834")] {
            let legacy = Digest::read_legacy(contents.as_bytes()).expect("readable");
            assert_eq!(legacy.to_string(), digest);
            assert!(legacy.is_legacy());
        }
        let value = Digest::legacy_of_value(&json!({"type": "detour", "a": 1}));
        assert_eq!(value.to_string(), "23-75edffdd650a9d9d");
    }
}
