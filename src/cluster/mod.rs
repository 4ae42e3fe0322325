//! Facts of pods, namespaces and NetworkAttachmentDefinitions, and requests that change the cluster.
//!
//! [`source`] selects one of three sources behind the trait [`Cluster`]: the node's agent, the API server, or a
//! directory of manifests.

use crate::cni::{self, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
pub use api::Api;
pub(crate) use api::{Collection, Failure, Kind};
pub use kubeconfig::{KubeconfigSummary, Token};
pub use manifests::{Given, Objects, objects};
pub use resources::{Definition, DefinitionQuery, Event, Lookup, ObjectRef};
pub use resources::{Permission, ScheduledPod, Workload};
use std::path::Path;

pub mod agent;
mod api;
mod kubeconfig;
pub(crate) mod manifests;
pub(crate) mod resources;

/// Returns the source that the configuration selects: `manifests_dir`, or `agent_socket` with `kubeconfig` as
/// fallback, or `kubeconfig`; `None` if it sets none of them.
///
/// The source opens no file and no connection before its first request. It reads the kubeconfig once, so use one
/// source per call, not per process.
#[must_use]
pub fn source(conf: &cni::Kubernetes) -> Option<Box<dyn Cluster>> {
    source_or(conf, None)
}

/// Like [`source`], with a fallback for `kubeconfig`.
#[must_use]
pub fn source_or(conf: &cni::Kubernetes, fallback: Option<Api>) -> Option<Box<dyn Cluster>> {
    if let Some(dir) = &conf.manifests_dir {
        return Some(Box::new(manifests::Manifests { dir: dir.clone() }));
    }
    let kubeconfig = conf.kubeconfig.clone().filter(|path| !path.as_os_str().is_empty());
    let api = kubeconfig.map(|path| Api::of_kubeconfig(Path::new("/"), path)).or(fallback);
    let api = api.map(|api| api.within(conf.timeout));
    match &conf.agent_socket {
        Some(socket) => Some(Box::new(agent::AgentClient::new(socket.clone(), api, conf.timeout))),
        None => Some(Box::new(api?)),
    }
}

/// Returns a source that answers at once or not at all, for pods that do not wait: `manifests_dir`, or what the agent
/// behind `agent_socket` has in memory; `None` if the configuration sets neither.
#[must_use]
pub fn memory(conf: &cni::Kubernetes) -> Option<Box<dyn Cluster>> {
    match (&conf.manifests_dir, &conf.agent_socket) {
        (Some(dir), _) => Some(Box::new(manifests::Manifests { dir: dir.clone() })),
        (None, Some(socket)) => Some(Box::new(agent::AgentClient::memory(socket.clone()))),
        (None, None) => None,
    }
}

/// A source of facts about pods and namespaces, which also takes the reports of calls.
pub trait Cluster: Definitions {
    /// Returns the pod `wanted`, if its UID matches, and its namespace if `with_namespace`.
    ///
    /// # Errors
    /// The facts are unavailable within the configured timeout. The CNI error names the pod, what was looked up
    /// where, and the next step.
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error>;

    /// Returns the namespace of the pod `wanted`.
    ///
    /// # Errors
    /// As [`Self::facts`].
    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error>;

    /// Checks with one request whether the source can answer now.
    ///
    /// # Errors
    /// The reason why it can't.
    fn probe(&self) -> Result<(), Error>;

    /// Reports the result of a call: sets the pod's annotation `k8s.v1.cni.cncf.io/network-status` to `status`, unless
    /// that is `None` or the pod was replaced (`pod.uid`), and records the events, within two
    /// seconds in all.
    ///
    /// # Errors
    /// The requests that failed. Callers continue: the pod does not depend on the report.
    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error>;
}

/// A source of NetworkAttachmentDefinitions.
pub trait Definitions {
    /// Looks up definitions concurrently and returns the results in the order of `wanted`. A definition that is
    /// `awaited` and not found is retried for two seconds, like a pod.
    ///
    /// # Errors
    /// The source is unavailable within the configured timeout.
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error>;
}

/// Describes how the UID of the pod that was found differs from the requested one.
fn uid_mismatch(found: &Pod, wanted: &PodRef) -> String {
    let (found, wanted) = (found.uid.as_deref().unwrap_or_default(), wanted.uid.as_deref().unwrap_or_default());
    format!("UID mismatch: expected {wanted}, got {found}")
}
