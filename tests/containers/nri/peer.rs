//! The plugin on its own thread, and a simulated runtime, which encodes its messages independently of the plugin.

use crate::support::directory::Directory;
use detour_cni::agent::nri::{self, NriContainer, NriReport, Stage};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// The service of plugins.
pub(crate) const PLUGIN: &str = "nri.pkg.api.v1alpha1.Plugin";

/// The contents of an empty message.
pub(crate) const EMPTY: [u8; 0] = [];

/// An encoded field with a text or a message.
pub(crate) fn bytes(number: u64, contents: impl AsRef<[u8]>) -> Vec<u8> {
    let contents = contents.as_ref();
    [varint(number << 3 | 2), varint(contents.len() as u64), contents.to_vec()].concat()
}

/// An encoded field with an integer.
pub(crate) fn integer(number: u64, value: u64) -> Vec<u8> {
    [varint(number << 3), varint(value)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut encoded = Vec::new();
    loop {
        let low = (value & 0x7f) as u8;
        value >>= 7;
        if value == 0 {
            encoded.push(low);
            return encoded;
        }
        encoded.push(low | 0x80);
    }
}

/// An entry of a map.
pub(crate) fn entry(number: u64, key: &str, value: &str) -> Vec<u8> {
    bytes(number, [bytes(1, key), bytes(2, value)].concat())
}

/// A pod as containerd reports it.
pub(crate) fn pod(id: &str) -> Vec<u8> {
    let namespaces = [bytes(5, bytes(1, "pid")), bytes(5, [bytes(1, "network"), bytes(2, "/run/netns/a")].concat())];
    [
        bytes(1, id),
        bytes(2, "web-0"),
        bytes(3, "8d1f"),
        bytes(4, "shop"),
        entry(6, "detour.io/exclude-containers", "app"),
        bytes(8, namespaces.concat()),
        integer(9, 4001),
    ]
    .concat()
}

/// A container that was created, as containerd reports it.
pub(crate) fn container(id: &str, pod: &str) -> Vec<u8> {
    [
        bytes(1, id),
        bytes(2, pod),
        bytes(3, "app"),
        integer(4, 1),
        entry(5, "io.kubernetes.container.name", "other"),
        bytes(7, "sleep"),
        bytes(11, bytes(5, "/kubepods/a/b")),
        integer(12, 4002),
    ]
    .concat()
}

/// The argument of an event: pod `pod-ID` and container `ID`.
pub(crate) fn event(id: &str) -> Vec<u8> {
    let pod_id = format!("pod-{id}");
    [bytes(1, pod(&pod_id)), bytes(2, container(id, &pod_id))].concat()
}

/// The argument of `StateChange`.
pub(crate) fn state_change(number: u64, id: &str) -> Vec<u8> {
    let pod_id = format!("pod-{id}");
    [integer(1, number), bytes(2, pod(&pod_id)), bytes(3, container(id, &pod_id))].concat()
}

/// The argument of `Configure`, with a request timeout in milliseconds.
pub(crate) fn configuration(request_timeout: u64) -> Vec<u8> {
    [bytes(2, "simulated"), bytes(3, "v1.2"), integer(4, 5000), integer(5, request_timeout)].concat()
}

/// A message of ttrpc in a frame.
pub(crate) fn frame(connection: u32, stream: u32, kind: u8, contents: &[u8]) -> Vec<u8> {
    let mut frame = connection.to_be_bytes().to_vec();
    frame.extend((contents.len() as u32 + 10).to_be_bytes());
    frame.extend((contents.len() as u32).to_be_bytes());
    frame.extend(stream.to_be_bytes());
    frame.extend([kind, 0]);
    frame.extend(contents);
    frame
}

/// A call of the runtime in a frame.
pub(crate) fn call(stream: u32, service: &str, method: &str, payload: &[u8]) -> Vec<u8> {
    let contents = [bytes(1, service), bytes(2, method), bytes(3, payload), integer(4, 2_000_000_000)].concat();
    frame(1, stream, 1, &contents)
}

/// The runtime's socket.
pub(crate) struct Runtime(UnixListener);

impl Runtime {
    pub(crate) fn listen(path: &Path) -> Self {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).expect("bound");
        Self(listener)
    }

    /// Returns the next connection of a plugin.
    pub(crate) fn accept(&self) -> Peer {
        let mut waiting = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(DEADLINE).expect("short");
        assert_eq!(poll(&mut waiting, timeout), Ok(1), "a plugin connects");
        let (stream, _) = self.0.accept().expect("accepted");
        stream.set_read_timeout(Some(DEADLINE)).expect("set");
        stream.set_write_timeout(Some(DEADLINE)).expect("set");
        Peer { stream, calls: 1 }
    }

    /// Returns the next connection after its registration, with these containers.
    pub(crate) fn register(&self, containers: &[u8]) -> Peer {
        let mut peer = self.accept();
        peer.expect_registration();
        assert_eq!(peer.call("Configure", &configuration(2000)), bytes(2, integer(2, 0b110_0110_0000)));
        peer.write(&frame(2, 1, 2, &[]));
        assert_eq!(peer.call("Synchronize", containers), EMPTY);
        peer
    }
}

