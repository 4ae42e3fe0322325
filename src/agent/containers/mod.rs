//! Excluded containers of the node's pods: their traffic bypasses the sidecar from their first instruction until they
//! exit. One task owns the state of all pod sandboxes (`sandbox`). Checks read saved state and change the sets in the pod's
//! network namespace. They block, so they run in the agent's pool of threads.

mod sandbox;

use super::install::NodeFiles;
use super::metrics::Metrics;
use super::nri::{self, NriContainer, NriReport, Stage};
use super::pod_reports::PodReports;
use crate::cluster::agent::ContainersStatus;
use crate::host_path::{HostPath, HostRoot};
use crate::pod::PodRef;
use crate::state::{ROOT, Store};
use sandbox::{Check, Connection, Sandbox, Tools, modified};
use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinSet, spawn_blocking, spawn_local};
use tokio::time::sleep;

/// The interval in which the saved state is searched for changes.
const SCAN_INTERVAL: Duration = Duration::from_millis(500);
/// The limit of checks, beyond which only those start for which the runtime waits.
const MAX_CHECKS: usize = 24;
/// The limit of the runtime's reports, and that of questions, that wait for the task.
const MAX_WAITING: usize = 64;

/// Asks for the status of a sandbox.
type Question = (String, oneshot::Sender<ContainersStatus>);

/// A running task. It ends with the last clone.
#[derive(Debug, Clone)]
pub(super) struct ExcludedContainers(mpsc::Sender<Question>);

/// The state of the task.
struct Task {
    tools: Arc<Tools>,
    nri_socket: HostPath,
    sandboxes: BTreeMap<String, Sandbox>,
    connection: Connection,
    checks: JoinSet<Check>,
}

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
        let (sender, questions) = mpsc::channel(MAX_WAITING);
        let tools = Tools { root: HostRoot::new(node.root()), metrics: metrics.clone(), reports, damaged };
        spawn_local(Task::new(tools, nri_socket.clone()).run(path, questions));
        Ok(Self(sender))
    }

    /// Returns the answer to CHECK and `doctor` about a sandbox.
    pub(super) async fn status(&self, sandbox_id: String) -> ContainersStatus {
        let (answer, status) = oneshot::channel();
        let _ = self.0.send((sandbox_id, answer)).await;
        // Fails only if the agent ends.
        status.await.unwrap_or_default()
    }
}

impl Task {
    fn new(tools: Tools, nri_socket: HostPath) -> Self {
        let connection = Connection::Disconnected { why: None, since: Instant::now() };
        let (tools, sandboxes, checks) = (Arc::new(tools), BTreeMap::new(), JoinSet::new());
        Self { tools, nri_socket, sandboxes, connection, checks }
    }

    /// Registers at the runtime's socket, which this process reaches at `socket`, and runs until no question can come.
    async fn run(mut self, socket: PathBuf, mut questions: mpsc::Receiver<Question>) {
        self.tools.metrics.set("nri_registered", [], false);
        let (sender, mut reports) = mpsc::channel(MAX_WAITING);
        let (connect, scanned) = (nri::run(&socket, sender), scan_after(Duration::ZERO));
        tokio::pin!(connect, scanned);
        loop {
            tokio::select! {
                never = &mut connect => match never {},
                Some(report) = reports.recv() => self.handle(report),
                Some(Ok(check)) = self.checks.join_next() => self.finish(check),
                question = questions.recv() => match question {
                    Some(question) => self.answer(question),
                    None => return,
                },
                found = &mut scanned => {
                    scanned.set(scan_after(SCAN_INTERVAL));
                    self.tick(found);
                }
            }
            self.begin_checks();
        }
    }

    /// Returns the sandbox with this ID, which is added if it is new.
    fn sandbox(&mut self, id: &str) -> &mut Sandbox {
        self.sandboxes.entry(id.to_owned()).or_insert_with(|| Sandbox::new(id))
    }

