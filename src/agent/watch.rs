//! Waits for changes in directories (inotify) and for the signals that end the process.

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::future::pending;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use tokio::io::unix::AsyncFd;

/// Waits for SIGTERM or SIGINT.
///
/// tokio's own signals would add system calls to every event loop, including that of the plugin.
#[derive(Debug)]
pub(super) struct EndSignals(AsyncFd<SignalFd>);

impl EndSignals {
    /// Blocks the signals in this thread and the threads that it starts: process 1 of a container would ignore them
    /// otherwise.
    ///
    /// # Errors
    /// The kernel refuses a signal descriptor.
    pub(super) fn new() -> io::Result<Self> {
        let mut set = SigSet::empty();
        set.add(Signal::SIGTERM);
        set.add(Signal::SIGINT);
        set.thread_block()?;
        Ok(Self(registered(SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?)?))
    }

    /// Waits for the first signal, and returns at once after it.
    pub(super) async fn received(&self) {
        // Fails only if the event loop ends.
        let _ = self.0.readable().await;
    }
}

/// An inotify instance as tokio needs it.
#[derive(Debug)]
struct Events(Inotify);

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// A watch of directories.
#[derive(Debug)]
pub(super) struct DirectoryWatch {
    /// `None` if the kernel refuses another instance (`fs.inotify.max_user_instances`).
    events: Option<AsyncFd<Events>>,
    /// Whether the kernel watches all requested directories.
    complete: bool,
    /// The watched directories. With a name, only events of the entry of this name count.
    watched: BTreeMap<i32, Option<OsString>>,
}

impl DirectoryWatch {
    /// Creates a watch without directories.
    pub(super) fn new() -> Self {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).map_err(io::Error::from);
        let events = inotify.and_then(|inotify| registered(Events(inotify))).inspect_err(|error| {
            tracing::warn!(%error, "can't watch files; polling them instead: raise fs.inotify.max_user_instances");
        });
        let events = events.ok();
        Self { complete: events.is_some(), events, watched: BTreeMap::new() }
    }

    /// Watches these directories and their parents, so that a directory that is created again or a symbolic link that
    /// is replaced (as the kubelet's `..data`) is noticed. For a missing directory, watches the nearest ancestor.
    pub(super) fn directories(&mut self, directories: &[PathBuf]) {
        let Some(events) = &self.events else { return };
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
            match events.get_ref().0.add_watch(path, flags | AddWatchFlags::IN_ONLYDIR) {
                Ok(watch) => drop(watched.insert(watch.as_raw(), child)),
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

    /// Discards all pending events.
    pub(super) fn discard_events(&self) {
        while self.read().is_ok() {}
    }

    /// Waits for a change.
    pub(super) async fn changed(&self) {
        let Some(events) = &self.events else { return pending().await };
        // Fails only if the event loop ends.
        while let Ok(mut ready) = events.readable().await {
            match self.read() {
                Ok(found) if found.iter().any(|event| self.is_relevant(event)) => return,
                Ok(_) => {}
                Err(_) => ready.clear_ready(),
            }
        }
    }

    fn read(&self) -> Result<Vec<InotifyEvent>, Errno> {
        self.events.as_ref().map_or(Err(Errno::EAGAIN), |events| events.get_ref().0.read_events())
    }

    fn is_relevant(&self, event: &InotifyEvent) -> bool {
        // An unknown watch belongs to an overflow of the queue or to a removed directory.
        match self.watched.get(&event.wd.as_raw()) {
            Some(Some(child)) => event.name.as_ref().is_none_or(|name| name == child),
            // The primary plugin creates a directory for each pod beside the kubeconfig.
            Some(None) => !event.mask.contains(AddWatchFlags::IN_ISDIR),
            None => true,
        }
    }
}

#[expect(deprecated, reason = "its replacement is unsafe; these descriptors are open as long as their owners exist")]
fn registered<T: AsRawFd>(owner: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::new(owner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_new_file_ends_the_wait_and_a_new_directory_does_not() {
        let directory = std::env::temp_dir().join(format!("detour-watch-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("made");
        let mut watch = DirectoryWatch::new();
        watch.directories(std::slice::from_ref(&directory));
        fs::create_dir(directory.join("a-container")).expect("made");
        timeout(Duration::from_millis(50), watch.changed()).await.expect_err("no file has changed");
        fs::write(directory.join("kubeconfig"), "").expect("written");
        timeout(Duration::from_secs(60), watch.changed()).await.expect("a change");
        fs::remove_dir_all(&directory).expect("removed");
    }
}
