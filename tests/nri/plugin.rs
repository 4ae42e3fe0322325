//! The plugin on its own thread, and its reports.

use super::directory::Directory;
use super::peer::{Peer, Runtime};
use detour_cni::agent::nri::{self, NriContainer, NriHandler, NriPod, NriStatus};
use std::io::{PipeWriter, pipe};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The limit of each wait.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A call of the handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    Synchronize(Vec<NriPod>, Vec<NriContainer>),
    Start(NriPod, NriContainer),
    Started(NriPod, NriContainer),
    Stopped(NriPod, NriContainer),
    Removed(NriPod, NriContainer),
}

/// What the plugin did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Report {
    Call(Call),
    Status(NriStatus),
}

/// A handler that reports its calls, and then does `work`.
struct Recorder<W> {
    reports: Sender<Report>,
    work: W,
}

impl<W: FnMut(&Call) + Send> Recorder<W> {
    fn record(&mut self, call: Call) {
        // Fails if the test has ended.
        let _ = self.reports.send(Report::Call(call.clone()));
        (self.work)(&call);
    }
}

impl<W: FnMut(&Call) + Send> NriHandler for Recorder<W> {
    fn synchronize(&mut self, pods: Vec<NriPod>, containers: Vec<NriContainer>) {
        self.record(Call::Synchronize(pods, containers));
    }

    fn start(&mut self, pod: &NriPod, container: &NriContainer) {
        self.record(Call::Start(pod.clone(), container.clone()));
    }

    fn started(&mut self, pod: &NriPod, container: &NriContainer) {
        self.record(Call::Started(pod.clone(), container.clone()));
    }

    fn stopped(&mut self, pod: &NriPod, container: &NriContainer) {
        self.record(Call::Stopped(pod.clone(), container.clone()));
    }

    fn removed(&mut self, pod: &NriPod, container: &NriContainer) {
        self.record(Call::Removed(pod.clone(), container.clone()));
    }
}

/// A running plugin. It ends with this value.
pub(crate) struct Plugin {
    reports: Receiver<Report>,
    end: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Plugin {
    /// Starts a plugin that only reports.
    pub(crate) fn start(socket: &Path) -> Self {
        Self::start_with(socket, |_| {})
    }

    /// Starts a plugin whose handler does `work` in each call.
    pub(crate) fn start_with(socket: &Path, work: impl FnMut(&Call) + Send + 'static) -> Self {
        let ((sender, reports), (ended, end)) = (channel(), pipe().expect("a pipe"));
        let (socket, handler) = (socket.to_owned(), Recorder { reports: sender.clone(), work });
        let report = move |status| {
            let _ = sender.send(Report::Status(status));
        };
        let thread = thread::spawn(move || nri::run(&socket, handler, report, ended));
        Self { reports, end: Some(end), thread: Some(thread) }
    }

    /// Returns the next report.
    pub(crate) fn next(&self) -> Report {
        self.reports.recv_timeout(DEADLINE).expect("a report")
    }

    /// Returns the next report, which is a call of the handler.
    pub(crate) fn next_call(&self) -> Call {
        match self.next() {
            Report::Call(call) => call,
            Report::Status(status) => panic!("{status:?}"),
        }
    }

    /// Returns the cause from the next report, which must be that the plugin is not connected.
    pub(crate) fn next_failure(&self) -> String {
        match self.next() {
            Report::Status(NriStatus::Disconnected(cause)) => cause,
            report => panic!("{report:?}"),
        }
    }

    /// Waits for the registration, and returns the containers that the runtime has.
    pub(crate) fn registered(&self) -> (Vec<NriPod>, Vec<NriContainer>) {
        let (pods, containers) = loop {
            match self.next() {
                Report::Call(Call::Synchronize(pods, containers)) => break (pods, containers),
                // The socket of a runtime that starts exists before it listens.
                Report::Status(NriStatus::Disconnected(cause)) if cause.contains("does not accept connections") => {}
                report => panic!("{report:?}"),
            }
        };
        let Report::Status(NriStatus::Registered { .. }) = self.next() else { panic!("another report") };
        (pods, containers)
    }

    /// Returns the reports that have arrived.
    pub(crate) fn reports(&self) -> Vec<Report> {
        self.reports.try_iter().collect()
    }

    /// Ends the plugin, and returns how long it took.
    pub(crate) fn end(mut self) -> Duration {
        let begin = Instant::now();
        drop(self.end.take());
        self.thread.take().expect("it runs").join().expect("no panic");
        begin.elapsed()
    }

    /// Waits until the plugin's thread has panicked.
    pub(crate) fn panicked(mut self) {
        assert!(self.thread.take().expect("it runs").join().is_err());
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns a directory and a path for a socket in it.
pub(crate) fn socket_path() -> (Directory, PathBuf) {
    let directory = Directory::new("nri");
    let path = directory.join("nri.sock");
    (directory, path)
}

/// Starts a runtime and a plugin.
pub(crate) fn started() -> (Directory, Runtime, Plugin) {
    let (directory, path) = socket_path();
    let runtime = Runtime::listen(&path);
    let plugin = Plugin::start(&path);
    (directory, runtime, plugin)
}

/// The same; the plugin registers with a runtime without containers.
pub(crate) fn registered() -> ((Directory, Runtime), Peer, Plugin) {
    let (directory, runtime, plugin) = started();
    let peer = runtime.register(&[]);
    plugin.registered();
    ((directory, runtime), peer, plugin)
}
