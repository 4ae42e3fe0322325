//! The node's agent as a source of facts: one request per connection over its socket. If the agent does not answer,
//! the API server is the fallback within the same deadline.
//!
//! `protocol` contains the messages.

use super::api::{Api, WRITE_TIMEOUT};
use super::resources::{DefinitionQuery, Event, Lookup};
use super::{Cluster, Definitions};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use nix::errno::Errno;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket};
use protocol::MAX_ANSWER;
pub use protocol::{
    AgentAnswer, AgentRequest, BypassingContainer, CallReport, ContainersStatus, FACTS, Hello, MAX_FINDINGS,
    MAX_REQUEST, PodFinding, PoliciesReport, PolicyCounts, RequestKind,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::cell::RefCell;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

mod protocol;

/// The maximum timeout for the agent if there is a fallback. The agent may have to ask the API, which may not know a
/// pod for two seconds.
const MAX_AGENT_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout for the agent's greeting: an agent that is not stuck sends it at once.
const HELLO_TIMEOUT: Duration = Duration::from_secs(1);
/// The timeout for what the agent has in memory.
const MEMORY_TIMEOUT: Duration = Duration::from_millis(200);
/// The timeout of a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Sends a call's report to the agent behind `socket`. An agent that does not accept it at once does not get it.
pub fn tell(socket: &Path, called: CallReport) {
    let request = AgentRequest { ask: RequestKind::Called(called), ..AgentRequest::default() };
    // The socket is non-blocking: nothing here waits.
    let sent = open(socket).and_then(|mut stream| {
        stream.write_all(&line(&request)).map_err(|error| NoAnswer::NotConnected(error.to_string()))
    });
    if let Err(error) = sent {
        tracing::debug!(?error, "the report of this call is not sent to the agent");
    }
}

/// Returns the excluded containers of a pod sandbox as the agent behind `socket` knows them.
///
/// # Errors
/// The agent does not answer within `timeout`, or an earlier version does not know the request.
pub fn excluded_containers(socket: &Path, sandbox_id: &str, timeout: Duration) -> Result<ContainersStatus, String> {
    let read = |answer| if let AgentAnswer::Containers(status) = answer { Some(status) } else { None };
    ask(socket, RequestKind::Containers { container: sandbox_id.to_owned() }, timeout, read)
}

/// Returns how many pods of the node have the rules of their policies, as the agent behind `socket` knows them.
///
/// # Errors
/// As [`excluded_containers`].
pub fn pod_policies(socket: &Path, timeout: Duration) -> Result<PoliciesReport, String> {
    let read = |answer| if let AgentAnswer::Policies(report) = answer { Some(report) } else { None };
    ask(socket, RequestKind::Policies, timeout, read)
}

/// Returns which watches of the agent behind `socket` have not been synchronized for a while, each with its cause.
///
/// # Errors
/// As [`excluded_containers`].
pub fn broken_watches(socket: &Path, timeout: Duration) -> Result<Vec<String>, String> {
    let read = |answer| if let AgentAnswer::Watches { broken } = answer { Some(broken) } else { None };
    ask(socket, RequestKind::Watches, timeout, read)
}

/// Sends a request without a fallback to the agent behind `socket`.
fn ask<T>(
    socket: &Path,
    ask: RequestKind,
    timeout: Duration,
    read: impl FnOnce(AgentAnswer) -> Option<T>,
) -> Result<T, String> {
    let answer = exchange(socket, ask, false, timeout).and_then(|answer| read(answer).ok_or_else(other));
    answer.map_err(|no_answer| no_answer.to_string())
}

/// The agent behind a socket, with the API as fallback.
pub(super) struct AgentClient {
    socket: PathBuf,
    api: Option<Api>,
    /// The timeout for facts, for the agent and its fallback together.
    timeout: Duration,
    /// Whether only what the agent has in memory is requested.
    from_memory: bool,
    /// Why the agent did not answer in this call; it gets no further requests.
    silence: RefCell<Option<NoAnswer>>,
}

impl AgentClient {
    pub(super) fn new(socket: PathBuf, api: Option<Api>, timeout: Duration) -> Self {
        Self { socket, api, timeout, from_memory: false, silence: RefCell::new(None) }
    }

    /// Returns the agent's memory as a source, which answers at once or not at all.
    pub(super) fn memory(socket: PathBuf) -> Self {
        Self { from_memory: true, ..Self::new(socket, None, MEMORY_TIMEOUT) }
    }

    /// Returns what `read` takes from the agent's answer, or else the result of `fallback`, by the same deadline. The
    /// agent has half of `timeout`, so that there is time for the fallback.
    fn request<T>(
        &self,
        ask: RequestKind,
        timeout: Duration,
        read: impl FnOnce(AgentAnswer) -> Option<T>,
        fallback: impl FnOnce(&Api) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let timeout = timeout.min(self.timeout);
        let started = Instant::now();
        let agent_timeout = if self.api.is_some() { (timeout / 2).min(MAX_AGENT_TIMEOUT) } else { timeout };
        let answer = self.ask_agent(ask, agent_timeout);
        let no_answer = match answer.and_then(|answer| read(answer).ok_or_else(other)) {
            Ok(value) => {
                tracing::debug!(facts = "agent", "answered by the agent");
                return Ok(value);
            }
            Err(NoAnswer::Failed(error)) if error.code == Code::PodUnknown || self.api.is_none() => return Err(error),
            Err(no_answer) => no_answer,
        };
        let (socket, why) = (self.socket.display(), no_answer.to_string());
        let Some(api) = &self.api else {
            let msg = format!(
                "kubernetes.agent_socket {socket}: no facts from the agent; check that the agent's pod \
                 (detour-agent-…) runs on this node, or set kubernetes.kubeconfig as fallback"
            );
            return Err(Error::new(Code::TryAgain, msg).with_details(why));
        };
        tracing::debug!(facts = "api", why, "asking the API server instead of the agent");
        let is_connected = !matches!(no_answer, NoAnswer::NotConnected(_));
        fallback(&api.since(started, timeout, is_connected)).map_err(|error| {
            let separator = if error.details.is_empty() { "" } else { "; " };
            let details = format!("{}{separator}agent_socket {socket}: {why}", error.details);
            error.with_details(details)
        })
    }

    /// Returns the agent's answer, or the reason for its absence.
    fn ask_agent(&self, ask: RequestKind, timeout: Duration) -> Result<AgentAnswer, NoAnswer> {
        if let Some(silence) = &*self.silence.borrow() {
            return Err(silence.clone());
        }
        exchange(&self.socket, ask, self.from_memory, timeout).inspect_err(|error| {
            let (socket, why) = (self.socket.display(), error.to_string());
            match error {
                NoAnswer::NotConnected(_) => tracing::info!(%socket, why, "no agent answers"),
                NoAnswer::Silent(_) => tracing::warn!(%socket, why, "the agent does not answer"),
                NoAnswer::Failed(_) => return,
            }
            *self.silence.borrow_mut() = Some(error.clone());
        })
    }
}

impl Cluster for AgentClient {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        let read = |answer| match answer {
            AgentAnswer::Facts { pod, namespace }
                if (&pod.namespace, &pod.name) == (&wanted.namespace, &wanted.name)
                    && pod.matches(wanted)
                    && namespace.as_ref().map(|found| &found.name) == with_namespace.then_some(&wanted.namespace) =>
            {
                Some(Facts { pod: *pod, namespace })
            }
            _ => None,
        };
        let ask = RequestKind::Facts { pod: wanted.clone(), with_namespace };
        let facts = self.request(ask, self.timeout, read, |api| api.facts(wanted, with_namespace));
        facts.map_err(|error| error.of_pod(&wanted.namespace, &wanted.name))
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        let read = |answer| match answer {
            AgentAnswer::Namespace { namespace } if namespace.name == wanted.namespace => Some(namespace),
            _ => None,
        };
        let ask = RequestKind::Namespace { pod: wanted.clone() };
        let namespace = self.request(ask, self.timeout, read, |api| api.namespace(wanted));
        namespace.map_err(|error| error.of_pod(&wanted.namespace, &wanted.name))
    }

    fn probe(&self) -> Result<(), Error> {
        self.request(RequestKind::Probe, PROBE_TIMEOUT, read_done, |api| api.probe())
    }

    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        let ask = RequestKind::Report { pod: pod.reference(), status: status.map(Into::into), events: events.to_vec() };
        self.request(ask, WRITE_TIMEOUT, read_done, |api| api.report(pod, status, events))
    }
}

