//! The task of the reconciler. Its passes block, so they run in the agent's pool of threads, one after the other.

use super::pod_state::MIN_INTERVAL;
use super::reconciler::{ObservedNode, PodReconciler};
use crate::agent::facts::{ObservedPod, SharedFacts};
use crate::cgroup;
use crate::cluster::agent::PoliciesReport;
use crate::host_path::HostRoot;
use crate::pod::PodRef;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tokio::task::{spawn_blocking, spawn_local};
use tokio::time::sleep;

/// The minimum pause if no pod is due, in which changes are collected.
const MIN_PAUSE: Duration = Duration::from_millis(20);
/// The pause if no pod is due, as a multiple of the time to find that out: pods that change all the time take at most a
/// fifth of a processor.
const PAUSE_FACTOR: u32 = 4;
/// The longest of these pauses. A pod is not changed more often either.
const MAX_PAUSE: Duration = MIN_INTERVAL;

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
        let [mut pods, mut namespaces] = facts.changes();
        if signals.leads.changed().await.is_err() {
            return;
        }
        policies.send_replace(self.empty_report());
        let mut role = Some(*signals.leads.borrow_and_update());
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
                changed = signals.leads.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    role = Some(*signals.leads.borrow_and_update());
                }
                Some(pod) = signals.damaged.recv() => self.check_soon(&pod, Instant::now()),
                // The senders are in the caches, which this task owns too.
                _ = pods.changed() => {}
                _ = namespaces.changed() => {}
                () = sleep(wait) => {}
            }
        }
    }
}

fn observed(facts: &SharedFacts) -> ObservedNode {
    let with_namespace = |observed: Arc<ObservedPod>| {
        let namespace = facts.namespace(&observed.pod.namespace);
        (observed, namespace)
    };
    ObservedNode { pods: facts.all_pods().into_iter().map(with_namespace).collect(), is_current: facts.are_current() }
}
