//! One registration: the plugin's answers to the runtime, over any stream.

use super::messages::{
    Answer, Configure, PLUGIN_SERVICE, RUNTIME_SERVICE, RegisterPlugin, Synchronize, event, subscription,
};
use super::ttrpc::{
    self, Messages, OF_PLUGIN, OF_RUNTIME, REQUEST, RESPONSE, Request, Response, Status, UNIMPLEMENTED, short_text,
};
use super::{NriContainer, NriPod, NriReport, NriStatus};
use crate::cni::is_identifier;
use prost::{DecodeError, Message};
use std::convert::Infallible;
use std::io;
use std::mem::{replace, take};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

/// The name and the index with which the plugin registers. The runtime calls plugins in the order of their indexes.
const NAME: &str = "detour";
const INDEX: &str = "10";
/// The number of this plugin's only call.
const REGISTRATION: u32 = 1;
/// The timeout from the connection to the end of the registration. A runtime registers one plugin after the other, and
/// waits 5 s for each.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the start of a container waits, whatever the receiver of the reports does. The runtime starts no other
/// container of the node meanwhile, and closes the connection after 2 s by default.
pub(in crate::agent) const START_TIMEOUT: Duration = Duration::from_secs(1);
/// The timeout for sending an answer.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

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

    /// Registers, and answers calls until the connection fails. Returns the cause.
    pub(crate) async fn serve(&mut self, reader: impl AsyncRead + Unpin, writer: impl AsyncWrite + Unpin) -> String {
        let Err(cause) = self.exchange(reader, writer, Instant::now() + REGISTRATION_TIMEOUT).await;
        cause
    }

    pub(super) async fn exchange(
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
        let (mut result, mut reports) = (Ok(Vec::new()), Vec::new());
        match request.method.as_str() {
            _ if request.service != PLUGIN_SERVICE => result = Err(unknown()),
            "Configure" => {
                self.configuration = Configure::decode(&*request.payload).map_err(malformed)?;
                result = Ok(subscription().encode_to_vec());
            }
            "Synchronize" => {
                let more = self.list(&request.payload)?;
                result = Ok(Answer { number: more.into() }.encode_to_vec());
                if !more {
                    let (pods, containers) = take(&mut self.listed);
                    reports.push(NriReport::Synchronized(pods, containers));
                    let runtime = short_text(&self.configuration.runtime);
                    let status = NriStatus::Registered { runtime, version: short_text(&self.configuration.version) };
                    reports.extend((!replace(&mut self.synchronized, true)).then_some(NriReport::Status(status)));
                }
            }
            "Shutdown" => {}
            method => {
                let (answer, answered) = oneshot::channel();
                match event(method, &request.payload, answer) {
                    Some(Ok(Some(start @ NriReport::Start(..)))) => self.wait_for(start, answered).await,
                    Some(Ok(report)) => reports.extend(report),
                    // With an error as the answer, containerd would not start the container.
                    Some(Err(error)) => tracing::warn!(
                        %error, "can't read an event of the container runtime; the container starts captured"
                    ),
                    None => result = Err(unknown()),
                }
            }
        }
        send(writer, &ttrpc::response(stream, result)).await?;
        for report in reports {
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
        Ok(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Ok(sent) => sent.map_err(|error| format!("can't send to the runtime: {error}")),
        Err(_) => Err("the runtime does not read the plugin's answers".to_owned()),
    }
}
