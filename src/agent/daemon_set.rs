//! Whether the agent's DaemonSet was deleted, which decides if the plugin stays on the node when the agent ends.
//!
//! Uninstalling deletes the DaemonSet, its service account and its permissions almost at once and in any order. The pods get
//! their signal after that, when a request may be refused already. A watch that was granted before continues without
//! permission and account, and reports the deletion.

use crate::cluster::{Api, ObjectRef};
use crate::wait::Backoff;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

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
    /// Whether the watch has reported that it was deleted.
    is_deleted: watch::Sender<bool>,
}

impl DaemonSet {
    /// Creates a handle for the DaemonSet `object`, which `account` reads.
    #[must_use]
    pub fn new(account: Api, object: ObjectRef) -> Self {
        Self { account, object, is_deleted: watch::Sender::new(false) }
    }

    /// Starts the task that watches the DaemonSet.
    pub(super) fn watch(&self) {
        let watched = self.clone();
        spawn_local(async move {
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
    pub(super) async fn is_gone(&self) -> Result<bool, String> {
        let started = Instant::now();
        let error = match self.account.has(&self.object, ANSWER_TIMEOUT).await {
            Ok(exists) => return Ok(!exists),
            Err(error) => error,
        };
        let left = ANSWER_TIMEOUT.saturating_sub(started.elapsed());
        let mut is_deleted = self.is_deleted.subscribe();
        let deleted = timeout(left, is_deleted.wait_for(|is_deleted| *is_deleted)).await;
        deleted.map(|_| true).map_err(|_| error.to_string())
    }

    fn observe(&self, exists: bool) {
        let was_deleted = self.is_deleted.send_replace(!exists);
        if !exists && !was_deleted {
            tracing::warn!(
                "DaemonSet {} was deleted: the agent removes the plugin from the node when it ends",
                self.object
            );
        }
    }
}
