//! Facts from the node's agent, over its socket; where it does not answer, from the API within the
//! same wait.
//!
//! One question on one connection, within a time.

use super::api::{Api, WRITE};
use super::{Cluster, DefinitionQuery, Event, Lookup, about};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use nix::errno::Errno;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::cell::RefCell;
use std::io;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use wire::LONGEST_ANSWER;
pub use wire::{AgentAnswer, AgentRequest, CallReport, FACTS, Hello, LONGEST_QUESTION, RequestKind};

mod wire;

/// The longest that an agent is waited for. It may have to ask the API, which may not know a pod for
/// two seconds.
const LONGEST: Duration = Duration::from_secs(5);

/// The agent behind a socket.
pub(super) struct AgentClient {
    socket: PathBuf,
    /// Whom to ask where the agent does not answer.
    api: Option<Api>,
    /// How long facts may take, both together.
    timeout: Duration,
    /// Why the agent is not asked again in this call.
    given_up: RefCell<Option<String>>,
}

impl AgentClient {
    pub(super) fn new(socket: PathBuf, api: Option<Api>, timeout: Duration) -> Self {
        Self { socket, api, timeout, given_up: RefCell::new(None) }
    }

    /// What `read` takes from the agent's answer; else what `api` does, told when the wait began. The
    /// agent has half of `wait`, so that there is time for the API.
    fn settle<T>(
        &self,
        ask: RequestKind,
        wait: Duration,
        read: impl FnOnce(AgentAnswer) -> Option<T>,
        api: impl FnOnce(&Api, Instant) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let started = Instant::now();
        let patience = if self.api.is_some() { (wait / 2).min(LONGEST) } else { wait };
        let why = match self.put(ask, started, patience) {
            Ok(AgentAnswer::Failed { code, msg, details }) => {
                let of_agent = Error::new(Code::numbered(code).unwrap_or(Code::TryAgain), msg).with_details(details);
                if wire::is_final(code) || self.api.is_none() {
                    return Err(of_agent);
                }
                format!("it can't know: {of_agent}")
            }
            Ok(AgentAnswer::Unknown) => "it is of a version that does not know the question".to_owned(),
            Ok(answer) => match read(answer) {
                Some(read) => {
                    tracing::debug!(facts = "agent", "answered by the agent");
                    return Ok(read);
                }
                None => "its answer is to another question".to_owned(),
            },
            Err(why) => why,
        };
        match &self.api {
            Some(fallback) => {
                tracing::debug!(facts = "api", why, "asks the API instead of the agent");
                api(fallback, started)
            }
            None => Err(self.alone(&why)),
        }
    }

    /// The agent's answer, or why there is none.
    fn put(&self, ask: RequestKind, started: Instant, patience: Duration) -> Result<AgentAnswer, String> {
        if let Some(why) = &*self.given_up.borrow() {
            return Err(why.clone());
        }
        let wait_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        exchange(&self.socket, &AgentRequest { wait_ms, ask }, started + patience).map_err(|silence| {
            let socket = self.socket.display();
            let why = match silence {
                NoAnswer::Absent(why) => {
                    tracing::info!(%socket, why, "no agent listens");
                    format!("nobody listens there: {why}")
                }
                NoAnswer::Trouble(why) => {
                    tracing::warn!(%socket, why, "the agent does not answer");
                    why
                }
            };
            *self.given_up.borrow_mut() = Some(why.clone());
            why
        })
    }

    fn alone(&self, why: &str) -> Error {
        let socket = self.socket.display();
        let msg = format!(
            "kubernetes.agent_socket {socket} gives no facts; see whether the agent's pod (detour-agent-…) runs on this \
             node, or name kubernetes.kubeconfig as well"
        );
        Error::new(Code::TryAgain, msg).with_details(why)
    }
}

