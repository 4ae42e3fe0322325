//! The thread of the reconciler, and the small pool of threads that run its jobs.

use super::limits::MIN_INTERVAL;
use super::reconciler::{FinishedJob, ObservedNode, PodReconciler};
use crate::agent::facts::{ObservedPod, SharedFacts};
use crate::cgroup;
use crate::cluster::agent::PoliciesReport;
use crate::host_path::HostRoot;
use std::sync::Arc;
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

impl PodReconciler {
    /// Starts the thread. `leads` changes with each attempt to install the plugin: the thread begins after the first one,
    /// and ends with the sender. `policies` gets the reports for the agent socket.
    ///
    /// # Errors
    /// The thread or its event loop can't be created.
    pub(in crate::agent) fn start(
        self,
        facts: SharedFacts,
        policies: watch::Sender<PoliciesReport>,
        leads: watch::Receiver<bool>,
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
        let work = move || runtime.block_on(self.run(&facts, &policies, leads));
        thread::Builder::new().name("pods".into()).spawn(work).map(drop)
    }

    async fn run(
        mut self,
        facts: &SharedFacts,
        policies: &watch::Sender<PoliciesReport>,
        mut leads: watch::Receiver<bool>,
    ) {
        let [mut pods, mut namespaces] = facts.changes();
        let mut jobs: JoinSet<FinishedJob> = JoinSet::new();
        if leads.changed().await.is_err() {
            return;
        }
        policies.send_replace(self.empty_report());
        let is_leading = *leads.borrow_and_update();
        self.update_node(is_leading, Instant::now());
        loop {
            let started = Instant::now();
            for job in self.start_due(&observed(facts), started) {
                jobs.spawn_blocking(job);
            }
            if let Some(report) = self.changed_report() {
                policies.send_replace(report);
            }
            sleep((started.elapsed() * PAUSE_FACTOR).clamp(MIN_PAUSE, MAX_PAUSE)).await;
            let wait = self.pause(Instant::now());
            tokio::select! {
                    changed = leads.changed() => {
                        if changed.is_err() {
                            return;
                        }
                        let is_leading = *leads.borrow_and_update();
            self.update_node(is_leading, Instant::now());
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
    let with_namespace = |observed: Arc<ObservedPod>| {
        let namespace = facts.namespace(&observed.pod.namespace);
        (observed, namespace)
    };
    ObservedNode { pods: facts.all_pods().into_iter().map(with_namespace).collect(), is_current: facts.are_current() }
}
