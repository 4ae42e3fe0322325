//! An API server with the credentials of a kubeconfig or a service account, and as a source of facts.

use super::failure::Failure;
use super::request::{ApiRequest, Collection, Kind, event, network_status};
use super::retry::Deadline;
use super::session::Session;
use crate::cluster::fact_source::{Cluster, Definitions, Reports, uid_mismatch, with_pod};
use crate::cluster::kubeconfig::Kubeconfig;
use crate::cluster::resources::{DefinitionQuery, Event, Lookup};
use crate::cluster::wire::{DefinitionObject, NamespaceObject, PodObject};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use futures_util::future::{join_all, try_join_all};
use serde::de::{DeserializeOwned, IgnoredAny};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::Handle;

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
    /// The timeout for facts, including retries, and of each page of a list.
    timeout: Duration,
    /// The deadline of a lookup that has asked another source before; `None` for one that starts with the request.
    deadline: Option<Deadline>,
    /// Whether requests are retried after transient errors.
    retries: bool,
    /// The node of the pod whose account it is.
    pub(super) node: Option<String>,
    /// Opened by the first request.
    session: Arc<OnceLock<Session>>,
    /// The event loop of a session that lives as long as this process; `None` for one of its own.
    runtime: Option<Handle>,
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
        let (credentials, session) = (Arc::new(credentials), Arc::default());
        Self { credentials, timeout: TIMEOUT, deadline: None, retries: true, node: None, session, runtime: None }
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

    /// Sends all requests on `runtime`, which another thread must run. The connection lives as long as the clones, and
    /// the files of the account are read again when they change.
    #[must_use]
    pub fn on(self, runtime: Handle) -> Self {
        Self { runtime: Some(runtime), ..self }
    }

    /// Returns the account of a pod on this node: its Events name the node, and the tokens that it requests are bound to it.
    #[must_use]
    pub fn on_node(self, node: Option<String>) -> Self {
        Self { node, ..self }
    }

    /// Returns the same server with a limit for each lookup of facts, including retries.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Self {
        Self { timeout, ..self.clone() }
    }

    /// Returns the same server without retries after transient errors: for callers with another source, and for users,
    /// who see at once why a request fails and can repeat the command.
    #[must_use]
    pub fn once(self) -> Self {
        Self { retries: false, ..self }
    }

    /// Returns the server for a lookup that has asked another source before. The attempts do not end early if that has
    /// accepted a connection.
    pub(in crate::cluster) fn by(&self, deadline: Deadline, is_connected: bool) -> Self {
        Self { deadline: Some(Deadline { needs_connection: !is_connected, ..deadline }), ..self.clone() }
    }

    /// Returns the session, which the first call opens.
    pub(super) fn session(&self) -> Result<&Session, Error> {
        if let Some(session) = self.session.get() {
            return Ok(session);
        }
        let (kubeconfig, path) = match &*self.credentials {
            Credentials::Kubeconfig { root, path } => (Kubeconfig::read(root, path)?, path),
            Credentials::Account { server, directory } => {
                (Kubeconfig::of_service_account(server, directory), directory)
            }
        };
        let session = Session::open(&kubeconfig, path.clone(), self.runtime.clone())?;
        Ok(self.session.get_or_init(|| session))
    }

    /// Returns the deadline of a lookup that starts now.
    fn deadline(&self) -> Deadline {
        let deadline = self.deadline.unwrap_or_else(|| Deadline::after(self.timeout));
        Deadline { retries: self.retries, ..deadline }
    }

    /// Sends a request whose first "not found" is the result, and returns what `accept` takes from the answer.
    pub(super) fn send<T: DeserializeOwned, U>(
        &self,
        request: &ApiRequest,
        accept: impl Fn(T) -> Result<U, Failure>,
    ) -> Result<U, Error> {
        self.session()?.run(self.sent(request, accept))
    }

    /// The same for tasks.
    pub(super) async fn sent<T: DeserializeOwned, U>(
        &self,
        request: &ApiRequest,
        accept: impl Fn(T) -> Result<U, Failure>,
    ) -> Result<U, Error> {
        self.session()?.send(request, Deadline { awaits: false, ..self.deadline() }, accept).await
    }

    /// Returns the objects of a collection, with one attempt per page. `subject` describes them in messages.
    pub(super) fn all<T: DeserializeOwned>(&self, collection: &Collection, subject: String) -> Result<Vec<T>, Error> {
        self.session()?.run(self.find_all(collection, subject))
    }

    async fn find_all<T: DeserializeOwned>(&self, collection: &Collection, subject: String) -> Result<Vec<T>, Error> {
        let (session, mut objects) = (self.session()?, Vec::new());
        let request = ApiRequest::list(collection, subject)?;
        let listed = session.list(collection, false, self.timeout, |object| objects.push(object)).await;
        listed.map(|_| objects).map_err(|failure| session.error(&request, failure))
    }

    async fn get_pod(&self, session: &Session, deadline: Deadline, wanted: &PodRef) -> Result<Pod, Error> {
        let accept = |found: PodObject| {
            let pod = Pod::from(found);
            if pod.matches(wanted) { Ok(pod) } else { Err(Failure::not_found(uid_mismatch(&pod, wanted))) }
        };
        let request = ApiRequest::get(Kind::POD, Some(&wanted.namespace), &wanted.name)?;
        session.send(&request, deadline, accept).await
    }

    async fn get_namespace(&self, session: &Session, deadline: Deadline, wanted: &PodRef) -> Result<Namespace, Error> {
        let accept = |found: NamespaceObject| Ok(found.into());
        let request = ApiRequest::get(Kind::NAMESPACE, None, &wanted.namespace)?;
        session.send(&request, deadline, accept).await.map_err(|error| with_pod(wanted, error))
    }
}

