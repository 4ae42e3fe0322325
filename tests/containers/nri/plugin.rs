//! The plugin on its own thread, and what it reports to another one.

use super::peer::{Peer, Runtime};
use crate::support::directory::Directory;
use detour_cni::agent::nri::{self, NriContainer, NriPod, NriReport, NriStatus};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// The limit of each wait.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A report of the runtime.
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

/// A running plugin. It ends with this value.
pub(crate) struct Plugin {
    reports: Receiver<Report>,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Plugin {
    /// Starts a plugin that only reports.
    pub(crate) fn start(socket: &Path) -> Self {
        Self::start_with(socket, |_| {})
    }

    /// Starts a plugin; the receiver of its reports does `work` for each call, and then answers.
    pub(crate) fn start_with(socket: &Path, mut work: impl FnMut(&Call) + Send + 'static) -> Self {
        let ((sender, reports), (end, ended), (reported, mut received)) =
            (channel(), oneshot::channel(), mpsc::channel(64));
        let socket = socket.to_owned();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
            runtime.block_on(async {
                tokio::select! {
                    () = nri::run(&socket, reported) => {}
                    _ = ended => {}
                }
            });
        });
        thread::spawn(move || {
            while let Some(report) = received.blocking_recv() {
                let (call, answer) = match report {
                    NriReport::Status(status) => {
                        let _ = sender.send(Report::Status(status));
                        continue;
                    }
                    NriReport::Start(pod, container, answer) => (Call::Start(pod, container), Some(answer)),
                    NriReport::Synchronized(pods, containers) => (Call::Synchronize(pods, containers), None),
                    NriReport::Started(pod, container) => (Call::Started(pod, container), None),
                    NriReport::Stopped(pod, container) => (Call::Stopped(pod, container), None),
                    NriReport::Removed(pod, container) => (Call::Removed(pod, container), None),
                };
                // Fails if the test has ended.
                let _ = sender.send(Report::Call(call.clone()));
                work(&call);
                answer.map(|answer| answer.send(()));
            }
        });
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

    /// Waits until the plugin ends by itself.
    pub(crate) fn ended(mut self) {
        self.thread.take().expect("it runs").join().expect("no panic");
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
