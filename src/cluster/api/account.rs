//! The API as a pod's own service account: the agent's requests. They share a connection if there is one
//! ([`ServiceAccount::through`]); otherwise, each method connects and reads the credentials anew.

use super::failure::Failure;
use super::request::{ApiRequest, Kind};
use super::retry::Deadline;
use super::server::{Api, WRITE_TIMEOUT};
use super::session::{Collection, Events, Session};
use crate::cluster::fact_source::Cluster;
use crate::cluster::resources::{Event, NodeTaints, ObjectRef, Token};
use crate::cluster::wire::{DaemonSetObject, NodeObject};
use crate::cni::{Code, Error};
use crate::pod::{Pod, PodRef};
use k8s_openapi::api::authentication::v1::TokenRequest;
use kube::api::WatchEvent;
use serde::de::DeserializeOwned;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::timeout;

/// The timeout for creating a token and for starting a watch, including retries.
const WATCH_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout for reading a node, including retries.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a watch of one object may take to send it, before a request checks whether it exists.
const FIRST_EVENT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long after its end a watch is considered broken, if the server has not ended it.
const MAX_WATCH_TIME: Duration = Duration::from_secs(300);
/// The limit for the pages of a list: more than a database of etcd (8 GiB) has if each object has the largest size and a
/// page of its own.
const MAX_PAGES: usize = 20_000;
/// The timeout of a page. The API server answers within a minute.
const PAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// The beginning of the answer of an API server that binds no tokens to nodes.
const UNBOUND: &str = "cannot bind token to ";

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

/// A service account: the API's address, and the directory where the kubelet mounts the credentials.
#[derive(Debug, Clone)]
pub struct ServiceAccount {
    server: String,
    /// The directory of `ca.crt` and `token`.
    pub directory: PathBuf,
    /// The node of the pod whose account it is.
    node: Option<String>,
    connection: Option<ApiConnection>,
}

impl ServiceAccount {
    /// The directory where the kubelet mounts the credentials.
    pub const DIRECTORY: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

    /// Returns the account of the API at the URL `server` whose files `ca.crt` and `token` are in `directory`.
    #[must_use]
    pub const fn new(server: String, directory: PathBuf) -> Self {
        Self { server, directory, node: None, connection: None }
    }

    /// Returns the account of a pod on this node: its Events name the node, and the tokens that it requests are bound to it.
    #[must_use]
    pub fn on_node(self, node: Option<String>) -> Self {
        Self { node, ..self }
    }

    /// Sends all requests through a connection that other accounts of the same server and directory share.
    #[must_use]
    pub fn through(self, connection: &ApiConnection) -> Self {
        Self { connection: Some(connection.clone()), ..self }
    }

    /// Returns the service account of the pod that this process runs in; `None` outside of pods (kubernetes.io,
    /// "Accessing the Kubernetes API from a Pod").
    #[must_use]
    pub fn of_environment() -> Option<Self> {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Some(Self::new(format!("https://{host}:{port}"), Self::DIRECTORY.into()))
    }

    /// Returns a source of facts for one lookup, which takes at most `timeout`.
    #[must_use]
    pub fn source(&self, timeout: Duration) -> Box<dyn Cluster> {
        Box::new(self.api(timeout))
    }

    /// Like [`Self::source`], without retries after transient errors: for callers with another source.
    #[must_use]
    pub fn source_once(&self, timeout: Duration) -> Box<dyn Cluster> {
        Box::new(Api { retries: false, ..self.api(timeout) })
    }

    /// Returns the API server of this account.
    pub(in crate::cluster) fn api(&self, timeout: Duration) -> Api {
        let api = Api { server: Some(self.server.clone()), ..Api::new(self.directory.clone(), timeout) };
        match self.connection.clone() {
            Some(ApiConnection { runtime, session }) => Api { runtime: Some(runtime), session, ..api },
            None => api,
        }
    }

    /// Creates a token of the service account `of` that expires after about `lifetime`: the API server may shorten
    /// it. It is bound to this account's node, so that it ends with the Node object, if the API server can
    /// (Kubernetes 1.31). It can't be bound to this account's pod: the API server binds a token only to a pod of the same
    /// account (Kubernetes, `registry/core/serviceaccount`).
    ///
    /// # Errors
    /// The API rejects the request, or does not answer within five seconds.
    pub fn token(&self, of: &ObjectRef, lifetime: Duration) -> Result<Token, Error> {
        let (api, deadline) = (self.api(WATCH_TIMEOUT), Deadline::after(WATCH_TIMEOUT));
        let session = api.session()?;
        let create = |node| {
            let request = ApiRequest::token(of, node, lifetime)?;
            session.run(session.send(&request, deadline, |granted: TokenRequest| {
                let granted = granted.status.ok_or_else(|| Failure::unexpected("no token"))?;
                Ok(Token { text: granted.token, expires: granted.expiration_timestamp.0 })
            }))
        };
        match create(self.node.as_deref()) {
            Err(error) if self.node.is_some() && error.details.contains(UNBOUND) => create(None),
            result => result,
        }
    }

    /// Records an Event of a pod (`create events`).
    ///
    /// # Errors
    /// As [`Cluster::report`](crate::cluster::Cluster::report).
    pub fn tell(&self, pod: &PodRef, event: &Event) -> Result<(), Error> {
        self.change(ApiRequest::event(&self.own(pod.clone()), event))
    }

    /// Returns a pod of this account's node, for reports.
    #[must_use]
    pub fn own(&self, pod: PodRef) -> Pod {
        Pod { node_name: self.node.clone(), ..pod.into() }
    }

