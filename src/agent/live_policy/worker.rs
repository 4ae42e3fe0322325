//! The thread that evaluates the policies of the node's pods, and reports them.

use super::change_limit::MIN_INTERVAL;
use super::jobs::{FinishedJob, Job, Jobs};
use super::report::SharedPolicies;
use super::sandbox::{by_pod, current_sandbox};
use super::texts;
use super::tracked_pod::TrackedPod;
use crate::agent::facts::{ObservedPod, SharedFacts};
use crate::agent::install::{Installed, NodeFiles};
use crate::agent::metrics::Metrics;
use crate::agent::pod_reports::PodReports;
use crate::agent::repair::{Criteria, check_state_directory, suspect};
use crate::cluster::agent::{MAX_POLICIES, PodPolicyStatus, PoliciesReport};
use crate::cni::{Code, NetConf};
use crate::host_path::HostRoot;
use crate::plugin::live_policy::{
    self, Assessment, Input, RunningPod, Verdict, applied_policy, assess, assess_changed, changes, union,
};
use crate::pod::{Facts, PodRef};
use crate::policy::LivePolicyScope;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;
use tokio::time::sleep;

/// The interval in which every pod is evaluated although nothing has changed.
const RESYNC_INTERVAL: Duration = Duration::from_secs(600);
/// The minimum pause between two passes, in which changes are collected.
const MIN_PAUSE: Duration = Duration::from_millis(20);
/// The pause after a short pass, as a multiple of its duration: pods that change all the time take at most a fifth of a
/// processor.
const PAUSE_FACTOR: u32 = 4;
/// The longest pause. A pod is not changed more often either.
const MAX_PAUSE: Duration = MIN_INTERVAL;
/// The pause after saved state or a configuration that can't be read.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// The state of the node after an iteration of the reconcile loop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::agent) struct NodeState {
    /// The number of iterations; 0 before the first one.
    pub(in crate::agent) iterations: u64,
    /// Whether this agent leads among those of its release.
    pub(in crate::agent) leads: bool,
}

/// The state of the thread.
pub(in crate::agent) struct Worker {
    /// What follows changes.
    pub(in crate::agent) scope: LivePolicyScope,
    /// Whether pods may follow no changes.
    pub(in crate::agent) opt_out: bool,
    /// The node on which the plugin is installed.
    pub(in crate::agent) node: NodeFiles,
    /// The watched pods and namespaces.
    pub(in crate::agent) facts: SharedFacts,
    /// The Events and conditions.
    pub(in crate::agent) reports: PodReports,
    /// The report for the agent socket.
    pub(in crate::agent) policies: SharedPolicies,
    pub(in crate::agent) metrics: Metrics,
}

/// The installed configurations that decide about pods.
#[derive(PartialEq)]
struct Configurations {
    own: Vec<Installed>,
}

impl Configurations {
    /// Reads the configurations.
    ///
    /// # Errors
    /// They can't be read, or there are none.
    fn read(node: &NodeFiles) -> Result<Self, String> {
        let own = check_state_directory(node).and_then(|()| node.installed())?;
        if own.is_empty() {
            return Err("the plugin is not installed".to_owned());
        }
        Ok(Self { own })
    }

    /// Returns all configurations.
    fn all(&self) -> Vec<&NetConf> {
        self.own.iter().map(|installed| &installed.conf).collect()
    }
}

/// The state between two passes.
struct Passes {
    worker: Worker,
    jobs: Jobs,
    /// By UID.
    pods: BTreeMap<String, TrackedPod>,
    /// `None` until the plugin is installed. While it is missing, the last ones apply.
    configurations: Option<Configurations>,
    /// The pods of containers whose records do not contain them; `None` if unknown.
    unnamed: BTreeMap<String, Option<PodRef>>,
    leads: bool,
    /// Whether the caches were complete and current in the last pass.
    was_current: bool,
    /// Whether an assessment has changed since the last report.
    has_changed: bool,
    /// When every pod is evaluated.
    next_resync: Instant,
    /// When the saved state is read again after a failure.
    retry: Option<Instant>,
    /// The last logged problems of the saved state and of the configurations.
    logged: String,
    logged_configuration: String,
}

