//! Waits for changes in directories (inotify) and for the signals that end the process.

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

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WakeReason {
    /// SIGTERM or SIGINT.
    Signal,
    /// A change in a directory.
    Change,
    /// The timeout.
    Timeout,
}

/// A watch of directories and signals.
#[derive(Debug)]
pub(super) struct DirectoryWatch {
    signals: SignalFd,
    /// `None` if the kernel refuses another instance (`fs.inotify.max_user_instances`).
    inotify: Option<Inotify>,
    /// Whether the kernel watches all requested directories.
    complete: bool,
    /// The watched directories. With a name, only events of the entry of this name count.
    watched: BTreeMap<i32, Option<OsString>>,
}

impl DirectoryWatch {
    /// Creates a watch. SIGTERM and SIGINT are blocked in this thread and the threads that it starts, and end a wait
    /// instead: process 1 of a container would ignore them otherwise.
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
            tracing::warn!(%error, "can't watch files; polling them instead: raise fs.inotify.max_user_instances");
        }
        let inotify = inotify.ok();
        Ok(Self { signals, complete: inotify.is_some(), inotify, watched: BTreeMap::new() })
    }

    /// Watches these directories and their parents, so that a directory that is created again or a symbolic link that
    /// is replaced (as the kubelet's `..data`) is noticed. For a missing directory, watches the nearest ancestor.
    pub(super) fn directories(&mut self, directories: &[PathBuf]) {
        let Some(inotify) = &self.inotify else { return };
        let content = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_DELETE;
        let entry = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVE | AddWatchFlags::IN_DELETE;
        let mut requested: BTreeMap<&Path, (AddWatchFlags, Option<OsString>)> = BTreeMap::new();
        for directory in directories {
            let existing = directory.ancestors().find(|path| path.is_dir());
            let parent = existing.and_then(Path::parent).filter(|_| existing == Some(directory));
            for path in existing.into_iter().chain(parent) {
                let is_target = path == directory;
                let child = directory.strip_prefix(path).ok().and_then(|rest| rest.iter().next());
                let flags = if is_target { content } else { entry };
                let child = child.filter(|_| !is_target).map(ToOwned::to_owned);
                // A directory that is watched for several reasons is watched for all events.
                let merge = |(other_flags, other_child): &mut (AddWatchFlags, Option<OsString>)| {
                    *other_flags |= flags;
                    other_child.take_if(|other| Some(&*other) != child.as_ref());
                };
                requested.entry(path).and_modify(merge).or_insert((flags, child.clone()));
            }
        }
        let (mut watched, mut complete) = (BTreeMap::new(), true);
        for (path, (flags, child)) in requested {
            match inotify.add_watch(path, flags | AddWatchFlags::IN_ONLYDIR) {
                Ok(watch) => drop(watched.insert(id(watch), child)),
                // While the agent polls, the same failure recurs with each poll.
                Err(error) if self.complete => {
                    complete = false;
                    tracing::warn!(directory = %path.display(), %error, "can't watch directory; polling it instead");
                }
                Err(_) => complete = false,
            }
        }
        (self.watched, self.complete) = (watched, complete);
    }

    /// Whether the kernel reports all changes; otherwise, they must be polled.
    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Discards all pending events of directories.
    pub(super) fn discard_events(&self) {
        while self.inotify.as_ref().is_some_and(|inotify| inotify.read_events().is_ok()) {}
    }

    /// Waits for a signal or, unless `ignore_events`, a change, for `time` at most.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub(super) fn wait(&self, time: Duration, ignore_events: bool) -> Result<WakeReason, Errno> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut descriptors = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            if let Some(inotify) = self.inotify.as_ref().filter(|_| !ignore_events) {
                descriptors.push(PollFd::new(inotify.as_fd(), PollFlags::POLLIN));
            }
            // Rounded up, so that poll does not spin through the last millisecond.
            let timeout = PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX);
            match poll(&mut descriptors, timeout) {
                Ok(0) => return Ok(WakeReason::Timeout),
                Ok(_) if self.signals.read_signal()?.is_some() => return Ok(WakeReason::Signal),
                Ok(_) if self.has_relevant_event() => return Ok(WakeReason::Change),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn has_relevant_event(&self) -> bool {
        let events = self.inotify.as_ref().and_then(|inotify| inotify.read_events().ok()).unwrap_or_default();
        events.iter().any(|event| self.is_relevant(event))
    }

    fn is_relevant(&self, event: &InotifyEvent) -> bool {
        // An unknown watch belongs to an overflow of the queue or to a removed directory.
        match self.watched.get(&id(event.wd)) {
            Some(Some(child)) => event.name.as_ref().is_none_or(|name| name == child),
            // The primary plugin creates a directory for each pod beside the kubeconfig.
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
    fn a_new_file_ends_the_wait_and_a_new_directory_does_not() {
        let directory = std::env::temp_dir().join(format!("detour-watch-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("made");
        let mut watch = DirectoryWatch::new().expect("a watch");
        watch.directories(std::slice::from_ref(&directory));
        fs::create_dir(directory.join("a-container")).expect("made");
        assert_eq!(watch.wait(Duration::ZERO, false), Ok(WakeReason::Timeout));
        fs::write(directory.join("kubeconfig"), "").expect("written");
        assert_eq!(watch.wait(Duration::ZERO, false), Ok(WakeReason::Change));
        fs::remove_dir_all(&directory).expect("removed");
    }
}
