//! Which pods are due, the jobs that change or check their rules, and the results. The jobs run elsewhere.

use super::pod_policy::{PolicyChange, PolicyEvaluation, Sandboxes};
use super::pod_rules::PodRules;
use super::repair::{RepairOutcome, RepairResult};
use super::rule_check::{RuleCheck, SharedLookups};
use super::settings::{PodSettings, Tools};
use super::tracked_pod::TrackedPod;
use crate::agent::facts::ObservedPod;
use crate::agent::install::{Installed, NodeFiles};
use crate::agent::metrics::Metrics;
use crate::agent::pod_reports::PodReports;
use crate::cluster::ServiceAccount;
use crate::cluster::agent::{MAX_POLICIES, PodPolicyStatus, PoliciesReport};
use crate::cni::Error;
use crate::host_path::HostPath;
use crate::plugin::running;
use crate::plugin::running::live_policy::{self, Assessment, Verdict};
use crate::pod::{Namespace, PodRef};
use crate::state::ROOT;
use crate::trusted_file::FileId;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The interval in which every policy is evaluated although nothing has changed.
pub(super) const RESYNC_INTERVAL: Duration = Duration::from_secs(600);
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

/// Work in the network namespace of a pod, which can take seconds.
pub type Job = Box<dyn FnOnce() -> FinishedJob + Send>;

/// The result of a job.
#[derive(Debug)]
pub struct FinishedJob {
    /// The key of the pod.
    uid: String,
    done: Done,
}

#[derive(Debug)]
enum Done {
    Change(PolicyChange, Result<(), Error>),
    Check(PodRules, Option<RepairResult>),
}

/// The state between two passes. No failure ends the agent.
#[derive(Debug)]
pub struct PodReconciler {
    pub(super) tools: Arc<Tools>,
    /// By UID.
    pods: BTreeMap<String, TrackedPod>,
    /// Empty while the plugin is not installed: nothing is evaluated or checked.
    installed: Arc<Vec<Installed>>,
    /// Whether this agent leads among those of the node.
    leads: bool,
    /// Whether the observed state was current in the last pass.
    was_current: bool,
    /// Whether an assessment has changed since the last report.
    has_changed: bool,
    /// Whether a pod has ended since saved state was cleaned up.
    needs_cleanup: bool,
    /// When every policy is evaluated.
    next_resync: Instant,
    /// When configurations and saved state are read again after a failure.
    retry: Option<Instant>,
    /// The last logged failure.
    logged: String,
}

impl PodReconciler {
    /// Creates a reconciler that has not checked any pod and does not lead.
    #[must_use]
    pub fn new(
        settings: PodSettings,
        node: NodeFiles,
        account: ServiceAccount,
        reports: PodReports,
        metrics: Metrics,
    ) -> Self {
        let tools = Tools { settings, node, account, reports, metrics, deletions: Mutex::default() };
        Self {
            tools: Arc::new(tools),
            pods: BTreeMap::new(),
            installed: Arc::default(),
            leads: false,
            was_current: false,
            has_changed: false,
            needs_cleanup: true,
            next_resync: Instant::now() + RESYNC_INTERVAL,
            retry: None,
            logged: String::new(),
        }
    }

    /// Updates the role of this agent, and reads the installed configurations. If they have changed, all policies are
    /// evaluated.
    pub fn update_node(&mut self, leads: bool, now: Instant) {
        if self.leads && !leads {
            tracing::info!("another agent leads: it changes the policies of running pods");
            // That agent exports them.
            Verdict::ALL.iter().for_each(|verdict| self.tools.metrics.pods(verdict.name(), 0));
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
                    self.pods.values_mut().for_each(|pod| pod.policy.resync(now));
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
            return RESYNC_INTERVAL;
        }
        let due = self.pods.values().filter_map(TrackedPod::due).min();
        let next = self.retry.or(due).map_or(self.next_resync, |next| next.min(self.next_resync));
        next.saturating_duration_since(now)
    }

