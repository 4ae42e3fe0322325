//! Excluded containers of the node's pods: their traffic bypasses the sidecar from their first instruction until they
//! exit. One task (`task`) owns the state of all pod sandboxes (`sandbox`). What blocks, the saved state and the sets in
//! the pods' network namespaces, is one check of one sandbox at a time in the agent's pool of threads (`check`).

mod check;
mod sandbox;
mod task;

use super::install::NodeFiles;
use super::metrics::Metrics;
use super::pod_reports::PodReports;
use crate::cluster::agent::ContainersStatus;
use crate::host_path::{HostPath, HostRoot};
use crate::pod::PodRef;
use task::{Question, Task};
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_local;

/// The limit of questions that wait for the task.
const MAX_QUESTIONS: usize = 64;

/// A running task. It ends with the last clone.
#[derive(Debug, Clone)]
pub(super) struct ExcludedContainers(mpsc::Sender<Question>);

impl ExcludedContainers {
    /// Starts the task, which registers at the runtime's NRI socket. `damaged` gets the pods whose rules for excluded
    /// containers are missing; it is `None` if the agent does not repair pods.
    ///
    /// # Errors
    /// The path of the socket can't be resolved.
    pub(super) fn start(
        nri_socket: &HostPath,
        node: &NodeFiles,
        metrics: &Metrics,
        reports: PodReports,
        damaged: Option<mpsc::Sender<PodRef>>,
    ) -> Result<Self, String> {
        let path = node.reach(nri_socket).map_err(|error| error.to_string())?;
        let (sender, questions) = mpsc::channel(MAX_QUESTIONS);
        let (root, nri_socket) = (HostRoot::new(node.root()), nri_socket.clone());
        let task = Task { root, nri_socket, metrics: metrics.clone(), reports, damaged };
        spawn_local(task.run(path, questions));
        Ok(Self(sender))
    }

    /// Returns the answer to CHECK and `doctor` about a sandbox.
    pub(super) async fn status(&self, sandbox_id: String) -> ContainersStatus {
        let (answer, status) = oneshot::channel();
        let _ = self.0.send(Question { sandbox_id, answer }).await;
        // Fails only if the agent ends.
        status.await.unwrap_or_default()
    }
}
