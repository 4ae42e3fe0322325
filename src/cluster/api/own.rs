//! What the node's agent asks for itself: a token for the plugin, and its own DaemonSet.

use super::{Api, Request, Session, check_names, get};
use crate::cluster::query::{Object, Query};
use crate::cluster::retry::{AttemptError, RetriesExhausted, retry};
use crate::cluster::{ObjectRef, Token, wire};
use crate::cni::{Code, Error};
use futures_util::TryStreamExt;
use kube::api::{WatchEvent, WatchParams};
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// How long a watch lasts, so that the credentials in use are never much older than their file's.
const WATCH_SECONDS: u32 = 240;
/// A server that has not ended a watch so long after its time is gone.
const SLACK: Duration = Duration::from_secs(10);
/// Whatever the API server has, and all changes from there on (kubernetes.io, "API Concepts", "Get State and
/// Start at Any"). The server must not wait for anything: a watch without a version waits for etcd's latest,
/// and both forms, if bookmarks are asked for, are refused with 500 where etcd reports no progress on request
/// (kube-apiserver 1.35 with etcd 3.4.23).
const ANY: &str = "0";
/// How long a watch may take to begin with the object, before a request tells whether there is one.
const BEGINNING: Duration = Duration::from_secs(3);

impl Api {
    /// A new token of a service account.
    pub(in crate::cluster) fn token(&self, of: &ObjectRef, lifetime: Duration) -> Result<Token, Error> {
        check_names("ServiceAccount", [&of.namespace, &of.name])?;
        let session = self.session()?;
        let query = self.query(session, Object::Token(of, lifetime));
        session.run(async {
            let attempt = async || get::<wire::TokenGranted>(session, &query).await;
            let granted = retry(Instant::now(), self.timeout, attempt).await.map_err(|end| query.gave_up(end))?;
            Ok(granted.into())
        })
    }

    /// Whether it is there to stay.
    pub(in crate::cluster) fn has(&self, daemon_set: &ObjectRef) -> Result<bool, Error> {
        check_names("DaemonSet", [&daemon_set.namespace, &daemon_set.name])?;
        let session = self.session()?;
        let query = self.query(session, Object::DaemonSet(daemon_set));
        session.run(self.is_staying(session, &query))
    }

    /// Follows whether it is.
    ///
    /// The watch begins at [`ANY`] version: the object's own may be older than the API server's watch
    /// cache, which begins anew with each start of the server. Such a watch begins with the object, so no
    /// change is missed. Where it does not, a request tells whether there is one.
    pub(in crate::cluster) fn watch(&self, daemon_set: &ObjectRef, mut tell: impl FnMut(bool)) -> Result<(), Error> {
        check_names("DaemonSet", [&daemon_set.namespace, &daemon_set.name])?;
        let session = self.session()?;
        let query = self.query(session, Object::DaemonSet(daemon_set));
        session.run(async {
            let params =
                WatchParams::default().disable_bookmarks().fields(&format!("metadata.name={}", daemon_set.name));
            let request = Request::new(query.object.collection())
                .watch_metadata(&params.timeout(WATCH_SECONDS), ANY)
                .map_err(|e| Error::new(Code::Internal, e.to_string()))?;
            let started = Instant::now();
            let ended = |last| query.gave_up(RetriesExhausted { last, tries: 1, waited: started.elapsed() });
            let broken = |e| ended(query.failed(&e));
            let events = timeout(self.timeout, session.client.request_events::<wire::OwnedObject>(request));
            let events = events.await.map_err(|_| ended(silent()))?.map_err(broken)?;
            let mut events = pin!(events);
            let longest = Duration::from_secs(WATCH_SECONDS.into()) + SLACK;
            let mut known = false;
            loop {
                let event = match timeout(if known { longest } else { BEGINNING }, events.try_next()).await {
                    Ok(event) => event.map_err(broken)?,
                    Err(_) if known => return Err(ended(silent())),
                    Err(_) => {
                        let there = self.is_staying(session, &query).await?;
                        tell(there);
                        known = !there;
                        continue;
                    }
                };
                match event {
                    Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => tell(object.stays()),
                    Some(WatchEvent::Deleted(_)) => tell(false),
                    Some(WatchEvent::Bookmark(_)) => continue,
                    Some(WatchEvent::Error(status)) => {
                        let cause = format!("the watch ended: {}, {}", status.code, status.message);
                        return Err(ended(query.not_again(&cause)));
                    }
                    None => return Ok(()),
                }
                known = true;
            }
        })
    }

    /// Whether the DaemonSet is there to stay.
    async fn is_staying(&self, session: &Session, query: &Query<'_>) -> Result<bool, Error> {
        let attempt = async || match get::<wire::OwnedObject>(session, query).await {
            Ok(object) => Ok(object.stays()),
            Err(AttemptError::Missing(_)) => Ok(false),
            Err(failure) => Err(failure),
        };
        retry(Instant::now(), self.timeout, attempt).await.map_err(|end| query.gave_up(end))
    }
}

fn silent() -> AttemptError {
    AttemptError::Trouble { cause: "the connection is silent".into(), after: None }
}
