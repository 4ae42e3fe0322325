//! The watches that fill the caches.

use super::cache::{Cache, SharedFacts};
use super::objects::WatchedKind;
use crate::agent::metrics::Metrics;
use crate::cluster::{PAGE, ServiceAccount, causes};
use crate::printable::without_tokens;
use futures_util::StreamExt;
use kube::api::ListParams;
use kube::runtime::watcher::{Config, DefaultBackoff, Error, Event, watcher};
use kube::{Api, Client};
use std::pin::pin;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// The pause if a backoff returns none.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// A restarted watch that has not failed for this long works, if the API server answers another request: it sends
/// nothing on a watch until an object changes.
const PROBATION: Duration = ServiceAccount::CONNECT.saturating_add(Duration::from_secs(1));

impl SharedFacts {
    /// Watches the pods of `node`, all namespaces and all definitions until the future is dropped.
    pub(in crate::agent) async fn watch(&self, account: &ServiceAccount, node: &str, metrics: &Metrics) {
        let client = client(account).await;
        let of_node = Config::default().fields(&format!("spec.nodeName={node}"));
        tokio::join!(
            watch(self.pods(), client.clone(), of_node, metrics),
            watch(self.namespaces(), client.clone(), Config::default(), metrics),
            watch(self.definitions(), client.clone(), Config::default(), metrics),
        );
    }
}

/// Creates a client as soon as the account's files are usable.
async fn client(account: &ServiceAccount) -> Client {
    let (mut backoff, mut logged) = (DefaultBackoff::default(), String::new());
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
        sleep(backoff.next().unwrap_or(MAX_BACKOFF)).await;
    }
}

async fn watch<T: WatchedKind>(cache: &Cache<T>, client: Client, config: Config, metrics: &Metrics) {
    let config = config.page_size(PAGE);
    let start = || watcher(Api::<T::Sent>::all(client.clone()), config.clone());
    let mut events = pin!(start());
    // An API server that starts refuses requests for a moment that it grants later. Refusals have a backoff of their
    // own, because that of the failures before has grown.
    let (mut failure_backoff, mut refusal_backoff) = (DefaultBackoff::default(), DefaultBackoff::default());
    let (mut on_probation, mut logged) = (false, String::new());
    loop {
        let next = events.next();
        let event = if on_probation {
            match timeout(PROBATION, next).await {
                Ok(event) => event,
                Err(_) => {
                    on_probation = !server_answers::<T>(&client).await;
                    if !on_probation && cache.mark_working() {
                        tracing::info!(count = cache.len(), "watching {} again", T::PLURAL);
                    }
                    continue;
                }
            }
        } else {
            next.await
        };
        match event {
            Some(Ok(event)) => {
                // The start of a list is reported before the request is sent.
                on_probation &= matches!(event, Event::Init);
                let completed = cache.apply(event);
                metrics.facts(T::METRICS_KIND, cache.len());
                if completed {
                    logged.clear();
                    tracing::info!(count = cache.len(), "watching {}", T::PLURAL);
                }
            }
            Some(Err(error)) => {
                let worked = cache.mark_broken();
                let failure = WatchFailure::of(&error);
                if worked || logged != failure.cause {
                    failure.log::<T>();
                    logged.clone_from(&failure.cause);
                }
                on_probation = true;
                if failure.expired {
                    // kube starts with a list only after an event that reports the expiry, not after a refused request.
                    events.set(start());
                }
                let backoff = if failure.refused { &mut refusal_backoff } else { &mut failure_backoff };
                sleep(backoff.next().unwrap_or(MAX_BACKOFF)).await;
            }
            // The stream of a watcher does not end.
            None => return,
        }
    }
}

/// Whether the API server answers requests; one that hangs accepts connections too.
async fn server_answers<T: WatchedKind>(client: &Client) -> bool {
    let one = ListParams::default().limit(1);
    let listed = timeout(ServiceAccount::CONNECT, Api::<T::Sent>::all(client.clone()).list(&one)).await;
    listed.is_ok_and(|listed| listed.is_ok())
}

/// Why a watch failed.
struct WatchFailure {
    cause: String,
    /// The API server does not know the kind.
    unknown: bool,
    /// The API server refuses the request, perhaps only until it has started.
    refused: bool,
    /// The resource version is too old to continue the watch.
    expired: bool,
}

impl WatchFailure {
    fn of(error: &Error) -> Self {
        let status = match error {
            Error::InitialListFailed(kube::Error::Api(status))
            | Error::WatchStartFailed(kube::Error::Api(status))
            | Error::WatchFailed(kube::Error::Api(status))
            | Error::WatchError(status) => Some(status),
            _ => None,
        };
        let cause = match (status, error) {
            (Some(status), _) => format!("{}, {}", status.code, without_tokens(&status.message)),
            (None, Error::InitialListFailed(error) | Error::WatchStartFailed(error) | Error::WatchFailed(error)) => {
                causes(error)
            }
            (None, other) => without_tokens(&other.to_string()).into_owned(),
        };
        let code = status.map_or(0, |status| status.code);
        Self { cause, unknown: code == 404, refused: matches!(code, 401 | 403 | 404), expired: code == 410 }
    }

    fn log<T: WatchedKind>(&self) {
        let cause = self.cause.as_str();
        if self.unknown {
            tracing::info!("this cluster has no {}", T::PLURAL);
        } else if self.refused {
            tracing::warn!(
                cause,
                "can't watch {}: grant the right to {}; until then each request goes to the API server",
                T::PLURAL,
                T::RIGHT
            );
        } else {
            tracing::warn!(
                cause,
                "can't watch {}: until the watch works, requests go to the API server, or to the cache if that does \
                 not answer",
                T::PLURAL
            );
        }
    }
}