    /// Updates the observed states, and evaluates the pods that are due at `now`. Returns the jobs to run.
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
        let needs_saved_state = self.pods.values().any(|pod| is_due(pod) && pod.policy.is_due(now));
        let sandboxes = if needs_saved_state { self.sandboxes(now) } else { None };
        let tools = Arc::clone(&self.tools);
        let installed = Arc::clone(&self.installed);
        let evaluation = sandboxes.map(|sandboxes| PolicyEvaluation {
            tools: &tools,
            installed: &installed,
            sandboxes,
            is_current: node.is_current,
            now,
        });
        self.has_changed |= evaluation.is_some();
        let lookups = Arc::new(SharedLookups::new(now));
        let mut count = self.pods.values().filter(|pod| pod.is_busy).count();
        let (mut jobs, mut overflow) = (Vec::new(), 0_usize);
        for (uid, pod) in self.pods.iter_mut().filter(|(_, pod)| is_due(pod)) {
            if count >= MAX_JOBS {
                overflow += 1;
                tools.metrics.overflows.inc();
                continue;
            }
            let evaluation = evaluation.as_ref().filter(|_| pod.policy.is_due(now));
            let change = evaluation
                .and_then(|evaluation| evaluation.evaluate(&mut pod.policy, &pod.observed, pod.namespace.as_deref()));
            let job = match change {
                Some(change) => Some(change_job(uid.clone(), change, Arc::clone(&tools))),
                None => check_job(uid.clone(), pod, (&tools, &installed, &lookups), now),
            };
            if let Some(job) = job {
                pod.is_busy = true;
                count += 1;
                jobs.push(job);
            }
        }
        if overflow > 0 {
            tracing::warn!("check of {overflow} pods deferred: the queue is full ({MAX_JOBS} pods)");
        }
        jobs
    }

    /// Updates the observed states.
    fn update(&mut self, node: &ObservedNode, now: Instant) {
        let is_resync = now >= self.next_resync;
        if is_resync {
            self.next_resync = now + RESYNC_INTERVAL;
        }
        let became_current = node.is_current && !std::mem::replace(&mut self.was_current, node.is_current);
        let own_netns = || node.pods.iter().filter(|(observed, _)| !observed.pod.host_network);
        let uids: BTreeSet<&str> = own_netns().filter_map(|(observed, _)| observed.pod.uid.as_deref()).collect();
        let before = self.pods.len();
        self.pods.retain(|uid, _| uids.contains(uid.as_str()));
        let has_ended = self.pods.len() < before;
        self.needs_cleanup |= has_ended;
        let is_repaired = self.tools.settings.repair.is_some();
        for (observed, namespace) in own_netns() {
            let Some(uid) = &observed.pod.uid else { continue };
            let new = || TrackedPod::new(Arc::clone(observed), is_repaired, now);
            let pod = self.pods.entry(uid.clone()).or_insert_with(new);
            pod.update(observed, namespace.clone(), now);
            if is_resync {
                pod.policy.resync(now);
            } else if became_current && pod.policy.container_id.is_none() {
                pod.policy.wake(now);
            }
        }
        // The counts change although no pod is evaluated.
        self.has_changed |= became_current || has_ended;
    }

    /// Checks the rules of a pod soon. If the agent does not repair pods, it does nothing.
    pub(super) fn check_soon(&mut self, pod: &PodRef, now: Instant) {
        let is_named = |tracked: &&mut TrackedPod| {
            let own = &tracked.observed.pod;
            (&own.namespace, &own.name) == (&pod.namespace, &pod.name) && own.matches(pod)
        };
        self.pods.values_mut().filter(is_named).for_each(|tracked| tracked.check_soon(now));
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

    /// Reads the saved state of all pod sandboxes.
    fn sandboxes(&mut self, now: Instant) -> Option<Sandboxes> {
        match live_policy::running() {
            Ok(running) => Some(Sandboxes::new(running)),
            Err(error) => {
                self.fail(format!("policies of running pods are not evaluated: {error}"), now);
                None
            }
        }
    }

    /// Records the result of a job. Returns the result of a repair.
    pub fn finish(&mut self, FinishedJob { uid, done }: FinishedJob, now: Instant) -> Option<RepairResult> {
        let pod = self.pods.get_mut(&uid)?;
        match done {
            Done::Change(change, result) => {
                pod.finish_job(None, now);
                let TrackedPod { policy, observed, .. } = pod;
                policy.finish_change(change, result, observed, &self.tools, now);
                self.has_changed = true;
                None
            }
            Done::Check(rules, result) => {
                pod.finish_job(Some(rules), now);
                let outcome = result.as_ref().map(|result| &result.outcome);
                if matches!(outcome, Some(RepairOutcome::Repaired | RepairOutcome::RepairedForNew { .. })) {
                    pod.policy.changed(now);
                }
                result
            }
        }
    }

    /// Returns the report about the policies of the node's pods if it has changed, and sets the metrics.
    pub(super) fn changed_report(&mut self) -> Option<PoliciesReport> {
        if !std::mem::take(&mut self.has_changed) {
            return None;
        }
        let mut report = self.empty_report();
        for pod in self.pods.values() {
            let Assessment { verdict: Some(verdict), applied, desired, reason, needs_new_pod, .. } =
                &pod.policy.assessment
            else {
                continue;
            };
            match verdict {
                Verdict::Current => report.current += 1,
                Verdict::Older => report.older += 1,
                Verdict::Rejected => report.rejected += 1,
                Verdict::None => report.none += 1,
            }
            if *verdict != Verdict::Current && report.pods.len() < MAX_POLICIES {
                report.pods.push(PodPolicyStatus {
                    pod: pod.observed.pod.reference(),
                    state: verdict.name().to_owned(),
                    applied: applied.clone(),
                    desired: desired.clone(),
                    reason: reason.clone(),
                    needs_new_pod: *needs_new_pod,
                });
            }
        }
        let counts = [report.current, report.older, report.rejected, report.none];
        for (verdict, count) in Verdict::ALL.into_iter().zip(counts) {
            self.tools.metrics.pods(verdict.name(), count);
        }
        Some(report)
    }

    /// Returns a report without pods.
    pub(super) fn empty_report(&self) -> PoliciesReport {
        PoliciesReport { scope: self.tools.settings.live_policy.to_string(), ..PoliciesReport::default() }
    }
}

fn change_job(uid: String, change: PolicyChange, tools: Arc<Tools>) -> Job {
    Box::new(move || {
        let result = change.apply(&tools);
        FinishedJob { uid, done: Done::Change(change, result) }
    })
}

/// Returns the check of the pod's rules if it is due, and takes them.
fn check_job(
    uid: String,
    pod: &mut TrackedPod,
    (tools, installed, lookups): (&Arc<Tools>, &Arc<Vec<Installed>>, &Arc<SharedLookups>),
    now: Instant,
) -> Option<Job> {
    let settings = tools.settings.repair.clone()?;
    let mut rules = pod.rules.take_if(|rules| rules.due.is_some_and(|due| due <= now))?;
    let check = RuleCheck {
        tools: Arc::clone(tools),
        settings,
        installed: Arc::clone(installed),
        lookups: Arc::clone(lookups),
        observed: Arc::clone(&pod.observed),
        namespace: pod.namespace.clone(),
    };
    Some(Box::new(move || {
        let result = check.run(&mut rules);
        FinishedJob { uid, done: Done::Check(rules, result) }
    }))
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
