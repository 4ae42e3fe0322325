//! Whether the agent's own DaemonSet exists: one request, or a watch.

use super::call::ApiCall;
use super::request::ApiRequest;
use super::retry::{AttemptError, RetriesExhausted};
use super::server::Api;
use crate::cluster::resources::ObjectRef;
use crate::cluster::wire::OwnedObject;
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

impl Api {
    /// Whether the DaemonSet exists and is not being deleted.
    pub(in crate::cluster) fn has(&self, daemon_set: &ObjectRef) -> Result<bool, Error> {
        let request = ApiRequest::daemon_set(daemon_set)?;
        let session = self.session()?;
        session.run(self.exists(&self.call(session, &request)))
    }

    /// Calls `report` with whether the DaemonSet exists, first at once and then after each change, until the watch
    /// ends. If the watch does not start with the object, a request checks whether it exists.
    pub(in crate::cluster) async fn watch(
        &self,
        daemon_set: &ObjectRef,
        mut report: impl FnMut(bool),
    ) -> Result<(), Error> {
        let get = ApiRequest::daemon_set(daemon_set)?;
        let watch = ApiRequest::watch_daemon_set(daemon_set, WATCH_SECONDS)?;
        let session = self.session()?;
        let call = self.call(session, &get);
        let started = Instant::now();
        let failed =
            |last| call.exhausted(RetriesExhausted { last, attempts: 1, elapsed: started.elapsed(), answered: true });
        let silent = || {
            failed(AttemptError::Transient {
                cause: "no data from the server".into(),
                retry_after: None,
                answered: true,
            })
        };
        let broken = |error| failed(call.no_response(&error));
        let client = session.client().map_err(broken)?;
        let events = timeout(self.timeout, client.request_events::<OwnedObject>(watch.http));
        let mut events = pin!(events.await.map_err(|_| silent())?.map_err(broken)?);
        let watch_timeout = Duration::from_secs(WATCH_SECONDS.into()) + WATCH_GRACE;
        let mut is_known = false;
        loop {
            let event_timeout = if is_known { watch_timeout } else { FIRST_EVENT_TIMEOUT };
            let event = match timeout(event_timeout, events.try_next()).await {
                Ok(event) => event.map_err(broken)?,
                Err(_) if is_known => return Err(silent()),
                Err(_) => {
                    let exists = self.exists(&call).await?;
                    report(exists);
                    is_known = !exists;
                    continue;
                }
            };
            match event {
                Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => report(!object.is_deleting()),
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

    async fn exists(&self, call: &ApiCall<'_>) -> Result<bool, Error> {
        let attempt = async || match call.get::<OwnedObject>().await {
            Ok(object) => Ok(!object.is_deleting()),
            Err(AttemptError::NotFound(_)) => Ok(false),
            Err(error) => Err(error),
        };
        call.run(Instant::now(), self.timeout, attempt).await
    }
}
