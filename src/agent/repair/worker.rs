//! The repair thread: keeps the state of all pods, and runs a pass over those that are due.

use super::action::{RepairResult, RepairSettings};
use super::repair_pass::{RepairPass, RepairTools};
use super::retry_budget::{DeletionLimit, MAX_QUEUE_LENGTH, RepairQueue};
use super::watched::WatchedPod;
use crate::agent::facts::ObservedPod;
use crate::agent::install::{Installed, NodeFiles};
use crate::agent::metrics::Metrics;
use crate::agent::pod_reports::PodReports;
use crate::cgroup;
use crate::cluster::ServiceAccount;
use crate::host_path::{HostPath, HostRoot};
use crate::plugin;
use crate::state::ROOT;
use crate::trusted_file::FileId;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

/// The maximum time between two passes.
const MAX_PAUSE: Duration = Duration::from_secs(600);
/// The pause if the plugin is not installed.
const NOT_INSTALLED_PAUSE: Duration = Duration::from_secs(5);

/// The pods of the node.
pub trait Pods: Send {
    /// Returns the last observed states. The state of a pod that has not changed is the same `Arc`.
    fn pods(&self) -> Vec<Arc<ObservedPod>>;

    /// Waits for a change, for `timeout` at most.
    fn wait(&mut self, timeout: Duration);
}

/// The state of the repair thread. No failure of a repair ends the agent.
#[derive(Debug)]
pub struct RepairWorker {
    tools: RepairTools,
    queue: RepairQueue,
    deletions: DeletionLimit,
    /// By UID.
    watched: BTreeMap<String, WatchedPod>,
    /// The last logged problem of the configuration.
    logged: Option<String>,
    /// Whether a pod has ended since saved state was cleaned up.
    needs_cleanup: bool,
}

impl RepairWorker {
    /// Creates a worker that has not checked any pod.
    #[must_use]
    pub fn new(
        settings: RepairSettings,
        node: NodeFiles,
        account: ServiceAccount,
        reports: PodReports,
        metrics: Metrics,
    ) -> Self {
        let (queue, watched) = (RepairQueue::new(MAX_QUEUE_LENGTH), BTreeMap::new());
        let tools = RepairTools { settings, node, account, reports, metrics };
        let deletions = DeletionLimit::default();
        Self { tools, queue, deletions, watched, logged: None, needs_cleanup: true }
    }

    /// Starts the thread. It begins with a message on `start`, and ends if that is disconnected before.
    ///
    /// # Errors
    /// The thread can't be created.
    pub fn start(mut self, mut pods: impl Pods + 'static, start: Receiver<()>) -> io::Result<()> {
        let work = move || {
            if start.recv().is_err() {
                return;
            }
            // Only the rules of excluded containers need it; if it fails, only they are refused.
            if let Err(error) = cgroup::enter_host_namespace(&HostRoot::new(self.tools.node.root())) {
                tracing::debug!("{error}");
            }
            loop {
                pods.wait(self.pause(Instant::now()));
                self.run_pass(&pods.pods(), Instant::now());
            }
        };
        thread::Builder::new().name("repair".into()).spawn(work).map(drop)
    }

    /// Checks the pods that are due at `now`. Returns the repairs.
    pub fn run_pass(&mut self, pods: &[Arc<ObservedPod>], now: Instant) -> Vec<RepairResult> {
        self.update(pods, now);
        self.clean_up();
        let mut results = Vec::new();
        if self.queue.is_empty() {
            return results;
        }
        let installed = self.installed();
        if installed.is_empty() {
            self.defer_all(now + NOT_INSTALLED_PAUSE);
            return results;
        }
        let mut pass = RepairPass::new(&self.tools, &installed, &mut self.deletions, now);
        while let Some(uid) = self.queue.pop() {
            if let Some(watched) = self.watched.get_mut(&uid) {
                results.extend(pass.check(watched));
            }
        }
        pass.end();
        results
    }

    /// Empties the queue; its pods are due at `time`.
    fn defer_all(&mut self, time: Instant) {
        while let Some(uid) = self.queue.pop() {
            if let Some(watched) = self.watched.get_mut(&uid) {
                watched.due = Some(time);
            }
        }
    }

    /// Returns the time until a pod is due.
    fn pause(&self, now: Instant) -> Duration {
        let next = self.watched.values().filter_map(|watched| watched.due).min();
        next.map_or(MAX_PAUSE, |next| next.saturating_duration_since(now)).min(MAX_PAUSE)
    }

    /// Updates the observed states, and queues the pods that are due.
    fn update(&mut self, pods: &[Arc<ObservedPod>], now: Instant) {
        let uid = |observed: &ObservedPod| observed.pod.uid.clone().unwrap_or_default();
        let existing: BTreeSet<String> = pods.iter().map(|observed| uid(observed)).collect();
        let before = self.watched.len();
        self.watched.retain(|uid, _| existing.contains(uid));
        self.needs_cleanup |= self.watched.len() < before;
        let mut overflow = 0_usize;
        for observed in pods {
            let uid = uid(observed);
            let new = || WatchedPod::new(Arc::clone(observed), now);
            let watched = self.watched.entry(uid.clone()).or_insert_with(new);
            watched.update(observed, now);
            if watched.is_due(now) && !self.queue.push(&uid) {
                overflow += 1;
                self.tools.metrics.queue_overflow();
            }
        }
        if overflow > 0 {
            tracing::warn!("check of {overflow} pods deferred: the queue is full ({MAX_QUEUE_LENGTH} pods)");
        }
    }

    /// Returns the installed configurations; none if they can't be used.
    fn installed(&mut self) -> Vec<Installed> {
        let installed = check_state_directory(&self.tools.node).and_then(|()| self.tools.node.installed());
        if let Err(error) = &installed
            && self.logged.as_ref() != Some(error)
        {
            tracing::warn!("can't repair pods: {error}");
        }
        self.logged = installed.as_ref().err().cloned();
        installed.unwrap_or_default()
    }

    /// Removes the saved state of pods that have ended. The runtime calls no DEL for an attachment that a repair added.
    fn clean_up(&mut self) {
        if !std::mem::take(&mut self.needs_cleanup) {
            return;
        }
        match plugin::forget_gone(self.tools.node.root()) {
            Ok(removed) => {
                removed.iter().for_each(|attachment| tracing::info!("removed the saved state of the {attachment}"));
            }
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

/// Checks that this process sees the plugin's state directory of the node. Without it, the rules of every pod would seem
/// to belong to another tool.
pub(in crate::agent) fn check_state_directory(node: &NodeFiles) -> Result<(), String> {
    let directory = Path::new(ROOT).parent().unwrap_or(Path::new(ROOT));
    // It does not exist before the plugin's first call.
    let _ = fs::create_dir_all(directory);
    let identity = |path: &Path| fs::metadata(path).ok().map(|metadata| FileId::of(&metadata));
    let of_node = HostPath::new(directory).and_then(|path| node.reach(&path).ok()).and_then(|path| identity(&path));
    let is_same = of_node.is_some() && of_node == identity(directory);
    is_same.then_some(()).ok_or_else(|| {
        let (path, root) = (directory.display(), node.root().display());
        format!("{path} is not the directory of the node (below {root}); mount the node's {path} at both paths")
    })
}