impl Cluster for AgentClient {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        let is_it = |pod: &Pod, namespace: &Option<Namespace>| {
            let named = (&pod.namespace, &pod.name) == (&wanted.namespace, &wanted.name);
            named && pod.is(wanted) && namespace.is_some() == with_namespace
        };
        let read = |answer| match answer {
            AgentAnswer::Facts { pod, namespace } if is_it(&pod, &namespace) => Some(Facts { pod: *pod, namespace }),
            _ => None,
        };
        let ask = RequestKind::Facts { pod: wanted.clone(), with_namespace };
        let facts = self.settle(ask, self.timeout, read, |api, since| api.facts_since(since, wanted, with_namespace));
        facts.map_err(|error| named(wanted, error))
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        let read = |answer| match answer {
            AgentAnswer::Namespace { namespace } if namespace.name == wanted.namespace => Some(namespace),
            _ => None,
        };
        let ask = RequestKind::Namespace { pod: wanted.clone() };
        let namespace = self.settle(ask, self.timeout, read, |api, since| api.namespace_since(since, wanted));
        namespace.map_err(|error| named(wanted, error))
    }

    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let is_it = |(sought, found): (&DefinitionQuery, &Lookup)| match found {
            Lookup::Found(definition) => definition.object == sought.object,
            Lookup::Missing(_) => true,
        };
        let read = |answer| match answer {
            AgentAnswer::Definitions { found } if found.len() == wanted.len() => {
                wanted.iter().zip(&found).all(is_it).then_some(found)
            }
            _ => None,
        };
        let ask = RequestKind::Definitions { wanted: wanted.to_vec() };
        self.settle(ask, self.timeout, read, |api, since| api.look_up(since, wanted))
    }

    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>> {
        let read = |answer| match answer {
            AgentAnswer::Namespaces { names } => Some(names),
            _ => None,
        };
        let ask = RequestKind::NamespacesWithDefinition { name: name.to_owned() };
        let none = || Error::new(Code::TryAgain, "not known");
        let list = |api: &Api, _| api.namespaces_with_definition(name).ok_or_else(none);
        self.settle(ask, WRITE, read, list).inspect_err(|error| tracing::debug!("{error}")).ok()
    }

    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        let told = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() };
        let ask = RequestKind::Report { pod: told, status: status.map(ToOwned::to_owned), events: events.to_vec() };
        self.settle(ask, WRITE, done, |api, since| api.report_since(since, pod, status, events))
    }

    fn probe(&self) -> Result<(), Error> {
        self.settle(RequestKind::Probe, Duration::from_secs(1), done, |api, _| api.probe())
    }
}

/// Tells the agent behind `socket` of a call that has ended. Where it does not take that at once, it is
/// not told.
pub fn tell(socket: &Path, called: CallReport) {
    let question = AgentRequest { wait_ms: 0, ask: RequestKind::Called(called) };
    if let Err(silence) = send_report(socket, &question) {
        tracing::debug!(?silence, "the agent is not told of this call");
    }
}

fn done(answer: AgentAnswer) -> Option<()> {
    matches!(answer, AgentAnswer::Done).then_some(())
}

/// The error with the pod's name, where it has not got it already.
fn named(wanted: &PodRef, error: Error) -> Error {
    if error.msg.contains(&format!("{}/{}", wanted.namespace, wanted.name)) { error } else { about(wanted, error) }
}

/// An agent that is not stuck says hello at once.
const HELLO: Duration = Duration::from_secs(1);

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum NoAnswer {
    /// Nobody is there: no agent on this node, or not now.
    Absent(String),
    /// Somebody is there and does not answer as an agent does.
    Trouble(String),
}

/// Asks, and waits until `until` at the longest.
fn exchange(path: &Path, question: &AgentRequest, until: Instant) -> Result<AgentAnswer, NoAnswer> {
    let mut stream = open(path)?;
    let trouble = |doing: &str, error: &io::Error| NoAnswer::Trouble(format!("{doing}: {}", plain(error)));
    let sent = stream.set_write_timeout(Some(HELLO)).and_then(|()| stream.write_all(&line(question)));
    sent.map_err(|error| trouble("the question can't be sent", &error))?;
    let mut lines = BufReader::new(TimedStream { stream, until: until.min(Instant::now() + HELLO) });
    let hello: Hello = read(&mut lines).map_err(|error| trouble("no greeting", &error))?;
    if hello.facts < FACTS {
        let version = hello.version;
        return Err(NoAnswer::Trouble(format!(
            "the agent is of an earlier version ({version}) that knows fewer facts"
        )));
    }
    lines.get_mut().until = until;
    read(&mut lines).map_err(|error| trouble("no answer", &error))
}

/// Says something, and does not wait for anything.
fn send_report(path: &Path, question: &AgentRequest) -> Result<(), NoAnswer> {
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
