//! The API server as commands on a node reach it, with the credentials of the agent or the plugin: the requests of
//! `doctor` and `audit` besides those for facts, with one attempt each.

use super::request::{ApiRequest, Page};
use super::server::Api;
use super::service_account::ServiceAccount;
use crate::cluster::fact_source::Cluster;
use crate::cluster::resources::{Permission, ReportedEvent, ScheduledPod, Workload};
use crate::cluster::wire::{NamespaceObject, PodObject};
use crate::cni::Error;
use crate::pod::{Namespace, PodRef};
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The API server with the credentials of the agent or the plugin.
pub struct NodeApi {
    api: Api,
}

impl NodeApi {
    /// The timeout of a request of `doctor` and `audit`.
    pub const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

    // Without retries: the user sees at once why a request fails, and can repeat the command.

    /// Returns the API server of the plugin's kubeconfig on a node, whose file system is mounted at `root`.
    #[must_use]
    pub fn of_node(root: &Path, kubeconfig: PathBuf, timeout: Duration) -> Self {
        Self { api: Api::new(kubeconfig, timeout).with_root(root).without_retries() }
    }

    /// Returns the API as the service account of the pod in which this process runs; `None` outside of pods.
    #[must_use]
    pub fn in_cluster(timeout: Duration) -> Option<Self> {
        ServiceAccount::of_environment().map(|account| Self { api: account.api(timeout).without_retries() })
    }

    /// Returns the server as a source of facts.
    #[must_use]
    pub fn cluster(&self) -> &dyn Cluster {
        &self.api
    }

    fn list<T>(
        &self,
        request: impl Fn(Page<'_>) -> Result<ApiRequest, Error>,
        read: impl Fn(Value) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        self.api.list(self.api.timeout, request, read)
    }

    fn get(&self, request: &ApiRequest) -> Result<Value, Error> {
        let session = self.api.session()?;
        session.run(self.api.call(session, request).get_once(self.api.timeout))
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
    pub fn may(&self, permission: &Permission) -> Result<bool, Error> {
        let review = self.get(&ApiRequest::access_review(permission)?)?;
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
    pub fn namespaces(&self, name: Option<&str>) -> Result<Vec<Namespace>, Error> {
        let Some(name) = name else { return self.list(ApiRequest::namespaces, parse_namespace) };
        let pod = PodRef { namespace: name.to_owned(), ..PodRef::default() };
        Ok(parse_namespace(self.get(&ApiRequest::namespace(&pod)?)?).into_iter().collect())
    }
}

/// Parses a pod of a list. An object that is not a pod is skipped.
fn scheduled_pod(object: Value) -> Option<ScheduledPod> {
    let object = PodObject::deserialize(object).ok()?;
    let metadata = &object.metadata;
    let template_hash = metadata.labels.get("pod-template-hash").map(String::as_str);
    let workload = metadata.controller().map(|owner| Workload::of(&owner.kind, &owner.name, template_hash));
    let (phase, is_ending) = (object.status.phase.clone(), metadata.is_deleting());
    Some(ScheduledPod { pod: object.into(), workload, phase, is_ending })
}

/// Parses a namespace. An object that is not a namespace is skipped.
fn parse_namespace(object: Value) -> Option<Namespace> {
    NamespaceObject::deserialize(object).ok().map(Namespace::from)
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
