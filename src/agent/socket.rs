//! The socket on which the plugin asks: only root can connect to it, the later of two agents has it, and
//! clients that are slow or send garbage delay no other client.
//!
//! What is made of the plugin's word on a call: a line of the log, and counts.

use super::Metrics;
use super::facts::Answers;
use super::health::{Busy, Connections};
use crate::cluster::agent::{AgentAnswer, AgentRequest, CallReport, Hello, LONGEST_QUESTION, RequestKind};
use crate::cni::{CniCommand, Code};
use crate::trusted_file::{FileId, create_directories, open_lock};
use serde::Serialize;
use std::fs::{DirBuilder, File, Permissions};
use std::future::pending;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout, timeout_at};

/// The most connections. At this limit a new one replaces the oldest that has sent no question yet; if all
/// have, it waits in the kernel.
const CONNECTIONS: usize = 64;
/// How long a question or an answer may be under way. The plugin sends at once.
const TRANSFER: Duration = Duration::from_secs(2);
/// No answer takes longer, whatever the plugin would wait for.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// How often is looked whether the socket is still there.
const LOOK: Duration = Duration::from_secs(5);

/// The connections that are served now.
pub(super) struct OpenConnections(Connections);

impl OpenConnections {
    /// No connections.
    pub(super) fn none() -> Self {
        Self(Connections::new(CONNECTIONS))
    }

    /// Waits until every question has an answer, for a moment at the longest.
    pub(super) async fn are_answered(&mut self) {
        let _ = timeout(TRANSFER, self.0.finish()).await;
    }
}

/// A socket of this process's own.
struct BoundSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Identifies the socket file, since another agent may replace it under the same name.
    file: FileId,
}

/// Answers at `path` for as long as the process lives. What it can't have it tries to get again; what a
/// later agent has taken it leaves, until that one is gone.
pub(super) async fn serve(path: &Path, answers: &Answers, OpenConnections(connections): &mut OpenConnections) {
    let (mut bound, mut said) = (None, String::new());
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = look.tick() => match claim(path, bound.as_ref()).await {
                Ok(Some(fresh)) => {
                    tracing::info!(socket = %path.display(), "answers the plugin's questions");
                    said.clear();
                    bound = Some(fresh);
                }
                Ok(None) => {}
                Err(error) => {
                    let why = error.to_string();
                    if said != why {
                        tracing::warn!(socket = %path.display(), why, "can't listen there; the plugin asks the API");
                        said = why;
                    }
                }
            },
            stream = accept(bound.as_ref(), connections) => {
                let answers = answers.clone();
                connections.serve(|busy| async move {
                    if let Err(error) = talk(stream, &answers, &busy).await {
                        tracing::debug!(%error, "a question got lost");
                    }
                });
            }
        }
    }
}

/// The next connection, once there is room for it; waits for ever where there is nothing to listen on.
async fn accept(bound: Option<&BoundSocket>, connections: &mut Connections) -> UnixStream {
    let Some(BoundSocket { listener, .. }) = bound else { return pending().await };
    connections.room().await;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::warn!(%error, "can't take a connection");
                // Out of descriptors, most of all: some are given back soon.
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// A socket at `path`, where it has to be made: there is none, or that of nobody who lives. An agent that
/// has had none yet takes it from whoever has it.
async fn claim(path: &Path, own: Option<&BoundSocket>) -> io::Result<Option<BoundSocket>> {
    if let Some(own) = own {
        match identity(path) {
            Ok(file) if file == own.file => return Ok(None),
            Ok(_) if timeout(TRANSFER, UnixStream::connect(path)).await.is_ok_and(|there| there.is_ok()) => {
                return Ok(None);
            }
            _ => {}
        }
    }
    bind(path).map(Some)
}

/// Makes the socket where nobody gets to it, and moves it to its place when only root does: there is no
/// moment without a socket, and none at which it is open to others.
fn bind(path: &Path) -> io::Result<BoundSocket> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    create_directories(directory)?;
    let _lock = locked(path)?;
    let apart = directory.join(".agent-socket");
    match fs::remove_dir_all(&apart) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    DirBuilder::new().mode(0o700).create(&apart)?;
    let made = apart.join("s");
    let listener = UnixListener::bind(&made)?;
    fs::set_permissions(&made, Permissions::from_mode(0o600))?;
    let file = identity(&made)?;
    put(&made, path)?;
    fs::remove_dir(&apart)?;
    Ok(BoundSocket { listener, path: path.to_owned(), file })
}

/// Gives the socket its place. An empty directory gives way: a pod that mounts the socket before there is
/// one makes that (hostPath, type `DirectoryOrCreate`).
fn put(made: &Path, path: &Path) -> io::Result<()> {
    match fs::rename(made, path) {
        Err(error) if error.kind() == ErrorKind::IsADirectory => {
            let step = "a directory is in the socket's place and can't be removed";
            fs::remove_dir(path).map_err(|why| io::Error::new(why.kind(), format!("{step}: {why}; remove it")))?;
            tracing::warn!(socket = %path.display(), "an empty directory in the socket's place was removed");
            fs::rename(made, path)
        }
        moved => moved,
    }
}