impl Definitions for AgentClient {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let read = |answer| match answer {
            AgentAnswer::Definitions { found } if found.len() == wanted.len() => Some(found),
            _ => None,
        };
        let ask = RequestKind::Definitions { wanted: wanted.to_vec() };
        self.request(ask, self.timeout, read, |api| api.definitions(wanted))
    }
}

fn read_done(answer: AgentAnswer) -> Option<()> {
    matches!(answer, AgentAnswer::Done).then_some(())
}

/// Why the agent does not answer what was requested.
#[derive(Debug, Clone, thiserror::Error)]
enum NoAnswer {
    /// No process of root accepts a connection.
    #[error("{0}")]
    NotConnected(String),
    /// No answer, one that can't be read, or one of another kind.
    #[error("{0}")]
    Silent(String),
    /// The request failed.
    #[error("the agent failed: {0}")]
    Failed(Error),
}

/// Returns the reason if the answer is that of an earlier version, or of an agent that is mistaken.
fn other() -> NoAnswer {
    NoAnswer::Silent("the agent answered another request, or its version does not support this one".to_owned())
}

/// Sends a request and waits for the answer.
fn exchange(path: &Path, ask: RequestKind, from_memory: bool, timeout: Duration) -> Result<AgentAnswer, NoAnswer> {
    let deadline = Instant::now() + timeout;
    let wait_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    let mut stream = DeadlineStream { stream: open(path)?, deadline: deadline.min(Instant::now() + HELLO_TIMEOUT) };
    let failed = |what: &str, error: &io::Error| NoAnswer::Silent(format!("{what}: {}", cause(error)));
    let request = line(&AgentRequest { wait_ms, from_memory, ask });
    let sent = stream.stream.set_nonblocking(false).and_then(|()| stream.write_all(&request));
    sent.map_err(|error| failed("request not sent", &error))?;
    let mut lines = BufReader::new(stream);
    let hello: Hello = read(&mut lines).map_err(|error| failed("no greeting", &error))?;
    if hello.facts < FACTS {
        let version = hello.version;
        return Err(NoAnswer::Silent(format!("the agent has an earlier version ({version}) with fewer facts")));
    }
    lines.get_mut().deadline = deadline;
    match read(&mut lines).map_err(|error| failed("no answer", &error))? {
        AgentAnswer::Failed { code, msg, details } => {
            let error = Error::new(Code::from_number(code).unwrap_or(Code::TryAgain), msg).with_details(details);
            Err(NoAnswer::Failed(error))
        }
        answer => Ok(answer),
    }
}

