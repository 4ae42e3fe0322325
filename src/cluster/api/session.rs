//! A session with an API server: the client, and the event loop on which its requests run.

use super::retry::ServerAddress;
use crate::cluster::kubeconfig::Kubeconfig;
use crate::cni::{Code, Error};
use kube::Client;
use tokio::runtime::{Builder, Handle, Runtime};

/// A client and the event loop on which its requests run.
pub(super) struct Session {
    event_loop: EventLoop,
    /// The server's address for messages.
    pub(super) server: String,
    /// Where to connect to it.
    pub(super) address: ServerAddress,
    client: Client,
}

enum EventLoop {
    /// On the calling thread: no thread is started. `Some` until the session is dropped.
    Own(Option<Runtime>),
    /// On another thread.
    Shared(Handle),
}

impl Session {
    /// Creates the client; the first request connects.
    pub(super) fn open(kubeconfig: Kubeconfig<'_>, runtime: Option<Handle>) -> Result<Self, Error> {
        let event_loop = runtime.map_or_else(EventLoop::own, |runtime| Ok(EventLoop::Shared(runtime)))?;
        let (server, address) = (kubeconfig.server(), kubeconfig.address());
        // A client spawns tasks.
        let client = {
            let _inside = event_loop.handle()?.enter();
            kubeconfig.client()?
        };
        Ok(Self { event_loop, server, address, client })
    }

    /// Returns the client. Call it on the event loop.
    pub(super) fn client(&self) -> Client {
        self.client.clone()
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
