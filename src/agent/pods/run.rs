//! The thread of the reconciler, and the small pool of threads that run its jobs.

use super::limits::MIN_INTERVAL;
use super::reconciler::{FinishedJob, ObservedNode, PodReconciler};
use crate::agent::facts::SharedFacts;
use crate::cgroup;
use crate::cluster::agent::PoliciesReport;
use crate::host_path::HostRoot;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// The minimum pause between two passes, in which changes are collected.
const MIN_PAUSE: Duration = Duration::from_millis(20);
/// The pause after a short pass, as a multiple of its duration: pods that change all the time take at most a fifth of a
/// processor.
const PAUSE_FACTOR: u32 = 4;
/// The longest pause. A pod is not changed more often either.
const MAX_PAUSE: Duration = MIN_INTERVAL;
/// The limit of threads for jobs. Most of the time of a change, the kernel waits until no packet uses the old rules.
const MAX_THREADS: usize = 8;
/// The time after which an idle thread ends.
const THREAD_IDLE_TIME: Duration = Duration::from_secs(1);

/// The state of the node after an iteration of the loop that installs the plugin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::agent) struct NodeState {
    /// The number of iterations; 0 before the first one.
    pub(in crate::agent) iterations: u64,
    /// Whether this agent leads among those of the node.
    pub(in crate::agent) leads: bool,
}

/// The last report about the policies of the node's pods, for the agent socket. Clones share it.
#[derive(Clone, Default)]
pub(in crate::agent) struct SharedPolicies(Arc<Mutex<PoliciesReport>>);

impl SharedPolicies {
    /// Returns the last report.
    pub(in crate::agent) fn report(&self) -> PoliciesReport {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, report: PoliciesReport) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }
}

impl PodReconciler {
    /// Starts the thread. It begins after the first attempt to install the plugin, and ends with the sender of `node`.
    ///
    /// # Errors
    /// The thread or its event loop can't be created.
    pub(in crate::agent) fn start(
        self,
        facts: SharedFacts,
        policies: SharedPolicies,
        node: watch::Receiver<NodeState>,
    ) -> io::Result<()> {
        let root = HostRoot::new(self.tools.node.root());
        let enter_host_namespace = move || {
            // Only the rules of excluded containers need it; if it fails, only they are refused.
            if let Err(error) = cgroup::enter_host_namespace(&root) {
                tracing::debug!("{error}");
            }
        };
        let mut builder = Builder::new_current_thread();
        builder.enable_time().thread_name("pod").max_blocking_threads(MAX_THREADS).thread_keep_alive(THREAD_IDLE_TIME);
        let runtime = builder.on_thread_start(enter_host_namespace).build()?;
        let work = move || runtime.block_on(self.run(&facts, &policies, node));
        thread::Builder::new().name("pods".into()).spawn(work).map(drop)
    }

    async fn run(mut self, facts: &SharedFacts, policies: &SharedPolicies, mut node: watch::Receiver<NodeState>) {
        let [mut pods, mut namespaces] = facts.changes();
        let mut jobs: JoinSet<FinishedJob> = JoinSet::new();
        if node.changed().await.is_err() {
            return;
        }
        policies.set(self.empty_report());
        self.update_node(node.borrow_and_update().leads, Instant::now());
        loop {
            let started = Instant::now();
            for job in self.start_due(&observed(facts), started) {
                jobs.spawn_blocking(move || job.run());
            }
            if let Some(report) = self.changed_report() {
                policies.set(report);
            }
            sleep((started.elapsed() * PAUSE_FACTOR).clamp(MIN_PAUSE, MAX_PAUSE)).await;
            let wait = self.pause(Instant::now());
            tokio::select! {
                changed = node.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.update_node(node.borrow_and_update().leads, Instant::now());
                }
                // The sender is in the caches, which this thread owns too.
                _ = pods.changed() => {}
                _ = namespaces.changed() => {}
                Some(Ok(finished)) = jobs.join_next() => {
                    self.finish(finished, Instant::now());
                }
                () = sleep(wait) => {}
            }
            while let Some(Ok(finished)) = jobs.try_join_next() {
                self.finish(finished, Instant::now());
            }
            pods.mark_unchanged();
            namespaces.mark_unchanged();
        }
    }
}

fn observed(facts: &SharedFacts) -> ObservedNode {
    let with_namespace = |observed: Arc<_>| {
        let observed: Arc<crate::agent::facts::ObservedPod> = observed;
        let namespace = facts.namespace(&observed.pod.namespace);
        (observed, namespace)
    };
    ObservedNode { pods: facts.all_pods().into_iter().map(with_namespace).collect(), is_current: facts.are_current() }
}
