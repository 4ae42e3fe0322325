//! Hashes of contents. An installation recognizes the files and list entries that it wrote by their hashes.

use ring::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;
use std::fmt::Write;
use std::io::{self, Read};

/// The SHA-256 of a content, as the installation record stores it: `sha256:` and 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(String);

const PREFIX: &str = "sha256:";
/// Bytes read at a time: the agent must not hold a whole program in memory.
const CHUNK_SIZE: usize = 1 << 16;

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
    pub fn read(mut reader: impl Read) -> io::Result<Self> {
        let mut context = Context::new(&SHA256);
        let mut chunk = Vec::with_capacity(CHUNK_SIZE);
        loop {
            chunk.clear();
            if reader.by_ref().take(CHUNK_SIZE as u64).read_to_end(&mut chunk)? == 0 {
                return Ok(Self::finish(context));
            }
            context.update(&chunk);
        }
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
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
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

    #[test]
    fn a_digest_is_the_sha256_of_the_content() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
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
}
