//! Which pods are due for a pass, the jobs that run the passes, and their results.

use super::pass::{Pass, SharedLookups};
use super::pod_state::{Finding, PodState};
use super::repair::RepairResult;
use super::settings::{PodSettings, Tools};
use super::tracked_pod::TrackedPod;
use crate::agent::facts::ObservedPod;
use crate::agent::install::{Installed, NodeFiles};
use crate::agent::metrics::Metrics;
use crate::agent::pod_reports::PodReports;
use crate::cluster::Api;
use crate::cluster::agent::{MAX_FINDINGS, PodFinding, PoliciesReport};
use crate::host_path::{HostPath, HostRoot};
use crate::plugin::running::{self, Sandboxes};
use crate::pod::{Namespace, PodRef};
use crate::state::ROOT;
use crate::trusted_file::FileId;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The longest pause without a pass.
const LONG_PAUSE: Duration = Duration::from_secs(600);
/// The pause after a configuration or saved state that can't be read.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// The limit of jobs that have not ended. The kubelet's default for the pods of a node is 110 (`maxPods`), OpenShift's is
/// 250, and 500 is the largest number that it is tested with.
const MAX_JOBS: usize = 512;

/// The observed state of the node's pods.
#[derive(Debug, Clone, Default)]
pub struct ObservedNode {
    /// The pods with their namespaces. The state of a pod that has not changed is the same `Arc`.
    pub pods: Vec<(Arc<ObservedPod>, Option<Arc<Namespace>>)>,
    /// Whether pods and namespaces are complete and current.
    pub is_current: bool,
}

/// A pass over one pod, which can take seconds.
pub type Job = Box<dyn FnOnce() -> FinishedJob + Send>;

/// The result of a job.
#[derive(Debug)]
pub struct FinishedJob {
    /// The key of the pod.
    uid: String,
    state: PodState,
    repair: Option<RepairResult>,
}

/// The state between two passes. No failure ends the agent.
#[derive(Debug)]
pub struct PodReconciler {
    pub(super) tools: Arc<Tools>,
    /// By UID.
    pods: BTreeMap<String, TrackedPod>,
    /// The pod sandboxes with saved state.
    sandboxes: Sandboxes,
    /// Empty while the plugin is not installed: no pod is changed.
    installed: Arc<Vec<Installed>>,
    /// Whether this agent leads among those of the node.
    leads: bool,
    /// Whether the observed state was current in the last pass.
    was_current: bool,
    /// Whether a finding may have changed since the last report.
    has_changed: bool,
    /// Whether a pod has ended since saved state was cleaned up.
    needs_cleanup: bool,
    /// When configurations and saved state are read again after a failure.
    retry: Option<Instant>,
    /// The last logged failure.
    logged: String,
}

impl PodReconciler {
    /// Creates a reconciler that has not checked any pod and does not lead.
    #[must_use]
    pub fn new(settings: PodSettings, node: NodeFiles, account: Api, reports: PodReports, metrics: Metrics) -> Self {
        let (deletions, sandbox) = (Mutex::default(), Mutex::default());
        let tools = Tools { settings, node, account, reports, metrics, deletions, sandbox };
        Self {
            tools: Arc::new(tools),
            pods: BTreeMap::new(),
            sandboxes: Sandboxes::default(),
            installed: Arc::default(),
            leads: false,
            was_current: false,
            has_changed: false,
            needs_cleanup: true,
            retry: None,
            logged: String::new(),
        }
    }

    /// Updates the role of this agent, and reads the installed configurations. If they have changed, a pass over all pods
    /// is due.
    pub fn update_node(&mut self, leads: bool, now: Instant) {
        if self.leads && !leads {
            tracing::info!("another agent leads: it changes the rules of running pods");
            // That agent exports them.
            self.tools.metrics.pods([0; 5]);
        }
        let has_taken_over = leads && !self.leads;
        self.leads = leads;
        if !leads {
            return;
        }
        match read_installed(&self.tools.node) {
            Ok(installed) => {
                (self.retry, self.logged) = (None, String::new());
                if has_taken_over || *self.installed != installed {
                    self.installed = Arc::new(installed);
                    self.pods.values_mut().for_each(|pod| pod.wake(now));
                }
            }
            Err(error) => {
                self.installed = Arc::default();
                self.fail(format!("running pods are neither repaired nor changed: {error}"), now);
            }
        }
    }

