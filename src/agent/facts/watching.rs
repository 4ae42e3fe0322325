//! The watches that fill the caches: a list in pages, then a watch that continues it.

use super::cache::{Cache, CacheEvent, SharedFacts};
use super::objects::{Sent, WatchedKind};
use super::sync::{SyncState, SyncStates};
use crate::agent::metrics::Metrics;
use crate::cluster::{Collection, CollectionError, ServiceAccount};
use crate::printable::without_tokens;
use futures_util::TryStreamExt;
use kube::Client;
use kube::api::WatchEvent;
use std::hash::{BuildHasher, RandomState};
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::time::sleep;

/// The number of pages that are in memory at the same time. With their limits, and those of the caches, the agent stays
/// within the memory limit of its container.
const PAGES_IN_MEMORY: usize = 1;
/// A watch that ended regularly within this time counts as failed.
const MIN_WATCH_TIME: Duration = Duration::from_secs(1);

/// What is watched.
pub(in crate::agent) struct WatchScope<'a> {
    /// The name of the node whose pods are watched, with all namespaces.
    pub(in crate::agent) node: &'a str,
    /// Whether all definitions are watched too.
    pub(in crate::agent) definitions: bool,
}

impl SharedFacts {
    /// Watches the objects in `scope` until the future is dropped.
    pub(in crate::agent) async fn watch(
        &self,
        account: &ServiceAccount,
        scope: WatchScope<'_>,
        states: &SyncStates,
        metrics: &Metrics,
    ) {
        let (client, pages) = (client(account).await, Semaphore::new(PAGES_IN_MEMORY));
        let of_node = format!("spec.nodeName={}", scope.node);
        let definitions = async {
            if scope.definitions {
                watch(self.definitions(), (&client, &pages), String::new(), states, metrics).await;
            }
        };
        tokio::join!(
            watch(self.pods(), (&client, &pages), of_node, states, metrics),
            watch(self.namespaces(), (&client, &pages), String::new(), states, metrics),
            definitions,
        );
    }
}

/// Creates a client as soon as the account's files are usable.
async fn client(account: &ServiceAccount) -> Client {
    let (mut backoff, mut logged) = (Backoff::default(), String::new());
    loop {
        match account.client() {
            Ok(client) => return client,
            Err(error) => {
                let error = error.to_string();
                if logged != error {
                    tracing::warn!(error, "can't connect to the API server yet; retrying");
                    logged = error;
                }
            }
        }
        sleep(backoff.next(Instant::now())).await;
    }
}

async fn watch<T: WatchedKind>(
    cache: &Cache<T>,
    (client, pages): (&Client, &Semaphore),
    fields: String,
    states: &SyncStates,
    metrics: &Metrics,
) {
    let collection = Collection { client, path: T::PATH, fields, pages };
    let state = states.start((T::PLURAL, T::METRICS_KIND), metrics);
    let mut failures = Failures::new(cache, &state);
    loop {
        let mut version = match list(cache, &collection, metrics).await {
            Ok(version) => version,
            Err(error) => {
                failures.pause(&error).await;
                continue;
            }
        };
        state.synced();
        if cache.apply(CacheEvent::InitDone) {
            failures.logged.clear();
            tracing::info!(count = cache.len().0, "watching {}", T::PLURAL);
        }
        metrics.facts(T::METRICS_KIND, cache.len());
        loop {
            let started = Instant::now();
            let error = match follow(cache, &collection, &mut version, &state, metrics).await {
                Ok(()) if started.elapsed() >= MIN_WATCH_TIME => continue,
                Ok(()) => CollectionError {
                    cause: "the API server ended the watch at once".into(),
                    ..CollectionError::default()
                },
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

/// Lists all objects, except for the end of the list. Returns its version.
async fn list<T: WatchedKind>(
    cache: &Cache<T>,
    collection: &Collection<'_>,
    metrics: &Metrics,
) -> Result<String, CollectionError> {
    cache.apply(CacheEvent::Init);
    let add = |sent| {
        cache.apply(CacheEvent::InitApply(sent));
    };
    let listed = collection.list(add).await;
    metrics.facts(T::METRICS_KIND, cache.len());
    listed
}

/// Applies the events of one watch, and updates the version at which the next one continues.
async fn follow<T: WatchedKind>(
    cache: &Cache<T>,
    collection: &Collection<'_>,
    version: &mut String,
    state: &SyncState<'_>,
    metrics: &Metrics,
) -> Result<(), CollectionError> {
    let mut events = pin!(collection.watch::<T::Sent>(version).await?);
    // The API server has accepted the watch, and sends nothing until an object changes.
    state.synced();
    if cache.mark_working() {
        tracing::info!(count = cache.len().0, "watching {} again", T::PLURAL);
    }
    while let Some(event) = events.try_next().await? {
        let event = match event {
            WatchEvent::Added(sent) | WatchEvent::Modified(sent) => {
                sent.version().clone_into(version);
                CacheEvent::Apply(sent)
            }
            WatchEvent::Deleted(sent) => {
                sent.version().clone_into(version);
                CacheEvent::Delete(sent)
            }
            WatchEvent::Bookmark(bookmark) => {
                *version = bookmark.metadata.resource_version;
                continue;
            }
            WatchEvent::Error(status) => return Err(kube::Error::Api(status).into()),
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
        Self { cache, state, refusals: Backoff::default(), others: Backoff::default(), logged: String::new() }
    }

    /// Records a failure, and waits before the next attempt.
    async fn pause(&mut self, error: &CollectionError) {
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
        sleep(backoff.next(Instant::now())).await;
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
            "can't watch {}: grant the right to {}; until then each request goes to the API server",
            T::PLURAL,
            T::RIGHT
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

/// Pauses that double, each with a random part, so that the agents of a cluster do not return at the same time.
#[derive(Debug, Default)]
struct Backoff {
    failures: u32,
    last: Option<Instant>,
}

impl Backoff {
    const MIN: Duration = Duration::from_millis(800);
    const MAX: Duration = Duration::from_secs(30);
    /// The time without a failure after which the first pause is short again.
    const RESET_TIME: Duration = Duration::from_secs(120);

    /// Returns the pause after a failure at `now`.
    fn next(&mut self, now: Instant) -> Duration {
        if self.last.is_some_and(|last| now.duration_since(last) >= Self::RESET_TIME) {
            self.failures = 0;
        }
        let pause = (Self::MIN * 2_u32.pow(self.failures.min(10))).min(Self::MAX);
        (self.failures, self.last) = (self.failures.saturating_add(1), Some(now));
        let random = u32::try_from(RandomState::new().hash_one(0) % 1000).unwrap_or(0);
        pause + pause * random / 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_shrink_after_a_time_without_failures() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        for expected in [800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000] {
            let pause = backoff.next(now).as_millis();
            assert!((expected..2 * expected).contains(&pause), "{expected}: {pause}");
        }
        assert!(backoff.next(now + Backoff::RESET_TIME) < 2 * Backoff::MIN);
    }
}
