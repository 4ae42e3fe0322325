//! Requests of `doctor` and `audit` besides those for facts: the API server's version, permissions, Events, pods and
//! namespaces, with one attempt each.

use super::request::ApiRequest;
use super::server::Api;
use super::service_account::ServiceAccount;
use crate::cluster::fact_source::Cluster;
use crate::cluster::resources::{LabeledNamespace, ObjectRef, ReportedEvent, Right, ScheduledPod};
use crate::cluster::wire::{NamespaceObject, PodObject};
use crate::cni::Error;
use crate::pod::PodRef;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(3);

/// An API server to examine.
pub struct ApiProbe(Api);

impl ApiProbe {
    /// Returns the server of the plugin's kubeconfig at `path`. Absolute paths in the kubeconfig refer to the file
    /// system that is mounted at `root`.
    #[must_use]
    pub fn new(root: &Path, path: PathBuf) -> Self {
        Self(Api::new(path, TIMEOUT).with_root(root))
    }

    /// Returns the server of a kubeconfig that is given on the command line.
    #[must_use]
    pub fn of_user(path: PathBuf) -> Self {
        Self(Api::new(path, TIMEOUT).of_any_owner())
    }

    /// Returns the API as the service account of the pod that this process runs in; `None` outside of pods.
    #[must_use]
    pub fn in_cluster() -> Option<Self> {
        ServiceAccount::of_environment().map(|account| Self(account.api(TIMEOUT)))
    }

    /// Returns the server as a source of facts.
    #[must_use]
    pub fn cluster(&self) -> &dyn Cluster {
        &self.0
    }

    /// Returns the server's version.
    ///
    /// # Errors
    /// The server is unreachable or rejects the credentials.
    pub fn version(&self) -> Result<String, Error> {
        let version = self.get(&ApiRequest::version()?)?;
        Ok(version["gitVersion"].as_str().unwrap_or("of an unknown version").to_owned())
    }

    /// Returns whether the client has a permission, with a `SelfSubjectAccessReview`: every authenticated client may
    /// create one (ClusterRole `system:basic-user`).
    ///
    /// # Errors
    /// The request failed.
    pub fn may(&self, right: &Right) -> Result<bool, Error> {
        let review = self.get(&ApiRequest::access_review(right)?)?;
        Ok(review["status"]["allowed"] == true)
    }

    /// Returns the Events about the pods of that name, the latest last.
    ///
    /// # Errors
    /// The request failed.
    pub fn events(&self, pod: &PodRef) -> Result<Vec<ReportedEvent>, Error> {
        let list = self.get(&ApiRequest::events_of(pod)?)?;
        let mut events: Vec<ReportedEvent> = list["items"].as_array().into_iter().flatten().map(parse_event).collect();
        events.sort_by_key(|event| event.last);
        Ok(events)
    }

    /// Returns the pods of a namespace that are scheduled to a node.
    ///
    /// # Errors
    /// The request failed.
    pub fn pods_on(&self, namespace: &str, node: &str) -> Result<Vec<ObjectRef>, Error> {
        let list = self.get(&ApiRequest::pods_on(namespace, node)?)?;
        let names = list["items"].as_array().into_iter().flatten().filter_map(|pod| pod["metadata"]["name"].as_str());
        Ok(names.map(|name| ObjectRef { namespace: namespace.to_owned(), name: name.to_owned() }).collect())
    }

    /// Returns the pods that are scheduled to a node, in `namespace` or in all namespaces.
    ///
    /// # Errors
    /// A request failed.
    pub fn pods_of_node(&self, node: &str, namespace: Option<&str>) -> Result<Vec<ScheduledPod>, Error> {
        self.0.list(TIMEOUT, |page| ApiRequest::pods_of_node(node, namespace, page), scheduled_pod)
    }

    /// Returns the namespaces: the one that is named, or all.
    ///
    /// # Errors
    /// A request failed.
    pub fn namespaces(&self, name: Option<&str>) -> Result<Vec<LabeledNamespace>, Error> {
        let Some(name) = name else { return self.0.list(TIMEOUT, ApiRequest::namespaces, labeled_namespace) };
        let pod = PodRef { namespace: name.to_owned(), ..PodRef::default() };
        Ok(labeled_namespace(self.get(&ApiRequest::namespace(&pod)?)?).into_iter().collect())
    }

    fn get(&self, request: &ApiRequest) -> Result<Value, Error> {
        let session = self.0.session()?;
        session.run(self.0.call(session, request).get_once(TIMEOUT))
    }
}

/// Parses a pod of a list. An object that is not a pod is skipped.
fn scheduled_pod(object: Value) -> Option<ScheduledPod> {
    let phase = object["status"]["phase"].as_str().unwrap_or_default().to_owned();
    let is_ending = object["metadata"]["deletionTimestamp"].is_string();
    let pod = PodObject::deserialize(&object).ok()?.into();
    Some(ScheduledPod { pod, phase, is_ending })
}

/// Parses a namespace. An object that is not a namespace is skipped.
fn labeled_namespace(object: Value) -> Option<LabeledNamespace> {
    let object = NamespaceObject::deserialize(&object).ok()?;
    Some(LabeledNamespace { labels: object.metadata.labels.clone(), namespace: object.into() })
}

/// Parses an Event in either form: `core/v1`, or one that was created as `events.k8s.io/v1`.
fn parse_event(event: &Value) -> ReportedEvent {
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
