//! The API as a pod's own service account: the agent's requests. They share a connection if there is one
//! ([`ServiceAccount::through`]); otherwise, each method connects and reads the credentials anew.

use super::request::ApiRequest;
use super::server::{Api, ApiConnection};
use crate::cluster::fact_source::Cluster;
use crate::cluster::resources::{Event, NodeTaints, ObjectRef, PolicyCondition, Token};
use crate::cni::{Code, Error};
use crate::pod::{Pod, PodRef};
use kube::Client;
use std::path::PathBuf;
use std::slice;
use std::time::{Duration, Instant};

/// The timeout for creating a token and for starting a watch, including retries.
const WATCH_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout for reading or changing a pod or node, including retries.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(10);

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

    /// Returns a source of facts for one lookup, which takes at most `timeout`, and at most `silence` while the server has
    /// sent no response.
    #[must_use]
    pub fn source(&self, timeout: Duration, silence: Duration) -> Box<dyn Cluster> {
        Box::new(self.api(timeout).with_silence(silence))
    }

    /// Like [`Self::source`], without retries after transient errors: for callers with another source.
    #[must_use]
    pub fn source_once(&self, timeout: Duration) -> Box<dyn Cluster> {
        Box::new(self.api(timeout).without_retries())
    }

    /// Returns a client for watches.
    ///
    /// # Errors
    /// A file can't be read, or its contents are invalid.
    pub(crate) fn client(&self) -> Result<Client, Error> {
        let api = self.api(WATCH_TIMEOUT);
        let failed = |error: kube::Error| Error::new(Code::Internal, "no client").with_details(error.to_string());
        api.session()?.client().map_err(failed)
    }

    /// Creates a token of the service account `of` that expires after about `lifetime`: the API server may shorten
    /// it. It is bound to this account's node, so that it ends with the Node object. It can't be bound to this account's
    /// pod: the API server binds a token only to a pod of the same account (Kubernetes, `registry/core/serviceaccount`).
    ///
    /// # Errors
    /// The API rejects the request, or does not answer within five seconds.
    pub fn token(&self, of: &ObjectRef, lifetime: Duration) -> Result<Token, Error> {
        self.api(WATCH_TIMEOUT).token(of, self.node.as_deref(), lifetime)
    }

    /// Returns whether a DaemonSet exists and is not being deleted; retries for `timeout`.
    ///
    /// # Errors
    /// The API rejects the request, or does not answer.
    pub fn has(&self, daemon_set: &ObjectRef, timeout: Duration) -> Result<bool, Error> {
        self.api(timeout).has(daemon_set)
    }

    /// Watches a DaemonSet for some minutes. Calls `report` with whether it exists, first at once and then after each
    /// change. For tasks of the connection's event loop.
    ///
    /// # Errors
    /// As [`Self::token`]; the connection breaks.
    pub async fn watch(&self, daemon_set: &ObjectRef, report: impl FnMut(bool)) -> Result<(), Error> {
        self.api(WATCH_TIMEOUT).watch(daemon_set, report).await
    }

    /// Records an Event of a pod (`create events`).
    ///
    /// # Errors
    /// As [`Cluster::report`](crate::cluster::Cluster::report).
    pub fn tell(&self, pod: &PodRef, event: &Event) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).report_since(Instant::now(), &self.own(pod.clone()), None, slice::from_ref(event))
    }

    /// Returns a pod of this account's node, for reports.
    #[must_use]
    pub fn own(&self, PodRef { namespace, name, uid }: PodRef) -> Pod {
        Pod { namespace, name, uid, node_name: self.node.clone(), ..Pod::default() }
    }

    /// Sets the condition of a pod's policy (`patch pods/status`). A condition with `has_changed_status` gets a new
    /// transition time.
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`] if the pod was deleted; otherwise as [`Self::tell`].
    pub fn set_condition(
        &self,
        pod: &PodRef,
        condition: &PolicyCondition,
        has_changed_status: bool,
    ) -> Result<(), Error> {
        let request = ApiRequest::policy_condition(pod, condition, has_changed_status)?;
        self.api(CONTROL_TIMEOUT).write(Instant::now(), &[request])
    }

    /// Deletes a pod that still has this UID and `resourceVersion` (`delete pods`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`] if the pod was deleted or changed; else as [`Cluster::report`].
    pub fn delete(&self, pod: &Pod, resource_version: &str) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).delete(pod, resource_version)
    }

    /// Sets a label of a pod that still has this UID and `resourceVersion` (`patch pods/status`).
    ///
    /// # Errors
    /// As [`Self::delete`].
    pub fn label(&self, pod: &Pod, resource_version: &str, label: (&str, &str)) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).label(pod, resource_version, label)
    }

    /// Gets a node (`get nodes`).
    ///
    /// # Errors
    /// The node does not exist, or the API does not answer.
    pub fn node(&self, name: &str) -> Result<NodeTaints, Error> {
        self.api(CONTROL_TIMEOUT).node(name)
    }

    /// Replaces all taints of a node that still has its `resource_version` (`patch nodes`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`] if another process changed or deleted the node; else as [`Self::node`].
    pub fn taint(&self, node: &NodeTaints) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).taint(node)
    }

    /// Returns the API server of this account.
    pub(in crate::cluster) fn api(&self, timeout: Duration) -> Api {
        let api = Api::as_account(self.server.clone(), self.directory.clone(), timeout);
        match &self.connection {
            Some(connection) => api.through(connection.clone()),
            None => api,
        }
    }
}
