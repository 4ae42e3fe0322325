//! Changes to the cluster: the report after a call, the agent's changes to pods and its node, and new tokens.

use super::request::ApiRequest;
use super::retry::{AttemptError, Deadline};
use super::server::Api;
use super::service_account::{ServiceAccount, WATCH_TIMEOUT};
use crate::cluster::resources::{Event, NodeTaints, ObjectRef, PolicyCondition, Token};
use crate::cluster::wire;
use crate::cni::Error;
use crate::pod::{Pod, PodRef};
use futures_util::future::try_join_all;
use std::time::Duration;

/// The timeout of a write, including retries: the pod's start waits for it.
pub(in crate::cluster) const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// The timeout for reading or changing a pod or node, including retries.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(10);
/// The beginning of the answer of an API server that binds no tokens to nodes.
const UNBOUND: &str = "cannot bind token to ";

impl Api {
    /// Sets a pod's network status and records its Events, concurrently.
    pub(in crate::cluster) fn report_by(
        &self,
        deadline: Deadline,
        pod: &Pod,
        status: Option<&str>,
        events: &[Event],
    ) -> Result<(), Error> {
        let status = status.map(|status| ApiRequest::network_status(pod, status));
        let events = events.iter().map(|event| ApiRequest::event(pod, event));
        self.write(deadline, &status.into_iter().chain(events).collect::<Result<Vec<_>, _>>()?)
    }

    /// Sends all requests concurrently and waits for all of them. "Not found" is not retried: the object existed.
    fn write(&self, deadline: Deadline, requests: &[ApiRequest]) -> Result<(), Error> {
        let session = self.session()?;
        let send = async |request| {
            let call = self.call(session, request);
            let attempt = async || match call.send().await {
                Ok(_) => Ok(()),
                Err(AttemptError::NotFound(cause)) => Err(call.gone(&cause)),
                Err(error) => Err(error),
            };
            Ok(call.run(deadline, attempt).await)
        };
        Error::all(session.run(try_join_all(requests.iter().map(send)))?)
    }
}

impl ServiceAccount {
    /// Creates a token of the service account `of` that expires after about `lifetime`: the API server may shorten
    /// it. It is bound to this account's node, so that it ends with the Node object, if the API server can
    /// (Kubernetes 1.31). It can't be bound to this account's pod: the API server binds a token only to a pod of the same
    /// account (Kubernetes, `registry/core/serviceaccount`).
    ///
    /// # Errors
    /// The API rejects the request, or does not answer within five seconds.
    pub fn token(&self, of: &ObjectRef, lifetime: Duration) -> Result<Token, Error> {
        let api = self.api(WATCH_TIMEOUT);
        let (deadline, session) = (Deadline::after(api.timeout), api.session()?);
        let create = |node| {
            let request = ApiRequest::token(of, node, lifetime)?;
            let call = api.call(session, &request);
            let attempt = async || Ok(call.get::<wire::TokenGranted>().await?.into());
            session.run(call.run(deadline, attempt))
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
        self.change(ApiRequest::policy_condition(pod, condition, has_changed_status))
    }

    /// Deletes a pod that still has this UID and `resourceVersion` (`delete pods`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`] if the pod was deleted or changed; else as [`Cluster::report`].
    pub fn delete(&self, pod: &Pod, resource_version: &str) -> Result<(), Error> {
        self.change(ApiRequest::deletion(pod, resource_version))
    }

    /// Sets a label of a pod that still has this UID and `resourceVersion` (`patch pods/status`).
    ///
    /// # Errors
    /// As [`Self::delete`].
    pub fn label(&self, pod: &Pod, resource_version: &str, label: (&str, &str)) -> Result<(), Error> {
        self.change(ApiRequest::label(pod, resource_version, label))
    }

    /// Gets a node (`get nodes`).
    ///
    /// # Errors
    /// The node does not exist, or the API does not answer.
    pub fn node(&self, name: &str) -> Result<NodeTaints, Error> {
        let (api, request) = (self.api(CONTROL_TIMEOUT), ApiRequest::node(name)?);
        let session = api.session()?;
        let call = api.call(session, &request);
        let attempt = async || Ok(call.get::<wire::NodeObject>().await?.into());
        session.run(call.run(Deadline::after(api.timeout), attempt))
    }

    /// Replaces all taints of a node that still has its `resource_version` (`patch nodes`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`] if another process changed or deleted the node; else as [`Self::node`].
    pub fn taint(&self, node: &NodeTaints) -> Result<(), Error> {
        self.change(ApiRequest::taints(node))
    }

    fn change(&self, request: Result<ApiRequest, Error>) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).write(Deadline::after(WRITE_TIMEOUT), &[request?])
    }
}
