//! Keeping a cache by a watch, for as long as the process lives.

use super::SharedFacts;
use super::cache::Cache;
use super::objects::WatchedKind;
use crate::agent::Metrics;
use crate::cluster::{PAGE, ServiceAccount, causes};
use futures_util::StreamExt;
use kube::api::ListParams;
use kube::runtime::watcher::{Config, DefaultBackoff, Error, Event, watcher};
use kube::{Api, Client};
use std::pin::pin;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// The pause where a backoff gives none.
const SLOWLY: Duration = Duration::from_secs(60);
/// A watch that was begun again and has not failed for so long has gone on, if the API answers: it says
/// nothing of a watch until something changes.
const PROBATION: Duration = ServiceAccount::CONNECT.saturating_add(Duration::from_secs(1));

impl SharedFacts {
    /// Keeps all of it, for the node of this name, asking as `account`.
    pub(in crate::agent) async fn keep(&self, account: &ServiceAccount, node: &str, metrics: &Metrics) {
        let client = client(account).await;
        let of_node = Config::default().fields(&format!("spec.nodeName={node}"));
        tokio::join!(
            keep(&self.0.pods, client.clone(), of_node, metrics),
            keep(&self.0.namespaces, client.clone(), Config::default(), metrics),
            keep(&self.0.definitions, client.clone(), Config::default(), metrics),
        );
    }
}

/// A client, as soon as the account's files are there.
async fn client(account: &ServiceAccount) -> Client {
    let (mut backoff, mut said) = (DefaultBackoff::default(), String::new());
    loop {
        match account.client() {
            Ok(client) => return client,
            Err(error) => {
                let why = error.to_string();
                if said != why {
                    tracing::warn!(why, "the API can't be watched yet");
                    said = why;
                }
            }
        }
        sleep(backoff.next().unwrap_or(SLOWLY)).await;
    }
}

async fn keep<T: WatchedKind>(cache: &Cache<T>, client: Client, config: Config, metrics: &Metrics) {
    let config = config.page_size(PAGE);
    let begin = || watcher(Api::<T::Sent>::all(client.clone()), config.clone());
    let mut events = pin!(begin());
    // An API server that starts refuses for a moment what it grants later, after it was away for long:
    // its refusals have a backoff of their own.
    let (mut broken, mut refused) = (DefaultBackoff::default(), DefaultBackoff::default());
    let (mut on_probation, mut said) = (false, String::new());
    loop {
        let next = events.next();
        let event = if on_probation {
            match timeout(PROBATION, next).await {
                Ok(event) => event,
                Err(_) => {
                    on_probation = !answers::<T>(&client).await;
                    if !on_probation && cache.goes_on() {
                        tracing::info!(count = cache.len(), "watches {} again", T::NAME);
                    }
                    continue;
                }
            }
        } else {
            next.await
        };
        match event {
            Some(Ok(event)) => {
                // That a list begins is said before the API is asked for it.
                on_probation &= matches!(event, Event::Init);
                let completed = cache.apply(event);
                metrics.facts(T::COUNTED, cache.len());
                if completed {
                    said.clear();
                    tracing::info!(count = cache.len(), "watches {}", T::NAME);
                }
            }
            Some(Err(error)) => {
                let newly = cache.breaks();
                let trouble = WatchProblem::of(&error);
                if newly || said != trouble.why {
                    trouble.say::<T>();
                    said.clone_from(&trouble.why);
                }
                on_probation = true;
                if trouble.expired {
                    // kube begins with a list only where an event says so, not where the request is refused.
                    events.set(begin());
                }
                let backoff = if trouble.refused { &mut refused } else { &mut broken };
                sleep(backoff.next().unwrap_or(SLOWLY)).await;
            }
            // It has no end.
            None => return,
        }
    }
}

/// Whether the API answers: a server that hangs takes requests, too.
async fn answers<T: WatchedKind>(client: &Client) -> bool {
    let one = ListParams::default().limit(1);
    let listed = timeout(ServiceAccount::CONNECT, Api::<T::Sent>::all(client.clone()).list(&one)).await;
    listed.is_ok_and(|listed| listed.is_ok())
}

/// What is wrong with a watch.
struct WatchProblem {
    why: String,
    /// The API has no such kind.
    unknown: bool,
    /// The API does not allow it, or not yet.
    refused: bool,
    /// The version from which the watch should go on is too old.
    expired: bool,
}

impl WatchProblem {
    fn of(error: &Error) -> Self {
        let status = match error {
            Error::InitialListFailed(kube::Error::Api(status))
            | Error::WatchStartFailed(kube::Error::Api(status))
            | Error::WatchFailed(kube::Error::Api(status))
            | Error::WatchError(status) => Some(status),
            _ => None,
        };
        let why = match (status, error) {
            (Some(status), _) => format!("{}, {}", status.code, status.message),
            (None, Error::InitialListFailed(error) | Error::WatchStartFailed(error) | Error::WatchFailed(error)) => {
                causes(error)
            }
            (None, other) => other.to_string(),
        };
        let code = status.map_or(0, |status| status.code);
        Self { why, unknown: code == 404, refused: matches!(code, 401 | 403 | 404), expired: code == 410 }
    }

    fn say<T: WatchedKind>(&self) {
        let why = self.why.as_str();
        if self.unknown {
            tracing::info!("this cluster has no {}", T::NAME);
        } else if self.refused {
            tracing::warn!(
                why,
                "can't watch {}: grant the right to {}; until then the API is asked",
                T::NAME,
                T::RIGHT
            );
        } else {
            tracing::warn!(
                why,
                "can't watch {} for now: the API is asked, and what was known serves while it gives no answer",
                T::NAME
            );
        }
    }
}
