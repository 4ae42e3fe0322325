//! Whether a file is still the one that was written.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Length and FNV-1a of a content: enough to see that somebody changed it, no protection against
/// one who hides it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(String);

impl Digest {
    /// Of these bytes.
    #[must_use]
    pub fn of(contents: &[u8]) -> Self {
        let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = contents.iter().fold(0xcbf2_9ce4_8422_2325, mix);
        Self(format!("{}-{hash:016x}", contents.len()))
    }
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
    fn it_is_fnv_1a() {
        // The vectors of the algorithm's own description (draft-eastlake-fnv).
        assert_eq!(Digest::of(b"").to_string(), "0-cbf29ce484222325");
        assert_eq!(Digest::of(b"foobar").to_string(), "6-85944171f73967e8");
    }
}
