//! The Unix socket for the plugin's requests. Only root can connect to it, the later of two agents owns it, and slow or
//! malformed clients do not delay others.

use super::facts::Answers;
use super::health::{Busy, Connections};
use crate::cluster::agent::{AgentAnswer, AgentRequest, Hello, MAX_REQUEST, RequestKind};
use crate::trusted_file::{FileId, create_directories, open_lock};
use serde::Serialize;
use std::fs::{DirBuilder, File, Permissions};
use std::future::pending;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout, timeout_at};

/// The limit of connections. At the limit, a new one replaces the oldest that has not sent its request; if all have
/// sent it, the new one waits in the kernel.
pub(super) const MAX_CONNECTIONS: usize = 64;
/// The timeout for receiving a request and for sending an answer.
pub(super) const TRANSFER_TIMEOUT: Duration = Duration::from_secs(2);
/// The timeout for an answer, if the plugin would wait longer.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(30);
/// The interval of the checks that the socket still exists. The end of the agent that serves it is detected at once.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The minimum interval of the checks after the serving agent has closed the connection on which another one waits.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The pause after a connection that could not be accepted.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// A socket of this process.
struct BoundSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Identifies the socket file, because another agent may replace it under the same name.
    file: FileId,
}

/// The agent that serves the socket in place of this one.
struct Successor {
    /// An idle connection. The successor closes it after a while, and the kernel when the successor has ended.
    stream: UnixStream,
    connected: Instant,
}

/// The result of a check of the socket.
enum Claim {
    /// It was bound.
    Bound(BoundSocket),
    /// It is in place.
    Held,
    /// Another agent has taken it over.
    Left(Successor),
}

/// Answers requests on `path` until the future is dropped. If the socket can't be bound, it retries. If a later agent
/// has taken over the socket, it binds the socket again as soon as that agent has ended.
pub(super) async fn serve(path: &Path, answers: &Answers, connections: &mut Connections) {
    let (mut bound, mut successor, mut logged) = (None, None, String::new());
    let replaced = Arc::new(Notify::new());
    let mut check = interval(CHECK_INTERVAL);
    check.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = check.tick() => {}
            () = closed(successor.as_mut()) => {}
            () = replaced.notified() => {}
            stream = accept(bound.as_ref(), connections) => {
                let (answers, replaced) = (answers.clone(), Arc::clone(&replaced));
                connections.serve(|busy| async move {
                    match handle(stream, &answers, &busy).await {
                        Ok(Received::Request) => {}
                        Ok(Received::Nothing) => replaced.notify_one(),
                        Err(error) => tracing::debug!(%error, "request from the plugin failed"),
                    }
                });
                continue;
            }
        }
        successor = None;
        match claim(path, bound.as_ref()).await {
            Ok(Claim::Bound(fresh)) => {
                tracing::info!(socket = %path.display(), "serving the plugin's requests");
                logged.clear();
                bound = Some(fresh);
            }
            Ok(Claim::Held) => {}
            Ok(Claim::Left(other)) => successor = Some(other),
            Err(error) => {
                let error = error.to_string();
                if logged != error {
                    tracing::warn!(
                        socket = %path.display(), error,
                        "can't listen on the agent socket; until it works, the plugin asks the API server"
                    );
                    logged = error;
                }
            }
        }
    }
}

/// Waits until the connection is closed. Without a successor, it waits until the future is dropped.
async fn closed(successor: Option<&mut Successor>) {
    let Some(Successor { stream, connected }) = successor else { return pending().await };
    // The successor sends nothing without a request.
    while stream.read(&mut [0; 64]).await.is_ok_and(|length| length > 0) {}
    sleep_until(*connected + MIN_CHECK_INTERVAL).await;
}