    /// Deletes a pod that still has this UID and `resourceVersion` (`delete pods`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`] if the pod was deleted or changed; else as [`Cluster::report`].
    pub fn delete(&self, pod: &Pod, resource_version: &str) -> Result<(), Error> {
        self.change(ApiRequest::deletion(pod, resource_version))
    }

    /// Gets a node (`get nodes`).
    ///
    /// # Errors
    /// The node does not exist, or the API does not answer.
    pub fn node(&self, name: &str) -> Result<NodeTaints, Error> {
        let (api, request) = (self.api(CONTROL_TIMEOUT), ApiRequest::get(Kind::NODE, None, name)?);
        let session = api.session()?;
        session.run(session.send(&request, Deadline::after(CONTROL_TIMEOUT), |node: NodeObject| Ok(node.into())))
    }

    /// Replaces all taints of a node that still has its `resource_version` (`patch nodes`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`] if another process changed or deleted the node; else as [`Self::node`].
    pub fn taint(&self, node: &NodeTaints) -> Result<(), Error> {
        self.change(ApiRequest::taints(node))
    }

    fn change(&self, request: Result<ApiRequest, Error>) -> Result<(), Error> {
        self.api(WRITE_TIMEOUT).write(Deadline::after(WRITE_TIMEOUT), &[request?])
    }

    /// Returns whether a DaemonSet exists and is not being deleted; retries for `timeout`.
    ///
    /// # Errors
    /// The API rejects the request, or does not answer.
    pub fn has(&self, daemon_set: &ObjectRef, timeout: Duration) -> Result<bool, Error> {
        let api = self.api(timeout);
        let session = api.session()?;
        session.run(session.has(daemon_set, timeout))
    }

    /// Watches a DaemonSet for some minutes. Calls `report` with whether it exists, first at once and then after each
    /// change. If the watch does not start with the object, a request checks whether it exists. For tasks of the
    /// connection's event loop.
    ///
    /// # Errors
    /// As [`Self::token`].
    pub async fn watch(&self, daemon_set: &ObjectRef, mut report: impl FnMut(bool)) -> Result<(), Error> {
        let api = self.api(WATCH_TIMEOUT);
        let session = api.session()?;
        let collection = Collection {
            kind: Kind::DAEMON_SET,
            namespace: Some(daemon_set.namespace.clone()),
            fields: Some(format!("metadata.name={}", daemon_set.name)),
            metadata_only: true,
        };
        let request = ApiRequest::get(Kind::DAEMON_SET, Some(&daemon_set.namespace), &daemon_set.name)?;
        let failed = |failure: Failure| session.error(&request, failure.into());
        // The object's own version may be older than the API server's watch cache, which is empty after each start of the
        // server. A watch from any version starts with the object, so no change is missed.
        let mut events = session.watch::<DaemonSetObject>(&collection, None).await.map_err(failed)?;
        let mut is_known = false;
        loop {
            let event_timeout = if is_known { MAX_WATCH_TIME } else { FIRST_EVENT_TIMEOUT };
            match timeout(event_timeout, events.next()).await {
                Ok(event) => match event.map_err(failed)? {
                    Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                        report(!object.metadata.is_deleting())
                    }
                    Some(WatchEvent::Deleted(_)) => report(false),
                    Some(_) => continue,
                    None => return Ok(()),
                },
                Err(_) if is_known => return Err(failed(Failure::new("no data from the server"))),
                Err(_) => {
                    let exists = session.has(daemon_set, WATCH_TIMEOUT).await?;
                    report(exists);
                    is_known = !exists;
                    continue;
                }
            }
            is_known = true;
        }
    }

    /// Calls `each` with every object of a collection. Returns the version of the list, at which a watch continues.
    /// `from_cache` is whether the server may answer from its cache, as for the first list of a client: that takes no
    /// request to etcd, which would have to read the pods of all nodes.
    ///
    /// # Errors
    /// The API server rejects a request or does not answer, an object is too large, or the list does not end.
    pub(crate) async fn list<T: DeserializeOwned>(
        &self,
        collection: &Collection,
        from_cache: bool,
        each: impl FnMut(T),
    ) -> Result<String, Failure> {
        let api = self.api(WATCH_TIMEOUT);
        let listed = api.session()?.list(collection, from_cache, (MAX_PAGES, PAGE_TIMEOUT), each).await?;
        listed.ok_or_else(|| Failure::new(format!("a list of more than {MAX_PAGES} pages")))
    }

    /// Watches the objects of a collection from `version` on, for some minutes. The server has started the watch when this
    /// returns.
    ///
    /// # Errors
    /// The API server rejects the request or does not answer.
    pub(crate) async fn follow<T: DeserializeOwned>(
        &self,
        collection: &Collection,
        version: &str,
    ) -> Result<Events<T>, Failure> {
        let api = self.api(WATCH_TIMEOUT);
        api.session()?.watch(collection, Some(version)).await
    }
}

impl Session {
    /// Returns whether a DaemonSet exists. A 404 counts only if it names the DaemonSet: a server that does not serve all
    /// resources yet, or a proxy in front of it, answers 404 as well.
    async fn has(&self, daemon_set: &ObjectRef, timeout: Duration) -> Result<bool, Error> {
        let ObjectRef { namespace, name } = daemon_set;
        let request = ApiRequest::get(Kind::DAEMON_SET, Some(namespace), name)?;
        let request = ApiRequest { confirmed_by: Some(name.clone()), ..request };
        let accept = |found: DaemonSetObject| Ok(!found.metadata.is_deleting());
        match self.send(&request, Deadline::after(timeout).awaiting(false), accept).await {
            Err(error) if error.code == Code::PodUnknown => Ok(false),
            result => result,
        }
    }
}