    /// Logs a failure, once until it changes, and schedules a retry.
    fn fail(&mut self, failure: String, now: Instant) {
        self.retry = Some(now + RETRY_DELAY);
        if self.logged != failure {
            tracing::warn!("{failure}");
            self.logged = failure;
        }
    }

    /// Returns the time until a pod is due.
    #[must_use]
    pub fn pause(&self, now: Instant) -> Duration {
        if !self.leads {
            return LONG_PAUSE;
        }
        let due = self.pods.values().filter_map(TrackedPod::due).min();
        self.retry.or(due).map_or(LONG_PAUSE, |next| next.saturating_duration_since(now))
    }

    /// Updates the observed states. Returns the jobs to run for the pods that are due at `now`.
    pub fn start_due(&mut self, node: &ObservedNode, now: Instant) -> Vec<Job> {
        if self.leads && self.retry.is_some_and(|retry| retry <= now) {
            self.update_node(true, now);
        }
        if !self.leads || self.installed.is_empty() || self.retry.is_some() {
            return Vec::new();
        }
        self.update(node, now);
        self.clean_up();
        let is_due = |pod: &TrackedPod| pod.due().is_some_and(|due| due <= now);
        if !self.pods.values().any(is_due) {
            return Vec::new();
        }
        if let Err(error) = self.sandboxes.refresh() {
            self.fail(format!("running pods are neither repaired nor changed: {error}"), now);
            return Vec::new();
        }
        let (root, lookups) = (HostRoot::new(self.tools.node.root()), Arc::new(SharedLookups::new(now)));
        let mut count = self.pods.values().filter(|pod| pod.state.is_none()).count();
        let (mut jobs, mut overflow) = (Vec::new(), 0_usize);
        for (uid, pod) in self.pods.iter_mut().filter(|(_, pod)| is_due(pod)) {
            if count >= MAX_JOBS {
                overflow += 1;
                self.tools.metrics.overflows.inc();
                continue;
            }
            let pass = Pass {
                tools: Arc::clone(&self.tools),
                installed: Arc::clone(&self.installed),
                lookups: Arc::clone(&lookups),
                observed: Arc::clone(&pod.observed),
                namespace: pod.namespace.clone(),
                is_current: node.is_current,
                sandbox: self.sandboxes.of(&pod.observed.pod, &root).cloned(),
            };
            let (uid, Some(mut state)) = (uid.clone(), pod.state.take()) else { continue };
            count += 1;
            jobs.push(Box::new(move || {
                let repair = pass.run(&mut state);
                FinishedJob { uid, state, repair }
            }) as Job);
        }
        if overflow > 0 {
            tracing::warn!("check of {overflow} pods deferred: the queue is full ({MAX_JOBS} pods)");
        }
        jobs
    }

    /// Updates the observed states.
    fn update(&mut self, node: &ObservedNode, now: Instant) {
        let became_current = node.is_current && !std::mem::replace(&mut self.was_current, node.is_current);
        let own_netns = || node.pods.iter().filter(|(observed, _)| !observed.pod.host_network);
        let uids: BTreeSet<&str> = own_netns().filter_map(|(observed, _)| observed.pod.uid.as_deref()).collect();
        let before = self.pods.len();
        self.pods.retain(|uid, _| uids.contains(uid.as_str()));
        let has_ended = self.pods.len() < before;
        self.needs_cleanup |= has_ended;
        for (observed, namespace) in own_netns() {
            let Some(uid) = &observed.pod.uid else { continue };
            let pod = self.pods.entry(uid.clone()).or_insert_with(|| TrackedPod::new(Arc::clone(observed), now));
            pod.update(observed, namespace.clone(), now);
            if became_current {
                pod.wake(now);
            }
        }
        // The counts change although there is no pass.
        self.has_changed |= became_current || has_ended;
    }

