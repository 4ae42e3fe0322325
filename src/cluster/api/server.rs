//! An API server with the credentials of a kubeconfig or a service account, and the session with it.

use super::call::ApiCall;
use super::request::ApiRequest;
use crate::cluster::kubeconfig::{Kubeconfig, KubeconfigOwner, UserKubeconfig};
use crate::cni::{Code, Error};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Client;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};

/// The API server of a kubeconfig or of a service account. The files are read by the first request.
pub(in crate::cluster) struct Api {
    /// The kubeconfig, or the directory of a service account.
    kubeconfig: PathBuf,
    /// The mount point of the file system that absolute paths in the kubeconfig refer to.
    root: PathBuf,
    /// Who may own the kubeconfig.
    owner: KubeconfigOwner,
    /// The server for a service account; a kubeconfig contains its server.
    server: Option<String>,
    /// The timeout for facts, including retries.
    pub(super) timeout: Duration,
    /// Whether requests for facts are retried after transient errors.
    retries: bool,
    /// Opened by the first request, because a TLS handshake costs more than a request.
    session: Arc<OnceLock<Session>>,
    /// The event loop of a session that lives as long as this process; `None` for one of its own.
    runtime: Option<Handle>,
}

/// A connection of this process's service account, which all its clones share. It reads the files of the account again
/// when they change.
#[derive(Clone)]
pub struct ApiConnection {
    runtime: Handle,
    session: Arc<OnceLock<Session>>,
}

impl ApiConnection {
    /// Creates a connection whose requests run on `runtime`, which another thread must run. The first request connects.
    #[must_use]
    pub fn new(runtime: Handle) -> Self {
        Self { runtime, session: Arc::default() }
    }
}

impl fmt::Debug for ApiConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiConnection").finish_non_exhaustive()
    }
}

impl Api {
    /// Returns the server of a kubeconfig; `timeout` limits each lookup of facts, including retries.
    pub(in crate::cluster) fn new(kubeconfig: PathBuf, timeout: Duration) -> Self {
        Self {
            kubeconfig,
            root: "/".into(),
            owner: KubeconfigOwner::Node,
            server: None,
            timeout,
            retries: true,
            session: Arc::default(),
            runtime: None,
        }
    }

    /// Returns the API at `server` as the service account with its files in `directory`.
    pub(in crate::cluster) fn as_account(server: String, directory: PathBuf, timeout: Duration) -> Self {
        Self { server: Some(server), ..Self::new(directory, timeout) }
    }

    /// Uses a shared connection.
    pub(super) fn through(self, ApiConnection { runtime, session }: ApiConnection) -> Self {
        Self { runtime: Some(runtime), session, ..self }
    }

    /// Returns the API of an open session; `kubeconfig` names its source in messages.
    pub(super) fn with_session(kubeconfig: PathBuf, session: Session, timeout: Duration) -> Self {
        Self { session: Arc::new(OnceLock::from(session)), ..Self::new(kubeconfig, timeout) }
    }

    /// Disables retries of requests for facts.
    pub(in crate::cluster) fn without_retries(self) -> Self {
        Self { retries: false, ..self }
    }

    /// Resolves absolute paths in the kubeconfig below `root`.
    pub(super) fn with_root(self, root: &Path) -> Self {
        Self { root: root.to_owned(), ..self }
    }

    /// Accepts a kubeconfig of any user: it is given on the command line.
    pub(in crate::cluster) fn of_any_owner(self) -> Self {
        Self { owner: KubeconfigOwner::User, ..self }
    }

    /// Returns the session, which the first call opens.
    pub(super) fn session(&self) -> Result<&Session, Error> {
        if let Some(session) = self.session.get() {
            return Ok(session);
        }
        let kubeconfig = match &self.server {
            None => Kubeconfig::load(&self.root, &self.kubeconfig, self.owner)?,
            Some(server) if self.runtime.is_some() => Kubeconfig::of_renewed_account(server, &self.kubeconfig)?,
            Some(server) => Kubeconfig::of_service_account(server, &self.kubeconfig)?,
        };
        let session = Session::open(kubeconfig, self.runtime.clone())?;
        Ok(self.session.get_or_init(|| session))
    }

    /// Returns the call of `request` in a session.
    pub(super) fn call<'a>(&'a self, session: &'a Session, request: &'a ApiRequest) -> ApiCall<'a> {
        ApiCall { request, session, kubeconfig: &self.kubeconfig, retries: true }
    }

    /// Like [`Self::call`], for facts: without retries after [`Self::without_retries`].
    pub(super) fn facts_call<'a>(&'a self, session: &'a Session, request: &'a ApiRequest) -> ApiCall<'a> {
        ApiCall { retries: self.retries, ..self.call(session, request) }
    }
}

/// The credentials of a credential plugin are renewed this long before they expire.
const RENEWAL_MARGIN: SignedDuration = SignedDuration::from_secs(60);

/// A client and the event loop on which its requests run.
pub(super) struct Session {
    event_loop: EventLoop,
    /// The server's address for messages.
    pub(super) server: String,
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
    fn open(kubeconfig: Kubeconfig<'_>, runtime: Option<Handle>) -> Result<Self, Error> {
        let event_loop = runtime.map_or_else(EventLoop::own, |runtime| Ok(EventLoop::Shared(runtime)))?;
        let server = kubeconfig.server();
        // A client spawns tasks.
        let client = {
            let _inside = event_loop.handle()?.enter();
            SessionClient::Lasting(kubeconfig.client()?)
        };
        Ok(Self { event_loop, server, client })
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
        let (server, client) = (kubeconfig.server(), SessionClient::Renewed(Box::new(kubeconfig), Mutex::new(client)));
        Ok(Self { event_loop, server, client })
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
