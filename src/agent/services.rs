//! Starts the tasks that need the node's name: the watches and the socket, the reconciler of running pods (`pods`), and the
//! node's taint (`taint`).

use super::containers::ExcludedContainers;
use super::facts::{Answers, SharedFacts, SyncStates};
use super::health::Connections;
use super::install::NodeFiles;
use super::metrics::Metrics;
use super::pod_reports::PodReports;
use super::pods::{PodReconciler, PodSettings, PodSignals};
use super::runtime::Tasks;
use super::socket;
use super::taint::{Taint, TaintController};
use crate::cluster::Api;
use crate::cluster::agent::PoliciesReport;
use crate::host_path::HostPath;
use crate::pod::PodRef;
use std::future::pending;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

/// The settings of the services.
#[derive(Debug, Clone)]
pub struct Services {
    /// The event loop.
    pub tasks: Tasks,
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
    /// The key of the taint for a node that is not ready; `None` for no taint.
    pub taint: Option<String>,
}

/// What an agent does about the node's taint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TaintDecision {
    /// The plugin is not ready.
    Add,
    /// The plugin is ready.
    Remove,
    /// It is not known yet whether the plugin is ready.
    Unchanged,
}

/// The running services. Dropping them ends the task of the watches and the socket.
pub(super) struct RunningServices {
    end: Option<oneshot::Sender<()>>,
    /// Disconnected when the task has ended.
    ended: Receiver<()>,
    /// Dropping it ends the reconciler of running pods.
    leads: watch::Sender<bool>,
    taint: Option<TaintController>,
}

impl Services {
    /// Starts the services for a node. `damaged` names the pods whose rules for excluded containers are missing.
    ///
    /// # Errors
    /// The path of the socket can't be resolved.
    pub(super) fn start(
        &self,
        node: &NodeFiles,
        metrics: &Metrics,
        (containers, damaged): (Option<ExcludedContainers>, mpsc::Receiver<PodRef>),
        reports: &PodReports,
        states: &SyncStates,
    ) -> Result<RunningServices, String> {
        let (facts, (end, ended)) = (SharedFacts::new(), oneshot::channel());
        let socket = self.socket.as_ref().map(|socket| node.reach(socket)).transpose();
        let socket = socket.map_err(|error| error.to_string())?;
        let (policies, policies_report) = watch::channel(PoliciesReport::default());
        let answers = Answers {
            facts: facts.clone(),
            account: Arc::new(self.account.clone()),
            metrics: metrics.clone(),
            containers,
            policies: policies_report,
            states: states.clone(),
        };
        let (services, shared_facts, shared) = (self.clone(), facts.clone(), (states.clone(), metrics.clone()));
        let ((leads, is_leading), (running, has_ended)) = (watch::channel(false), channel());
        let leads_socket = is_leading.clone();
        self.tasks.start(|| async move {
            services.run(&shared_facts, &shared, (socket, leads_socket, &answers), ended).await;
            drop::<Sender<()>>(running);
        });
        // An agent that neither repairs nor changes pods may have no access to saved state: the chart does not mount it.
        if self.pods.uses_saved_state() {
            let (account, reports) = (self.account.clone(), reports.clone());
            let pods = PodReconciler::new(self.pods, node.clone(), account, reports, metrics.clone());
            pods.start(&self.tasks, facts, policies, PodSignals { leads: is_leading, damaged });
        }
        let taint =
            |key: &String| Taint { key: key.clone(), node: self.node_name.clone(), account: self.account.clone() };
        let taint = self.taint.as_ref().map(|key| taint(key).start(&self.tasks));
        Ok(RunningServices { end: Some(end), ended: has_ended, leads, taint })
    }

    async fn run(
        &self,
        facts: &SharedFacts,
        (states, metrics): &(SyncStates, Metrics),
        (socket, leads, answers): (Option<PathBuf>, watch::Receiver<bool>, &Answers),
        ended: oneshot::Receiver<()>,
    ) {
        let mut connections = Connections::new(socket::MAX_CONNECTIONS);
        let serve = async {
            match socket {
                Some(socket) => socket::serve(&socket, answers, &mut connections, leads).await,
                None => pending().await,
            }
        };
        tokio::select! {
            _ = ended => {}
            () = facts.watch(&self.account, &self.node_name, self.definitions, states, metrics) => {}
            () = serve => {}
        }
        // Every request is answered.
        let _ = timeout(socket::TRANSFER_TIMEOUT, connections.finish()).await;
    }
}

impl RunningServices {
    /// Serves the plugin's requests and changes pods from now on: this agent leads.
    pub(super) fn lead(&self) {
        self.leads.send_replace(true);
    }

    /// Reports an attempt to install the plugin. The reconciler of running pods reads the installed configurations again,
    /// and the node's taint changes.
    pub(super) fn report(&mut self, taint: TaintDecision) {
        self.lead();
        match (&self.taint, taint) {
            (Some(controller), TaintDecision::Add) => controller.set_ready(false),
            (Some(controller), TaintDecision::Remove) => controller.set_ready(true),
            (None, _) | (_, TaintDecision::Unchanged) => {}
        }
    }

    /// Removes the taint, because the plugin is removed from the node.
    pub(super) fn remove_taint(&mut self) {
        if let Some(taint) = self.taint.take() {
            taint.remove();
        }
    }
}

impl Drop for RunningServices {
    fn drop(&mut self) {
        drop(self.end.take());
        // The task answers the requests that it has received, and removes the socket.
        let _ = self.ended.recv();
    }
}
