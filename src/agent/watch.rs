//! Waiting until something changes in a directory, or the process is told to end.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What ended a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WakeReason {
    /// SIGTERM or SIGINT.
    ToEnd,
    /// A change.
    ByChange,
    /// Nothing: the time is over.
    ByTime,
}

/// Directories, and who of them is interesting.
#[derive(Debug)]
pub(super) struct DirectoryWatch {
    signals: SignalFd,
    /// `None` where the kernel has none left (`fs.inotify.max_user_instances`).
    inotify: Option<Inotify>,
    /// For a directory that is watched only for the coming and going of one entry, that entry.
    only: BTreeMap<i32, Option<OsString>>,
}

impl DirectoryWatch {
    /// Takes SIGTERM and SIGINT over from their usual effect, for this thread and those that it
    /// starts: process 1 of a container would ignore them otherwise.
    ///
    /// # Errors
    /// The kernel refuses a signal descriptor.
    pub(super) fn new() -> Result<Self, Errno> {
        let mut set = SigSet::empty();
        set.add(Signal::SIGTERM);
        set.add(Signal::SIGINT);
        set.thread_block()?;
        let signals = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        if let Err(error) = &inotify {
            tracing::warn!(%error, "changes are seen only from time to time: raise fs.inotify.max_user_instances");
        }
        Ok(Self { signals, inotify: inotify.ok(), only: BTreeMap::new() })
    }

    /// Watches these directories, wherever their names lead now, and their parents, so that one
    /// that is made anew, or a link that is turned (the kubelet's `..data`, for one), is noticed.
    /// Where there is none yet, its nearest ancestor is watched.
    pub(super) fn directories(&mut self, directories: &[PathBuf]) {
        let Some(inotify) = &self.inotify else { return };
        let content = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_DELETE;
        let entry = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVE | AddWatchFlags::IN_DELETE;
        let mut wanted: BTreeMap<&Path, (AddWatchFlags, Option<OsString>)> = BTreeMap::new();
        for directory in directories {
            let there = directory.ancestors().find(|path| path.is_dir());
            let parent = there.and_then(Path::parent).filter(|_| there == Some(directory));
            for path in there.into_iter().chain(parent) {
                let own = path == directory;
                let child = directory.strip_prefix(path).ok().and_then(|rest| rest.iter().next());
                let flags = if own { content } else { entry };
                let child = child.filter(|_| !own).map(ToOwned::to_owned);
                // One that is watched for two reasons is watched for all that happens there.
                let both = |(known, only): &mut (AddWatchFlags, Option<OsString>)| {
                    *known |= flags;
                    only.take_if(|only| Some(&*only) != child.as_ref());
                };
                wanted.entry(path).and_modify(both).or_insert((flags, child.clone()));
            }
        }
        let mut only = BTreeMap::new();
        for (path, (flags, child)) in wanted {
            match inotify.add_watch(path, flags | AddWatchFlags::IN_ONLYDIR) {
                Ok(watch) => drop(only.insert(id(watch), child)),
                Err(error) => tracing::warn!(directory = %path.display(), %error, "can't be watched"),
            }
        }
        self.only = only;
    }

    /// Forgets what changed so far.
    pub(super) fn forget(&self) {
        while self.inotify.as_ref().is_some_and(|inotify| inotify.read_events().is_ok()) {}
    }

    /// Waits for a signal or, unless `deaf`, a change; at most for `time`.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub(super) fn wait(&self, time: Duration, deaf: bool) -> Result<WakeReason, Errno> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut wanted = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            if let Some(inotify) = self.inotify.as_ref().filter(|_| !deaf) {
                wanted.push(PollFd::new(inotify.as_fd(), PollFlags::POLLIN));
            }
            // Rounded up, lest the last millisecond be spent turning in a circle.
            let timeout = PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX);
            match poll(&mut wanted, timeout) {
                Ok(0) => return Ok(WakeReason::ByTime),
                Ok(_) if self.signals.read_signal()?.is_some() => return Ok(WakeReason::ToEnd),
                Ok(_) if self.changed() => return Ok(WakeReason::ByChange),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether something that matters is among what changed.
    fn changed(&self) -> bool {
        let events = self.inotify.as_ref().and_then(|inotify| inotify.read_events().ok()).unwrap_or_default();
        events.iter().any(|event| self.matters(event))
    }

    fn matters(&self, event: &InotifyEvent) -> bool {
        // A watch that is not known is of an overflow, or of a directory that is gone.
        match self.only.get(&id(event.wd)) {
            Some(Some(child)) => event.name.as_ref().is_none_or(|name| name == child),
            // The primary plugin makes a directory for each pod beside the kubeconfig.
            Some(None) => !event.mask.contains(AddWatchFlags::IN_ISDIR),
            None => true,
        }
    }
}

fn id(watch: WatchDescriptor) -> i32 {
    watch.as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn files_wake_and_directories_do_not() {
        let directory = std::env::temp_dir().join(format!("detour-watch-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("made");
        let mut watch = DirectoryWatch::new().expect("a watch");
        watch.directories(std::slice::from_ref(&directory));
        fs::create_dir(directory.join("a-container")).expect("made");
        assert_eq!(watch.wait(Duration::ZERO, false), Ok(WakeReason::ByTime));
        fs::write(directory.join("kubeconfig"), "").expect("written");
        assert_eq!(watch.wait(Duration::ZERO, false), Ok(WakeReason::ByChange));
        fs::remove_dir_all(&directory).expect("removed");
    }
}
