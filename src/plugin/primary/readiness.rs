//! No ADD before the cluster's own network says that it is ready: by a file.

use crate::cni::{Code, Error, Primary};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Waits until there is the readiness file, where one is configured.
///
/// # Errors
/// [`Code::TryAgain`]: there is none in time.
pub(super) fn wait(conf: &Primary) -> Result<(), Error> {
    let Some(file) = conf.readiness_file.as_deref().filter(|file| !file.exists()) else { return Ok(()) };
    tracing::info!("waiting for {}", file.display());
    let deadline = Instant::now() + conf.readiness_timeout;
    match wait_for(file, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(missing(file, Some(conf.readiness_timeout))),
        Err(errno) => Err(missing(file, None).with_details(format!("it can't be waited for: {errno}"))),
    }
}

/// Whether there is the readiness file now, where one is configured.
///
/// # Errors
/// [`Code::TryAgain`]: there is none.
pub(super) fn look(conf: &Primary) -> Result<(), Error> {
    match conf.readiness_file.as_deref().filter(|file| !file.exists()) {
        Some(file) => Err(missing(file, None)),
        None => Ok(()),
    }
}

fn missing(file: &Path, waited: Option<Duration>) -> Error {
    let waited = waited.map(|waited| format!(" after {} s", waited.as_secs())).unwrap_or_default();
    let msg = format!(
        "readinessindicatorfile: {} is not there{waited}: the agent of the cluster's network writes it once it is \
         ready; see whether its pod runs on this node",
        file.display()
    );
    Error::new(Code::TryAgain, msg)
}

/// Whether the file is there before the deadline. A directory that is not there yet can't be
/// watched, so the nearest one that is there is, and again after every change.
fn wait_for(file: &Path, deadline: Instant) -> Result<bool, Errno> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    let changes = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_DELETE_SELF;
    loop {
        for directory in file.ancestors().skip(1) {
            match inotify.add_watch(directory, changes | AddWatchFlags::IN_ONLYDIR) {
                Err(Errno::ENOENT | Errno::ENOTDIR) => {}
                other => {
                    other?;
                    break;
                }
            }
        }
        // It may have come before the watch did.
        if file.exists() {
            return Ok(true);
        }
        let Some(left) = deadline.checked_duration_since(Instant::now()) else { return Ok(false) };
        let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(inotify.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) | Err(Errno::EINTR) => {}
            other => {
                other?;
                // What has changed does not matter, but that it has.
                match inotify.read_events() {
                    Ok(_) | Err(Errno::EAGAIN | Errno::EINTR) => {}
                    Err(errno) => return Err(errno),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_whose_directories_come_late_is_seen() {
        let root = std::env::temp_dir().join(format!("detour-readiness-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir(&root).expect("a directory");
        let file = root.join("net.d/multus/10-ready.conf");
        let far = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| wait_for(&file, far));
            fs::create_dir_all(file.parent().expect("it has one")).expect("directories");
            fs::write(root.join("net.d/multus/other"), "").expect("writable");
            fs::write(root.join("new"), "").expect("writable");
            fs::rename(root.join("new"), &file).expect("moved");
            assert_eq!(waiting.join().expect("no panic"), Ok(true));
        });
        assert_eq!(wait_for(&root.join("never"), Instant::now()), Ok(false));
        fs::remove_dir_all(&root).expect("removable");
    }
}
