//! The Kubernetes API: an API server with the credentials of a kubeconfig or a service account, as a source of facts, and
//! as the destination of what plugin and agent write to the cluster. This file has the requests for facts and the reports.

use crate::cluster::kubeconfig::Kubeconfig;
use crate::cluster::resources::{DefinitionQuery, Event, Lookup};
use crate::cluster::wire::{DefinitionObject, NamespaceObject, PodObject};
use crate::cluster::{Cluster, Definitions, uid_mismatch, with_pod};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use futures_util::future::{join_all, try_join_all};
use request::{ApiRequest, event, network_status};
pub(crate) use request::{Collection, Failure, Kind};
use serde::de::{DeserializeOwned, IgnoredAny};
use session::{Limits, Session};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

mod objects;
mod request;
mod session;

/// The timeout of a write, including retries: the pod's start waits for it.
pub(in crate::cluster) const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// The timeout of a probe: short enough for a runtime that sends STATUS every few seconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The timeout of other requests, unless [`Api::within`] sets one.
const TIMEOUT: Duration = Duration::from_secs(10);

/// An API server. The files with the credentials are read by the first request. Clones share the connection, because a
/// TLS handshake costs more than a request.
#[derive(Clone)]
pub struct Api {
    credentials: Arc<Credentials>,
    /// The limits of each lookup and change; the timeout also limits each page of a list.
    limits: Limits,
    /// The node of the pod whose account it is.
    node: Option<String>,
    /// Opened by the first request.
    session: Arc<OnceLock<Session>>,
    /// Whether tasks use the session, which then lives as long as this process.
    of_tasks: bool,
}

enum Credentials {
    /// A kubeconfig, and the mount point of the file system that absolute paths in it refer to.
    Kubeconfig { root: PathBuf, path: PathBuf },
    /// The URL of a server, and the directory with `ca.crt` and `token` of a service account.
    Account { server: String, directory: PathBuf },
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

impl Api {
    /// The directory where the kubelet mounts the credentials of a service account.
    pub const ACCOUNT_DIRECTORY: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

    fn new(credentials: Credentials) -> Self {
        let (credentials, limits) = (Arc::new(credentials), Limits::of(TIMEOUT));
        Self { credentials, limits, node: None, session: Arc::default(), of_tasks: false }
    }

    /// Returns the server of a kubeconfig. Absolute paths in it refer to the file system that is mounted at `root`.
    #[must_use]
    pub fn of_kubeconfig(root: &Path, path: PathBuf) -> Self {
        Self::new(Credentials::Kubeconfig { root: root.to_owned(), path })
    }

    /// Returns the server at the URL `server` with the service account whose files `ca.crt` and `token` are in
    /// `directory`.
    #[must_use]
    pub fn of_account(server: String, directory: PathBuf) -> Self {
        Self::new(Credentials::Account { server, directory })
    }

    /// Returns the server with the service account of the pod that this process runs in; `None` outside of pods
    /// (kubernetes.io, "Accessing the Kubernetes API from a Pod").
    #[must_use]
    pub fn in_cluster() -> Option<Self> {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Some(Self::of_account(format!("https://{host}:{port}"), Self::ACCOUNT_DIRECTORY.into()))
    }

    /// Returns the server for tasks of a long-running process: the requests run on the event loop of the task that sends
    /// the first one, and the files of the account are read again when they change. Callers that block can't use it.
    #[must_use]
    pub fn for_tasks(self) -> Self {
        Self { of_tasks: true, ..self }
    }

    /// Returns the account of a pod on this node: its Events name the node, and the tokens that it requests are bound to it.
    #[must_use]
    pub fn on_node(self, node: Option<String>) -> Self {
        Self { node, ..self }
    }

    /// Returns the same server with a limit for each lookup of facts, including retries.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Self {
        Self { limits: Limits { timeout, started: None, ..self.limits }, ..self.clone() }
    }

    /// Returns the same server without retries after transient errors: for callers with another source, and for users,
    /// who see at once why a request fails and can repeat the command.
    #[must_use]
    pub fn once(self) -> Self {
        Self { limits: Limits { retries: false, ..self.limits }, ..self }
    }

    /// Returns the same server for a lookup that began at `started` with another source, which did not answer.
    /// `is_connected`: that source accepted a connection.
    pub(in crate::cluster) fn as_fallback(&self, started: Instant, timeout: Duration, is_connected: bool) -> Self {
        let limits = Limits { timeout, started: Some(started), needs_connection: !is_connected, ..self.limits };
        Self { limits, ..self.clone() }
    }

