//! Facts of pods, namespaces and NetworkAttachmentDefinitions, and requests that change the cluster.
//!
//! [`source`] selects one of three sources behind the trait [`Cluster`]: the node's agent, the API server, or a
//! directory of manifests.

use crate::cni;
pub use api::{ApiConnection, NodeApi, ServiceAccount};
pub(crate) use api::{Collection, CollectionError};
pub use fact_source::{Cluster, Definitions, Reports};
pub use kubeconfig::{Authority, CredentialsSummary, KubeconfigSummary};
pub use resources::{Definition, DefinitionQuery, Event, Lookup, NodeTaints, ObjectRef};
pub use resources::{Permission, PolicyCondition, ReportedEvent, ScheduledPod, Token, Workload};
pub use silence::SILENCE_MARK;
use silence::{SILENCE_TIMEOUT, SilenceMark};
pub use text::{Given, Objects, objects};

pub mod agent;
mod api;
mod fact_source;
mod kubeconfig;
mod manifests;
mod resources;
mod response_limit;
mod silence;
mod text;
pub(crate) mod wire;
pub(crate) mod yaml;

/// Returns the source that the configuration selects: `manifests_dir`, or `agent_socket` with `kubeconfig` as
/// fallback, or `kubeconfig`; `None` if it sets none of them.
///
/// The source opens no file and no connection before its first request. It reads the kubeconfig once, so use one
/// source per call, not per process.
#[must_use]
pub fn source(conf: &cni::Kubernetes) -> Option<Box<dyn Cluster>> {
    source_or(conf, SilenceMark::Unused, || None)
}

/// Like [`source`], with the service account of the pod that this process runs in as fallback for `kubeconfig`.
#[must_use]
pub fn source_or_in_cluster(conf: &cni::Kubernetes) -> Option<Box<dyn Cluster>> {
    source_or(conf, SilenceMark::Unused, || in_cluster(conf))
}

/// Whether a pod can start without facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Facts {
    /// It can: an ADD waits for two seconds at most, and for a fraction of a second if the sources have not answered a moment
    /// ago.
    Optional,
    /// It can't.
    Required,
}

/// Like [`source`], for an ADD; with `in_cluster`, like [`source_or_in_cluster`]. If neither the agent nor the API server
/// answers, a request fails within two seconds.
#[must_use]
pub fn source_for_add(conf: &cni::Kubernetes, facts: Facts, is_in_cluster: bool) -> Option<Box<dyn Cluster>> {
    let fallback = |conf: &cni::Kubernetes| if is_in_cluster { in_cluster(conf) } else { None };
    match facts {
        Facts::Optional => {
            let conf = &cni::Kubernetes { timeout: conf.timeout.min(SILENCE_TIMEOUT), ..conf.clone() };
            source_or(conf, SilenceMark::Heeded, || fallback(conf))
        }
        Facts::Required => source_or(conf, SilenceMark::Set, || fallback(conf)),
    }
}

fn in_cluster(conf: &cni::Kubernetes) -> Option<api::Api> {
    ServiceAccount::of_environment().map(|account| account.api(conf.timeout))
}

fn source_or(
    conf: &cni::Kubernetes,
    mark: SilenceMark,
    fallback: impl FnOnce() -> Option<api::Api>,
) -> Option<Box<dyn Cluster>> {
    if let Some(dir) = &conf.manifests_dir {
        return Some(Box::new(manifests::Manifests { dir: dir.clone() }));
    }
    let kubeconfig = conf.kubeconfig.clone().filter(|path| !path.as_os_str().is_empty());
    let api = kubeconfig.map(|path| api::Api::new(path, conf.timeout)).or_else(fallback);
    match &conf.agent_socket {
        Some(socket) => Some(Box::new(agent::AgentClient::new(socket.clone(), api, conf.timeout, mark))),
        None if mark == SilenceMark::Unused => Some(Box::new(api?)),
        None => Some(Box::new(api?.with_silence(SILENCE_TIMEOUT).with_mark(mark))),
    }
}
