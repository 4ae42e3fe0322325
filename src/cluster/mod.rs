//! Facts of pods, namespaces and NetworkAttachmentDefinitions, and requests that change the cluster.
//!
//! [`source`] selects one of three sources behind the trait [`Cluster`]: the node's agent, the API server, or a
//! directory of manifests.

use crate::cni;
pub use api::Api;
pub(crate) use api::{Collection, Failure, Kind};
pub use fact_source::{Cluster, Definitions, Reports};
pub use kubeconfig::KubeconfigSummary;
pub use manifests::{Given, Objects, objects};
pub use resources::{Definition, DefinitionQuery, Event, Lookup, NodeTaints, ObjectRef};
pub use resources::{Permission, ReportedEvent, ScheduledPod, Token, Workload};
use std::path::Path;

pub mod agent;
mod api;
mod fact_source;
mod kubeconfig;
mod manifests;
mod resources;
pub(crate) mod wire;
pub(crate) mod yaml;

/// Returns the source that the configuration selects: `manifests_dir`, or `agent_socket` with `kubeconfig` as
/// fallback, or `kubeconfig`; `None` if it sets none of them.
///
/// The source opens no file and no connection before its first request. It reads the kubeconfig once, so use one
/// source per call, not per process.
#[must_use]
pub fn source(conf: &cni::Kubernetes) -> Option<Box<dyn Cluster>> {
    source_or(conf, || None)
}

/// Like [`source`], with the service account of the pod that this process runs in as fallback for `kubeconfig`.
#[must_use]
pub fn source_or_in_cluster(conf: &cni::Kubernetes) -> Option<Box<dyn Cluster>> {
    source_or(conf, || Api::in_cluster().map(|api| api.within(conf.timeout)))
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

fn source_or(conf: &cni::Kubernetes, fallback: impl FnOnce() -> Option<Api>) -> Option<Box<dyn Cluster>> {
    if let Some(dir) = &conf.manifests_dir {
        return Some(Box::new(manifests::Manifests { dir: dir.clone() }));
    }
    let kubeconfig = conf.kubeconfig.clone().filter(|path| !path.as_os_str().is_empty());
    let api = kubeconfig.map(|path| Api::of_kubeconfig(Path::new("/"), path).within(conf.timeout)).or_else(fallback);
    match &conf.agent_socket {
        Some(socket) => Some(Box::new(agent::AgentClient::new(socket.clone(), api, conf.timeout))),
        None => Some(Box::new(api?)),
    }
}
