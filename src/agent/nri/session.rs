//! Connects to the runtime's socket, and reconnects after each failure. One registration: the plugin's answers to the
//! runtime, over any stream.

use super::ttrpc::{
    self, Messages, OF_PLUGIN, OF_RUNTIME, REQUEST, RESPONSE, Request, Response, Status, UNIMPLEMENTED, short_text,
};
use super::{
    Answer, Configure, NriContainer, NriPod, NriReport, PLUGIN_SERVICE, RUNTIME_SERVICE, RegisterPlugin, SUBSCRIPTION,
    Synchronize, event,
};
use crate::cni::is_identifier;
use crate::trusted_file::{check, is_trusted};
use crate::wait::Backoff;
use prost::{DecodeError, Message};
use std::convert::Infallible;
use std::fs;
use std::io::ErrorKind;
use std::mem::take;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;
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

/// The state of a registration.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    reports: &'a mpsc::Sender<NriReport>,
    configuration: Configure,
    /// The parts of the runtime's list.
    listed: (Vec<NriPod>, Vec<NriContainer>),
    /// Whether the runtime has synchronized the plugin, so that it reports events.
    pub(super) synchronized: bool,
}

impl<'a> Session<'a> {
    pub(crate) fn new(reports: &'a mpsc::Sender<NriReport>) -> Self {
        let configuration = Configure::default();
        Self { reports, configuration, listed: (Vec::new(), Vec::new()), synchronized: false }
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
                true => messages.next().await?,
                false => timeout_at(deadline, messages.next()).await.map_err(|_| {
                    let seconds = REGISTRATION_TIMEOUT.as_secs();
                    format!("the runtime did not register the plugin within {seconds} s; see its log")
                })??,
            };
            let Some(message) = message else {
                let when =
                    if self.synchronized { "; if it does not restart," } else { " before it registered the plugin;" };
                return Err(format!("the runtime closed the connection{when} see its log"));
            };
            match message.kind {
                (OF_RUNTIME, REQUEST) => {
                    let request = Request::decode(&*message.contents).map_err(malformed)?;
                    self.answer(message.stream, &request, &mut writer).await?;
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

    /// Answers a call, and reports what it contains: the start of a container before the answer, all else after it.
    async fn answer(
        &mut self,
        stream: u32,
        request: &Request,
        writer: &mut (impl AsyncWrite + Unpin),
    ) -> Result<(), String> {
        let unknown = || Status { code: UNIMPLEMENTED, message: format!("unknown method {}", request.method) };
        let (mut result, mut report) = (Ok(Vec::new()), None);
        match request.method.as_str() {
            _ if request.service != PLUGIN_SERVICE => result = Err(unknown()),
            "Configure" => {
                self.configuration = Configure::decode(&*request.payload).map_err(malformed)?;
                result = Ok(Answer { number: SUBSCRIPTION }.encode_to_vec());
            }
            "Synchronize" => {
                let more = self.list(&request.payload)?;
                result = Ok(Answer { number: more.into() }.encode_to_vec());
                if !more {
                    let ((pods, containers), Configure { runtime, version, .. }) =
                        (take(&mut self.listed), &self.configuration);
                    let (runtime, version) = (short_text(runtime), short_text(version));
                    report = Some(NriReport::Registered { runtime, version, pods, containers });
                    self.synchronized = true;
                }
            }
            "Shutdown" => {}
            method => {
                let (answer, answered) = oneshot::channel();
                match event(method, &request.payload, answer) {
                    Some(Ok(Some(start @ NriReport::Start(..)))) => self.wait_for(start, answered).await,
                    Some(Ok(event)) => report = event,
                    // With an error as the answer, containerd would not start the container.
                    Some(Err(error)) => tracing::warn!(
                        %error, "can't read an event of the container runtime; the container starts captured"
                    ),
                    None => result = Err(unknown()),
                }
            }
        }
        send(writer, &ttrpc::response(stream, result)).await?;
        if let Some(report) = report {
            // Fails only if the receiver has ended, which ends the connection.
            let _ = self.reports.send(report).await;
        }
        Ok(())
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

    /// Adds a part of the runtime's list, without pods and containers whose ID is not an identifier. Returns whether
    /// another part follows.
    fn list(&mut self, part: &[u8]) -> Result<bool, String> {
        let Synchronize { pods, containers, more } = Synchronize::decode(part).map_err(malformed)?;
        self.listed.0.extend(pods.into_iter().filter(|pod| is_identifier(&pod.id)));
        let is_valid = |it: &NriContainer| is_identifier(&it.id) && is_identifier(&it.pod_id);
        self.listed.1.extend(containers.into_iter().map(NriContainer::from).filter(is_valid));
        Ok(more)
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
