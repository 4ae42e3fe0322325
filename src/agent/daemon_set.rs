//! Whether the agent is to come back: whether its DaemonSet is still there.
//!
//! Whoever uninstalls deletes the DaemonSet, its service account and its rights within the same moment,
//! in one order or another, and the pods are told to end only after that. To ask then can be too late.
//! A watch that was granted goes on without right and account, and tells of the deletion.

use crate::cluster::{ObjectRef, ServiceAccount};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

/// From the failure of a watch to the next one.
const PAUSE: Duration = Duration::from_secs(5);
/// How long an agent that ends waits to know it, the watch's lag behind the signal included.
const LAG: Duration = Duration::from_secs(3);

/// The DaemonSet that this agent belongs to.
#[derive(Debug, Clone)]
pub struct DaemonSet {
    account: ServiceAccount,
    object: ObjectRef,
    /// What was seen last.
    seen: Arc<(Mutex<ObservedDaemonSet>, Condvar)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ObservedDaemonSet {
    Nothing,
    There,
    Gone,
}

impl DaemonSet {
    /// The one called `object`, for which `account` asks.
    #[must_use]
    pub fn new(account: ServiceAccount, object: ObjectRef) -> Self {
        Self { account, object, seen: Arc::new((Mutex::new(ObservedDaemonSet::Nothing), Condvar::new())) }
    }

    /// Watches it from now on.
    ///
    /// # Errors
    /// There can't be another thread.
    pub(super) fn watch(&self) -> io::Result<()> {
        let watched = self.clone();
        thread::Builder::new().name("daemonset".into()).spawn(move || {
            let mut told = false;
            loop {
                let begun = Instant::now();
                let trouble = watched.account.watch(&watched.object, |there| watched.tell(there)).err();
                if let Some(why) = trouble.as_ref().filter(|_| !told) {
                    tracing::warn!("{why}; meanwhile a deletion of it can go unseen");
                }
                told = trouble.is_some();
                // One that has ended after its time is followed by the next at once: a deletion between
                // two watches is seen only while the agent still has its rights.
                if told || begun.elapsed() < PAUSE {
                    thread::park_timeout(PAUSE);
                }
            }
        })?;
        Ok(())
    }

    /// Whether it has gone, as the API says now or, where that can't be asked any more, the watch has said.
    ///
    /// # Errors
    /// It can't be known: in words.
    pub(super) fn is_gone(&self) -> Result<bool, String> {
        let asked = Instant::now();
        let why = match self.account.has(&self.object, LAG) {
            Ok(there) => return Ok(!there),
            Err(why) => why,
        };
        let left = LAG.saturating_sub(asked.elapsed());
        let waited = self.seen.1.wait_timeout_while(self.seen(), left, |seen| *seen != ObservedDaemonSet::Gone);
        let (seen, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *seen == ObservedDaemonSet::Gone { Ok(true) } else { Err(why.to_string()) }
    }

    fn tell(&self, there: bool) {
        let now = if there { ObservedDaemonSet::There } else { ObservedDaemonSet::Gone };
        let before = std::mem::replace(&mut *self.seen(), now);
        if before != now && now == ObservedDaemonSet::Gone {
            tracing::warn!(
                "DaemonSet {} is not there: the plugin is taken off the node when this agent ends",
                self.object
            );
            self.seen.1.notify_all();
        }
    }

    fn seen(&self) -> MutexGuard<'_, ObservedDaemonSet> {
        self.seen.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
