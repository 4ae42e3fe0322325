//! Digests of programs that were computed before.

use crate::agent::install::record::Digest;
use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The maximum number of digests that are kept.
const MAX_DIGESTS: usize = 64;
/// How long a file must be unchanged before its digest is kept: changes within the resolution of its times can't be
/// noticed.
const MIN_AGE: Duration = Duration::from_secs(2);

/// Digests of programs, by what changes with their contents. An agent looks at the node after each change of a
/// configuration, and its program has several megabytes.
#[derive(Debug, Clone, Default)]
pub(super) struct ProgramDigests(Arc<Mutex<BTreeMap<[i64; 5], Digest>>>);

impl ProgramDigests {
    /// Returns the digest of the contents of `file`.
    pub(super) fn digest(&self, file: File, metadata: &Metadata) -> io::Result<Digest> {
        let inode = [metadata.dev().cast_signed(), metadata.ino().cast_signed(), metadata.size().cast_signed()];
        let key = [inode[0], inode[1], inode[2], metadata.ctime(), metadata.ctime_nsec()];
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(digest) = known.get(&key) {
            return Ok(digest.clone());
        }
        let digest = Digest::read(file)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let changed = Duration::from_secs(metadata.ctime().max(0).cast_unsigned());
        if now.saturating_sub(changed) > MIN_AGE {
            if known.len() >= MAX_DIGESTS {
                known.clear();
            }
            known.insert(key, digest.clone());
        }
        Ok(digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trusted_file;
    use std::fs;

    #[test]
    fn a_program_with_other_contents_has_another_digest() {
        let path = std::env::temp_dir().join(format!("detour-digests-{}", std::process::id()));
        let known = ProgramDigests::default();
        // Each one is written within the resolution of the file's times, and has the same size.
        for contents in [b"1", b"2", b"3"] {
            fs::write(&path, contents).expect("written");
            let file = trusted_file::follow(&path).expect("opened");
            let metadata = file.metadata().expect("there");
            assert_eq!(known.digest(file, &metadata).expect("readable"), Digest::of(contents));
        }
        fs::remove_file(&path).expect("removed");
    }
}
