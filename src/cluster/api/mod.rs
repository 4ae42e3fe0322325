//! The Kubernetes API: an API server with the credentials of a kubeconfig or a service account, as a source of facts, and
//! as the destination of what plugin and agent write to the cluster. This file has the requests: those for facts, those of
//! the agent as its pod's service account, and those of `doctor` and `audit`.

use crate::cluster::kubeconfig::{Kubeconfig, Token};
use crate::cluster::resources::{
    DaemonSetObject, DefinitionObject, DefinitionQuery, Event, Lookup, NamespaceObject, NodeSpec, Object, ObjectRef,
    Permission, PodObject, ScheduledPod, Workload,
};
use crate::cluster::{Cluster, Definitions, uid_mismatch};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use futures_util::future::try_join_all;
use futures_util::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::Event as ApiEvent;
use k8s_openapi::jiff::Timestamp;
use kube::api::{
    DeleteParams, ListParams, ObjectList, Patch, PatchParams, PostParams, Preconditions, Request, WatchEvent,
};
use request::{ApiRequest, Target, event, in_namespace, network_status};
pub(crate) use request::{Collection, Failure, Kind};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};
use session::{Limits, Session};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

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

    /// Returns the same server with one limit for all requests, which began at `started`. `is_connected`: another source was
    /// asked first, and accepted a connection.
    pub(in crate::cluster) fn since(&self, started: Instant, timeout: Duration, is_connected: bool) -> Self {
        let limits = Limits { timeout, started: Some(started), needs_connection: !is_connected, ..self.limits };
        Self { limits, ..self.clone() }
    }

    /// Returns the session, which the first call opens.
    pub(crate) fn session(&self) -> Result<&Session, Error> {
        if let Some(session) = self.session.get() {
            return Ok(session);
        }
        let kubeconfig = match &*self.credentials {
            Credentials::Kubeconfig { root, path } => Kubeconfig::read(root, path)?,
            Credentials::Account { server, directory } => Kubeconfig::of_service_account(server, directory),
        };
        let session = Session::open(&kubeconfig, self.of_tasks)?;
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

    /// Sets the network status, then records the Events: concurrent requests would need several connections, and a TLS
    /// handshake costs more than a request. "Not found" is not retried: the pod existed.
    pub(crate) async fn send_report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        let limited = self.since(Instant::now(), WRITE_TIMEOUT.min(self.limits.timeout), false);
        let status = status.map(|status| network_status(pod, status));
        let requests = stream::iter(status.into_iter().chain(events.iter().map(|one| event(pod, one))));
        let sent = requests.then(async |request| limited.sent(&request?, |_: IgnoredAny| Ok(())).await);
        Error::all(sent.collect::<Vec<_>>().await)
    }
}

impl Cluster for Api {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        self.wait_for(self.find_facts(wanted, with_namespace))
            .map_err(|error| error.of_pod(&wanted.namespace, &wanted.name))
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        self.wait_for(self.find_namespace(wanted)).map_err(|error| error.of_pod(&wanted.namespace, &wanted.name))
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

/// The timeout for creating a token, including retries, and for reading a DaemonSet.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(5);
/// The beginning of the answer of an API server that binds no tokens to nodes.
const UNBOUND: &str = "cannot bind token to ";

/// The agent's requests.
impl Api {
    /// Creates a token of the service account `of` that expires after about `lifetime`: the API server may shorten
    /// it. It is bound to this account's node, so that it ends with the Node object, if the API server can
    /// (Kubernetes 1.31). It can't be bound to this account's pod: the API server binds a token only to a pod of the same
    /// account (Kubernetes, `registry/core/serviceaccount`).
    ///
    /// # Errors
    /// The API rejects the request, or does not answer within five seconds.
    pub async fn token(&self, of: &ObjectRef, lifetime: Duration) -> Result<Token, Error> {
        let create = async |node: Option<&str>| {
            let mut spec = json!({"audiences": [], "expirationSeconds": lifetime.as_secs()});
            if let Some(node) = node {
                spec["boundObjectRef"] = json!({"kind": "Node", "apiVersion": "v1", "name": node});
            }
            let body = json!({"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": spec});
            let target = Target(Kind::SERVICE_ACCOUNT, Some(&of.namespace), &of.name);
            let request = ApiRequest::of_object("create", "serviceaccounts/token", target, |accounts| {
                accounts.create_subresource("token", &of.name, &PostParams::default(), body.to_string().into())
            })?;
            let accept = |granted: TokenRequest| {
                let granted = granted.status.ok_or_else(|| Failure::unexpected("no token"))?;
                Ok(Token { text: granted.token, expires: granted.expiration_timestamp.0 })
            };
            self.within(TOKEN_TIMEOUT).sent(&request, accept).await
        };
        match create(self.node.as_deref()).await {
            Err(error) if self.node.is_some() && error.details.contains(UNBOUND) => create(None).await,
            result => result,
        }
    }

