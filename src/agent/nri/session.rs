//! Connects to the runtime's socket, and reconnects after each failure. One registration: the plugin's answers to the
//! runtime, over any stream.

use super::ttrpc::{
    self, Messages, OF_PLUGIN, OF_RUNTIME, REQUEST, RESPONSE, Request, Response, Status, UNIMPLEMENTED, short_text,
};
use super::{
    Answer, Configure, Containers, NriContainer, NriReport, PAUSED, PLUGIN_SERVICE, RUNNING, RUNTIME_SERVICE,
    RegisterPlugin, SUBSCRIPTION, Stage, event,
};
use crate::trusted_file::{check, is_trusted};
use crate::wait::Backoff;
use prost::{DecodeError, Message};
use std::convert::Infallible;
use std::io::ErrorKind;
use std::mem::take;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// The name and the index with which the plugin registers. The runtime calls plugins in the order of their indexes.
const NAME: &str = "detour";
const INDEX: &str = "10";
/// The number of this plugin's only call.
const REGISTRATION: u32 = 1;
/// The timeout from the connection to the end of the registration. A runtime registers one plugin after the other, and
/// waits 5 s for each.
pub(crate) const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the start of a container waits, whatever the receiver of the reports does. The runtime starts no other
/// container of the node meanwhile, and closes the connection after 2 s by default.
pub(in crate::agent) const START_TIMEOUT: Duration = Duration::from_secs(1);
/// The timeout for sending an answer.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// The pause after the first failure.
const MIN_BACKOFF: Duration = Duration::from_millis(100);
/// The longest pause, without its random part: containers that start before the registration start captured.
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// The cause if the socket does not exist, with the next step.
const NOT_FOUND: &str =
    "socket not found; check that the container runtime runs and that its configuration enables NRI";

/// The state of a registration.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    reports: &'a mpsc::Sender<NriReport>,
    configuration: Configure,
    /// The running containers from the parts of the runtime's list.
    running: Vec<NriContainer>,
    /// Whether the runtime has synchronized the plugin, so that it reports events.
    synchronized: bool,
}

impl<'a> Session<'a> {
    pub(crate) fn new(reports: &'a mpsc::Sender<NriReport>) -> Self {
        Self { reports, configuration: Configure::default(), running: Vec::new(), synchronized: false }
    }

    /// Registers by `deadline`, and answers calls until the connection fails.
    ///
    /// # Errors
    /// Always, with the cause of the end.
    pub(crate) async fn serve(
        &mut self,
        reader: impl AsyncRead + Unpin,
        mut writer: impl AsyncWrite + Unpin,
        deadline: Instant,
    ) -> Result<Infallible, String> {
        let argument = RegisterPlugin { name: NAME.to_owned(), index: INDEX.to_owned() };
        let registration = ttrpc::request(REGISTRATION, RUNTIME_SERVICE, "RegisterPlugin", &argument);
        send(&mut writer, &registration).await?;
        let mut messages = Messages::new(reader);
        loop {
            let message = match self.synchronized {
                true => messages.next().await,
                false => timeout_at(deadline, messages.next()).await.map_err(|_| {
                    let seconds = REGISTRATION_TIMEOUT.as_secs();
                    format!("the runtime did not register the plugin within {seconds} s; see its log")
                })?,
            };
            let message = message.map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
                    "the runtime closed the connection; if it does not restart, see its log".to_owned()
                }
                _ => error.to_string(),
            })?;
            match message.kind {
                (OF_RUNTIME, REQUEST) => {
                    let request = Request::decode(&*message.contents).map_err(malformed)?;
                    let (result, report) = self.answer(&request).await?;
                    send(&mut writer, &ttrpc::response(message.stream, result)).await?;
                    if let Some(report) = report {
                        // Fails only if the receiver has ended.
                        let _ = self.reports.send(report).await;
                    }
                }
                (OF_PLUGIN, RESPONSE) => {
                    let Response { status, .. } = Response::decode(&*message.contents).map_err(malformed)?;
                    if let Some(Status { code, message }) = status.filter(|status| status.code != 0) {
                        let message = short_text(&message);
                        return Err(format!(
                            "the runtime refused to register plugin {NAME:?} with index {INDEX}: {message} (code {code})"
                        ));
                    }
                }
                _ => {}
            }
        }
    }

    /// Returns the answer to a call, and what to report after it: all except the start of a container.
    async fn answer(&mut self, request: &Request) -> Result<(Result<Vec<u8>, Status>, Option<NriReport>), String> {
        let unknown = || Status { code: UNIMPLEMENTED, message: format!("unknown method {}", request.method) };
        let (mut result, mut report) = (Ok(Vec::new()), None);
        match request.method.as_str() {
            _ if request.service != PLUGIN_SERVICE => result = Err(unknown()),
            "Configure" => {
                self.configuration = Configure::decode(&*request.payload).map_err(malformed)?;
                result = Ok(Answer { number: SUBSCRIPTION }.encode_to_vec());
            }
            "Synchronize" => {
                let Containers { containers, more } = Containers::decode(&*request.payload).map_err(malformed)?;
                let running = containers.into_iter().filter(|one| matches!(one.state, PAUSED | RUNNING));
                self.running.extend(running.filter_map(NriContainer::checked));
                result = Ok(Answer { number: more.into() }.encode_to_vec());
                if !more {
                    let Configure { runtime, version, .. } = &self.configuration;
                    let runtime = format!("{} {}", short_text(runtime), short_text(version));
                    report = Some(NriReport::Registered { runtime, running: take(&mut self.running) });
                    self.synchronized = true;
                }
            }
            "Shutdown" => {}
            method => {
                let (answer, answered) = oneshot::channel();
                match event(method, &request.payload, answer) {
                    Some(Some(start @ NriReport::Container(Stage::Start(_), _))) => {
                        self.wait_for(start, answered).await
                    }
                    Some(event) => report = event,
                    None => result = Err(unknown()),
                }
            }
        }
        Ok((result, report))
    }

    /// Reports the start of a container, and waits for the receiver's answer as long as the runtime should wait.
    async fn wait_for(&self, start: NriReport, answered: oneshot::Receiver<()>) {
        let limit = self.configuration.request_timeout.try_into().ok().filter(|limit| *limit > 0);
        let limit = limit.map_or(START_TIMEOUT, |limit| START_TIMEOUT.min(Duration::from_millis(limit) / 2));
        let _ = timeout(limit, async {
            let _ = self.reports.send(start).await;
            // Also if the receiver drops its end.
            let _ = answered.await;
        })
        .await;
    }
}

