//! One registration: the plugin's answers to the runtime, independent of the socket.

use super::messages::{
    Configure, Event, EventKind, PLUGIN_SERVICE, RUNTIME_SERVICE, RegisterPlugin, Subscription, Synchronization,
};
use super::ttrpc::{self, Demultiplexer, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, Request, Status, UNIMPLEMENTED};
use super::{NriHandler, NriStatus};
use prost::{DecodeError, Message};
use std::fmt::Display;
use std::mem::take;
use std::time::{Duration, Instant};

/// The name and the index with which the plugin registers. The runtime calls plugins in the order of their indexes.
const NAME: &str = "detour";
const INDEX: &str = "10";
/// The number of this plugin's only call.
const REGISTRATION: u32 = 1;
/// The limit of memory for the pods and containers of the node: about 30,000.
const MAX_SYNCHRONIZATION: usize = 16 << 20;

/// What `Synchronize` contains, for errors.
const CONTAINERS: &str = "list of pods and containers";

/// Why a connection ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The caller of [`super::run`] ended it.
    Ended,
    /// The runtime closed it; [`Session::closed`] returns why.
    Closed,
    /// Any other reason.
    Cause(String),
}

impl From<String> for Failure {
    fn from(cause: String) -> Self {
        Self::Cause(cause)
    }
}

/// Sends bytes to the runtime.
pub(crate) type Send<'a> = dyn FnMut(&[u8]) -> Result<(), Failure> + 'a;

/// What a call reports.
enum Report {
    Event(Event),
    All(Synchronization),
    Nothing,
}

/// The state of a registration.
#[derive(Debug, Default)]
pub(crate) struct Session {
    demultiplexer: Demultiplexer,
    configuration: Configure,
    synchronization: Synchronization,
    /// Whether the runtime has synchronized the plugin, so that it reports events.
    synchronized: bool,
    /// Why the runtime is about to close the connection, if it is known.
    cause: Option<String>,
    /// How long the plugin took for its last answer.
    last_answer: Duration,
}

impl Session {
    /// Returns the call that registers the plugin.
    pub(super) fn registration() -> Vec<u8> {
        let argument = RegisterPlugin { name: NAME.to_owned(), index: INDEX.to_owned() };
        ttrpc::request(REGISTRATION, RUNTIME_SERVICE, "RegisterPlugin", &argument)
    }

    /// Returns the status with the runtime after it has registered the plugin; `None` before.
    pub(super) fn registered(&self) -> Option<NriStatus> {
        let (runtime, version) = self.configuration.runtime();
        self.synchronized.then_some(NriStatus::Registered { runtime, version })
    }

    /// Answers the calls in `input`, and calls `handler`.
    ///
    /// # Errors
    /// The connection can't be used anymore; the error is the cause.
    pub(crate) fn receive(
        &mut self,
        mut input: &[u8],
        handler: &mut impl NriHandler,
        send: &mut Send<'_>,
    ) -> Result<(), Failure> {
        while let Some(message) = self.demultiplexer.next(&mut input)? {
            let malformed = |_: DecodeError| "the runtime sent a malformed message".to_owned();
            if let Some(request) = message.request() {
                self.answer(message.stream(), &request.map_err(malformed)?, handler, send)?;
            } else if let Some(response) = message.response() {
                response.map_err(malformed)?.map_err(|Status { code, message }| {
                    format!(
                        "the runtime refused to register plugin {NAME:?} with index {INDEX}: {message} (code {code})"
                    )
                })?;
            }
        }
        Ok(())
    }

    /// Returns why the runtime has probably closed the connection.
    pub(crate) fn closed(&self) -> String {
        let limit = Duration::from_millis(self.configuration.request_timeout.try_into().unwrap_or_default());
        match self {
            Self { cause: Some(cause), .. } => cause.clone(),
            // The runtime's clock started earlier than the plugin's.
            Self { last_answer, .. } if !limit.is_zero() && *last_answer >= limit / 2 => format!(
                "the runtime closed the connection: the plugin's last answer took {} ms, and the runtime waits {} ms",
                last_answer.as_millis(),
                limit.as_millis()
            ),
            Self { synchronized: true, .. } => {
                "the runtime closed the connection; if it does not restart, see its log".into()
            }
            Self { .. } => "the runtime closed the connection before it registered the plugin; see its log".into(),
        }
    }

