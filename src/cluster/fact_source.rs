//! What the plugin, the agent and the command line ask of a cluster, whichever source answers: facts ([`Cluster`],
//! [`Definitions`]) and reports ([`Reports`]).

use super::resources::{DefinitionQuery, Event, Lookup};
use crate::cni::Error;
use crate::pod::{Facts, Namespace, Pod, PodRef};

/// A source of facts about pods and namespaces, which also takes the reports of calls.
pub trait Cluster: Definitions + Reports {
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

/// A destination of reports about a pod.
pub trait Reports {
    /// Reports the result of a call: sets the pod's annotation `k8s.v1.cni.cncf.io/network-status` to `status`, unless
    /// that is `None` or the pod was replaced (`pod.uid`), and records the events. All requests run concurrently and
    /// take two seconds at most.
    ///
    /// # Errors
    /// The requests that failed. Callers continue: the pod does not depend on the report.
    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error>;
}

/// Describes how the UID of the pod that was found differs from the requested one.
pub(super) fn uid_mismatch(found: &Pod, wanted: &PodRef) -> String {
    let (found, wanted) = (found.uid.as_deref().unwrap_or_default(), wanted.uid.as_deref().unwrap_or_default());
    format!("UID mismatch: expected {wanted}, got {found}")
}

/// Returns the error with the pod's name in its message, once.
pub(super) fn with_pod(PodRef { namespace, name, .. }: &PodRef, error: Error) -> Error {
    error.of_pod(namespace, name)
}
