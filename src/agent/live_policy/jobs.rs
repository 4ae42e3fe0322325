//! The threads that apply changes: a network namespace in which the kernel is slow delays few other pods.

use crate::cgroup;
use crate::cni::Error;
use crate::host_path::HostRoot;
use crate::plugin::live_policy::{Assessment, Policies, RunningPod};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use tokio::sync::mpsc::UnboundedSender;

/// The limit of threads. Most of the time of a change, the kernel waits until no packet uses the old rules.
const MAX_THREADS: usize = 8;

/// A change of one pod.
pub(super) struct Job {
    /// The key of the pod.
    pub(super) uid: String,
    pub(super) running: RunningPod,
    pub(super) change: Policies,
    /// The assessment if the change is applied.
    pub(super) after: Assessment,
    /// The change in words.
    pub(super) words: String,
}

/// A job, and its result.
pub(super) struct FinishedJob {
    pub(super) job: Job,
    pub(super) result: Result<(), Error>,
}

/// Applies changes in threads that end when no change is left.
pub(super) struct Jobs {
    root: PathBuf,
    state: Arc<Mutex<JobState>>,
    results: UnboundedSender<FinishedJob>,
}

#[derive(Default)]
struct JobState {
    waiting: VecDeque<Job>,
    threads: usize,
}

impl Jobs {
    /// Creates a pool without threads; `root` is the mount point of the node's file system.
    pub(super) fn new(root: PathBuf, results: UnboundedSender<FinishedJob>) -> Self {
        Self { root, state: Arc::default(), results }
    }

    /// Applies a change in one of the threads.
    pub(super) fn start(&self, job: Job) {
        let mut state = lock(&self.state);
        state.waiting.push_back(job);
        if state.threads == MAX_THREADS {
            return;
        }
        let (root, shared, results) = (self.root.clone(), Arc::clone(&self.state), self.results.clone());
        let work = move || {
            // Only the rules of excluded containers need it; if it fails, only they are refused.
            if let Err(error) = cgroup::enter_host_namespace(&HostRoot::new(&root)) {
                tracing::debug!("{error}");
            }
            while let Some(job) = next(&shared) {
                let result = job.running.apply(&root, &job.change);
                // Fails only if the agent ends.
                let _ = results.send(FinishedJob { job, result });
            }
        };
        // Without a thread, the next change starts one, and the pod's change waits.
        match thread::Builder::new().name("policy".into()).spawn(work) {
            Ok(_) => state.threads += 1,
            Err(error) => tracing::warn!("can't start a thread that changes the policies of pods: {error}; retrying"),
        }
    }
}

/// Returns the next job, and records the end of the thread if no job waits.
fn next(state: &Mutex<JobState>) -> Option<Job> {
    let mut state = lock(state);
    let job = state.waiting.pop_front();
    if job.is_none() {
        state.threads -= 1;
    }
    job
}

fn lock(state: &Mutex<JobState>) -> MutexGuard<'_, JobState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