    fn handle(&mut self, report: NriReport) {
        match report {
            NriReport::Disconnected(why) => {
                tracing::warn!(why, "not registered at the container runtime: excluded containers start captured");
                let since = match &self.connection {
                    Connection::Disconnected { since, .. } => *since,
                    Connection::Registered(_) => Instant::now(),
                };
                self.set(Connection::Disconnected { why: Some(why), since });
            }
            NriReport::Registered { runtime, running } => {
                tracing::info!(socket = %self.nri_socket, runtime, "registered at the container runtime");
                self.synchronize(running);
                self.set(Connection::Registered(runtime));
            }
            NriReport::Container(stage, container) => self.sandbox(&container.pod_id).set_stage(stage, container),
        }
    }

    /// Sets the state of the connection, and makes a check of each sandbox due: the state decides whether all running
    /// containers are known.
    fn set(&mut self, connection: Connection) {
        self.connection = connection;
        self.tools.metrics.set("nri_registered", [], matches!(self.connection, Connection::Registered(_)));
        self.sandboxes.values_mut().for_each(Sandbox::wake);
    }

    /// Replaces all containers by these. An element without a container is removed.
    fn synchronize(&mut self, running: Vec<NriContainer>) {
        let ids: BTreeSet<String> = running.iter().map(|container| container.id.clone()).collect();
        self.sandboxes.values_mut().for_each(|sandbox| sandbox.retain(&ids));
        for container in running {
            self.sandbox(&container.pod_id).set_stage(Stage::Started, container);
        }
    }

    /// Answers a question, or lets the answer wait for a check that runs.
    fn answer(&mut self, (id, answer): Question) {
        let (runtime, error) = match &self.connection {
            Connection::Disconnected { why: None, .. } => (None, "the agent has just started".to_owned()),
            Connection::Disconnected { why: Some(why), .. } => (None, why.clone()),
            Connection::Registered(runtime) => (Some(runtime.clone()), String::new()),
        };
        let mut status = ContainersStatus { runtime, error, expected: None };
        if let Some(sandbox) = self.sandboxes.get_mut(&id).filter(|_| status.runtime.is_some()) {
            if sandbox.checking.is_some() {
                return sandbox.questions.push(answer);
            }
            (status.error, status.expected) = (sandbox.failure.clone(), sandbox.expected());
        }
        let _ = answer.send(status);
    }

    /// Compares the saved state with the changes that were found, and reports late checks.
    fn tick(&mut self, found: Option<BTreeMap<String, SystemTime>>) {
        if let Some(mut found) = found {
            for id in found.keys() {
                self.sandbox(id);
            }
            for (id, sandbox) in &mut self.sandboxes {
                sandbox.scanned(found.remove(id));
            }
        }
        self.sandboxes.values_mut().for_each(|sandbox| sandbox.report_late(&self.tools));
    }

    /// Starts the checks that are due, and removes unused sandboxes.
    fn begin_checks(&mut self) {
        let is_complete = matches!(self.connection, Connection::Registered(_));
        for sandbox in self.sandboxes.values_mut().filter(|sandbox| sandbox.checking.is_none()) {
            if sandbox.is_due(self.checks.len() < MAX_CHECKS) {
                let (check, tools) = (sandbox.begin(is_complete), Arc::clone(&self.tools));
                self.checks.spawn_blocking(move || check.run(&tools.root));
            }
        }
        self.sandboxes.retain(|_, sandbox| !sandbox.is_unused());
    }

    /// Ends a check.
    fn finish(&mut self, check: Check) {
        let id = check.sandbox_id.clone();
        let Some(sandbox) = self.sandboxes.get_mut(&id) else { return };
        sandbox.end(check, &self.connection, &self.tools);
        let questions = take(&mut sandbox.questions);
        questions.into_iter().for_each(|question| self.answer((id.clone(), question)));
    }
}

/// Returns the sandboxes with saved state, each with the time of its last change; `None` if they can't be read.
async fn scan_after(pause: Duration) -> Option<BTreeMap<String, SystemTime>> {
    sleep(pause).await;
    let scan = || {
        // The plugin's calls report it if they can't use this directory either.
        let ids = Store::new(ROOT).sandboxes().inspect_err(|error| tracing::debug!("{error}")).ok()?;
        // A sandbox may be gone by now.
        Some(ids.into_iter().filter_map(|id| modified(&id).map(|modified| (id, modified))).collect())
    };
    spawn_blocking(scan).await.ok().flatten()
}