impl Worker {
    /// Starts the thread. It begins after the first iteration of the reconcile loop, and ends with the sender of `node`.
    ///
    /// # Errors
    /// The thread or its event loop can't be created.
    pub(in crate::agent) fn start(self, node: watch::Receiver<NodeState>) -> io::Result<()> {
        let runtime = Builder::new_current_thread().enable_time().build()?;
        let work = move || runtime.block_on(self.run(node));
        thread::Builder::new().name("live-policy".into()).spawn(work).map(drop)
    }

    fn empty_report(&self) -> PoliciesReport {
        PoliciesReport { scope: self.scope.to_string(), forbids_opt_out: !self.opt_out, ..PoliciesReport::default() }
    }

    async fn run(self, mut node: watch::Receiver<NodeState>) {
        if node.changed().await.is_err() {
            return;
        }
        self.policies.set(self.empty_report());
        let [mut pods, mut namespaces] = self.facts.changes();
        let (sender, mut results) = unbounded_channel();
        let now = Instant::now();
        let mut passes = Passes {
            jobs: Jobs::new(self.node.root().to_owned(), sender),
            pods: BTreeMap::new(),
            configurations: None,
            unnamed: BTreeMap::new(),
            leads: false,
            was_current: false,
            has_changed: false,
            next_resync: now + RESYNC_INTERVAL,
            retry: None,
            logged: String::new(),
            logged_configuration: String::new(),
            worker: self,
        };
        let mut state = *node.borrow_and_update();
        passes.set_node(state, now);
        loop {
            let started = Instant::now();
            passes.run(&mut results, started);
            let pause = (started.elapsed() * PAUSE_FACTOR).clamp(MIN_PAUSE, MAX_PAUSE);
            sleep(pause).await;
            let wait = passes.wait(Instant::now());
            tokio::select! {
                changed = node.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    state = *node.borrow_and_update();
                    passes.set_node(state, Instant::now());
                }
                // The sender is in the caches, which this thread owns too.
                _ = pods.changed() => {}
                _ = namespaces.changed() => {}
                finished = results.recv() => {
                    if let Some(finished) = finished {
                        passes.finish(finished, Instant::now());
                    }
                }
                () = sleep(wait) => {}
            }
            pods.mark_unchanged();
            namespaces.mark_unchanged();
        }
    }
}

impl Passes {
    /// Returns the time until a pod is due.
    fn wait(&self, now: Instant) -> Duration {
        if !self.is_active() {
            return RESYNC_INTERVAL;
        }
        let pods = self.pods.values().filter(|pod| !pod.is_changing).filter_map(|pod| pod.due);
        let next = pods.min().map(|due| self.retry.map_or(due, |retry| due.max(retry)));
        let next = next.map_or(self.next_resync, |next| next.min(self.next_resync));
        next.saturating_duration_since(now)
    }

    /// Updates the role of this agent, and evaluates all pods if the configurations of the node have changed.
    fn set_node(&mut self, state: NodeState, now: Instant) {
        if self.leads && !state.leads {
            tracing::info!("another agent leads: it changes the policies of running pods");
            // That agent exports them.
            Verdict::ALL.iter().for_each(|verdict| self.worker.metrics.pods(verdict.name(), 0));
        }
        let has_taken_over = state.leads && !self.leads;
        self.leads = state.leads;
        if !self.leads {
            return;
        }
        let read = match Configurations::read(&self.worker.node) {
            Ok(read) => read,
            Err(error) => {
                let problem = format!("policies of running pods do not follow the configuration: {error}");
                return log(&mut self.logged_configuration, problem);
            }
        };
        self.logged_configuration.clear();
        if has_taken_over || self.configurations.as_ref() != Some(&read) {
            self.configurations = Some(read);
            self.pods.values_mut().for_each(|pod| pod.resync(now));
        }
    }

    /// Whether pods are evaluated.
    const fn is_active(&self) -> bool {
        self.leads && self.configurations.is_some()
    }

    /// Evaluates the pods that are due.
    fn run(&mut self, results: &mut UnboundedReceiver<FinishedJob>, now: Instant) {
        if !self.is_active() {
            return;
        }
        while let Ok(finished) = results.try_recv() {
            self.finish(finished, now);
        }
        self.update(now);
        if self.pods.values().any(|pod| pod.is_due(now)) && self.retry.is_none_or(|retry| retry <= now) {
            self.evaluate(now);
        }
        if std::mem::take(&mut self.has_changed) {
            self.publish();
        }
    }

