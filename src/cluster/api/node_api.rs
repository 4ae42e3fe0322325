//! The API server as commands on a node reach it, with the credentials of the agent or the plugin: the requests of
//! `doctor` and `audit` besides those for facts, with one attempt each.

use super::account::ServiceAccount;
use super::request::{ApiRequest, Kind, check_names, in_namespace};
use super::retry::Deadline;
use super::server::Api;
use crate::cluster::fact_source::Cluster;
use crate::cluster::resources::{Permission, ReportedEvent, ScheduledPod, Workload};
use crate::cluster::wire::{NamespaceObject, PodObject};
use crate::cni::Error;
use crate::pod::{Namespace, PodRef};
use k8s_openapi::jiff::Timestamp;
use serde::de::DeserializeOwned;
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
        Self { api: Api { root: root.to_owned(), retries: false, ..Api::new(kubeconfig, timeout) } }
    }

    /// Returns the API as the service account of the pod in which this process runs; `None` outside of pods.
    #[must_use]
    pub fn in_cluster(timeout: Duration) -> Option<Self> {
        ServiceAccount::of_environment().map(|account| Self { api: Api { retries: false, ..account.api(timeout) } })
    }

    /// Returns the server as a source of facts.
    #[must_use]
    pub fn cluster(&self) -> &dyn Cluster {
        &self.api
    }

    /// Returns the server as a source of facts.
    #[must_use]
    pub fn into_cluster(self) -> Box<dyn Cluster> {
        Box::new(self.api)
    }

    fn get<T: DeserializeOwned>(&self, request: &ApiRequest) -> Result<T, Error> {
        let deadline = Deadline::after(self.api.timeout).with_retries(false).awaiting(false);
        let session = self.api.session()?;
        session.run(session.send(request, deadline, Ok))
    }

    /// Returns the server's version.
    ///
    /// # Errors
    /// The server is unreachable or rejects the credentials.
    pub fn version(&self) -> Result<String, Error> {
        let version: Value = self.get(&ApiRequest::version()?)?;
        Ok(version["gitVersion"].as_str().unwrap_or("of an unknown version").to_owned())
    }

    /// Returns whether the client has a permission, with a `SelfSubjectAccessReview`: every authenticated client may
    /// create one (ClusterRole `system:basic-user`).
    ///
    /// # Errors
    /// The request failed.
    pub fn may(&self, permission: &Permission) -> Result<bool, Error> {
        let review: Value = self.get(&ApiRequest::access_review(permission)?)?;
        Ok(review["status"]["allowed"] == true)
    }

    /// Returns the Events about the pods of that name, the latest last.
    ///
    /// # Errors
    /// The request failed.
    pub fn events(&self, PodRef { namespace, name, .. }: &PodRef) -> Result<Vec<ReportedEvent>, Error> {
        check_names("pod", [&**namespace, name])?;
        let fields = format!("involvedObject.kind=Pod,involvedObject.name={name}");
        let subject = format!("events of pod {namespace}/{name}");
        let found = self.api.list(Kind::EVENT, Some(namespace), (subject, Some(fields)), self.api.timeout)?;
        let mut events: Vec<ReportedEvent> = found.iter().map(parse_event).collect();
        events.sort_by_key(|event| event.last);
        Ok(events)
    }

    /// Returns the pods that are scheduled to a node, in `namespace` or in all namespaces.
    ///
    /// # Errors
    /// A request failed.
    pub fn pods_of_node(&self, node: &str, namespace: Option<&str>) -> Result<Vec<ScheduledPod>, Error> {
        check_names("pods", [node].into_iter().chain(namespace))?;
        let (subject, fields) =
            (format!("pods on node {node}{}", in_namespace(namespace)), format!("spec.nodeName={node}"));
        let pods = self.api.list(Kind::POD, namespace, (subject, Some(fields)), self.api.timeout)?;
        Ok(pods.into_iter().map(scheduled_pod).collect())
    }

    /// Returns the namespaces: the one that is named, or all.
    ///
    /// # Errors
    /// A request failed.
    pub fn namespaces(&self, name: Option<&str>) -> Result<Vec<Namespace>, Error> {
        if let Some(name) = name {
            return Ok(vec![self.get::<NamespaceObject>(&ApiRequest::get(Kind::NAMESPACE, None, name)?)?.into()]);
        }
        let found = self.api.list(Kind::NAMESPACE, None, ("namespaces".to_owned(), None), self.api.timeout)?;
        Ok(found.into_iter().map(|namespace: NamespaceObject| namespace.into()).collect())
    }
}

fn scheduled_pod(object: PodObject) -> ScheduledPod {
    let metadata = &object.metadata;
    let template_hash = metadata.labels.get("pod-template-hash").map(String::as_str);
    let workload = metadata.controller().map(|owner| Workload::of(&owner.kind, &owner.name, template_hash));
    let is_ending = metadata.is_deleting();
    let phase = object.status.as_ref().map(|status| status.phase.clone()).unwrap_or_default();
    ScheduledPod { pod: object.into(), workload, phase, is_ending }
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
