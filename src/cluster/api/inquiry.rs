//! What somebody who looks for a fault asks besides facts: one try each.

use super::{Api, check_names, get};
use crate::cluster::query::Object;
use crate::cluster::retry::{AttemptError, retry};
use crate::cluster::{Cluster, ObjectRef, Right, ServiceAccount, ReportedEvent};
use crate::cni::Error;
use crate::pod::PodRef;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

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