fn malformed(_: DecodeError) -> String {
    "the runtime sent a malformed message".to_owned()
}

async fn send(writer: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result<(), String> {
    match timeout(SEND_TIMEOUT, writer.write_all(bytes)).await {
        // The next read reports the end of the connection.
        Ok(Err(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        Ok(sent) => sent.map_err(|error| format!("can't send to the runtime: {error}")),
        Err(_) => Err("the runtime does not read the plugin's answers".to_owned()),
    }
}

/// Registers with the runtime at `path`, and sends what it reports to `reports`, until the future is dropped. After a
/// failure, it reconnects with a backoff of at most 1.5 s.
pub async fn run(path: &Path, reports: mpsc::Sender<NriReport>) -> Infallible {
    let (mut backoff, mut last) = (Backoff::new(MIN_BACKOFF, MAX_BACKOFF), String::new());
    loop {
        let mut session = Session::new(&reports);
        let Err(cause) = async {
            let mut stream = connect(path).await?;
            let (reader, writer) = stream.split();
            session.serve(reader, writer, Instant::now() + REGISTRATION_TIMEOUT).await
        }
        .await;
        if session.synchronized || last != cause {
            // Fails only if the receiver has ended.
            let _ = reports.send(NriReport::Disconnected(format!("{}: {cause}", path.display()))).await;
            last = cause;
        }
        sleep(backoff.pause(Instant::now().into_std())).await;
    }
}

/// Connects to the socket, if only root can have created it.
async fn connect(path: &Path) -> Result<UnixStream, String> {
    let (directory, name) = path.parent().zip(path.file_name()).ok_or("expected a path")?;
    let directory = check(directory)
        .map_err(|error| if error.is_not_found() { NOT_FOUND.to_owned() } else { error.to_string() })?;
    let stream = UnixStream::connect(directory.join(name)).await.map_err(|error| match error.kind() {
        ErrorKind::NotFound => NOT_FOUND.to_owned(),
        _ => format!(
            "the runtime does not accept connections: {error}; check that it runs, and the path in --nri-socket"
        ),
    })?;
    let owner = stream.peer_cred().map_err(|error| format!("can't identify the listener: {error}"))?.uid();
    if !is_trusted(owner) {
        return Err(format!("expected root as listener on the socket, got UID {owner}; remove the socket"));
    }
    Ok(stream)
}