/// Returns the next connection as soon as it can be served. Without a socket, it waits until the future is dropped.
async fn accept(bound: Option<&BoundSocket>, connections: &mut Connections) -> UnixStream {
    let Some(BoundSocket { listener, .. }) = bound else { return pending().await };
    connections.room().await;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::warn!(%error, "can't accept a connection on the agent socket");
                // Usually the limit of descriptors, of which some are closed soon.
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Binds the socket if its file is missing or its process has ended. An agent that has no socket yet takes it over from
/// a running one. The running agent detects this by a connection that is then closed.
async fn claim(path: &Path, own: Option<&BoundSocket>) -> io::Result<Claim> {
    if let Some(own) = own {
        match identity(path) {
            Ok(file) if file == own.file => return Ok(Claim::Held),
            Ok(_) => {
                if let Ok(Ok(stream)) = timeout(TRANSFER_TIMEOUT, UnixStream::connect(path)).await {
                    return Ok(Claim::Left(Successor { stream, connected: Instant::now() }));
                }
            }
            Err(_) => {}
        }
    }
    let predecessor = timeout(TRANSFER_TIMEOUT, UnixStream::connect(path)).await;
    let bound = bind(path);
    drop(predecessor);
    bound.map(Claim::Bound)
}

/// Binds the socket in a private directory, and moves it to its path when only root can connect: there is no moment
/// without a socket, and none at which other users can connect.
fn bind(path: &Path) -> io::Result<BoundSocket> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    create_directories(directory)?;
    let _lock = lock(path)?;
    let private = directory.join(".agent-socket");
    match fs::remove_dir_all(&private) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    DirBuilder::new().mode(0o700).create(&private)?;
    let temporary = private.join("s");
    let listener = UnixListener::bind(&temporary)?;
    fs::set_permissions(&temporary, Permissions::from_mode(0o600))?;
    let file = identity(&temporary)?;
    publish(&temporary, path)?;
    fs::remove_dir(&private)?;
    Ok(BoundSocket { listener, path: path.to_owned(), file })
}

/// Moves the socket to its path, and replaces an empty directory there: the kubelet creates one for a pod that mounts
/// the socket before it exists (hostPath, type `DirectoryOrCreate`).
fn publish(temporary: &Path, path: &Path) -> io::Result<()> {
    match fs::rename(temporary, path) {
        Err(error) if error.kind() == ErrorKind::IsADirectory => {
            let problem = "a directory exists at the socket's path and can't be removed";
            fs::remove_dir(path)
                .map_err(|error| io::Error::new(error.kind(), format!("{problem}: {error}; remove it")))?;
            tracing::warn!(socket = %path.display(), "removed an empty directory at the socket's path");
            fs::rename(temporary, path)
        }
        result => result,
    }
}

impl Drop for BoundSocket {
    /// Removes the socket's file, unless another agent has replaced it.
    fn drop(&mut self) {
        let removed = lock(&self.path).and_then(|_lock| {
            if identity(&self.path).is_ok_and(|file| file == self.file) {
                fs::remove_file(&self.path)?;
            }
            fs::remove_file(lock_file(&self.path))
        });
        if let Err(error) = removed {
            tracing::warn!(socket = %self.path.display(), %error, "can't remove the agent socket");
        }
    }
}

/// Locks the socket's directory against other agents. The lock is a file of its own: every user can open the directory,
/// and hold a lock on it.
fn lock(path: &Path) -> io::Result<File> {
    loop {
        let lock = open_lock(&lock_file(path))?;
        lock.lock()?;
        // An agent that ended may have removed the file before it was locked; then the next one locks another file.
        if lock.metadata()?.nlink() > 0 {
            return Ok(lock);
        }
    }
}

fn lock_file(socket: &Path) -> PathBuf {
    socket.with_file_name("agent.lock")
}

fn identity(path: &Path) -> io::Result<FileId> {
    Ok(FileId::of(&fs::symlink_metadata(path)?))
}

/// What a client sent.
enum Received {
    Request,
    /// Another agent checks whether this one is running, or has taken the socket over.
    Nothing,
}

/// Reads one request and answers it.
async fn handle(mut stream: UnixStream, answers: &Answers, busy: &Busy) -> io::Result<Received> {
    let uid = stream.peer_cred()?.uid();
    if uid != 0 {
        tracing::warn!(uid, "rejected a request: only root may use the agent socket");
        return Ok(Received::Request);
    }
    let received = Instant::now();
    let mut line = Vec::new();
    let mut reader = BufReader::new(&mut stream).take(MAX_REQUEST);
    timeout_at(received + TRANSFER_TIMEOUT, reader.read_until(b'\n', &mut line)).await??;
    busy.begin();
    if line.is_empty() {
        return Ok(Received::Nothing);
    }
    let request = serde_json::from_slice(&line).unwrap_or_else(|error| {
        tracing::warn!(%error, "malformed request");
        AgentRequest::default()
    });
    drop(line);
    if let RequestKind::Called(report) = &request.ask {
        answers.record(report);
        return Ok(Received::Request);
    }
    send(&mut stream, &Hello::own()).await?;
    let wait = Duration::from_millis(request.wait_ms).min(MAX_ANSWER_TIME);
    let answer: AgentAnswer =
        timeout_at(received + wait, answers.answer(request.ask, request.from_memory, received + wait)).await?;
    send(&mut stream, &answer).await.map(|()| Received::Request)
}

async fn send(stream: &mut UnixStream, line: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    timeout(TRANSFER_TIMEOUT, stream.write_all(&text)).await?
}