    /// Records an Event of a pod (`create events`).
    ///
    /// # Errors
    /// As [`Cluster::report`](crate::cluster::Cluster::report).
    pub async fn tell(&self, pod: &PodRef, one: &Event) -> Result<(), Error> {
        self.change(event(&self.own(pod.clone()), one)).await
    }

    /// Returns a pod of this account's node, for reports.
    #[must_use]
    pub fn own(&self, pod: PodRef) -> Pod {
        Pod { node_name: self.node.clone(), ..pod.into() }
    }

    /// Deletes a pod that still has this UID and `resourceVersion` (`delete pods`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`] if the pod was deleted or changed; else as [`Self::tell`].
    pub async fn delete(&self, pod: &Pod, resource_version: &str) -> Result<(), Error> {
        let preconditions = Preconditions { uid: pod.uid.clone(), resource_version: Some(resource_version.to_owned()) };
        let params = DeleteParams::default().preconditions(preconditions);
        let target = Target(Kind::POD, Some(&pod.namespace), &pod.name);
        let request = ApiRequest::of_object("delete", "pods", target, |pods| pods.delete(&pod.name, &params));
        self.change(request).await
    }

    /// Replaces the taints of a node with what `change` returns (`get nodes`, `patch nodes`). Returns false if that is
    /// `None`.
    ///
    /// # Errors
    /// The node does not exist, or the API does not answer; [`crate::cni::Code::PodUnknown`] if another process changed or
    /// deleted the node meanwhile.
    pub async fn change_taints(
        &self,
        name: &str,
        change: impl FnOnce(&[Value]) -> Option<Vec<Value>>,
    ) -> Result<bool, Error> {
        let node: Object<NodeSpec> = self.sent(&ApiRequest::get(Kind::NODE, None, name)?, Ok).await?;
        let Some(taints) = change(&node.spec.unwrap_or_default().taints) else { return Ok(false) };
        // The API server refuses the patch if the node has another version.
        let metadata = json!({"resourceVersion": node.metadata.resource_version});
        let patch = Patch::Merge(json!({"metadata": metadata, "spec": {"taints": taints}}));
        let request = ApiRequest::of_object("patch", "nodes", Target(Kind::NODE, None, name), |nodes| {
            nodes.patch(name, &PatchParams::default(), &patch)
        });
        self.change(request).await.map(|()| true)
    }

    async fn change(&self, request: Result<ApiRequest, Error>) -> Result<(), Error> {
        self.within(WRITE_TIMEOUT).sent(&request?, |_: IgnoredAny| Ok(())).await
    }

    /// Returns whether a DaemonSet exists and is not being deleted; retries for `timeout`. A list is requested, because "not
    /// found" can also come from a server that does not serve all resources yet, or from a proxy in front of it.
    ///
    /// # Errors
    /// The API rejects the request, or does not answer.
    pub async fn has(&self, daemon_set: &ObjectRef, timeout: Duration) -> Result<bool, Error> {
        let exists = |found: ObjectList<DaemonSetObject>| Ok(found.items.iter().any(|one| !one.metadata.is_deleting()));
        self.within(timeout).sent(&only(daemon_set)?.1, exists).await
    }

    /// Watches a DaemonSet for some minutes. Calls `report` with whether it exists, first at once and then after each
    /// change. For tasks of the connection's event loop.
    ///
    /// # Errors
    /// As [`Self::token`].
    pub async fn watch(&self, daemon_set: &ObjectRef, mut report: impl FnMut(bool)) -> Result<(), Error> {
        let (session, (collection, request)) = (self.session()?, only(daemon_set)?);
        let failed = |failure: Failure| session.error(&request, failure);
        let mut exists = false;
        let found = |object: DaemonSetObject| exists = !object.metadata.is_deleting();
        let version = session.list(&collection, true, TOKEN_TIMEOUT, found).await.map_err(failed)?;
        report(exists);
        let mut events = session.watch::<DaemonSetObject>(&collection, &version).await.map_err(failed)?;
        while let Some(event) = events.try_next().await.map_err(failed)? {
            match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => report(!object.metadata.is_deleting()),
                WatchEvent::Deleted(_) => report(false),
                WatchEvent::Bookmark(_) | WatchEvent::Error(_) => {}
            }
        }
        Ok(())
    }
}

/// Returns the collection of this DaemonSet only, and the request for it.
fn only(daemon_set: &ObjectRef) -> Result<(Collection, ApiRequest), Error> {
    let named =
        Collection::new(Kind::DAEMON_SET, Some(&daemon_set.namespace), Some(("metadata.name", &daemon_set.name)));
    let collection = Collection { metadata_only: true, ..named };
    let request = ApiRequest::list(&collection, format!("DaemonSet {daemon_set}"))?;
    Ok((collection, request))
}

