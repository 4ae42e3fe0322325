//! One question on one connection, within a time.

use super::wire::{AgentAnswer, FACTS, Hello, LONGEST_ANSWER, AgentRequest};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt::PeerCredentials,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// An agent that is not stuck says hello at once.
const HELLO: Duration = Duration::from_secs(1);

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// Nobody is there: no agent on this node, or not now.
    Absent(String),
    /// Somebody is there and does not answer as an agent does.
    Trouble(String),
}

/// Asks, and waits until `until` at the longest.
pub(super) fn exchange(path: &Path, question: &AgentRequest, until: Instant) -> Result<AgentAnswer, NoAnswer> {
    let mut stream = open(path)?;
    let trouble = |doing: &str, error: &io::Error| NoAnswer::Trouble(format!("{doing}: {}", plain(error)));
    let sent = stream.set_write_timeout(Some(HELLO)).and_then(|()| stream.write_all(&line(question)));
    sent.map_err(|error| trouble("the question can't be sent", &error))?;
    let mut lines = BufReader::new(TimedStream { stream, until: until.min(Instant::now() + HELLO) });
    let hello: Hello = read(&mut lines).map_err(|error| trouble("no greeting", &error))?;
    if hello.facts < FACTS {
        let version = hello.version;
        return Err(NoAnswer::Trouble(format!("the agent is of an earlier version ({version}) that knows fewer facts")));
    }
    lines.get_mut().until = until;
    read(&mut lines).map_err(|error| trouble("no answer", &error))
}

/// Says something, and does not wait for anything.
pub(super) fn send_report(path: &Path, question: &AgentRequest) -> Result<(), NoAnswer> {
    let mut stream = open(path)?;
    let lost = |error: io::Error| NoAnswer::Trouble(error.to_string());
    stream.set_nonblocking(true).map_err(lost)?;
    stream.write_all(&line(question)).map_err(lost)
}

/// A connection to a listener of root's.
fn open(path: &Path) -> Result<UnixStream, NoAnswer> {
    let absent = |errno: Errno| NoAnswer::Absent(errno.desc().to_lowercase());
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let trouble = |errno: Errno| NoAnswer::Trouble(errno.desc().to_lowercase());
    let address = UnixAddr::new(path).map_err(trouble)?;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None).map_err(trouble)?;
    // With a listener that accepts nothing any more, a socket that blocks would wait for ever (unix(7)).
    connect(socket.as_raw_fd(), &address).map_err(|errno| match errno {
        Errno::EAGAIN => NoAnswer::Trouble("too many wait for it already".into()),
        Errno::ENOENT | Errno::ECONNREFUSED => absent(errno),
        other => trouble(other),
    })?;
    let owner = getsockopt(&socket, PeerCredentials).map_err(trouble)?.uid();
    if owner != 0 {
        return Err(NoAnswer::Trouble(format!("UID {owner} listens there, not root: remove the socket")));
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false).map_err(|error| NoAnswer::Trouble(error.to_string()))?;
    Ok(stream)
}

fn line(value: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line
}

fn read<T: DeserializeOwned>(lines: &mut BufReader<TimedStream>) -> io::Result<T> {
    let mut line = Vec::new();
    lines.take(LONGEST_ANSWER).read_until(b'\n', &mut line)?;
    if line.last() != Some(&b'\n') {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&line)?)
}

fn plain(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "it is stuck or too slow".into(),
        ErrorKind::UnexpectedEof => "it ends the connection".into(),
        _ => error.to_string(),
    }
}

/// A stream that is read from until a moment.
struct TimedStream {
    stream: UnixStream,
    until: Instant,
}

impl Read for TimedStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer)
    }
}
