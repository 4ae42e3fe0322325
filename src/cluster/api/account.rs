//! What the node's agent asks as itself.

use super::{Request, Session, check_names, get};
use crate::cluster::kubeconfig::Kubeconfig;
use crate::cluster::query::{Object, Query};
use crate::cluster::retry::{Failure, GaveUp, retry};
use crate::cluster::{ObjectRef, Token, wire};
use crate::cni::{Code, Error};
use futures_util::TryStreamExt;
use kube::api::{WatchEvent, WatchParams};
use std::path::PathBuf;
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// How long one answer may take, all tries together.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a watch lasts, so that the credentials in use are never much older than their file's.
const WATCH_SECONDS: u32 = 240;
/// A server that has not ended a watch so long after its time is gone.
const SLACK: Duration = Duration::from_secs(10);

/// The service account of the pod that this process runs in. Its files are read at each question, for
/// the kubelet renews them.
#[derive(Debug, Clone)]
pub struct Account {
    server: String,
    directory: PathBuf,
}

impl Account {
    /// The one whose `ca.crt` and `token` are in `directory`, at the API that `server` (a URL) names.
    #[must_use]
    pub fn new(server: String, directory: PathBuf) -> Self {
        Self { server, directory }
    }

    /// A new token of the service account `of`, for about `lifetime`: the API server may shorten that.
    /// It is bound to no pod (k8s.io/api, `authentication/v1`, `BoundObjectReference`).
    ///
    /// # Errors
    /// What the API refuses, or that it gives no answer within five seconds.
    pub fn token(&self, of: &ObjectRef, lifetime: Duration) -> Result<Token, Error> {
        check_names("ServiceAccount", [&of.namespace, &of.name])?;
        let session = self.session()?;
        let query = self.query(&session, Object::Token(of, lifetime));
        session.run(async {
            let attempt = async || get::<wire::TokenGranted>(&session, &query).await;
            let granted = retry(Instant::now(), PATIENCE, attempt).await.map_err(|end| query.gave_up(end))?;
            Ok(granted.into())
        })
    }

    /// Whether a DaemonSet is there and nobody has deleted it.
    ///
    /// # Errors
    /// As [`Self::token`].
    pub fn has(&self, daemon_set: &ObjectRef) -> Result<bool, Error> {
        check_names("DaemonSet", [&daemon_set.namespace, &daemon_set.name])?;
        let session = self.session()?;
        let query = self.query(&session, Object::DaemonSet(daemon_set));
        session.run(async { Ok(version(&session, &query).await?.is_some()) })
    }

    /// Tells whether that DaemonSet is there, at once and whenever that changes, until some minutes are
    /// over or it is not there any more.
    ///
    /// # Errors
    /// As [`Self::token`]; the connection ends.
    pub fn watch(&self, daemon_set: &ObjectRef, mut tell: impl FnMut(bool)) -> Result<(), Error> {
        check_names("DaemonSet", [&daemon_set.namespace, &daemon_set.name])?;
        let session = self.session()?;
        let query = self.query(&session, Object::DaemonSet(daemon_set));
        session.run(async {
            let version = version(&session, &query).await?;
            tell(version.is_some());
            let Some(version) = version else { return Ok(()) };
            let params = WatchParams::default().fields(&format!("metadata.name={}", daemon_set.name));
            let request = Request::new(query.object.collection())
                .watch_metadata(&params.timeout(WATCH_SECONDS), &version)
                .map_err(|e| Error::new(Code::Internal, e.to_string()))?;
            let started = Instant::now();
            let ended = |last| query.gave_up(GaveUp { last, tries: 1, waited: started.elapsed() });
            let broken = |e| ended(query.failed(&e));
            let events = timeout(PATIENCE, session.client.request_events::<wire::Owner>(request));
            let events = events.await.map_err(|_| ended(silent()))?.map_err(broken)?;
            let mut events = pin!(events);
            let longest = Duration::from_secs(WATCH_SECONDS.into()) + SLACK;
            while let Some(event) =
                timeout(longest, events.try_next()).await.map_err(|_| ended(silent()))?.map_err(broken)?
            {
                match event {
                    WatchEvent::Added(object) | WatchEvent::Modified(object) => tell(object.staying().is_some()),
                    WatchEvent::Deleted(_) => tell(false),
                    // What it began with is too old by now.
                    WatchEvent::Error(_) => break,
                    WatchEvent::Bookmark(_) => {}
                }
            }
            Ok(())
        })
    }

    fn session(&self) -> Result<Session, Error> {
        Session::open(Kubeconfig::of_service_account(&self.server, &self.directory)?)
    }

    fn query<'a>(&'a self, session: &'a Session, object: Object<'a>) -> Query<'a> {
        Query { object, server: &session.server, kubeconfig: &self.directory }
    }
}

/// The version of a DaemonSet that stays.
async fn version(session: &Session, query: &Query<'_>) -> Result<Option<String>, Error> {
    let attempt = async || match get::<wire::Owner>(session, query).await {
        Ok(object) => Ok(object.staying()),
        Err(Failure::Missing(_)) => Ok(None),
        Err(failure) => Err(failure),
    };
    retry(Instant::now(), PATIENCE, attempt).await.map_err(|end| query.gave_up(end))
}

fn silent() -> Failure {
    Failure::Trouble { cause: "the connection is silent".into(), after: None }
}
