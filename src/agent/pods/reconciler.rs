//! The queue of the node's pods: which pod has the next pass, and what the passes found. Its task runs the passes.

use super::pass::{INTERVAL, Pass};
use super::pod_state::{Finding, MIN_INTERVAL, PodState};
use super::suspicion::Cause;
use super::texts;
use super::{PodSettings, Tools};
use crate::agent::facts::{ObservedPod, SharedFacts};
use crate::agent::install::{Installed, NodeFiles};
use crate::agent::metrics::Metrics;
use crate::agent::pod_reports::PodReports;
use crate::cgroup;
use crate::cluster::agent::{MAX_FINDINGS, PodFinding, PoliciesReport, PolicyCounts};
use crate::cluster::{Api, Event};
use crate::host_path::{HostPath, HostRoot};
use crate::plugin::running::{self, Sandboxes};
use crate::pod::{Namespace, PodRef};
use crate::state::ROOT;
use crate::trusted_file::FileId;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Display;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// The minimum pause if no pod is due, in which changes are collected.
const MIN_PAUSE: Duration = Duration::from_millis(20);
/// The pause if no pod is due, as a multiple of the time to find that out: pods that change all the time take at most a
/// fifth of a processor.
const PAUSE_FACTOR: u32 = 4;
/// The longest of these pauses. A pod is not changed more often either.
const MAX_PAUSE: Duration = MIN_INTERVAL;

/// The longest pause without a pass.
const LONG_PAUSE: Duration = Duration::from_secs(600);

/// The observed state of the node's pods.
#[derive(Debug, Clone, Default)]
pub struct ObservedNode {
    /// The pods with their namespaces. The state of a pod that has not changed is the same `Arc`.
    pub pods: Vec<(Arc<ObservedPod>, Option<Arc<Namespace>>)>,
    /// Whether pods and namespaces are complete and current.
    pub is_current: bool,
}

/// A pod of the node.
struct TrackedPod {
    observed: Arc<ObservedPod>,
    namespace: Option<Arc<Namespace>>,
    state: PodState,
}

impl TrackedPod {
    /// Logs the Events of the pod and creates them. Returns them.
    fn create_events(&mut self, reports: &PodReports) -> Vec<Event> {
        let events = std::mem::take(&mut self.state.events);
        events.iter().for_each(|event| reports.report(&self.observed.pod.reference(), event.clone()));
        events
    }
}

/// The state between two passes. No failure ends the agent.
pub struct PodReconciler {
    tools: Tools,
    reports: PodReports,
    /// By UID.
    pods: BTreeMap<String, TrackedPod>,
    /// The UIDs of the pods that are due.
    queue: VecDeque<String>,
    /// The pod that the last pass has selected for deletion.
    deletion: Option<(String, Cause)>,
    /// The pod sandboxes with saved state.
    sandboxes: Sandboxes,
    /// The installed configurations; empty if they can't be read.
    installed: Vec<Installed>,
    /// Whether this agent leads, so that it changes pods.
    leads: bool,
    /// Whether the observed state was current at the last pass.
    was_current: bool,
    /// Whether the findings may have changed since the last report.
    has_changed: bool,
    /// Whether saved state of pods that have ended may exist.
    needs_cleanup: bool,
    /// The last logged failure.
    logged: String,
}

impl PodReconciler {
    /// Creates a reconciler that has not checked any pod and does not lead.
    #[must_use]
    pub fn new(settings: PodSettings, node: NodeFiles, account: Api, reports: PodReports, metrics: Metrics) -> Self {
        Self {
            tools: Tools::new(settings, node, account, metrics),
            reports,
            pods: BTreeMap::new(),
            queue: VecDeque::new(),
            deletion: None,
            sandboxes: Sandboxes::default(),
            installed: Vec::new(),
            leads: false,
            was_current: false,
            has_changed: false,
            needs_cleanup: true,
            logged: String::new(),
        }
    }

