//! Where facts come from: one trait, and its sources.
//!
//! A source of facts that nothing is told to.

use crate::cni;
use crate::cni::Error;
use crate::pod::{Facts, Namespace, Pod, PodRef};
pub use api::ApiProbe;
pub(crate) use body::PAGE;
pub use definition::{Definition, DefinitionQuery, Lookup, ObjectRef};
pub use kubeconfig::{Authority, CredentialsSummary, KubeconfigSummary};
pub(crate) use query::causes;
pub use requests::{Event, NodeTaints, ReportedEvent, Right, Token};
pub use service_account::ServiceAccount;
use std::path::PathBuf;
use std::time::Duration;
pub use text::{Given, Objects, objects};

pub mod agent;
mod api;
mod body;
mod certificate;
mod definition;
mod kubeconfig;
mod manifests;
mod query;
mod requests;
mod retry;
mod service_account;
mod text;
pub(crate) mod wire;

/// A source of facts.
pub trait Cluster {
    /// The pod that `wanted` speaks of, UID compared, and its namespace where `with_namespace`.
    ///
    /// # Errors
    /// What can't be known within the configured wait, as the CNI error that names the pod, what
    /// was looked for and where, and the next step.
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error>;

    /// The namespace of the pod that `wanted` speaks of.
    ///
    /// # Errors
    /// As [`Self::facts`].
    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error>;

    /// The definitions, in the order of `wanted`, all looked up at the same time. One that is awaited
    /// and not there is looked for during two seconds, like a pod.
    ///
    /// # Errors
    /// Whether they are there can't be known within the configured wait.
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error>;

    /// The namespaces that have a definition of this name, sorted; `None` where that can't be
    /// known at once.
    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>>;

    /// Tells of a pod: sets its annotation `k8s.v1.cni.cncf.io/network-status` to `status`, where there
    /// is one and if it still is this pod (`pod.uid`), and records the events. All is done at the same
    /// time and takes two seconds at the most.
    ///
    /// # Errors
    /// What could not be told. That is no reason to keep a pod from running.
    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error>;

    /// Whether facts could be had now: one question, no second try.
    ///
    /// # Errors
    /// Why not.
    fn probe(&self) -> Result<(), Error>;
}

/// The source that the configuration names: `manifests_dir`, else `agent_socket` with `kubeconfig` where
/// nobody answers there, else `kubeconfig`; `None` where it names none. Nothing is read and nothing is
/// connected to until something is asked for; from then on the kubeconfig that was read counts, so a source
/// is for one call, not for a process that stays.
#[must_use]
pub fn source(conf: &cni::Kubernetes) -> Option<Box<dyn Cluster>> {
    source_or(conf, || None)
}

/// The same; without a kubeconfig, a pod's own service account counts in its place.
#[must_use]
pub fn source_or_in_cluster(conf: &cni::Kubernetes) -> Option<Box<dyn Cluster>> {
    source_or(conf, || ServiceAccount::of_environment().map(|account| account.api(conf.timeout)))
}

/// The API server of a kubeconfig that the user of the command line names: it may belong to any user.
#[must_use]
pub fn source_of_user(kubeconfig: PathBuf, timeout: Duration) -> Box<dyn Cluster> {
    Box::new(api::Api::new(kubeconfig, timeout).of_user())
}

fn source_or(conf: &cni::Kubernetes, other: impl FnOnce() -> Option<api::Api>) -> Option<Box<dyn Cluster>> {
    if let Some(dir) = &conf.manifests_dir {
        return Some(Box::new(manifests::Manifests { dir: dir.clone() }));
    }
    let kubeconfig = conf.kubeconfig.clone().filter(|path| !path.as_os_str().is_empty());
    let api = kubeconfig.map(|path| api::Api::new(path, conf.timeout)).or_else(other);
    match &conf.agent_socket {
        Some(socket) => Some(Box::new(agent::AgentClient::new(socket.clone(), api, conf.timeout))),
        None => Some(Box::new(api?)),
    }
}

/// How the pod that was found differs from the one that is wanted.
fn another_uid(found: &Pod, wanted: &PodRef) -> String {
    let (found, wanted) = (found.uid.as_deref().unwrap_or_default(), wanted.uid.as_deref().unwrap_or_default());
    format!("the pod of that name has UID {found}, wanted is {wanted}")
}

/// The error, with the pod that it keeps from its facts.
fn about(PodRef { namespace, name, .. }: &PodRef, error: Error) -> Error {
    Error { msg: format!("pod {namespace}/{name}: {}", error.msg), ..error }
}

/// Another source, for whoever only wants to know.
pub struct ReadOnly<'a>(pub &'a dyn Cluster);

impl Cluster for ReadOnly<'_> {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        self.0.facts(wanted, with_namespace)
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        self.0.namespace(wanted)
    }

    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        self.0.definitions(wanted)
    }

    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>> {
        self.0.namespaces_with_definition(name)
    }

    fn report(&self, _: &Pod, _: Option<&str>, _: &[Event]) -> Result<(), Error> {
        Ok(())
    }

    fn probe(&self) -> Result<(), Error> {
        self.0.probe()
    }
}