    fn answer(
        &mut self,
        stream: u32,
        request: &Request,
        handler: &mut impl NriHandler,
        send: &mut Send<'_>,
    ) -> Result<(), Failure> {
        let received = Instant::now();
        let (result, report) = self.read(request);
        if let Report::Event(Event { kind: Some(EventKind::Start), pod, container }) = &report {
            handler.start(pod, container);
        }
        self.last_answer = received.elapsed();
        send(&ttrpc::response(stream, result))?;
        match report {
            Report::Event(Event { kind: Some(EventKind::Started), pod, container }) => {
                handler.started(&pod, &container);
            }
            Report::Event(Event { kind: Some(EventKind::Stop), pod, container }) => {
                handler.stopped(&pod, &container);
            }
            Report::Event(Event { kind: Some(EventKind::Remove), pod, container }) => {
                handler.removed(&pod, &container);
            }
            Report::All(Synchronization { pods, containers, .. }) => {
                handler.synchronize(pods, containers);
                self.synchronized = true;
            }
            Report::Event(_) | Report::Nothing => {}
        }
        Ok(())
    }

    /// Returns the answer to a call, and what the call reports.
    fn read(&mut self, request: &Request) -> (Result<Vec<u8>, Status>, Report) {
        let unknown = || {
            let message = format!("unknown method {}", ttrpc::short_text(&request.method));
            (Err(Status { code: UNIMPLEMENTED, message }), Report::Nothing)
        };
        if request.service != PLUGIN_SERVICE {
            return unknown();
        }
        let event = match request.method.as_str() {
            "Configure" => return (self.configure(&request.payload), Report::Nothing),
            "Synchronize" => {
                let answer = self.synchronize(&request.payload);
                let complete = answer.is_ok() && !self.synchronization.more;
                let report = complete.then(|| Report::All(take(&mut self.synchronization)));
                return (answer, report.unwrap_or(Report::Nothing));
            }
            "Shutdown" => {
                self.cause = Some("the runtime is shutting down".into());
                return (Ok(Vec::new()), Report::Nothing);
            }
            "StateChange" => Event::of_state_change(&request.payload),
            method => match EventKind::of_method(method) {
                Some(kind) => Event::of_method(kind, &request.payload),
                None => return unknown(),
            },
        };
        // With an error as the answer, containerd would not start the container.
        let report = match event {
            Ok(event) if event.is_valid() => Report::Event(event),
            Ok(_) => Report::Nothing,
            Err(error) => {
                tracing::warn!(%error, "can't read an event of the container runtime; the container starts captured");
                Report::Nothing
            }
        };
        (Ok(Vec::new()), report)
    }

    fn configure(&mut self, message: &[u8]) -> Result<Vec<u8>, Status> {
        let configuration = Configure::decode(message);
        self.configuration = configuration.map_err(|error| self.refuse("configuration", INVALID_ARGUMENT, error))?;
        Ok(Subscription::to_all().encode_to_vec())
    }

    fn synchronize(&mut self, part: &[u8]) -> Result<Vec<u8>, Status> {
        let added = self.synchronization.add(part);
        added.map_err(|error| self.refuse(CONTAINERS, INVALID_ARGUMENT, error))?;
        if self.synchronization.size() > MAX_SYNCHRONIZATION {
            let limit = format!("expected pods and containers of at most {MAX_SYNCHRONIZATION} bytes, got more");
            return Err(self.refuse(CONTAINERS, RESOURCE_EXHAUSTED, limit));
        }
        Ok(self.synchronization.answer().encode_to_vec())
    }

    /// Returns an answer after which the runtime closes the connection.
    fn refuse(&mut self, what: &str, code: i32, error: impl Display) -> Status {
        self.cause = Some(format!("can't read the runtime's {what}: {error}"));
        Status { code, message: error.to_string() }
    }
}
