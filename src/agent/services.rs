//! Starts the tasks that need the node's name: the watches and the socket, the reconciler of running pods (`pods`), and the
//! node's taint (`taint`).

use super::containers::ExcludedContainers;
use super::facts::{Answers, SharedFacts};
use super::install::NodeFiles;
use super::metrics::Metrics;
use super::pod_reports::PodReports;
use super::pods::{PodReconciler, PodSettings, RepairMode};
use super::socket;
use super::taint::TaintController;
use crate::cluster::Api;
use crate::cluster::agent::PoliciesReport;
use crate::host_path::HostPath;
use std::future::pending;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::timeout;

/// The limit of pods that wait for a check of their rules for excluded containers.
const MAX_DAMAGED: usize = 64;

/// The settings of the services.
#[derive(Debug, Clone)]
pub struct Services {
    /// The name of the Node object.
    pub node_name: String,
    /// The path of the socket for the plugin's requests; `None` for no socket.
    pub socket: Option<HostPath>,
    /// The account of the watches and of all changes.
    pub account: Api,
    /// Whether to watch all definitions, for a primary plugin.
    pub definitions: bool,
    /// What is done about running pods.
    pub pods: PodSettings,
    /// The NRI socket of the container runtime, which reports excluded containers; `None` if containers can't be excluded.
    pub nri_socket: Option<HostPath>,
    /// The key of the taint for a node that is not ready; `None` for no taint.
    pub taint: Option<String>,
}

/// The running services.
pub(super) struct RunningServices {
    /// Ends the task of the watches and the socket.
    end: oneshot::Sender<()>,
    task: JoinHandle<()>,
    /// Dropping it ends the reconciler of running pods.
    leads: watch::Sender<bool>,
    taint: Option<TaintController>,
}

impl Services {
    /// Starts the services for a node.
    ///
    /// # Errors
    /// The path of a socket can't be resolved.
    pub(super) fn start(
        &self,
        node: &NodeFiles,
        metrics: &Metrics,
        reports: &PodReports,
        facts: &SharedFacts,
    ) -> Result<RunningServices, String> {
        let (end, ended) = oneshot::channel();
        let socket = self.socket.as_ref().map(|socket| node.reach(socket)).transpose();
        let socket = socket.map_err(|error| error.to_string())?;
        let (sender, damaged) = mpsc::channel(MAX_DAMAGED);
        let sender = (self.pods.repair != RepairMode::Off).then_some(sender);
        let start = |path: &HostPath| ExcludedContainers::start(path, node, metrics, reports.clone(), sender);
        let containers = self.nri_socket.as_ref().map(start).transpose()?;
        let (policies, policies_report) = watch::channel(PoliciesReport::default());
        let answers = Answers {
            facts: facts.clone(),
            account: Arc::new(self.account.clone()),
            metrics: metrics.clone(),
            containers,
            policies: policies_report,
        };
        let (leads, is_leading) = watch::channel(false);
        let task = spawn_local(self.clone().run(socket, is_leading.clone(), answers, ended));
        // An agent that neither repairs nor changes pods may have no access to saved state: the chart does not mount it.
        if self.pods.uses_saved_state() {
            let (account, reports) = (self.account.clone(), reports.clone());
            let pods = PodReconciler::new(self.pods, node.clone(), account, reports, metrics.clone());
            spawn_local(pods.run(facts.clone(), policies, is_leading, damaged));
        }
        let start = |key| TaintController::start(self.account.clone(), self.node_name.clone(), key);
        let taint = self.taint.clone().map(start);
        Ok(RunningServices { end, task, leads, taint })
    }

    async fn run(
        self,
        socket: Option<PathBuf>,
        leads: watch::Receiver<bool>,
        answers: Answers,
        ended: oneshot::Receiver<()>,
    ) {
        let connections = Arc::new(Semaphore::new(socket::MAX_CONNECTIONS as usize));
        let serve = async {
            match socket {
                Some(socket) => socket::serve(&socket, &answers, &connections, leads).await,
                None => pending().await,
            }
        };
        let Answers { facts, metrics, .. } = &answers;
        tokio::select! {
            _ = ended => {}
            () = facts.watch(&self.account, &self.node_name, self.definitions, metrics) => {}
            () = serve => {}
        }
        // Every request is answered.
        let _ = timeout(socket::TRANSFER_TIMEOUT, connections.acquire_many(socket::MAX_CONNECTIONS)).await;
    }
}

impl RunningServices {
    /// Serves the plugin's requests from now on: this agent leads.
    pub(super) fn lead(&self) {
        self.leads.send_if_modified(|leads| !std::mem::replace(leads, true));
    }

    /// Reports an attempt to install the plugin, and whether the node is ready if that is known: the node's taint changes,
    /// and the reconciler of running pods reads the installed configurations again.
    pub(super) fn report(&self, is_ready: Option<bool>) {
        self.leads.send_replace(true);
        if let (Some(taint), Some(is_ready)) = (&self.taint, is_ready) {
            taint.set_ready(is_ready);
        }
    }

    /// Removes the taint, because the plugin is removed from the node.
    pub(super) async fn remove_taint(&mut self) {
        if let Some(taint) = self.taint.take() {
            taint.remove().await;
        }
    }

    /// Answers the requests that were received, and ends: the socket is removed.
    pub(super) async fn stop(self) {
        drop(self.end);
        // Fails only if the task panics.
        let _ = self.task.await;
    }
}