/// One connection of a plugin.
pub(crate) struct Peer {
    pub(crate) stream: UnixStream,
    calls: u32,
}

impl Peer {
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("sent");
    }

    /// Returns the next message: connection, stream, kind, contents.
    pub(crate) fn read(&mut self) -> (u32, u32, u8, Vec<u8>) {
        let mut header = [0; 18];
        self.stream.read_exact(&mut header).expect("a message");
        let number = |at: usize| u32::from_be_bytes(*header[at..].first_chunk().expect("four bytes"));
        assert_eq!(number(4), number(8) + 10, "one frame per message");
        let mut contents = vec![0; number(8) as usize];
        self.stream.read_exact(&mut contents).expect("its contents");
        (number(0), number(12), header[16], contents)
    }

    /// Reads the call that registers the plugin.
    pub(crate) fn expect_registration(&mut self) {
        let plugin = [bytes(1, "detour"), bytes(2, "10")].concat();
        let contents =
            [bytes(1, "nri.pkg.api.v1alpha1.Runtime"), bytes(2, "RegisterPlugin"), bytes(3, plugin)].concat();
        assert_eq!(self.read(), (2, 1, 1, contents));
    }

    /// Sends a call and returns the contents of the answer.
    pub(crate) fn call(&mut self, method: &str, payload: &[u8]) -> Vec<u8> {
        self.call_service(PLUGIN, method, payload)
    }

    pub(crate) fn call_service(&mut self, service: &str, method: &str, payload: &[u8]) -> Vec<u8> {
        let stream = self.send(service, method, payload);
        self.answer(stream)
    }

    /// Sends a call and returns its stream.
    pub(crate) fn send(&mut self, service: &str, method: &str, payload: &[u8]) -> u32 {
        let stream = self.calls;
        self.calls += 2;
        self.write(&call(stream, service, method, payload));
        stream
    }

    /// Returns the contents of the answer to a call; it is the next message.
    pub(crate) fn answer(&mut self, stream: u32) -> Vec<u8> {
        let (connection, answered, kind, contents) = self.read();
        assert_eq!((connection, answered, kind), (1, stream, 2));
        contents
    }

    /// Waits until the plugin has closed the connection.
    pub(crate) fn closed(&mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => assert_eq!(rest, EMPTY),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
}

/// The contents of an answer with an error.
pub(crate) fn error(code: u64, message: &str) -> Vec<u8> {
    bytes(1, [integer(1, code), bytes(2, message)].concat())
}

/// The limit of each wait.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A report of the plugin, with the container that it names.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Report {
    Disconnected(String),
    /// The runtime, and its running containers.
    Registered(String, Vec<NriContainer>),
    Start(NriContainer),
    Started(NriContainer),
    Stopped(NriContainer),
    Removed(NriContainer),
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

    /// Starts a plugin; the receiver of its reports does `work` for each one, and then answers.
    pub(crate) fn start_with(socket: &Path, mut work: impl FnMut(&Report) + Send + 'static) -> Self {
        let ((sender, reports), (end, ended), (reported, mut received)) =
            (channel(), oneshot::channel(), mpsc::channel(64));
        let socket = socket.to_owned();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
            runtime.block_on(async {
                tokio::select! {
                    never = nri::run(&socket, reported) => match never {},
                    _ = ended => {}
                }
            });
        });
        thread::spawn(move || {
            while let Some(report) = received.blocking_recv() {
                let mut answer = None;
                let report = match report {
                    NriReport::Disconnected(why) => Report::Disconnected(why),
                    NriReport::Registered { runtime, running } => Report::Registered(runtime, running),
                    NriReport::Container(stage, container) => match stage {
                        Stage::Start(sender) => {
                            answer = Some(sender);
                            Report::Start(container)
                        }
                        Stage::Started => Report::Started(container),
                        Stage::Stopped => Report::Stopped(container),
                        Stage::Removed => Report::Removed(container),
                    },
                };
                // Fails if the test has ended.
                let _ = sender.send(report.clone());
                work(&report);
                answer.map(|answer| answer.send(()));
            }
        });
        Self { reports, end: Some(end), thread: Some(thread) }
    }

    /// Returns the next report.
    pub(crate) fn next(&self) -> Report {
        self.reports.recv_timeout(DEADLINE).expect("a report")
    }

    /// Returns the cause from the next report, which must be that the plugin is not connected.
    pub(crate) fn next_failure(&self) -> String {
        match self.next() {
            Report::Disconnected(cause) => cause,
            report => panic!("{report:?}"),
        }
    }

    /// Waits for the registration, and returns the containers that run.
    pub(crate) fn registered(&self) -> Vec<NriContainer> {
        loop {
            match self.next() {
                Report::Registered(_, running) => return running,
                // The socket of a runtime that starts exists before it listens.
                Report::Disconnected(cause) if cause.contains("does not accept connections") => {}
                report => panic!("{report:?}"),
            }
        }
    }

    /// Returns the reports that have arrived.
    pub(crate) fn reports(&self) -> Vec<Report> {
        self.reports.try_iter().collect()
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