/// The requests of `doctor` and `audit`.
impl Api {
    /// The timeout of a request of `doctor` and `audit`.
    pub const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

    /// Returns the server's version.
    ///
    /// # Errors
    /// The server is unreachable or rejects the credentials.
    pub fn version(&self) -> Result<String, Error> {
        let http = Request::new("/version").list(&ListParams::default());
        let request = ApiRequest::of(http, "the API server".to_owned(), "get /version".to_owned())?;
        let version = |found: Value| Ok(found["gitVersion"].as_str().unwrap_or("of an unknown version").to_owned());
        self.wait_for(self.sent(&request, version))
    }

    /// Returns whether the client has a permission, with a `SelfSubjectAccessReview` (k8s.io/api, `authorization/v1`):
    /// every authenticated client may create one (ClusterRole `system:basic-user`).
    ///
    /// # Errors
    /// The request failed.
    pub fn may(&self, permission: &Permission) -> Result<bool, Error> {
        let Permission { verb, group, resource, subresource } = permission;
        let attributes = json!({"verb": verb, "group": group, "resource": resource, "subresource": subresource});
        let (kind, spec) = (Kind::ACCESS_REVIEW, json!({"resourceAttributes": attributes}));
        let body = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec});
        let http = kind.requests(None).create(&PostParams::default(), body.to_string().into());
        let subject = format!("the permission to {permission}");
        let request = ApiRequest::of(http, subject, format!("create {}", kind.resource()))?;
        self.wait_for(self.sent(&request, |review: Value| Ok(review["status"]["allowed"] == true)))
    }

    /// Returns the Events about the pods of that name, the latest last.
    ///
    /// # Errors
    /// The request failed.
    pub fn events(&self, PodRef { namespace, name, .. }: &PodRef) -> Result<Vec<ApiEvent>, Error> {
        let of_pod =
            Collection::new(Kind::EVENT, Some(namespace), Some(("involvedObject.kind=Pod,involvedObject.name", name)));
        let mut events = self.wait_for(self.all(&of_pod, format!("events of pod {namespace}/{name}")))?;
        events.sort_by_key(last_time);
        Ok(events)
    }

    /// Returns the pods that are scheduled to a node, in `namespace` or in all namespaces.
    ///
    /// # Errors
    /// A request failed.
    pub fn pods_of_node(&self, node: &str, namespace: Option<&str>) -> Result<Vec<ScheduledPod>, Error> {
        let of_node = Collection::new(Kind::POD, namespace, Some(("spec.nodeName", node)));
        let pods = self.wait_for(self.all(&of_node, format!("pods on node {node}{}", in_namespace(namespace))))?;
        Ok(pods.into_iter().map(scheduled_pod).collect())
    }

    /// Returns the namespaces: the one that is named, or all.
    ///
    /// # Errors
    /// A request failed.
    pub fn namespaces(&self, name: Option<&str>) -> Result<Vec<Namespace>, Error> {
        let named = Collection::new(Kind::NAMESPACE, None, name.map(|name| ("metadata.name", name)));
        let found: Vec<NamespaceObject> = self.wait_for(self.all(&named, "namespaces".to_owned()))?;
        Ok(found.into_iter().map(Into::into).collect())
    }
}

fn scheduled_pod(object: PodObject) -> ScheduledPod {
    let metadata = &object.metadata;
    let template_hash = metadata.labels.get("pod-template-hash").map(String::as_str);
    let workload = metadata.controller().map(|owner| Workload::of(&owner.kind, &owner.name, template_hash));
    let status = object.status.as_ref();
    let is_pending = status.is_some_and(|status| status.phase == "Pending");
    let is_ending = metadata.is_deleting() || status.is_some_and(|status| status.has_ended());
    ScheduledPod { workload, is_pending, is_ending, pod: object.into() }
}

/// Returns the time of the last occurrence of an Event in either form: `core/v1`, or one that was created as
/// `events.k8s.io/v1`.
fn last_time(event: &ApiEvent) -> Option<Timestamp> {
    let last = event.last_timestamp.as_ref().map(|time| time.0).or(event.event_time.as_ref().map(|time| time.0));
    last.or(event.first_timestamp.as_ref().map(|time| time.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_ending_if_it_has_ended_or_is_being_deleted() {
        for (phase, deleted, expected) in [
            ("Pending", Value::Null, (true, false)),
            ("Running", Value::Null, (false, false)),
            ("Running", json!("2026-01-01T00:00:00Z"), (false, true)),
            ("Succeeded", Value::Null, (false, true)),
            ("Failed", Value::Null, (false, true)),
        ] {
            let object = json!({"metadata": {"name": "p", "deletionTimestamp": deleted}, "status": {"phase": phase}});
            let pod = scheduled_pod(serde_json::from_value(object).expect("a pod"));
            assert_eq!((pod.is_pending, pod.is_ending), expected, "{phase}");
        }
    }
}