    /// Runs the passes, which block, in the agent's pool of threads, one after the other: from the first attempt to install
    /// the plugin on, until the sender of `leads` is dropped. `leads` changes with each attempt. `damaged` gets the pods
    /// whose rules for excluded containers are missing; `policies` are the reports for the agent socket.
    pub(in crate::agent) async fn run(
        mut self,
        facts: SharedFacts,
        policies: watch::Sender<PoliciesReport>,
        mut leads: watch::Receiver<bool>,
        mut damaged: mpsc::Receiver<PodRef>,
    ) {
        let [mut pods, mut namespaces] = facts.changes();
        if leads.changed().await.is_err() {
            return;
        }
        policies.send_replace(self.empty_report());
        let mut role = Some(*leads.borrow_and_update());
        loop {
            let (started, facts) = (Instant::now(), facts.clone());
            let step = move || {
                if let Some(leads) = role {
                    self.update_node(leads, started);
                }
                // Only the rules of excluded containers need it; if it fails, only they are refused.
                if let Err(error) = cgroup::enter_host_namespace(&HostRoot::new(self.tools.node.root())) {
                    tracing::debug!("{error}");
                }
                let was_due = self.run_next(&observed(&facts), started).is_some();
                (self, was_due)
            };
            pods.mark_unchanged();
            namespaces.mark_unchanged();
            // Fails only if the pass panics.
            let Ok((reconciler, was_due)) = spawn_blocking(step).await else { return };
            (self, role) = (reconciler, None);
            self.delete(Instant::now()).await;
            if let Some(report) = self.changed_report() {
                policies.send_replace(report);
            }
            let mut wait = Duration::ZERO;
            if !was_due {
                sleep((started.elapsed() * PAUSE_FACTOR).clamp(MIN_PAUSE, MAX_PAUSE)).await;
                wait = self.pause(Instant::now());
            }
            tokio::select! {
                biased;
                changed = leads.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    role = Some(*leads.borrow_and_update());
                }
                Some(pod) = damaged.recv() => self.check_soon(&pod, Instant::now()),
                // The senders are in the caches, which this task owns too.
                _ = pods.changed() => {}
                _ = namespaces.changed() => {}
                () = sleep(wait) => {}
            }
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
                self.logged.clear();
                if has_taken_over || self.installed != installed {
                    self.installed = installed;
                    self.pods.values_mut().for_each(|pod| pod.state.changed(now));
                }
            }
            Err(error) => self.fail(&error),
        }
    }

    /// Logs a failure, once until it changes. There is no pass until the next attempt to install the plugin.
    fn fail(&mut self, error: &dyn Display) {
        self.installed.clear();
        let failure = format!("running pods are neither repaired nor changed: {error}");
        if self.logged != failure {
            tracing::warn!("{failure}");
            self.logged = failure;
        }
    }

    /// Returns the time until a pod is due.
    #[must_use]
    pub fn pause(&self, now: Instant) -> Duration {
        if !self.leads || self.installed.is_empty() {
            return LONG_PAUSE;
        }
        let due = self.pods.values().filter_map(|pod| pod.state.due).min();
        due.map_or(LONG_PAUSE, |next| next.saturating_duration_since(now))
    }

    /// Updates the observed states, and runs the pass over the next pod that is due at `now`. Returns its Events; `None` if
    /// no pod is due.
    pub fn run_next(&mut self, node: &ObservedNode, now: Instant) -> Option<Vec<Event>> {
        if !self.leads || self.installed.is_empty() {
            return None;
        }
        self.update(node, now);
        self.clean_up();
        if self.queue.is_empty() {
            let due = |(uid, pod): (&String, &TrackedPod)| Some((pod.state.due?, uid.clone()));
            let mut due: Vec<_> = self.pods.iter().filter_map(due).filter(|(due, _)| *due <= now).collect();
            if due.is_empty() {
                return None;
            }
            if let Err(error) = self.sandboxes.refresh() {
                self.fail(&error);
                return None;
            }
            due.sort();
            self.queue = due.into_iter().map(|(_, uid)| uid).collect();
        }
        let uid = std::iter::from_fn(|| self.queue.pop_front()).find(|uid| self.pods.contains_key(uid))?;
        let pod = self.pods.get_mut(&uid)?;
        if pod.state.due.is_some_and(|due| now >= due + INTERVAL) {
            self.tools.metrics.count("repair_queue_overflows", []);
        }
        let pass = Pass {
            tools: &self.tools,
            installed: &self.installed,
            began: (now, Instant::now()),
            observed: &pod.observed,
            namespace: pod.namespace.as_ref(),
            is_current: node.is_current,
            sandbox: self.sandboxes.of(&pod.observed.pod, &HostRoot::new(self.tools.node.root())),
        };
        pass.run(&mut pod.state);
        self.deletion = pod.state.deletion.take().map(|cause| (uid, cause));
        self.has_changed = true;
        Some(pod.create_events(&self.reports))
    }

    /// Deletes the pod that the last pass has selected. Returns its Events.
    pub async fn delete(&mut self, now: Instant) -> Vec<Event> {
        let Some((uid, cause)) = self.deletion.take() else { return Vec::new() };
        let (Tools { account, metrics, settings, .. }, Some(pod)) = (&self.tools, self.pods.get_mut(&uid)) else {
            return Vec::new();
        };
        let result = match account.delete(&pod.observed.pod, &pod.observed.resource_version).await {
            Ok(()) => {
                pod.state.events.push(texts::deleted(cause));
                "done"
            }
            Err(error) => {
                pod.state.fail(&error, &pod.observed.full_name(), now);
                pod.state.report_hourly(texts::repair_failed(cause, &error.to_string()), now);
                "failed"
            }
        };
        metrics.count("repairs", [("type", settings.repair.name()), ("result", result)]);
        pod.create_events(&self.reports)
    }

    /// Updates the observed states. A pass over each pod that has changed is due.
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
            let new = || TrackedPod { observed: Arc::default(), namespace: None, state: PodState::new(now) };
            let pod = self.pods.entry(uid.clone()).or_insert_with(new);
            if became_current || !Arc::ptr_eq(&pod.observed, observed) || pod.namespace != *namespace {
                (pod.observed, pod.namespace) = (Arc::clone(observed), namespace.clone());
                pod.state.changed(now);
            }
        }
        // The counts change although there is no pass.
        self.has_changed |= became_current || has_ended;
    }

    /// Starts a pass over a pod soon.
    fn check_soon(&mut self, pod: &PodRef, now: Instant) {
        let is_named = |tracked: &&mut TrackedPod| {
            let own = &tracked.observed.pod;
            (&own.namespace, &own.name) == (&pod.namespace, &pod.name) && own.matches(pod)
        };
        self.pods.values_mut().filter(is_named).for_each(|tracked| tracked.state.changed(now));
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

    /// Returns the report about the rules of the node's pods if it may have changed, and sets the metrics.
    fn changed_report(&mut self) -> Option<PoliciesReport> {
        if !std::mem::take(&mut self.has_changed) {
            return None;
        }
        let (mut report, mut counts) = (self.empty_report(), [0; 5]);
        for pod in self.pods.values() {
            let Some((finding, reason)) = &pod.state.finding else { continue };
            counts[*finding as usize] += 1;
            if *finding != Finding::Current && report.findings.len() < MAX_FINDINGS {
                report.findings.push(PodFinding {
                    pod: pod.observed.pod.reference(),
                    state: Finding::NAMES[*finding as usize].to_owned(),
                    reason: reason.clone(),
                });
            }
        }
        let [current, rejected, failed, none, outside] = counts;
        self.tools.metrics.pods(counts);
        Some(PoliciesReport { counts: PolicyCounts { current, rejected, failed, none, outside }, ..report })
    }

    /// Returns a report without pods.
    fn empty_report(&self) -> PoliciesReport {
        PoliciesReport { follows: Some(self.tools.settings.live_policy), ..PoliciesReport::default() }
    }
}

fn observed(facts: &SharedFacts) -> ObservedNode {
    let with_namespace = |observed: Arc<ObservedPod>| {
        let namespace = facts.namespace(&observed.pod.namespace);
        (observed, namespace)
    };
    ObservedNode { pods: facts.all_pods().into_iter().map(with_namespace).collect(), is_current: facts.are_current() }
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
