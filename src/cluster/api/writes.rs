//! Changes to the cluster: the report after a call, the agent's changes to pods and its node, and new tokens.

use super::request::ApiRequest;
use super::retry::AttemptError;
use super::server::Api;
use crate::cluster::resources::{Event, NodeTaints, ObjectRef, Token};
use crate::cluster::wire;
use crate::cni::Error;
use crate::pod::Pod;
use futures_util::future::try_join_all;
use std::time::{Duration, Instant};

/// The timeout of a write, including retries: the pod's start waits for it.
pub(in crate::cluster) const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// The beginning of the answer of an API server that binds no tokens to nodes.
const UNBOUND: &str = "cannot bind token to ";

impl Api {
    /// Sets a pod's network status and records its Events, concurrently; the timeout counts from `started`.
    pub(in crate::cluster) fn report_since(
        &self,
        started: Instant,
        pod: &Pod,
        status: Option<&str>,
        events: &[Event],
    ) -> Result<(), Error> {
        let status = status.map(|status| ApiRequest::network_status(pod, status));
        let events = events.iter().map(|event| ApiRequest::event(pod, event));
        self.write(started, &status.into_iter().chain(events).collect::<Result<Vec<_>, _>>()?)
    }

    /// Deletes a pod that still has this `resourceVersion`.
    pub(in crate::cluster) fn delete(&self, pod: &Pod, resource_version: &str) -> Result<(), Error> {
        self.write(Instant::now(), &[ApiRequest::deletion(pod, resource_version)?])
    }

    /// Sets a label of a pod that still has this `resourceVersion`.
    pub(in crate::cluster) fn label(
        &self,
        pod: &Pod,
        resource_version: &str,
        label: (&str, &str),
    ) -> Result<(), Error> {
        self.write(Instant::now(), &[ApiRequest::label(pod, resource_version, label)?])
    }

    /// Replaces the taints of a node that is unchanged since it was read.
    pub(in crate::cluster) fn taint(&self, node: &NodeTaints) -> Result<(), Error> {
        self.write(Instant::now(), &[ApiRequest::taints(node)?])
    }

    /// Gets a node.
    pub(in crate::cluster) fn node(&self, name: &str) -> Result<NodeTaints, Error> {
        let request = ApiRequest::node(name)?;
        let session = self.session()?;
        let call = self.call(session, &request);
        let attempt = async || Ok(call.get::<wire::NodeObject>().await?.into());
        session.run(call.run(Instant::now(), self.timeout, attempt))
    }

    /// Creates a token of a service account, bound to a node if the API server can (Kubernetes 1.31).
    pub(in crate::cluster) fn token(
        &self,
        account: &ObjectRef,
        node: Option<&str>,
        lifetime: Duration,
    ) -> Result<Token, Error> {
        let (started, session) = (Instant::now(), self.session()?);
        let create = |node| {
            let request = ApiRequest::token(account, node, lifetime)?;
            let call = self.call(session, &request);
            let attempt = async || Ok(call.get::<wire::TokenGranted>().await?.into());
            session.run(call.run(started, self.timeout, attempt))
        };
        match create(node) {
            Err(error) if node.is_some() && error.details.contains(UNBOUND) => create(None),
            result => result,
        }
    }

    /// Sends all requests concurrently and waits for all of them. "Not found" is not retried: the object existed.
    pub(super) fn write(&self, started: Instant, requests: &[ApiRequest]) -> Result<(), Error> {
        let session = self.session()?;
        let timeout = WRITE_TIMEOUT.min(self.timeout);
        let send = async |request| {
            let call = self.call(session, request);
            let attempt = async || match call.send().await {
                Ok(_) => Ok(()),
                Err(AttemptError::NotFound(cause)) => Err(call.gone(&cause)),
                Err(error) => Err(error),
            };
            Ok(call.run(started, timeout, attempt).await)
        };
        Error::all(session.run(try_join_all(requests.iter().map(send)))?)
    }
}
