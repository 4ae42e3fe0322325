//! The Unix socket for the plugin's requests. Only root can connect to it, the later of two agents owns it, and slow or
//! malformed clients do not delay others.

use super::facts::{Answers, record};
use super::health::accept_all;
use crate::cluster::agent::{AgentAnswer, AgentRequest, Hello, MAX_REQUEST, RequestKind};
use crate::trusted_file::{FileId, create_directories};
use serde::Serialize;
use std::fs::{DirBuilder, Permissions};
use std::future::pending;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// The limit of connections; further ones wait in the kernel.
pub(super) const MAX_CONNECTIONS: u32 = 64;
/// The timeout for receiving a request and for sending an answer.
pub(super) const TRANSFER_TIMEOUT: Duration = Duration::from_secs(2);
/// The timeout for an answer, if the plugin would wait longer.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(30);
/// The interval of the checks that the socket still exists.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// A socket of this process.
struct BoundSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Identifies the socket file, because another agent may replace it under the same name.
    file: FileId,
}

/// Answers requests on `path` from when the agent leads until the future is dropped. If the socket can't be bound, or is
/// removed, it binds it again.
pub(super) async fn serve(
    path: &Path,
    answers: &Answers,
    connections: &Arc<Semaphore>,
    mut leads: watch::Receiver<bool>,
) {
    if leads.wait_for(|leads| *leads).await.is_err() {
        // The agent ends.
        return pending().await;
    }
    let mut logged = String::new();
    loop {
        match bind(path) {
            Ok(bound) => {
                tracing::info!(socket = %path.display(), "serving the plugin's requests");
                logged.clear();
                let replaced = async {
                    while bound.is_in_place() {
                        sleep(CHECK_INTERVAL).await;
                    }
                };
                let accept = async || bound.listener.accept().await;
                tokio::select! {
                    () = replaced => {}
                    () = accept_all(connections, accept, |(stream, _)| handle(stream, answers.clone())) => {}
                }
            }
            Err(error) => {
                let error = error.to_string();
                if logged != error {
                    tracing::warn!(
                        socket = %path.display(), error,
                        "can't listen on the agent socket; until it works, the plugin asks the API server"
                    );
                    logged = error;
                }
                sleep(CHECK_INTERVAL).await;
            }
        }
    }
}

/// Binds the socket in a private directory, and moves it to its path when only root can connect: there is no moment
/// without a socket, and none at which other users can connect.
fn bind(path: &Path) -> io::Result<BoundSocket> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    create_directories(directory)?;
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

impl BoundSocket {
    fn is_in_place(&self) -> bool {
        identity(&self.path).is_ok_and(|file| file == self.file)
    }
}

impl Drop for BoundSocket {
    /// Removes the socket's file, unless another agent has replaced it.
    fn drop(&mut self) {
        if self.is_in_place()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(socket = %self.path.display(), %error, "can't remove the agent socket");
        }
    }
}

/// Identifies the socket file at `path`.
pub(super) fn identity(path: &Path) -> io::Result<FileId> {
    Ok(FileId::of(&fs::symlink_metadata(path)?))
}

async fn handle(stream: UnixStream, answers: Answers) {
    if let Err(error) = answer(stream, &answers).await {
        tracing::debug!(%error, "request from the plugin failed");
    }
}

/// Reads one request and answers it.
async fn answer(mut stream: UnixStream, answers: &Answers) -> io::Result<()> {
    let uid = stream.peer_cred()?.uid();
    if uid != 0 {
        tracing::warn!(uid, "rejected a request: only root may use the agent socket");
        return Ok(());
    }
    let received = Instant::now();
    let mut line = Vec::new();
    let mut reader = BufReader::new(&mut stream).take(MAX_REQUEST);
    timeout_at(received + TRANSFER_TIMEOUT, reader.read_until(b'\n', &mut line)).await??;
    if line.is_empty() {
        return Ok(());
    }
    let request = serde_json::from_slice(&line).unwrap_or_else(|error| {
        tracing::warn!(%error, "malformed request");
        AgentRequest::default()
    });
    drop(line);
    if let RequestKind::Called(report) = &request.ask {
        record(report, &answers.metrics);
        return Ok(());
    }
    send(&mut stream, &Hello::own()).await?;
    let wait = Duration::from_millis(request.wait_ms).min(MAX_ANSWER_TIME);
    let answer: AgentAnswer =
        timeout_at(received + wait, answers.answer(request.ask, request.from_memory, received + wait)).await?;
    send(&mut stream, &answer).await
}

async fn send(stream: &mut UnixStream, line: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    timeout(TRANSFER_TIMEOUT, stream.write_all(&text)).await?
}
