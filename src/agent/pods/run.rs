//! The task of the reconciler. Its passes and its jobs block, so they run in the agent's pool of threads.

use super::limits::MIN_INTERVAL;
use super::reconciler::{FinishedJob, Job, ObservedNode, PodReconciler};
use crate::agent::facts::{ObservedPod, SharedFacts};
use crate::cgroup;
use crate::cluster::agent::PoliciesReport;
use crate::host_path::HostRoot;
use crate::pod::PodRef;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::{JoinSet, spawn_blocking, spawn_local};
use tokio::time::sleep;

/// The minimum pause between two passes, in which changes are collected.
const MIN_PAUSE: Duration = Duration::from_millis(20);
/// The pause after a short pass, as a multiple of its duration: pods that change all the time take at most a fifth of a
/// processor.
const PAUSE_FACTOR: u32 = 4;
/// The longest pause. A pod is not changed more often either.
const MAX_PAUSE: Duration = MIN_INTERVAL;
/// The limit of jobs that run. Most of the time of a change, the kernel waits until no packet uses the old rules.
const MAX_RUNNING: usize = 8;

/// What other tasks and threads tell the reconciler.
pub(in crate::agent) struct PodSignals {
    /// Whether this agent leads, after each attempt to install the plugin. The reconciler begins after the first one, and
    /// ends with the sender.
    pub(in crate::agent) leads: watch::Receiver<bool>,
    /// The pods whose rules for excluded containers are missing.
    pub(in crate::agent) damaged: mpsc::Receiver<PodRef>,
}

impl PodReconciler {
    /// Starts the task. `policies` gets the reports for the agent socket.
    pub(in crate::agent) fn start(
        self,
        facts: SharedFacts,
        policies: watch::Sender<PoliciesReport>,
        signals: PodSignals,
    ) {
        spawn_local(self.run(facts, policies, signals));
    }

    async fn run(mut self, facts: SharedFacts, policies: watch::Sender<PoliciesReport>, mut signals: PodSignals) {
        let (root, slots) = (HostRoot::new(self.tools.node.root()), Arc::new(Semaphore::new(MAX_RUNNING)));
        let [mut pods, mut namespaces] = facts.changes();
        let mut jobs: JoinSet<Option<FinishedJob>> = JoinSet::new();
        if signals.leads.changed().await.is_err() {
            return;
        }
        policies.send_replace(self.empty_report());
        let mut role = Some(*signals.leads.borrow_and_update());
        loop {
            let (started, facts) = (Instant::now(), facts.clone());
            let pass = move || {
                if let Some(leads) = role {
                    self.update_node(leads, started);
                }
                let due = self.start_due(&observed(&facts), started);
                (self, due)
            };
            // Fails only if the pass panics.
            let Ok((reconciler, due)) = spawn_blocking(pass).await else { return };
            (self, role) = (reconciler, None);
            for job in due {
                jobs.spawn_local(run(job, root.clone(), Arc::clone(&slots)));
            }
            if let Some(report) = self.changed_report() {
                policies.send_replace(report);
            }
            sleep((started.elapsed() * PAUSE_FACTOR).clamp(MIN_PAUSE, MAX_PAUSE)).await;
            let wait = self.pause(Instant::now());
            tokio::select! {
                changed = signals.leads.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    role = Some(*signals.leads.borrow_and_update());
                }
                // The senders are in the caches, which this task owns too.
                _ = pods.changed() => {}
                _ = namespaces.changed() => {}
                Some(pod) = signals.damaged.recv() => self.check_soon(&pod, Instant::now()),
                Some(Ok(Some(finished))) = jobs.join_next() => {
                    self.finish(finished, Instant::now());
                }
                () = sleep(wait) => {}
            }
            while let Some(Ok(Some(finished))) = jobs.try_join_next() {
                self.finish(finished, Instant::now());
            }
            pods.mark_unchanged();
            namespaces.mark_unchanged();
        }
    }
}

/// Runs a job in the pool of threads; returns `None` if it panics.
async fn run(job: Job, root: HostRoot, slots: Arc<Semaphore>) -> Option<FinishedJob> {
    let _slot = slots.acquire_owned().await.ok()?;
    let work = move || {
        // Only the rules of excluded containers need it; if it fails, only they are refused.
        if let Err(error) = cgroup::enter_host_namespace(&root) {
            tracing::debug!("{error}");
        }
        job()
    };
    spawn_blocking(work).await.ok()
}

fn observed(facts: &SharedFacts) -> ObservedNode {
    let with_namespace = |observed: Arc<ObservedPod>| {
        let namespace = facts.namespace(&observed.pod.namespace);
        (observed, namespace)
    };
    ObservedNode { pods: facts.all_pods().into_iter().map(with_namespace).collect(), is_current: facts.are_current() }
}