    /// Starts a pass over a pod soon.
    pub(super) fn check_soon(&mut self, pod: &PodRef, now: Instant) {
        let is_named = |tracked: &&mut TrackedPod| {
            let own = &tracked.observed.pod;
            (&own.namespace, &own.name) == (&pod.namespace, &pod.name) && own.matches(pod)
        };
        self.pods.values_mut().filter(is_named).for_each(|tracked| tracked.wake(now));
    }

    /// Removes the saved state of pods that have ended. The runtime calls no DEL for an attachment that a repair added.
    fn clean_up(&mut self) {
        if !std::mem::take(&mut self.needs_cleanup) {
            return;
        }
        match running::forget_gone(self.tools.node.root()) {
            Ok(removed) => {
                removed.iter().for_each(|attachment| tracing::info!("removed the saved state of the {attachment}"));
            }
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// Records the result of a job. Returns the result of a repair.
    pub fn finish(&mut self, FinishedJob { uid, state, repair }: FinishedJob, now: Instant) -> Option<RepairResult> {
        self.has_changed = true;
        self.pods.get_mut(&uid)?.finish(state, now);
        repair
    }

    /// Returns the report about the rules of the node's pods if it may have changed, and sets the metrics.
    pub(super) fn changed_report(&mut self) -> Option<PoliciesReport> {
        if !std::mem::take(&mut self.has_changed) {
            return None;
        }
        let (mut report, mut counts) = (self.empty_report(), [0; 5]);
        for pod in self.pods.values() {
            let (kind, reason) = match &pod.finding {
                Finding::Nothing => continue,
                Finding::Current => (0, None),
                Finding::Rejected(reason) => (1, Some(reason)),
                Finding::Failed(reason) => (2, Some(reason)),
                Finding::NoRules(reason) => (3, Some(reason)),
                Finding::OutsideMesh(reason) => (4, Some(reason)),
            };
            counts[kind] += 1;
            let reason = reason.filter(|_| report.findings.len() < MAX_FINDINGS);
            report.findings.extend(reason.map(|reason| PodFinding {
                pod: pod.observed.pod.reference(),
                state: Finding::NAMES[kind].to_owned(),
                reason: reason.clone(),
            }));
        }
        let [current, rejected, failed, none, outside] = counts;
        self.tools.metrics.pods(counts);
        Some(PoliciesReport { current, rejected, failed, none, outside, ..report })
    }

    /// Returns a report without pods.
    pub(super) fn empty_report(&self) -> PoliciesReport {
        PoliciesReport { follows: Some(self.tools.settings.live_policy), ..PoliciesReport::default() }
    }
}

/// Reads the installed configurations.
///
/// # Errors
/// They can't be read, there are none, or this process does not see the plugin's state directory of the node: without it,
/// the rules of every pod would seem to belong to another tool.
fn read_installed(node: &NodeFiles) -> Result<Vec<Installed>, String> {
    let directory = Path::new(ROOT).parent().unwrap_or(Path::new(ROOT));
    // It does not exist before the plugin's first call.
    let _ = fs::create_dir_all(directory);
    let identity = |path: &Path| fs::metadata(path).ok().map(|metadata| FileId::of(&metadata));
    let of_node = HostPath::new(directory).and_then(|path| node.reach(&path).ok()).and_then(|path| identity(&path));
    if of_node.is_none() || of_node != identity(directory) {
        let (path, root) = (directory.display(), node.root().display());
        return Err(format!(
            "{path} is not the directory of the node (below {root}); mount the node's {path} at both paths"
        ));
    }
    let installed = node.installed()?;
    if installed.is_empty() {
        return Err("the plugin is not installed".to_owned());
    }
    Ok(installed)
}
