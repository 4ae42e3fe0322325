//! Whether the agent's DaemonSet was deleted, which decides if the plugin stays on the node when the agent ends.
//!
//! Uninstalling deletes the DaemonSet, its service account and its permissions almost at once and in any order. The pods get
//! their signal after that, when a request may be refused already. A watch that was granted before continues without
//! permission and account, and reports the deletion.

use super::runtime::Tasks;
use crate::backoff::Backoff;
use crate::cluster::{Api, ObjectRef};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// The pauses after failed watches.
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(4), Duration::from_secs(30));
/// A watch that ended regularly within this time counts as failed.
const MIN_WATCH_TIME: Duration = Duration::from_secs(5);
/// How long an agent that ends waits for the answer, the watch's lag behind the signal included.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// The DaemonSet of this agent.
#[derive(Debug, Clone)]
pub struct DaemonSet {
    account: Api,
    object: ObjectRef,
    /// The last state that the watch reported.
    observed: Arc<(Mutex<ObservedDaemonSet>, Condvar)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ObservedDaemonSet {
    Unknown,
    Exists,
    Deleted,
}

impl DaemonSet {
    /// Creates a handle for the DaemonSet `object`, which `account` reads.
    #[must_use]
    pub fn new(account: Api, object: ObjectRef) -> Self {
        Self { account, object, observed: Arc::new((Mutex::new(ObservedDaemonSet::Unknown), Condvar::new())) }
    }

    /// Starts the task that watches the DaemonSet.
    pub(super) fn watch(&self, tasks: &Tasks) {
        let watched = self.clone();
        tasks.start(|| async move {
            let (mut backoff, mut has_failed) = (BACKOFF, false);
            loop {
                let started = Instant::now();
                let failure = watched.account.watch(&watched.object, |exists| watched.observe(exists)).await.err();
                if let Some(error) = failure.as_ref().filter(|_| !has_failed) {
                    tracing::warn!("{error}; the agent may miss a deletion of the DaemonSet until the watch works");
                }
                has_failed = failure.is_some();
                // A watch that ended regularly is continued at once: a deletion between two watches is seen only
                // while the agent still has its permissions.
                if has_failed || started.elapsed() < MIN_WATCH_TIME {
                    sleep(backoff.pause(Instant::now())).await;
                } else {
                    backoff.reset();
                }
            }
        });
    }

    /// Whether the DaemonSet was deleted, according to the API server or, if that can't answer, to the watch.
    ///
    /// # Errors
    /// Neither has an answer; returns the reason.
    pub(super) fn is_gone(&self) -> Result<bool, String> {
        let started = Instant::now();
        let error = match self.account.has(&self.object, ANSWER_TIMEOUT) {
            Ok(exists) => return Ok(!exists),
            Err(error) => error,
        };
        let left = ANSWER_TIMEOUT.saturating_sub(started.elapsed());
        let is_open = |observed: &mut ObservedDaemonSet| *observed != ObservedDaemonSet::Deleted;
        let waited = self.observed.1.wait_timeout_while(self.observed(), left, is_open);
        let (observed, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *observed == ObservedDaemonSet::Deleted { Ok(true) } else { Err(error.to_string()) }
    }

    fn observe(&self, exists: bool) {
        let now = if exists { ObservedDaemonSet::Exists } else { ObservedDaemonSet::Deleted };
        let before = std::mem::replace(&mut *self.observed(), now);
        if before != now && now == ObservedDaemonSet::Deleted {
            tracing::warn!(
                "DaemonSet {} was deleted: the agent removes the plugin from the node when it ends",
                self.object
            );
            self.observed.1.notify_all();
        }
    }

    fn observed(&self) -> MutexGuard<'_, ObservedDaemonSet> {
        self.observed.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
