//! Where facts come from: one trait, and its sources.

mod api;
mod certificate;
mod kubeconfig;
mod manifests;
mod query;
mod retry;
mod text;
mod wire;

pub use text::{Objects, objects};

use crate::cni;
use crate::pod::{Facts, Pod, PodRef};

/// A source of facts.
pub trait Cluster {
    /// The pod that `wanted` speaks of, UID compared, and its namespace where `with_namespace`.
    ///
    /// # Errors
    /// What can't be known within the configured wait, as the CNI error that names the pod, what
    /// was looked for and where, and the next step.
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, cni::Error>;

    /// Whether facts could be had now: one question, no second try.
    ///
    /// # Errors
    /// Why not.
    fn probe(&self) -> Result<(), cni::Error>;
}

/// The source that the configuration names: `manifests_dir` before `kubeconfig`; `None` where it
/// names neither. Nothing is read and nothing is connected to until facts are asked for.
#[must_use]
pub fn source(conf: &cni::Kubernetes) -> Option<Box<dyn Cluster>> {
    if let Some(dir) = &conf.manifests_dir {
        return Some(Box::new(manifests::Manifests { dir: dir.clone() }));
    }
    let kubeconfig = conf.kubeconfig.clone().filter(|path| !path.as_os_str().is_empty())?;
    Some(Box::new(api::Api { kubeconfig, timeout: conf.timeout }))
}

/// How the pod that was found differs from the one that is wanted.
fn another_uid(found: &Pod, wanted: &PodRef) -> String {
    let (found, wanted) = (found.uid.as_deref().unwrap_or_default(), wanted.uid.as_deref().unwrap_or_default());
    format!("the pod of that name has UID {found}, wanted is {wanted}")
}

/// The error, with the pod that it keeps from its facts.
fn about(PodRef { namespace, name, .. }: &PodRef, error: cni::Error) -> cni::Error {
    cni::Error { msg: format!("pod {namespace}/{name}: {}", error.msg), ..error }
}