    /// Updates the observed states.
    fn update(&mut self, now: Instant) {
        let is_resync = now >= self.next_resync;
        if is_resync {
            self.next_resync = now + RESYNC_INTERVAL;
        }
        let observed: Vec<Arc<ObservedPod>> =
            self.worker.facts.all_pods().into_iter().filter(|observed| !observed.pod.host_network).collect();
        let uids: BTreeSet<&str> = observed.iter().filter_map(|observed| observed.pod.uid.as_deref()).collect();
        let is_current = self.worker.facts.are_current();
        let was_current = std::mem::replace(&mut self.was_current, is_current);
        let became_current = is_current && !was_current;
        let before = self.pods.len();
        self.pods.retain(|uid, _| uids.contains(uid.as_str()));
        for observed in &observed {
            let Some(uid) = &observed.pod.uid else { continue };
            let namespace = self.worker.facts.namespace(&observed.pod.namespace);
            let new = || TrackedPod::new(Arc::clone(observed), now);
            let pod = self.pods.entry(uid.clone()).or_insert_with(new);
            pod.update(observed, namespace, now);
            if is_resync {
                pod.resync(now);
            } else if became_current && pod.container_id.is_none() {
                pod.wake(now);
            }
        }
        // The counts change although no pod is evaluated.
        self.has_changed |= became_current || self.pods.len() < before;
    }

    /// Evaluates the pods that are due.
    fn evaluate(&mut self, now: Instant) {
        let Some(configurations) = &self.configurations else { return };
        let running = match live_policy::running() {
            Ok(running) => running,
            Err(error) => {
                self.retry = Some(now + RETRY_DELAY);
                return log(&mut self.logged, format!("policies of running pods are not evaluated: {error}"));
            }
        };
        self.retry = None;
        self.logged.clear();
        let running = by_pod(running, &mut self.unnamed, &HostRoot::new(self.worker.node.root()));
        let due: Vec<String> =
            self.pods.iter().filter(|(_, pod)| pod.is_due(now)).map(|(uid, _)| uid.clone()).collect();
        let is_current = self.worker.facts.are_current();
        let root = HostRoot::new(self.worker.node.root());
        for uid in &due {
            let Some(pod) = self.pods.get_mut(uid) else { continue };
            let sandbox = current_sandbox(&running, &pod.observed, &root);
            let is_known = sandbox.is_some_and(|sandbox| pod.container_id.as_ref() == Some(&sandbox.container_id));
            if pod.observed.ending {
                pod.evaluated(now);
                pod.assessment = Assessment::default();
            } else if is_known || is_current {
                pod.evaluated(now);
                evaluate(pod, sandbox, (&self.worker, configurations, &self.jobs), now);
            } else {
                // The facts of its ADD may be newer than the cache.
                pod.retry(now);
            }
        }
        self.has_changed = true;
    }

    /// Records the result of a change.
    fn finish(&mut self, FinishedJob { job, result }: FinishedJob, now: Instant) {
        let Some(pod) = self.pods.get_mut(&job.uid) else { return };
        self.has_changed = true;
        pod.is_changing = false;
        let Worker { metrics, reports, .. } = &self.worker;
        let pod_ref = pod.pod_ref();
        let name = format!("{}/{}", pod_ref.namespace, pod_ref.name);
        match result {
            Ok(()) => {
                metrics.policy_change("applied");
                pod.succeeded();
                let event = texts::changed(&pod.assessment.applied, &job.after.applied, &job.words);
                tracing::info!(pod = name, "{}", event.message);
                if !job.words.is_empty() {
                    reports.event(&pod_ref, event);
                }
                pod.report(job.after, reports);
            }
            Err(error) if error.code == Code::InvalidConfig => {
                metrics.policy_change("refused");
                let reason = error.to_string();
                let assessment = Assessment { verdict: Some(Verdict::Refused), reason, ..pod.assessment.clone() };
                pod.report(Assessment { change: None, ..assessment }, reports);
            }
            Err(error) => {
                metrics.policy_change("failed");
                let reason = format!("the change failed, and the agent retries: {error}");
                if pod.assessment.reason != reason {
                    tracing::warn!(pod = name, "can't change its policy: {error}");
                }
                let assessment = Assessment { change: None, reason, ..pod.assessment.clone() };
                pod.report(assessment, reports);
                pod.retry(now);
            }
        }
    }

