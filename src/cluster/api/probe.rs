//! What somebody who looks for a fault asks besides facts: one try each.
//!
//! A connection to the API server, kept from one request to the next.
//!
//! Several answers that are waited for at the same time.

use super::{Api, check_names, get};
use crate::cluster::kubeconfig::Kubeconfig;
use crate::cluster::query::Object;
use crate::cluster::retry::{AttemptError, retry};
use crate::cluster::{Cluster, ObjectRef, ReportedEvent, Right, ServiceAccount};
use crate::cni::{Code, Error};
use crate::pod::PodRef;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use serde_json::Value;
use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};

/// How long one answer may take.
const PATIENCE: Duration = Duration::from_secs(3);

/// An API server, asked as a kubeconfig says.
pub struct ApiProbe(Api);

impl ApiProbe {
    /// The server that the plugin's kubeconfig at `path` names; absolute paths in that are those of the file
    /// system mounted at `root`.
    #[must_use]
    pub fn new(root: &Path, path: PathBuf) -> Self {
        Self(Api::new(path, PATIENCE).within(root))
    }

    /// The server that a kubeconfig names which the user of the command line names.
    #[must_use]
    pub fn of_user(path: PathBuf) -> Self {
        Self(Api::new(path, PATIENCE).of_user())
    }

    /// The server of the cluster that this process is a pod of, asked as that pod's service account; `None`
    /// outside of pods.
    #[must_use]
    pub fn in_cluster() -> Option<Self> {
        ServiceAccount::of_environment().map(|account| Self(account.api(PATIENCE)))
    }

    /// The same server as a source of facts.
    #[must_use]
    pub fn cluster(&self) -> &dyn Cluster {
        &self.0
    }

    fn ask(&self, object: Object<'_>) -> Result<Value, Error> {
        let session = self.0.session()?;
        let query = self.0.query(session, object);
        session.run(async {
            let attempt = async || match get(session, &query).await {
                Err(AttemptError::Trouble { cause, .. }) => Err(query.not_again(&cause)),
                Err(AttemptError::Missing(cause)) => Err(query.gone(&cause)),
                other => other,
            };
            retry(Instant::now(), PATIENCE, attempt).await.map_err(|end| query.gave_up(end))
        })
    }

    /// The server's version.
    ///
    /// # Errors
    /// It can't be reached, or does not know whoever asks.
    pub fn version(&self) -> Result<String, Error> {
        let version = self.ask(Object::Version)?;
        Ok(version["gitVersion"].as_str().unwrap_or("of an unknown version").to_owned())
    }

    /// Whether whoever asks has this right (SelfSubjectAccessReview, which everybody who is known may
    /// create: ClusterRole system:basic-user).
    ///
    /// # Errors
    /// The server does not say.
    pub fn may(&self, right: &Right) -> Result<bool, Error> {
        let review = self.ask(Object::Review(right))?;
        Ok(review["status"]["allowed"] == true)
    }

    /// The events about a pod of that name, the latest last.
    ///
    /// # Errors
    /// The server does not say.
    pub fn events(&self, pod: &PodRef) -> Result<Vec<ReportedEvent>, Error> {
        check_names("pod", [&pod.namespace, &pod.name])?;
        let list = self.ask(Object::EventsOf(pod))?;
        let mut events: Vec<ReportedEvent> = list["items"].as_array().into_iter().flatten().map(told).collect();
        events.sort_by_key(|event| event.last);
        Ok(events)
    }

    /// The pods of a namespace that are on a node.
    ///
    /// # Errors
    /// The server does not say.
    pub fn pods_on(&self, namespace: &String, node: &str) -> Result<Vec<ObjectRef>, Error> {
        check_names("pods", [namespace, &node.to_owned()])?;
        let list = self.ask(Object::PodsOn { namespace, node })?;
        let names = list["items"].as_array().into_iter().flatten().filter_map(|pod| pod["metadata"]["name"].as_str());
        Ok(names.map(|name| ObjectRef { namespace: namespace.clone(), name: name.to_owned() }).collect())
    }
}

/// Both forms of an event: those of `core/v1` and those that came by `events.k8s.io/v1`.
fn told(event: &Value) -> ReportedEvent {
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let time = ["lastTimestamp", "eventTime", "firstTimestamp"].iter().find_map(|key| text(&event[key]));
    let count = [&event["count"], &event["series"]["count"]].into_iter().find_map(Value::as_u64);
    ReportedEvent {
        warning: event["type"] == "Warning",
        reason: text(&event["reason"]).unwrap_or_default(),
        message: text(&event["message"]).unwrap_or_default(),
        by: text(&event["source"]["component"]).or_else(|| text(&event["reportingComponent"])).unwrap_or_default(),
        last: time.and_then(|time| time.parse::<Timestamp>().ok()).map_or(0, Timestamp::as_second),
        count: count.unwrap_or(1),
    }
}

/// An event loop of this thread alone, and a client on it.
pub(super) struct Session {
    /// There until the session ends.
    runtime: Option<Runtime>,
    /// Where the server is, for messages.
    pub(super) server: String,
    /// Who asks it.
    pub(super) client: Client,
}

impl Session {
    /// Nothing is connected to yet.
    ///
    /// # Errors
    /// As [`Kubeconfig::client`].
    pub(super) fn open(kubeconfig: Kubeconfig<'_>) -> Result<Self, Error> {
        let runtime = Builder::new_current_thread().enable_io().enable_time().build();
        let runtime = runtime.map_err(|e| Error::new(Code::Internal, "no event loop").with_details(e.to_string()))?;
        let server = kubeconfig.server();
        let client = {
            // The client has tasks of its own on the loop.
            let _inside = runtime.enter();
            kubeconfig.client()?
        };
        Ok(Self { runtime: Some(runtime), server, client })
    }

    /// Does `work` to its end.
    pub(super) fn run<T>(&self, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        match &self.runtime {
            Some(runtime) => runtime.block_on(work),
            None => Err(Error::new(Code::Internal, "the event loop has ended")),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Otherwise it would wait for a name that is still being resolved.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// All values, in the order of the futures, or the first failure, which does not wait for the others.
pub(super) async fn all<'a, T, E>(
    futures: impl IntoIterator<Item = impl Future<Output = Result<T, E>> + 'a>,
) -> Result<Vec<T>, E> {
    let mut waiting: Vec<_> = futures.into_iter().map(|future| JoinState::Waiting(Box::pin(future))).collect();
    poll_fn(|context| {
        for state in &mut waiting {
            if let JoinState::Waiting(future) = state
                && let Poll::Ready(result) = future.as_mut().poll(context)
            {
                match result {
                    Ok(value) => *state = JoinState::Done(value),
                    Err(error) => return Poll::Ready(Some(error)),
                }
            }
        }
        if waiting.iter().all(|state| matches!(state, JoinState::Done(_))) { Poll::Ready(None) } else { Poll::Pending }
    })
    .await
    .map_or(Ok(()), Err)?;
    Ok(waiting.into_iter().filter_map(JoinState::done).collect())
}

enum JoinState<F, T> {
    Waiting(Pin<Box<F>>),
    Done(T),
}

impl<F, T> JoinState<F, T> {
    fn done(self) -> Option<T> {
        match self {
            Self::Waiting(_) => None,
            Self::Done(value) => Some(value),
        }
    }
}
