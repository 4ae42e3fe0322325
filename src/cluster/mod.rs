//! Where facts come from: one trait, and its sources.

use crate::cni;
use crate::pod::{Facts, PodRef};

/// A source of facts.
pub trait Cluster {
    /// The pod that `wanted` speaks of, UID compared, and its namespace where `with_namespace`.
    ///
    /// # Errors
    /// What can't be known within the configured wait, as the CNI error that names the pod, what
    /// was looked for and where, and the next step.
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, cni::Error>;
}
