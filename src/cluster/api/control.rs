//! What the agent does to a pod or its node.

use super::{Api, check_names, get};
use crate::cluster::query::Object;
use crate::cluster::retry::retry;
use crate::cluster::{NodeTaints, wire};
use crate::cni::Error;
use crate::pod::Pod;
use std::iter;
use std::time::Instant;

impl Api {
    /// Ends the pod.
    pub(in crate::cluster) fn delete(&self, pod: &Pod, resource_version: &str) -> Result<(), Error> {
        self.write(Instant::now(), pod, iter::once(Object::Deletion(pod, resource_version)))
    }

    /// Labels the pod.
    pub(in crate::cluster) fn label(&self, pod: &Pod, version: &str, label: (&str, &str)) -> Result<(), Error> {
        self.write(Instant::now(), pod, iter::once(Object::Label(pod, version, label)))
    }

    /// The node of that name.
    pub(in crate::cluster) fn node(&self, name: &String) -> Result<NodeTaints, Error> {
        check_names("node", [name])?;
        let session = self.session()?;
        let query = self.query(session, Object::Node(name));
        session.run(async {
            let attempt = async || Ok(get::<wire::NodeObject>(session, &query).await?.into());
            retry(Instant::now(), self.timeout, attempt).await.map_err(|end| query.gave_up(end))
        })
    }

    /// Replaces the node's taints.
    pub(in crate::cluster) fn taint(&self, node: &NodeTaints) -> Result<(), Error> {
        self.write_to(Instant::now(), "node", &[&node.name], iter::once(Object::Taints(node)))
    }
}