/// Connects to a listener that belongs to root. No operation on the stream waits.
fn open(path: &Path) -> Result<UnixStream, NoAnswer> {
    let failed = |errno: Errno| NoAnswer::NotConnected(errno.desc().to_lowercase());
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let address = UnixAddr::new(path).map_err(failed)?;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None).map_err(failed)?;
    // A blocking connect to a listener that no longer accepts would never return (unix(7)).
    connect(socket.as_raw_fd(), &address).map_err(|errno| match errno {
        Errno::EAGAIN => NoAnswer::NotConnected("the agent's connection queue is full".to_owned()),
        Errno::ENOENT | Errno::ECONNREFUSED => {
            NoAnswer::NotConnected(format!("no agent listens on the socket: {}", errno.desc().to_lowercase()))
        }
        other => failed(other),
    })?;
    let owner = getsockopt(&socket, PeerCredentials).map_err(failed)?.uid();
    if owner != 0 {
        let why = format!("expected root as listener on the socket, got UID {owner}; remove the socket");
        return Err(NoAnswer::NotConnected(why));
    }
    Ok(socket.into())
}

fn line(value: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line
}

fn read<T: DeserializeOwned>(lines: &mut BufReader<DeadlineStream>) -> io::Result<T> {
    let mut line = Vec::new();
    lines.take(MAX_ANSWER).read_until(b'\n', &mut line)?;
    if line.last() != Some(&b'\n') {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&line)?)
}

fn cause(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "timeout; the agent is stuck or too slow".into(),
        ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
            "the agent closed the connection".into()
        }
        _ => error.to_string(),
    }
}

/// A stream whose reads and writes wait until a deadline, which a peer that never stops sending does not extend.
struct DeadlineStream {
    stream: UnixStream,
    deadline: Instant,
}

impl DeadlineStream {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for DeadlineStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for DeadlineStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