/// The requests for facts and the reports, for tasks. [`Cluster`] has them for callers that block.
impl Api {
    pub(crate) async fn find_facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        let session = self.session().map_err(|error| with_pod(wanted, error))?;
        let deadline = self.deadline();
        let namespace = async {
            if !with_namespace {
                return Ok(Ok(None));
            }
            match self.get_namespace(session, deadline, wanted).await {
                // The pod is probably missing too, which is the better error.
                Err(error) if error.code == Code::PodUnknown => Ok(Err(error)),
                other => other.map(|namespace| Ok(Some(namespace))),
            }
        };
        let (pod, namespace) = tokio::try_join!(self.get_pod(session, deadline, wanted), namespace)?;
        Ok(Facts { pod, namespace: namespace? })
    }

    pub(crate) async fn find_namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        let session = self.session().map_err(|error| with_pod(wanted, error))?;
        self.get_namespace(session, self.deadline(), wanted).await
    }

    pub(crate) async fn find_definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        let (session, deadline) = (self.session()?, self.deadline());
        let look_up = async |DefinitionQuery { object, awaited }: &DefinitionQuery| {
            let request = ApiRequest::get(Kind::DEFINITION, Some(&object.namespace), &object.name)?;
            let accept = |found: DefinitionObject| Ok(Lookup::Found(found.into()));
            match session.send(&request, Deadline { awaits: *awaited, ..deadline }, accept).await {
                Err(error) if error.code == Code::PodUnknown => Ok(Lookup::Missing(error.to_string())),
                result => result,
            }
        };
        try_join_all(wanted.iter().map(look_up)).await
    }

    pub(crate) async fn check(&self) -> Result<(), Error> {
        let request = ApiRequest::get(Kind::POD, Some("default"), "detour-status-probe")?;
        let at_once = Self { deadline: None, ..self.within(PROBE_TIMEOUT) };
        match at_once.sent(&request, |_: PodObject| Ok(())).await {
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
        let limited = self.within(WRITE_TIMEOUT.min(self.timeout));
        Error::all(join_all(requests.iter().map(|request| limited.sent(request, |_: IgnoredAny| Ok(())))).await)
    }
}

impl Cluster for Api {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        let session = self.session().map_err(|error| with_pod(wanted, error))?;
        session.run(self.find_facts(wanted, with_namespace))
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        let session = self.session().map_err(|error| with_pod(wanted, error))?;
        session.run(self.find_namespace(wanted))
    }

    fn probe(&self) -> Result<(), Error> {
        self.session()?.run(self.check())
    }
}

impl Definitions for Api {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        if wanted.is_empty() { Ok(Vec::new()) } else { self.session()?.run(self.find_definitions(wanted)) }
    }
}

impl Reports for Api {
    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        self.session()?.run(self.send_report(pod, status, events))
    }
}
