//! Which watches are not synchronized, since when and why, for `/readyz`, `doctor` and the metrics.

use crate::agent::metrics::Metrics;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a watch may be broken before the agent reports it: an API server that restarts breaks all watches.
const GRACE: Duration = Duration::from_secs(60);

/// The watches that are not synchronized. Clones share them.
#[derive(Debug, Clone, Default)]
pub(in crate::agent) struct SyncStates(Arc<Mutex<BTreeMap<&'static str, Problem>>>);

#[derive(Debug, Clone)]
struct Problem {
    since: Instant,
    cause: String,
}

/// The state of one watch.
pub(super) struct SyncState<'a> {
    states: &'a SyncStates,
    metrics: &'a Metrics,
    /// The plural of the kind, and the value of the metrics' label.
    kind: (&'static str, &'static str),
}

impl SyncStates {
    /// Returns the state of the watch of a kind, which is not synchronized yet.
    pub(super) fn start<'a>(&'a self, kind: (&'static str, &'static str), metrics: &'a Metrics) -> SyncState<'a> {
        let state = SyncState { states: self, metrics, kind };
        state.failed("the first list is not complete");
        state
    }

    fn problems(&self) -> MutexGuard<'_, BTreeMap<&'static str, Problem>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the problems that have lasted for long, each in words.
    pub(in crate::agent) fn lasting(&self, now: Instant) -> Vec<String> {
        let words = |(plural, Problem { since, cause }): (&&str, &Problem)| {
            let time = now.saturating_duration_since(*since);
            (time >= GRACE)
                .then(|| format!("the watch of {plural} is not synchronized for {} s: {cause}", time.as_secs()))
        };
        self.problems().iter().filter_map(words).collect()
    }
}

impl SyncState<'_> {
    /// Records that the watch is synchronized, or that the cluster has no such kind.
    pub(super) fn synced(&self) {
        self.states.problems().remove(self.kind.0);
        self.metrics.watch_synced(self.kind.1, true);
    }

    /// Records that the watch is not synchronized.
    pub(super) fn failed(&self, cause: &str) {
        let mut problems = self.states.problems();
        let new = || Problem { since: Instant::now(), cause: String::new() };
        cause.clone_into(&mut problems.entry(self.kind.0).or_insert_with(new).cause);
        self.metrics.watch_synced(self.kind.1, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_that_is_broken_for_long_is_reported_with_its_last_cause() {
        let (states, metrics, now) = (SyncStates::default(), Metrics::default(), Instant::now());
        let pods = states.start(("pods of this node", "pods"), &metrics);
        assert!(states.lasting(now).is_empty());
        let later = Instant::now() + GRACE;
        assert!(states.lasting(later)[0].contains("pods of this node"), "{:?}", states.lasting(later));
        assert!(metrics.text().contains("detour_watch_synced{kind=\"pods\"} 0\n"));
        pods.failed("403, no");
        assert!(states.lasting(later)[0].ends_with("s: 403, no"), "{:?}", states.lasting(later));
        pods.synced();
        assert!(states.lasting(later).is_empty());
        assert!(metrics.text().contains("detour_watch_synced{kind=\"pods\"} 1\n"));
    }
}
