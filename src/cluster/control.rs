//! What the node's agent does to objects of the cluster; the plugin's calls never do.

use super::{Cluster, Event, ServiceAccount};
use crate::cni::Error;
use crate::pod::Pod;
use serde_json::Value;
use std::time::Duration;

/// How long each request may take, all tries together.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(10);

/// A node, as far as its taints need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeTaints {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.resourceVersion`.
    pub resource_version: String,
    /// `spec.taints`, each as it came.
    pub taints: Vec<Value>,
}

/// Credentials are read anew for each thing that is done: they change while the agent stays.
impl ServiceAccount {
    /// Records an event of a pod (`create events`).
    ///
    /// # Errors
    /// As [`Cluster::report`].
    pub fn tell(&self, pod: &Pod, event: &Event) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).report(pod, None, std::slice::from_ref(event))
    }

    /// Deletes a pod, if it still is the one of this UID and `resourceVersion` (`delete pods`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`]: it is gone or is not as it was; else as
    /// [`Cluster::report`].
    pub fn delete(&self, pod: &Pod, resource_version: &str) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).delete(pod, resource_version)
    }

    /// Gives a pod a label, if it still is the one of this UID and `resourceVersion` (`patch
    /// pods/status`).
    ///
    /// # Errors
    /// As [`ServiceAccount::delete`].
    pub fn label(&self, pod: &Pod, resource_version: &str, label: (&str, &str)) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).label(pod, resource_version, label)
    }

    /// A node (`get nodes`).
    ///
    /// # Errors
    /// It is not there, or can't be known.
    pub fn node(&self, name: &str) -> Result<NodeTaints, Error> {
        self.api(CONTROL_TIMEOUT).node(&name.to_owned())
    }

    /// Gives a node these taints, all of them, if it still has its `resource_version` (`patch nodes`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`]: another process changed it meanwhile, or it is gone; else as
    /// [`ServiceAccount::node`].
    pub fn taint(&self, node: &NodeTaints) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).taint(node)
    }
}
