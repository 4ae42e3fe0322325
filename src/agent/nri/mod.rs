//! The agent as a plugin of the container runtime: the runtime reports each container before its first instruction
//! (Node Resource Interface, NRI).

mod messages;
pub(crate) mod session;
mod ttrpc;

use crate::backoff::Backoff;
use crate::trusted_file::{check, is_trusted};
use session::Session;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

pub(super) use session::START_TIMEOUT;

/// The pause after the first failure.
const MIN_BACKOFF: Duration = Duration::from_millis(100);
/// The longest pause, without its random part: containers that start before the registration start captured.
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// What the runtime reports, in the order in which it reports it.
#[derive(Debug)]
pub enum NriReport {
    /// The result of the first attempt to register, and then each change of it.
    Status(NriStatus),
    /// All pods and containers of the node: before each [`NriStatus::Registered`].
    Synchronized(Vec<NriPod>, Vec<NriContainer>),
    /// A container is about to start: its control group exists. The runtime delays the first instruction until the
    /// sender is used or dropped, for at most 1 s.
    Start(NriPod, NriContainer, oneshot::Sender<()>),
    /// A container has started.
    Started(NriPod, NriContainer),
    /// A container stops, or has ended.
    Stopped(NriPod, NriContainer),
    /// A container is removed. None of its processes runs.
    Removed(NriPod, NriContainer),
}

/// A pod sandbox, as the runtime reports it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct NriPod {
    /// The ID of the sandbox (`CNI_CONTAINERID`).
    #[prost(string, tag = "1")]
    pub id: String,
    /// The pod's name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// The pod's namespace.
    #[prost(string, tag = "4")]
    pub namespace: String,
    /// The pod's UID.
    #[prost(string, tag = "3")]
    pub uid: String,
}

/// A container, as the runtime reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NriContainer {
    /// The container's ID.
    pub id: String,
    /// The ID of its pod sandbox.
    pub pod_id: String,
    /// Its name in the pod; empty if the runtime does not report it.
    pub name: String,
    /// Whether it runs. False in [`NriReport::Start`], which precedes its first instruction.
    pub running: bool,
    /// Its control group: a path, or `SLICE:PREFIX:NAME` of the systemd driver.
    pub cgroups_path: String,
    /// Its first process; 0 if the runtime does not report it (CRI-O).
    pub pid: u32,
}

/// Whether the runtime reports containers to this plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NriStatus {
    /// The runtime reports no containers, with the cause and the next step.
    Disconnected(String),
    /// The runtime reports containers.
    Registered {
        /// The name of the runtime, such as `containerd`.
        runtime: String,
        /// Its version.
        version: String,
    },
}

/// Registers with the runtime at `path`, and sends what it reports to `reports`, until their receiver is dropped. After a
/// failure, it reconnects with a backoff of at most 1.5 s.
pub async fn run(path: &Path, reports: mpsc::Sender<NriReport>) {
    tokio::select! {
        () = reports.closed() => {}
        () = reconnect(path, &reports) => {}
    }
}

/// Connects again and again.
async fn reconnect(path: &Path, reports: &mpsc::Sender<NriReport>) {
    let (mut backoff, mut last) = (Backoff::new(MIN_BACKOFF, MAX_BACKOFF), String::new());
    loop {
        let mut session = Session::new(reports);
        let cause = match connect(path).await {
            Ok(mut stream) => {
                let (reader, writer) = stream.split();
                session.serve(reader, writer).await
            }
            Err(cause) => cause,
        };
        if session.synchronized || last != cause {
            let status = NriStatus::Disconnected(format!("{}: {cause}", path.display()));
            // Fails only if the receiver has ended.
            let _ = reports.send(NriReport::Status(status)).await;
            last = cause;
        }
        sleep(backoff.pause(Instant::now())).await;
    }
}

/// Connects to the socket, if only root can have created it.
async fn connect(path: &Path) -> Result<UnixStream, String> {
    let own = path.to_owned();
    let path = spawn_blocking(move || checked(&own)).await.map_err(|error| error.to_string())??;
    let stream = UnixStream::connect(path).await.map_err(|error| match error.kind() {
        ErrorKind::NotFound => not_found(),
        ErrorKind::ConnectionRefused => "the runtime does not accept connections; check that it runs".into(),
        ErrorKind::WouldBlock => "the runtime's connection queue is full".into(),
        _ => format!("can't connect: {error}"),
    })?;
    let owner = stream.peer_cred().map_err(|error| format!("can't identify the listener: {error}"))?.uid();
    if !is_trusted(owner) {
        return Err(format!("expected root as listener on the socket, got UID {owner}; remove the socket"));
    }
    Ok(stream)
}

/// Returns the path without symbolic links, if it leads to a socket in a directory that only root can change.
fn checked(path: &Path) -> Result<PathBuf, String> {
    let (directory, name) = path.parent().zip(path.file_name()).ok_or_else(|| "expected a path".to_owned())?;
    let directory =
        check(directory).map_err(|error| if error.is_not_found() { not_found() } else { error.to_string() })?;
    let path = directory.join(name);
    // The kernel refuses connections to other files as to a socket without a listener.
    if fs::metadata(&path).is_ok_and(|metadata| !metadata.file_type().is_socket()) {
        return Err("expected a socket; correct the path in --nri-socket".to_owned());
    }
    Ok(path)
}

fn not_found() -> String {
    "socket not found; check that the container runtime runs and that its configuration enables NRI".into()
}

#[cfg(test)]
mod tests;
