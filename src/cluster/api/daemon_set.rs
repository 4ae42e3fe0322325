//! Whether the agent's own DaemonSet exists: one request, or a watch.

use super::call::ApiCall;
use super::request::ApiRequest;
use super::retry::{AttemptError, Deadline, RetriesExhausted};
use super::server::Api;
use super::service_account::{ServiceAccount, WATCH_TIMEOUT};
use crate::cluster::resources::ObjectRef;
use crate::cluster::wire::DaemonSetObject;
use crate::cni::Error;
use futures_util::TryStreamExt;
use kube::api::WatchEvent;
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// The duration of a watch: short, so that it uses current credentials.
const WATCH_SECONDS: u32 = 240;
/// How long after its end a watch is considered broken, if the server has not ended it.
const WATCH_GRACE: Duration = Duration::from_secs(10);
/// How long a watch may take to send the object, before a request checks whether it exists.
const FIRST_EVENT_TIMEOUT: Duration = Duration::from_secs(3);

impl ServiceAccount {
    /// Returns whether a DaemonSet exists and is not being deleted; retries for `timeout`.
    ///
    /// # Errors
    /// The API rejects the request, or does not answer.
    pub fn has(&self, daemon_set: &ObjectRef, timeout: Duration) -> Result<bool, Error> {
        let (api, request) = (self.api(timeout), ApiRequest::daemon_set(daemon_set)?);
        let session = api.session()?;
        session.run(api.exists(&api.call(session, &request)))
    }

    /// Watches a DaemonSet for some minutes. Calls `report` with whether it exists, first at once and then after each
    /// change. If the watch does not start with the object, a request checks whether it exists. For tasks of the
    /// connection's event loop.
    ///
    /// # Errors
    /// As [`Self::token`]; the connection breaks.
    pub async fn watch(&self, daemon_set: &ObjectRef, mut report: impl FnMut(bool)) -> Result<(), Error> {
        let get = ApiRequest::daemon_set(daemon_set)?;
        let watch = ApiRequest::watch_daemon_set(daemon_set, WATCH_SECONDS)?;
        let api = self.api(WATCH_TIMEOUT);
        let session = api.session()?;
        let call = api.call(session, &get);
        let started = Instant::now();
        let failed = |last| call.exhausted(RetriesExhausted { last, attempts: 1, elapsed: started.elapsed() });
        let silent = || failed(AttemptError::Transient { cause: "no data from the server".into(), retry_after: None });
        let broken = |error| failed(call.no_response(&error));
        let client = session.client();
        let events = timeout(WATCH_TIMEOUT, client.request_events::<DaemonSetObject>(watch.http));
        let mut events = pin!(events.await.map_err(|_| silent())?.map_err(broken)?);
        let watch_timeout = Duration::from_secs(WATCH_SECONDS.into()) + WATCH_GRACE;
        let mut is_known = false;
        loop {
            let event_timeout = if is_known { watch_timeout } else { FIRST_EVENT_TIMEOUT };
            let event = match timeout(event_timeout, events.try_next()).await {
                Ok(event) => event.map_err(broken)?,
                Err(_) if is_known => return Err(silent()),
                Err(_) => {
                    let exists = api.exists(&call).await?;
                    report(exists);
                    is_known = !exists;
                    continue;
                }
            };
            match event {
                Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                    report(!object.metadata.is_deleting())
                }
                Some(WatchEvent::Deleted(_)) => report(false),
                Some(WatchEvent::Bookmark(_)) => continue,
                Some(WatchEvent::Error(status)) => {
                    let cause = format!("the watch ended: {}, {}", status.code, status.message);
                    return Err(failed(call.not_retried(&cause)));
                }
                None => return Ok(()),
            }
            is_known = true;
        }
    }
}

impl Api {
    async fn exists(&self, call: &ApiCall<'_>) -> Result<bool, Error> {
        let attempt = async || match call.get::<DaemonSetObject>().await {
            Ok(object) => Ok(!object.metadata.is_deleting()),
            Err(AttemptError::NotFound(_)) => Ok(false),
            Err(error) => Err(error),
        };
        call.run(Deadline::after(self.timeout), attempt).await
    }
}
