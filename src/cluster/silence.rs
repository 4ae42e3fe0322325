//! Silent sources of facts: neither the agent nor the API server answers. An ADD gives up early, because it delays other
//! pods. For some seconds, a mark on the node lets pods that can start without facts give up after a fraction of a second,
//! so that not each of them waits for the same timeout.

use crate::cni::Error;
use crate::trusted_file::{self, create_directories, overwrite};
use rustix::fs::OFlags;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// How long an ADD waits for facts if neither the agent nor the API server answers. Together with the rest of the call,
/// this is less than two seconds.
pub(super) const SILENCE_TIMEOUT: Duration = Duration::from_millis(1900);
/// How long it waits for each of them if the mark is valid.
pub(super) const SHORT_SILENCE_TIMEOUT: Duration = Duration::from_millis(250);
/// The mark: a file whose time of modification is when the sources were silent. Only root can write to it.
pub const SILENCE_MARK: &str = "/run/detour/facts-unavailable";
/// How long the mark is valid.
const VALIDITY: Duration = Duration::from_secs(5);

/// What a source of facts does with the mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SilenceMark {
    /// Nothing: no pod waits for the answer.
    Unused,
    /// It sets the mark after a request without an answer.
    Set,
    /// It also gives up early while the mark is valid: the pod can start without facts.
    Heeded,
}

impl SilenceMark {
    /// Sets the mark if the sources did not answer a lookup, unless it is heeded and valid. Returns its result.
    pub(super) fn record<T>(self, result: Result<T, Error>) -> Result<T, Error> {
        if self != Self::Unused
            && result.as_ref().is_err_and(|error| error.unanswered)
            && !self.is_valid()
            && let Err(error) = set(Path::new(SILENCE_MARK))
        {
            tracing::warn!(path = SILENCE_MARK, %error, "can't mark that facts are unavailable");
        }
        result
    }

    /// Whether the mark is heeded and valid.
    pub(super) fn is_valid(self) -> bool {
        self == Self::Heeded && is_valid_at(Path::new(SILENCE_MARK), SystemTime::now())
    }
}

fn set(path: &Path) -> io::Result<()> {
    create_directories(path.parent().unwrap_or(Path::new("/")))?;
    overwrite(path)?.set_modified(SystemTime::now())
}

/// Whether only root can have set the mark, less than [`VALIDITY`] before `now`. A mark of the future is invalid: the
/// clock was corrected.
fn is_valid_at(path: &Path, now: SystemTime) -> bool {
    let set_at = || {
        let path = trusted_file::check(path).ok()?;
        trusted_file::open(&path, OFlags::RDONLY).ok()?.metadata().ok()?.modified().ok()
    };
    set_at().and_then(|set| now.duration_since(set).ok()).is_some_and(|age| age < VALIDITY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::unistd::{Uid, chown};
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn the_mark_is_valid_for_seconds_and_only_if_root_alone_can_have_set_it() {
        let directory = Path::new("/run").join(format!("detour-silence-{}", std::process::id()));
        let (mark, now) = (directory.join("mark"), SystemTime::now());
        assert!(!is_valid_at(&mark, now), "it does not exist");
        set(&mark).expect("needs root");
        let second = Duration::from_secs(1);
        let age =
            |age| fs::File::options().write(true).open(&mark).and_then(|file| file.set_modified(age)).expect("set");
        for (set_at, valid) in
            [(now, true), (now - 4 * second, true), (now - VALIDITY, false), (now + second, false), (now, true)]
        {
            age(set_at);
            assert_eq!(is_valid_at(&mark, now), valid, "{set_at:?}");
        }
        set(&mark).expect("set again");
        assert!(is_valid_at(&mark, SystemTime::now()));

        age(now);
        for (uid, valid) in [(12345, false), (0, true)] {
            chown(&mark, Some(Uid::from_raw(uid)), None).expect("root");
            assert_eq!(is_valid_at(&mark, now), valid, "{uid}");
        }
        for (path, mode, valid) in
            [(&mark, 0o606, false), (&mark, 0o600, true), (&directory, 0o757, false), (&directory, 0o755, true)]
        {
            fs::set_permissions(path, Permissions::from_mode(mode)).expect("changed");
            assert_eq!(is_valid_at(&mark, now), valid, "{mode:o}");
        }
        // Neither followed nor written through.
        let other = directory.join("other");
        fs::rename(&mark, &other).expect("renamed");
        chown(&other, Some(Uid::from_raw(12345)), None).expect("root");
        symlink(&other, &mark).expect("linked");
        assert!(!is_valid_at(&mark, now) && set(&mark).is_err());
        fs::remove_dir_all(&directory).expect("removed");
    }
}
