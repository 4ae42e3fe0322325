//! The readiness file of the cluster's network: no ADD before it exists.

use crate::cni::{Code, Error, Primary};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Waits until the readiness file exists, if one is configured.
///
/// # Errors
/// [`Code::TryAgain`]: timeout.
pub(super) fn wait(conf: &Primary) -> Result<(), Error> {
    let Some(file) = conf.readiness_file.as_deref().filter(|file| !file.exists()) else { return Ok(()) };
    tracing::info!("waiting for {}", file.display());
    let deadline = Instant::now() + conf.readiness_timeout;
    match wait_for_file(file, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(missing(file, Some(conf.readiness_timeout))),
        Err(errno) => Err(missing(file, None).with_details(format!("can't watch its directory: {errno}"))),
    }
}

/// Checks that the readiness file exists, if one is configured.
///
/// # Errors
/// [`Code::TryAgain`]: file not found.
pub(super) fn check(conf: &Primary) -> Result<(), Error> {
    match conf.readiness_file.as_deref().filter(|file| !file.exists()) {
        Some(file) => Err(missing(file, None)),
        None => Ok(()),
    }
}

fn missing(file: &Path, waited: Option<Duration>) -> Error {
    let waited = waited.map(|waited| format!(" after {} s", waited.as_secs())).unwrap_or_default();
    let msg = format!(
        "readinessindicatorfile: {} does not exist{waited}: the agent of the cluster's network writes it when that \
         network is ready; check that the agent's pod runs on this node",
        file.display()
    );
    Error::new(Code::TryAgain, msg)
}

/// Waits for the file until the deadline; returns whether it exists. A missing directory can't be watched, so the
/// nearest existing ancestor is watched, and chosen again after every change.
fn wait_for_file(file: &Path, deadline: Instant) -> Result<bool, Errno> {
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
        // It may have appeared before the watch started.
        if file.exists() {
            return Ok(true);
        }
        let Some(left) = deadline.checked_duration_since(Instant::now()) else { return Ok(false) };
        let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(inotify.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) | Err(Errno::EINTR) => {}
            other => {
                other?;
                // Every change has the same effect: look again.
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
    fn a_file_in_directories_that_are_created_later_is_found() {
        let root = std::env::temp_dir().join(format!("detour-readiness-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir(&root).expect("a directory");
        let file = root.join("net.d/multus/10-ready.conf");
        let far = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| wait_for_file(&file, far));
            fs::create_dir_all(file.parent().expect("it has one")).expect("directories");
            fs::write(root.join("net.d/multus/other"), "").expect("writable");
            fs::write(root.join("new"), "").expect("writable");
            fs::rename(root.join("new"), &file).expect("moved");
            assert_eq!(waiting.join().expect("no panic"), Ok(true));
        });
        assert_eq!(wait_for_file(&root.join("never"), Instant::now()), Ok(false));
        fs::remove_dir_all(&root).expect("removable");
    }
}
