//! The node's pods, all namespaces and, for a primary plugin, all attachment definitions, cached by watches, and the answers
//! to the plugin. Each watch starts with a list of all objects, and then follows their changes.
//!
//! Measured memory of an agent (6.5 MB with empty caches): a thousand pods of an ordinary mesh (two containers, forty
//! variables) add 13 MB, a thousand definitions 1 MB, 500 pods with 5,000 definitions 10 MB. The objects of a kind take at
//! most 24 MiB; of an object that is too large, only a part is cached. Lists are read in pages of at most 8 MiB,
//! of which one is in memory at a time.

mod answer;
mod cache;
mod objects;

pub(super) use answer::{Answers, record};
pub(super) use cache::SharedFacts;
pub use objects::ObservedPod;

use crate::agent::metrics::Metrics;
use crate::cluster::{Api, Collection, Failure};
use crate::printable::without_secrets;
use crate::wait::Backoff;
use cache::{Cache, Caches};
use futures_util::TryStreamExt;
use kube::api::WatchEvent;
use objects::{Sent, WatchedKind};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// A watch that ended regularly within this time counts as failed.
const MIN_WATCH_TIME: Duration = Duration::from_secs(1);

/// The timeout of a page of a list. The API server answers within a minute.
const PAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// The pauses after failures.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(800), Duration::from_secs(30));

impl Caches {
    /// Watches the pods of the node, all namespaces and, if requested, all definitions, until the future is dropped.
    pub(in crate::agent) async fn watch(&self, account: &Api, node: &str, with_definitions: bool, metrics: &Metrics) {
        let of_node = Some(("spec.nodeName", node));
        let definitions = async {
            if with_definitions {
                Watch::new(&self.definitions, account, None, metrics).run().await;
            }
        };
        tokio::join!(
            Watch::new(&self.pods, account, of_node, metrics).run(),
            Watch::new(&self.namespaces, account, None, metrics).run(),
            definitions,
        );
    }
}

/// The watch of one kind.
struct Watch<'a, T> {
    cache: &'a Cache<T>,
    account: &'a Api,
    collection: Collection,
    metrics: &'a Metrics,
    /// After its start, an API server briefly refuses requests that it grants later. Refusals have a separate
    /// backoff, because the failures before the start have increased the other one.
    refusals: Backoff,
    others: Backoff,
    /// The last logged cause.
    logged: String,
}

impl<'a, T: WatchedKind> Watch<'a, T> {
    fn new(cache: &'a Cache<T>, account: &'a Api, field: Option<(&'static str, &str)>, metrics: &'a Metrics) -> Self {
        let collection = Collection { metadata_only: T::METADATA_ONLY, ..Collection::new(T::KIND, None, field) };
        Self { cache, account, collection, metrics, refusals: BACKOFF, others: BACKOFF, logged: String::new() }
    }

    async fn run(mut self) {
        self.set_broken(Some("the first list is not complete"));
        let (mut version, mut is_first) = (None, true);
        loop {
            let result = match &mut version {
                Some(version) => self.follow(version).await,
                None => self.list(is_first).await.map(|listed| {
                    (version, is_first) = (Some(listed), false);
                }),
            };
            if let Err(error) = result {
                self.pause(&error).await;
                // The version is too old to continue.
                if error.status == 410 {
                    version = None;
                }
            }
        }
    }

    /// Lists all objects. Returns the version of the list. A list that replaces an earlier one is not from the server's
    /// cache, which may be older than what was watched before.
    async fn list(&mut self, from_cache: bool) -> Result<String, Failure> {
        self.cache.begin_list();
        let listed =
            self.account.session()?.list(&self.collection, from_cache, PAGE_TIMEOUT, |sent| self.cache.add(sent)).await;
        if listed.is_ok() {
            self.set_synced("");
        }
        self.count_objects();
        listed
    }

    /// Applies the events of one watch, and updates the version at which the next one continues.
    async fn follow(&mut self, version: &mut String) -> Result<(), Failure> {
        let started = Instant::now();
        let mut events = self.account.session()?.watch::<Sent<T>>(&self.collection, version).await?;
        // The API server has accepted the watch, and sends nothing until an object changes.
        self.set_synced(" again");
        while let Some(event) = events.try_next().await? {
            match event {
                WatchEvent::Added(sent) | WatchEvent::Modified(sent) => {
                    sent.metadata.resource_version.clone_into(version);
                    self.cache.add(sent);
                }
                WatchEvent::Deleted(sent) => {
                    sent.metadata.resource_version.clone_into(version);
                    self.cache.remove(&sent.metadata);
                }
                WatchEvent::Bookmark(bookmark) => *version = bookmark.metadata.resource_version,
                // `Session::watch` returns it as an error.
                WatchEvent::Error(_) => {}
            }
            self.count_objects();
        }
        if started.elapsed() < MIN_WATCH_TIME {
            return Err(Failure::new("the API server ended the watch at once"));
        }
        Ok(())
    }

    fn count_objects(&self) {
        let (count, too_large) = self.cache.len();
        self.metrics.set("facts", [("kind", T::METRICS_KIND)], count);
        self.metrics.set("facts_too_large", [("kind", T::METRICS_KIND)], too_large);
    }

    fn set_synced(&mut self, again: &str) {
        if self.cache.set_synced() {
            self.logged.clear();
            tracing::info!(count = self.cache.len().0, "watching {}{again}", T::PLURAL);
        }
        self.metrics.set("watch_synced", [("kind", T::METRICS_KIND)], true);
    }

    /// Records why the watch is not synchronized; `None` if the cluster has no such kind. Returns whether it was
    /// synchronized before.
    fn set_broken(&self, cause: Option<&str>) -> bool {
        self.metrics.set("watch_synced", [("kind", T::METRICS_KIND)], cause.is_none());
        self.cache.set_broken(cause)
    }

    /// Records a failure, and waits before the next attempt.
    async fn pause(&mut self, error: &Failure) {
        let cause = without_secrets(&error.cause);
        if self.set_broken((error.status != 404).then_some(&*cause)) || self.logged != cause {
            log::<T>(error.status, &cause);
            self.logged = cause;
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
