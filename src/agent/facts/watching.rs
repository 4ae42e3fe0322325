//! The watches that fill the caches: a list in pages, then a watch that continues it. Which of them are not synchronized,
//! since when and why, for `/readyz`, `doctor` and the metrics.

use super::cache::{Cache, CacheEvent, SharedFacts};
use super::objects::WatchedKind;
use crate::agent::metrics::Metrics;
use crate::backoff::Backoff;
use crate::cluster::{Api, Collection, Failure};
use crate::printable::without_tokens;
use kube::api::WatchEvent;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// A watch that ended regularly within this time counts as failed.
const MIN_WATCH_TIME: Duration = Duration::from_secs(1);

/// The pauses after failures.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(800), Duration::from_secs(30));

impl SharedFacts {
    /// Watches the pods of the node, all namespaces and, if requested, all definitions, until the future is dropped.
    pub(in crate::agent) async fn watch(
        &self,
        account: &Api,
        node: &str,
        with_definitions: bool,
        states: &SyncStates,
        metrics: &Metrics,
    ) {
        let of_node = Some(("spec.nodeName", node));
        let definitions = async {
            if with_definitions {
                watch(self.definitions(), account, None, states, metrics).await;
            }
        };
        tokio::join!(
            watch(self.pods(), account, of_node, states, metrics),
            watch(self.namespaces(), account, None, states, metrics),
            definitions,
        );
    }
}

async fn watch<T: WatchedKind>(
    cache: &Cache<T>,
    account: &Api,
    field: Option<(&'static str, &str)>,
    states: &SyncStates,
    metrics: &Metrics,
) {
    let collection = Collection { metadata_only: T::METADATA_ONLY, ..Collection::new(T::KIND, None, field) };
    let state = states.start((T::PLURAL, T::METRICS_KIND), metrics);
    let (mut failures, mut is_first) = (Failures::new(cache, &state), true);
    loop {
        let mut version = match list(cache, (account, &collection), is_first, metrics).await {
            Ok(version) => version,
            Err(error) => {
                failures.pause(&error).await;
                continue;
            }
        };
        is_first = false;
        state.synced();
        if cache.apply(CacheEvent::InitDone) {
            failures.logged.clear();
            tracing::info!(count = cache.len().0, "watching {}", T::PLURAL);
        }
        metrics.facts(T::METRICS_KIND, cache.len());
        loop {
            let started = Instant::now();
            let error = match follow(cache, (account, &collection), &mut version, &state, metrics).await {
                Ok(()) if started.elapsed() >= MIN_WATCH_TIME => continue,
                Ok(()) => Failure::new("the API server ended the watch at once"),
                Err(error) => error,
            };
            failures.pause(&error).await;
            // The version is too old to continue. An event that is too large may be small enough in a list.
            if error.status == 410 || error.is_too_large {
                break;
            }
        }
    }
}

/// Lists all objects, except for the end of the list. Returns its version. A list that replaces an earlier one is not
/// from the server's cache, which may be older than what was watched before.
async fn list<T: WatchedKind>(
    cache: &Cache<T>,
    (account, collection): (&Api, &Collection),
    from_cache: bool,
    metrics: &Metrics,
) -> Result<String, Failure> {
    cache.apply(CacheEvent::Init);
    let add = |sent| {
        cache.apply(CacheEvent::InitApply(sent));
    };
    let listed = account.list(collection, from_cache, add).await;
    metrics.facts(T::METRICS_KIND, cache.len());
    listed
}

/// Applies the events of one watch, and updates the version at which the next one continues.
async fn follow<T: WatchedKind>(
    cache: &Cache<T>,
    (account, collection): (&Api, &Collection),
    version: &mut String,
    state: &SyncState<'_>,
    metrics: &Metrics,
) -> Result<(), Failure> {
    let mut events = account.follow::<T::Sent>(collection, version).await?;
    // The API server has accepted the watch, and sends nothing until an object changes.
    state.synced();
    if cache.mark_working() {
        tracing::info!(count = cache.len().0, "watching {} again", T::PLURAL);
    }
    while let Some(event) = events.next().await? {
        let event = match event {
            WatchEvent::Added(sent) | WatchEvent::Modified(sent) => {
                T::metadata(&sent).resource_version.clone_into(version);
                CacheEvent::Apply(sent)
            }
            WatchEvent::Deleted(sent) => {
                T::metadata(&sent).resource_version.clone_into(version);
                CacheEvent::Delete(sent)
            }
            WatchEvent::Bookmark(bookmark) => {
                *version = bookmark.metadata.resource_version;
                continue;
            }
            // `next` returns it as its error.
            WatchEvent::Error(_) => continue,
        };
        cache.apply(event);
        metrics.facts(T::METRICS_KIND, cache.len());
    }
    Ok(())
}

/// The failures of one watch: the log, and the pauses after them.
struct Failures<'a, T> {
    cache: &'a Cache<T>,
    state: &'a SyncState<'a>,
    /// An API server that starts refuses requests for a moment that it grants later. Refusals have a backoff of their
    /// own, because that of the failures before has grown.
    refusals: Backoff,
    others: Backoff,
    /// The last logged cause.
    logged: String,
}

impl<'a, T: WatchedKind> Failures<'a, T> {
    fn new(cache: &'a Cache<T>, state: &'a SyncState<'a>) -> Self {
        Self { cache, state, refusals: BACKOFF, others: BACKOFF, logged: String::new() }
    }

    /// Records a failure, and waits before the next attempt.
    async fn pause(&mut self, error: &Failure) {
        let worked = self.cache.mark_broken();
        let cause = without_tokens(&error.cause);
        if worked || self.logged != cause {
            log::<T>(error.status, &cause);
            self.logged = cause.clone().into_owned();
        }
        // Without the kind, there is nothing to synchronize.
        if error.status == 404 {
            self.state.synced()
        } else {
            self.state.failed(&cause)
        }
        let backoff = if is_refused(error.status) { &mut self.refusals } else { &mut self.others };
        sleep(backoff.pause(Instant::now())).await;
    }
}

const fn is_refused(status: u16) -> bool {
    matches!(status, 401 | 403 | 404)
}

fn log<T: WatchedKind>(status: u16, cause: &str) {
    if status == 404 {
        tracing::info!("this cluster has no {}", T::PLURAL);
    } else if is_refused(status) {
        tracing::warn!(
            cause,
            "can't watch {}: grant the permission to list and watch {}; until then each request goes to the API server",
            T::PLURAL,
            T::KIND.resource()
        );
    } else {
        tracing::warn!(
            cause,
            "can't watch {}: until the watch works, requests go to the API server, or to the cache if that does not \
             answer",
            T::PLURAL
        );
    }
}

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
