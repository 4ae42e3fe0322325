//! A session with an API server: the client, and the event loop on which its requests run.

use super::retry::ServerAddress;
use crate::cluster::kubeconfig::{Kubeconfig, UserKubeconfig};
use crate::cni::{Code, Error};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Client;
use std::sync::{Mutex, PoisonError};
use tokio::runtime::{Builder, Handle, Runtime};

/// The credentials of a credential plugin are renewed this long before they expire.
const RENEWAL_MARGIN: SignedDuration = SignedDuration::from_secs(60);

/// A client and the event loop on which its requests run.
pub(super) struct Session {
    event_loop: EventLoop,
    /// The server's address for messages.
    pub(super) server: String,
    /// Where to connect to it.
    pub(super) address: ServerAddress,
    client: SessionClient,
}

enum EventLoop {
    /// On the calling thread: no thread is started. `Some` until the session is dropped.
    Own(Option<Runtime>),
    /// On another thread.
    Shared(Handle),
}

enum SessionClient {
    /// Its credentials do not expire, or kube reads their files again.
    Lasting(Client),
    /// Its credentials may be those of a credential plugin; with the time when they expire.
    Renewed(Box<UserKubeconfig>, Mutex<(Client, Option<Timestamp>)>),
}

impl Session {
    /// Creates the client; the first request connects.
    pub(super) fn open(kubeconfig: Kubeconfig<'_>, runtime: Option<Handle>) -> Result<Self, Error> {
        let event_loop = runtime.map_or_else(EventLoop::own, |runtime| Ok(EventLoop::Shared(runtime)))?;
        let (server, address) = (kubeconfig.server(), kubeconfig.address());
        // A client spawns tasks.
        let client = {
            let _inside = event_loop.handle()?.enter();
            SessionClient::Lasting(kubeconfig.client()?)
        };
        Ok(Self { event_loop, server, address, client })
    }

    /// Creates the client of a user of kubectl. The credential plugin runs.
    pub(super) fn open_as_user(
        kubeconfig: impl Future<Output = Result<UserKubeconfig, String>>,
        invalid: impl Fn(String) -> Error,
    ) -> Result<Self, Error> {
        let event_loop = EventLoop::own()?;
        let (kubeconfig, client) = event_loop
            .handle()?
            .block_on(async {
                let kubeconfig = kubeconfig.await?;
                let client = kubeconfig.client()?;
                Ok((kubeconfig, client))
            })
            .map_err(invalid)?;
        let (server, address) = (kubeconfig.server(), kubeconfig.address());
        let client = SessionClient::Renewed(Box::new(kubeconfig), Mutex::new(client));
        Ok(Self { event_loop, server, address, client })
    }

    /// Returns the client, with new credentials if those of a credential plugin expire. Call it on the event loop.
    ///
    /// # Errors
    /// The credential plugin fails.
    pub(super) fn client(&self) -> Result<Client, kube::Error> {
        let (kubeconfig, current) = match &self.client {
            SessionClient::Lasting(client) => return Ok(client.clone()),
            SessionClient::Renewed(kubeconfig, current) => (kubeconfig, current),
        };
        let mut current = current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.1.is_some_and(|expiry| Timestamp::now() + RENEWAL_MARGIN >= expiry) {
            *current = kubeconfig.client().map_err(|cause| kube::Error::Service(cause.into()))?;
        }
        Ok(current.0.clone())
    }

    /// Returns the namespace of a user's context.
    pub(super) fn namespace(&self) -> &str {
        match &self.client {
            SessionClient::Renewed(kubeconfig, _) => kubeconfig.namespace(),
            SessionClient::Lasting(_) => "default",
        }
    }

    /// Runs `work` on the event loop until it ends. Not for tasks of a shared event loop.
    pub(super) fn run<T>(&self, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        match &self.event_loop {
            EventLoop::Own(Some(runtime)) => runtime.block_on(work),
            EventLoop::Own(None) => Err(EventLoop::ended()),
            EventLoop::Shared(runtime) => runtime.block_on(work),
        }
    }
}

impl EventLoop {
    fn own() -> Result<Self, Error> {
        let runtime = Builder::new_current_thread().enable_io().enable_time().build();
        let runtime = runtime.map_err(|error| {
            Error::new(Code::Internal, "event loop for API requests not started").with_details(error.to_string())
        })?;
        Ok(Self::Own(Some(runtime)))
    }

    fn handle(&self) -> Result<&Handle, Error> {
        match self {
            Self::Own(runtime) => runtime.as_ref().map(Runtime::handle).ok_or_else(Self::ended),
            Self::Shared(runtime) => Ok(runtime),
        }
    }

    fn ended() -> Error {
        Error::new(Code::Internal, "event loop for API requests has ended")
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        // Dropping the runtime would wait for a name lookup that still runs.
        if let Self::Own(runtime) = self
            && let Some(runtime) = runtime.take()
        {
            runtime.shutdown_background();
        }
    }
}
