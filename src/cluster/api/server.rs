//! An API server with the credentials of a kubeconfig or a service account.

use super::call::ApiCall;
use super::request::ApiRequest;
use super::session::Session;
use crate::cluster::kubeconfig::Kubeconfig;
use crate::cni::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::Handle;

/// The API server of a kubeconfig or of a service account. The files are read by the first request.
pub(in crate::cluster) struct Api {
    /// The kubeconfig, or the directory of a service account.
    kubeconfig: PathBuf,
    /// The mount point of the file system that absolute paths in the kubeconfig refer to.
    root: PathBuf,
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

    /// Disables retries of requests for facts.
    pub(in crate::cluster) fn without_retries(self) -> Self {
        Self { retries: false, ..self }
    }

    /// Resolves absolute paths in the kubeconfig below `root`.
    pub(super) fn with_root(self, root: &Path) -> Self {
        Self { root: root.to_owned(), ..self }
    }

    /// Returns the session, which the first call opens.
    pub(super) fn session(&self) -> Result<&Session, Error> {
        if let Some(session) = self.session.get() {
            return Ok(session);
        }
        let kubeconfig = match &self.server {
            None => Kubeconfig::load(&self.root, &self.kubeconfig)?,
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