    /// Sets the report for the agent socket, and the metrics.
    fn publish(&self) {
        let mut report = self.worker.empty_report();
        for pod in self.pods.values() {
            let Assessment { verdict: Some(verdict), applied, desired, reason, needs_new_pod, .. } = &pod.assessment
            else {
                continue;
            };
            match verdict {
                Verdict::Current => report.current += 1,
                Verdict::Older => report.older += 1,
                Verdict::Refused => report.refused += 1,
                Verdict::None => report.none += 1,
            }
            if *verdict != Verdict::Current && report.pods.len() < MAX_POLICIES {
                report.pods.push(PodPolicyStatus {
                    pod: pod.pod_ref(),
                    state: verdict.name().to_owned(),
                    applied: applied.clone(),
                    desired: desired.clone(),
                    reason: reason.clone(),
                    needs_new_pod: *needs_new_pod,
                });
            }
        }
        let counts = [report.current, report.older, report.refused, report.none];
        for (verdict, count) in Verdict::ALL.into_iter().zip(counts) {
            self.worker.metrics.pods(verdict.name(), count);
        }
        self.worker.policies.set(report);
    }
}

/// Evaluates a pod, and starts its change.
fn evaluate(
    pod: &mut TrackedPod,
    sandbox: Option<&RunningPod>,
    (worker, configurations, jobs): (&Worker, &Configurations, &Jobs),
    now: Instant,
) {
    let observed = Arc::clone(&pod.observed);
    pod.container_id = sandbox.map(|sandbox| sandbox.container_id.clone());
    let Some(running) = sandbox else {
        // A repair that adds the rules does not change the pod in the cluster.
        let suspicion = suspect(&Criteria::default(), &configurations.own, &observed).map(|(_, suspicion)| suspicion);
        let is_bypassing = suspicion.is_some_and(|it| it.redirectable && it.settled);
        if is_bypassing {
            let reason = "no saved rules: the plugin was not called for it, or another tool redirects it".to_owned();
            let none = Assessment { verdict: Some(Verdict::None), reason, ..Assessment::default() };
            pod.report(none, &worker.reports);
            pod.retry(now);
        } else {
            pod.assessment = Assessment::default();
        }
        return;
    };
    let Some(namespace) = &pod.namespace else {
        // Its watch wakes this thread.
        return;
    };
    let facts = Facts { pod: observed.pod.clone(), namespace: Some((**namespace).clone()) };
    let desired = running.desired(worker.node.root(), &facts, &configurations.all());
    let Worker { scope, opt_out, .. } = *worker;
    let input = Input { running, facts: &facts, desired: &desired, scope, opt_out };
    let assessment = assess(&input);
    let was_refused = pod.assessment.verdict == Some(Verdict::Refused) && pod.assessment.reason == assessment.reason;
    if assessment.verdict == Some(Verdict::Refused) && !was_refused && worker.scope != LivePolicyScope::Off {
        worker.metrics.policy_change("refused");
    }
    let Some(change) = &assessment.change else {
        pod.report(assessment, &worker.reports);
        return;
    };
    if let Some(next) = pod.limit.next(now) {
        pod.wake(next);
        // The text is the same until the change, so that the condition is set once.
        let reason = "its policy changes too often; the next change follows within 10 s".to_owned();
        let waiting = Assessment { reason, ..assessment };
        if next - now > MIN_INTERVAL {
            pod.report(waiting, &worker.reports);
        } else {
            pod.assessment = waiting;
        }
        return;
    }
    pod.limit.record(now);
    let words = changes(&applied_policy(running), &union(change.iter().map(|(_, policy)| policy)));
    let after = assess_changed(&input, change);
    let uid = observed.pod.uid.clone().unwrap_or_default();
    let job = Job { uid, running: running.clone(), change: change.clone(), after, words };
    pod.assessment = Assessment { change: None, ..assessment };
    pod.is_changing = true;
    jobs.start(job);
}

/// Logs a problem, once until it changes.
fn log(logged: &mut String, problem: String) {
    if *logged != problem {
        tracing::warn!("{problem}");
        *logged = problem;
    }
}