    /// Returns the session, which the first call opens.
    pub(crate) fn session(&self) -> Result<&Session, Error> {
        if let Some(session) = self.session.get() {
            return Ok(session);
        }
        let (kubeconfig, path) = match &*self.credentials {
            Credentials::Kubeconfig { root, path } => (Kubeconfig::read(root, path)?, path),
            Credentials::Account { server, directory } => {
                (Kubeconfig::of_service_account(server, directory), directory)
            }
        };
        let session = Session::open(&kubeconfig, path.clone(), self.of_tasks)?;
        Ok(self.session.get_or_init(|| session))
    }

    /// Waits for requests on the event loop of the session. Not for tasks.
    fn wait_for<T>(&self, requests: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        self.session()?.run(requests)
    }

    /// Sends a request without a retry after "not found", and returns what `accept` takes from the answer.
    async fn sent<T: DeserializeOwned, U>(
        &self,
        request: &ApiRequest,
        accept: impl Fn(T) -> Result<U, Failure>,
    ) -> Result<U, Error> {
        self.session()?.send(request, Limits { awaits: false, ..self.limits }, accept).await
    }

    /// Returns the objects of a collection, with one attempt per page. `subject` describes them in messages.
    async fn all<T: DeserializeOwned>(&self, collection: &Collection, subject: String) -> Result<Vec<T>, Error> {
        let (session, mut objects) = (self.session()?, Vec::new());
        let request = ApiRequest::list(collection, subject)?;
        let listed = session.list(collection, false, self.limits.timeout, |object| objects.push(object)).await;
        listed.map(|_| objects).map_err(|failure| session.error(&request, failure))
    }
}

/// The requests for facts and the reports, for tasks. [`Cluster`] has them for callers that block.
impl Api {
    pub(crate) async fn find_facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        let accept = |found: PodObject| {
            let pod = Pod::from(found);
            if pod.matches(wanted) { Ok(pod) } else { Err(Failure::not_found(uid_mismatch(&pod, wanted))) }
        };
        let request = ApiRequest::get(Kind::POD, Some(&wanted.namespace), &wanted.name)?;
        let pod = self.session()?.send(&request, self.limits, accept);
        if !with_namespace {
            return Ok(Facts { pod: pod.await?, namespace: None });
        }
        let namespace = async {
            match self.find_namespace(wanted).await {
                // The pod is probably missing too, and its error is the better one.
                Err(error) if error.code == Code::PodUnknown => Ok(Err(error)),
                found => found.map(Ok),
            }
        };
        let (pod, namespace) = tokio::try_join!(pod, namespace)?;
        Ok(Facts { pod, namespace: Some(namespace?) })
    }

    pub(crate) async fn find_namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        let request = ApiRequest::get(Kind::NAMESPACE, None, &wanted.namespace)?;
        self.session()?.send(&request, self.limits, |found: NamespaceObject| Ok(found.into())).await
    }

    pub(crate) async fn find_definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        let session = self.session()?;
        let look_up = async |DefinitionQuery { object, awaited }: &DefinitionQuery| {
            let request = ApiRequest::get(Kind::DEFINITION, Some(&object.namespace), &object.name)?;
            let accept = |found: DefinitionObject| Ok(Lookup::Found(found.into()));
            match session.send(&request, Limits { awaits: *awaited, ..self.limits }, accept).await {
                Err(error) if error.code == Code::PodUnknown => Ok(Lookup::Missing(error.to_string())),
                result => result,
            }
        };
        try_join_all(wanted.iter().map(look_up)).await
    }

    pub(crate) async fn check(&self) -> Result<(), Error> {
        let request = ApiRequest::get(Kind::POD, Some("default"), "detour-status-probe")?;
        match self.within(PROBE_TIMEOUT.min(self.limits.timeout)).sent(&request, |_: PodObject| Ok(())).await {
            // "Not found" shows that the server answers and grants the permission to get pods.
            Err(error) if error.code == Code::PodUnknown => Ok(()),
            result => result,
        }
    }

    /// Sets the network status and records the Events concurrently. "Not found" is not retried: the pod existed.
    pub(crate) async fn send_report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        let status = status.map(|status| network_status(pod, status));
        let requests = status.into_iter().chain(events.iter().map(|one| event(pod, one)));
        let requests = requests.collect::<Result<Vec<_>, _>>()?;
        let limited = self.within(WRITE_TIMEOUT.min(self.limits.timeout));
        Error::all(join_all(requests.iter().map(|request| limited.sent(request, |_: IgnoredAny| Ok(())))).await)
    }
}

impl Cluster for Api {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        self.wait_for(self.find_facts(wanted, with_namespace)).map_err(|error| with_pod(wanted, error))
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        self.wait_for(self.find_namespace(wanted)).map_err(|error| with_pod(wanted, error))
    }

    fn probe(&self) -> Result<(), Error> {
        self.wait_for(self.check())
    }

    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        self.wait_for(self.send_report(pod, status, events))
    }
}

impl Definitions for Api {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        if wanted.is_empty() { Ok(Vec::new()) } else { self.wait_for(self.find_definitions(wanted)) }
    }
}
