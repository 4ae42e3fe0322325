//! Requests of `doctor` and `audit` besides those for facts: the API server's version, permissions, Events, pods and
//! namespaces, with one attempt each.

use super::request::ApiRequest;
use super::user::UserApi;
use crate::cluster::resources::{LabeledNamespace, ReportedEvent, Right, ScheduledPod};
use crate::cluster::wire::{NamespaceObject, PodObject};
use crate::cni::Error;
use crate::pod::PodRef;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

impl UserApi {
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
        let mut events = self.list(|page| ApiRequest::events_of(pod, page), |event| Some(parse_event(&event)))?;
        events.sort_by_key(|event| event.last);
        Ok(events)
    }

    /// Returns the pods that are scheduled to a node, in `namespace` or in all namespaces.
    ///
    /// # Errors
    /// A request failed.
    pub fn pods_of_node(&self, node: &str, namespace: Option<&str>) -> Result<Vec<ScheduledPod>, Error> {
        self.list(|page| ApiRequest::pods_of_node(node, namespace, page), scheduled_pod)
    }

    /// Returns the namespaces: the one that is named, or all.
    ///
    /// # Errors
    /// A request failed.
    pub fn namespaces(&self, name: Option<&str>) -> Result<Vec<LabeledNamespace>, Error> {
        let Some(name) = name else { return self.list(ApiRequest::namespaces, labeled_namespace) };
        let pod = PodRef { namespace: name.to_owned(), ..PodRef::default() };
        Ok(labeled_namespace(self.get(&ApiRequest::namespace(&pod)?)?).into_iter().collect())
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