/// Takes the socket away, where it still is this one.
impl Drop for BoundSocket {
    fn drop(&mut self) {
        let removed = locked(&self.path).and_then(|_lock| {
            if identity(&self.path).is_ok_and(|file| file == self.file) {
                fs::remove_file(&self.path)?;
            }
            fs::remove_file(lock_of(&self.path))
        });
        if let Err(error) = removed {
            tracing::warn!(socket = %self.path.display(), %error, "can't take the socket away");
        }
    }
}

/// Keeps other agents from changing what is in the socket's directory. The directory itself is not the
/// lock: every user can open it, and so hold its lock.
fn locked(path: &Path) -> io::Result<File> {
    loop {
        let lock = open_lock(&lock_of(path))?;
        lock.lock()?;
        // An agent that ended has removed it meanwhile: the next one locks another file.
        if lock.metadata()?.nlink() > 0 {
            return Ok(lock);
        }
    }
}

fn lock_of(socket: &Path) -> PathBuf {
    socket.with_file_name("agent.lock")
}

fn identity(path: &Path) -> io::Result<FileId> {
    Ok(FileId::of(&fs::symlink_metadata(path)?))
}

/// One question and its answer.
async fn talk(mut stream: UnixStream, answers: &Answers, busy: &Busy) -> io::Result<()> {
    let asker = stream.peer_cred()?.uid();
    if asker != 0 {
        tracing::warn!(uid = asker, "refuses to answer anybody but root");
        return Ok(());
    }
    let arrived = Instant::now();
    let mut line = Vec::new();
    let mut reader = BufReader::new(&mut stream).take(LONGEST_QUESTION);
    timeout_at(arrived + TRANSFER, reader.read_until(b'\n', &mut line)).await??;
    busy.begin();
    if line.is_empty() {
        // An earlier agent looks whether anybody is here.
        return Ok(());
    }
    let question = serde_json::from_slice(&line).unwrap_or_else(|error| {
        tracing::warn!(%error, "a question is none");
        AgentRequest::default()
    });
    drop(line);
    if let RequestKind::Called(called) = &question.ask {
        answers.told(called);
        return Ok(());
    }
    send(&mut stream, &Hello::own()).await?;
    let wait = Duration::from_millis(question.wait_ms).min(LONGEST_WAIT);
    let answer: AgentAnswer = timeout_at(arrived + wait, answers.answer(question.ask, arrived + wait)).await?;
    send(&mut stream, &answer).await
}

async fn send(stream: &mut UnixStream, line: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    timeout(TRANSFER, stream.write_all(&text)).await?
}

/// Logs a call in one line and counts it.
pub(super) fn record(called: &CallReport, metrics: &Metrics) {
    let milliseconds = |us: u64| format!("{:.1}", us as f64 / 1e3);
    let CallReport { command, pod, container, network, ifname, facts, .. } = called;
    let (wall_ms, cpu_ms) = (milliseconds(called.wall_us), milliseconds(called.cpu_us));
    let warnings = (!called.warnings.is_empty()).then(|| called.warnings.join("; "));
    let facts = (!facts.is_empty()).then_some(facts.as_str());
    // GC is about no container.
    let [pod, container, ifname] = [pod, container, ifname].map(|text| (!text.is_empty()).then_some(text.as_str()));
    match called.code {
        None => tracing::info!(
            command,
            pod,
            network,
            ifname,
            container,
            facts,
            wall_ms,
            cpu_ms,
            warnings,
            "the plugin was called"
        ),
        Some(code) => tracing::error!(
            command,
            pod,
            network,
            ifname,
            container,
            code,
            error = called.error,
            facts,
            wall_ms,
            cpu_ms,
            warnings,
            "the plugin failed"
        ),
    }
    if facts == Some("api") {
        metrics.api_fallback("agent-passed-over");
    }
    // A verb of a later version has no name here.
    let Some(verb) = CniCommand::named(command) else { return };
    let (outcome, reason) = match called.code {
        None => ("done", ""),
        Some(code) => ("failed", Code::numbered(code).map_or("of-another-plugin", Code::name)),
    };
    metrics.call(verb.name(), outcome, reason, called.wall_us as f64 / 1e6);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_what_came_of_them() {
        let metrics = Metrics::default();
        let called = |command: &str, code, facts: &str| {
            let called = CallReport { command: command.into(), code, facts: facts.into(), ..CallReport::default() };
            record(&called, &metrics);
        };
        called("ADD", None, "agent");
        called("ADD", Some(Code::PodUnknown.number()), "api");
        called("ADD", Some(999), "");
        called("LATER", None, "");
        let text = metrics.text();
        for line in [
            r#"detour_plugin_calls_total{verb="ADD",outcome="done",reason=""} 1"#,
            r#"detour_plugin_calls_total{verb="ADD",outcome="failed",reason="pod-unknown"} 1"#,
            r#"detour_plugin_calls_total{verb="ADD",outcome="failed",reason="of-another-plugin"} 1"#,
            r#"detour_api_fallbacks_total{reason="agent-passed-over"} 1"#,
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("LATER"));
    }
}
