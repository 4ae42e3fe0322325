//! The requests besides those for facts: those of the agent as its pod's service account, and those of `doctor` and
//! `audit`.

use super::failure::Failure;
use super::request::{ApiRequest, Collection, Kind, Target, event, in_namespace};
use super::retry::Deadline;
use super::server::{Api, WRITE_TIMEOUT};
use super::session::{Events, Session};
use crate::cluster::resources::{
    Event, NodeTaints, ObjectRef, Permission, ReportedEvent, ScheduledPod, Token, Workload,
};
use crate::cluster::wire::{DaemonSetObject, NamespaceObject, PodObject};
use crate::cni::{Code, Error};
use crate::pod::{Namespace, Pod, PodRef};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, Request, WatchEvent};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::timeout;

/// The timeout for creating a token and for reading a DaemonSet, including retries.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a watch of one object may take to send it, before a request checks whether it exists.
const FIRST_EVENT_TIMEOUT: Duration = Duration::from_secs(3);
/// The timeout of a page of the agent's lists. The API server answers within a minute.
const PAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// The beginning of the answer of an API server that binds no tokens to nodes.
const UNBOUND: &str = "cannot bind token to ";

/// The agent's requests.
impl Api {
    /// Creates a token of the service account `of` that expires after about `lifetime`: the API server may shorten
    /// it. It is bound to this account's node, so that it ends with the Node object, if the API server can
    /// (Kubernetes 1.31). It can't be bound to this account's pod: the API server binds a token only to a pod of the same
    /// account (Kubernetes, `registry/core/serviceaccount`).
    ///
    /// # Errors
    /// The API rejects the request, or does not answer within five seconds.
    pub async fn token(&self, of: &ObjectRef, lifetime: Duration) -> Result<Token, Error> {
        let create = async |node: Option<&str>| {
            let mut spec = json!({"audiences": [], "expirationSeconds": lifetime.as_secs()});
            if let Some(node) = node {
                spec["boundObjectRef"] = json!({"kind": "Node", "apiVersion": "v1", "name": node});
            }
            let body = json!({"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": spec});
            let target = Target(Kind::SERVICE_ACCOUNT, Some(&of.namespace), &of.name);
            let request = ApiRequest::of_object("create", "serviceaccounts/token", target, |accounts| {
                accounts.create_subresource("token", &of.name, &PostParams::default(), body.to_string().into())
            })?;
            let accept = |granted: TokenRequest| {
                let granted = granted.status.ok_or_else(|| Failure::unexpected("no token"))?;
                Ok(Token { text: granted.token, expires: granted.expiration_timestamp.0 })
            };
            self.within(TOKEN_TIMEOUT).sent(&request, accept).await
        };
        match create(self.node.as_deref()).await {
            Err(error) if self.node.is_some() && error.details.contains(UNBOUND) => create(None).await,
            result => result,
        }
    }

    /// Records an Event of a pod (`create events`).
    ///
    /// # Errors
    /// As [`Cluster::report`](crate::cluster::Cluster::report).
    pub async fn tell(&self, pod: &PodRef, one: &Event) -> Result<(), Error> {
        self.change(event(&self.own(pod.clone()), one)).await
    }

    /// Returns a pod of this account's node, for reports.
    #[must_use]
    pub fn own(&self, pod: PodRef) -> Pod {
        Pod { node_name: self.node.clone(), ..pod.into() }
    }

    /// Deletes a pod that still has this UID and `resourceVersion` (`delete pods`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`] if the pod was deleted or changed; else as [`Self::tell`].
    pub async fn delete(&self, pod: &Pod, resource_version: &str) -> Result<(), Error> {
        let preconditions = Preconditions { uid: pod.uid.clone(), resource_version: Some(resource_version.to_owned()) };
        let params = DeleteParams::default().preconditions(preconditions);
        let target = Target(Kind::POD, Some(&pod.namespace), &pod.name);
        let request = ApiRequest::of_object("delete", "pods", target, |pods| pods.delete(&pod.name, &params));
        self.change(request).await
    }

    /// Gets a node (`get nodes`).
    ///
    /// # Errors
    /// The node does not exist, or the API does not answer.
    pub async fn node(&self, name: &str) -> Result<NodeTaints, Error> {
        let accept = |node: Value| {
            let text = |at: &Value| at.as_str().map(str::to_owned).ok_or_else(|| Failure::unexpected("not a node"));
            let (name, resource_version) =
                (text(&node["metadata"]["name"])?, text(&node["metadata"]["resourceVersion"])?);
            Ok(NodeTaints {
                name,
                resource_version,
                taints: node["spec"]["taints"].as_array().cloned().unwrap_or_default(),
            })
        };
        self.sent(&ApiRequest::get(Kind::NODE, None, name)?, accept).await
    }

    /// Replaces all taints of a node that still has its `resource_version` (`patch nodes`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`] if another process changed or deleted the node; else as [`Self::node`].
    pub async fn taint(&self, NodeTaints { name, resource_version, taints }: &NodeTaints) -> Result<(), Error> {
        let patch = json!({"metadata": {"resourceVersion": resource_version}, "spec": {"taints": taints}});
        let request = ApiRequest::of_object("patch", "nodes", Target(Kind::NODE, None, name), |nodes| {
            nodes.patch(name, &PatchParams::default(), &Patch::Merge(patch))
        });
        self.change(request).await
    }

    async fn change(&self, request: Result<ApiRequest, Error>) -> Result<(), Error> {
        self.within(WRITE_TIMEOUT).sent(&request?, |_: IgnoredAny| Ok(())).await
    }

    /// Returns whether a DaemonSet exists and is not being deleted; retries for `timeout`.
    ///
    /// # Errors
    /// The API rejects the request, or does not answer.
    pub async fn has(&self, daemon_set: &ObjectRef, timeout: Duration) -> Result<bool, Error> {
        self.session()?.has(daemon_set, timeout).await
    }

    /// Watches a DaemonSet for some minutes. Calls `report` with whether it exists, first at once and then after each
    /// change. If the watch does not start with the object, a request checks whether it exists. For tasks of the
    /// connection's event loop.
    ///
    /// # Errors
    /// As [`Self::token`].
    pub async fn watch(&self, daemon_set: &ObjectRef, mut report: impl FnMut(bool)) -> Result<(), Error> {
        let ObjectRef { namespace, name } = daemon_set;
        let (session, request) = (self.session()?, ApiRequest::get(Kind::DAEMON_SET, Some(namespace), name)?);
        let failed = |failure: Failure| session.error(&request, failure);
        let named = Collection::new(Kind::DAEMON_SET, Some(namespace), Some(("metadata.name", name)));
        let collection = Collection { metadata_only: true, ..named };
        // The object's own version may be older than the API server's watch cache, which is empty after each start of the
        // server. A watch from any version starts with the object, so no change is missed.
        let mut events = session.watch::<DaemonSetObject>(&collection, None).await.map_err(failed)?;
        let mut next = match timeout(FIRST_EVENT_TIMEOUT, events.next()).await {
            Ok(first) => first,
            Err(_) => {
                report(session.has(daemon_set, TOKEN_TIMEOUT).await?);
                events.next().await
            }
        };
        while let Some(event) = next.map_err(failed)? {
            match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => report(!object.metadata.is_deleting()),
                WatchEvent::Deleted(_) => report(false),
                WatchEvent::Bookmark(_) | WatchEvent::Error(_) => {}
            }
            next = events.next().await;
        }
        Ok(())
    }

    /// Calls `each` with every object of a collection. Returns the version of the list, at which a watch continues.
    /// `from_cache` is whether the server may answer from its cache, as for the first list of a client: that takes no
    /// request to etcd, which would have to read the pods of all nodes.
    ///
    /// # Errors
    /// The API server rejects a request or does not answer, an object is too large, or the list does not end.
    pub(crate) async fn list<T: DeserializeOwned>(
        &self,
        collection: &Collection,
        from_cache: bool,
        each: impl FnMut(T),
    ) -> Result<String, Failure> {
        self.session()?.list(collection, from_cache, PAGE_TIMEOUT, each).await
    }

    /// Watches the objects of a collection from `version` on, for some minutes. The server has started the watch when this
    /// returns.
    ///
    /// # Errors
    /// The API server rejects the request or does not answer.
    pub(crate) async fn follow<T: DeserializeOwned>(
        &self,
        collection: &Collection,
        version: &str,
    ) -> Result<Events<T>, Failure> {
        self.session()?.watch(collection, Some(version)).await
    }
}

impl Session {
    /// Returns whether a DaemonSet exists. A 404 counts only if it names the DaemonSet: a server that does not serve all
    /// resources yet, or a proxy in front of it, answers 404 as well.
    async fn has(&self, daemon_set: &ObjectRef, timeout: Duration) -> Result<bool, Error> {
        let ObjectRef { namespace, name } = daemon_set;
        let mut request = ApiRequest::get(Kind::DAEMON_SET, Some(namespace), name)?;
        request.confirmed_by = Some(name.clone());
        let accept = |found: DaemonSetObject| Ok(!found.metadata.is_deleting());
        match self.send(&request, Deadline { awaits: false, ..Deadline::after(timeout) }, accept).await {
            Err(error) if error.code == Code::PodUnknown => Ok(false),
            result => result,
        }
    }
}

/// The requests of `doctor` and `audit`.
impl Api {
    /// The timeout of a request of `doctor` and `audit`.
    pub const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

    /// Returns the server's version.
    ///
    /// # Errors
    /// The server is unreachable or rejects the credentials.
    pub fn version(&self) -> Result<String, Error> {
        let http = Request::new("/version").list(&ListParams::default());
        let request = ApiRequest::of(http, "the API server".to_owned(), "get /version".to_owned())?;
        self.send(&request, |found: Value| {
            Ok(found["gitVersion"].as_str().unwrap_or("of an unknown version").to_owned())
        })
    }

    /// Returns whether the client has a permission, with a `SelfSubjectAccessReview` (k8s.io/api, `authorization/v1`):
    /// every authenticated client may create one (ClusterRole `system:basic-user`).
    ///
    /// # Errors
    /// The request failed.
    pub fn may(&self, permission: &Permission) -> Result<bool, Error> {
        let Permission { verb, group, resource, subresource } = permission;
        let attributes = json!({"verb": verb, "group": group, "resource": resource, "subresource": subresource});
        let (kind, spec) = (Kind::ACCESS_REVIEW, json!({"resourceAttributes": attributes}));
        let body = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec});
        let http = kind.requests(None).create(&PostParams::default(), body.to_string().into());
        let subject = format!("the permission to {permission}");
        let request = ApiRequest::of(http, subject, format!("create {}", kind.resource()))?;
        self.send(&request, |review: Value| Ok(review["status"]["allowed"] == true))
    }

    /// Returns the Events about the pods of that name, the latest last.
    ///
    /// # Errors
    /// The request failed.
    pub fn events(&self, PodRef { namespace, name, .. }: &PodRef) -> Result<Vec<ReportedEvent>, Error> {
        let of_pod =
            Collection::new(Kind::EVENT, Some(namespace), Some(("involvedObject.kind=Pod,involvedObject.name", name)));
        let mut events: Vec<Value> = self.all(&of_pod, format!("events of pod {namespace}/{name}"))?;
        events.sort_by_cached_key(last_time);
        Ok(events.iter().map(reported_event).collect())
    }

    /// Returns the pods that are scheduled to a node, in `namespace` or in all namespaces.
    ///
    /// # Errors
    /// A request failed.
    pub fn pods_of_node(&self, node: &str, namespace: Option<&str>) -> Result<Vec<ScheduledPod>, Error> {
        let of_node = Collection::new(Kind::POD, namespace, Some(("spec.nodeName", node)));
        let pods = self.all(&of_node, format!("pods on node {node}{}", in_namespace(namespace)))?;
        Ok(pods.into_iter().map(scheduled_pod).collect())
    }

    /// Returns the namespaces: the one that is named, or all.
    ///
    /// # Errors
    /// A request failed.
    pub fn namespaces(&self, name: Option<&str>) -> Result<Vec<Namespace>, Error> {
        if let Some(name) = name {
            let request = ApiRequest::get(Kind::NAMESPACE, None, name)?;
            return self.send(&request, |found: NamespaceObject| Ok(vec![found.into()]));
        }
        let found: Vec<NamespaceObject> =
            self.all(&Collection::new(Kind::NAMESPACE, None, None), "namespaces".to_owned())?;
        Ok(found.into_iter().map(Into::into).collect())
    }
}

fn scheduled_pod(object: PodObject) -> ScheduledPod {
    let metadata = &object.metadata;
    let template_hash = metadata.labels.get("pod-template-hash").map(String::as_str);
    let workload = metadata.controller().map(|owner| Workload::of(&owner.kind, &owner.name, template_hash));
    let status = object.status.as_ref();
    let is_pending = status.is_some_and(|status| status.phase == "Pending");
    let is_ending = metadata.is_deleting() || status.is_some_and(|status| status.has_ended());
    ScheduledPod { workload, is_pending, is_ending, pod: object.into() }
}

/// Returns the time of the last occurrence of an Event in either form: `core/v1`, or one that was created as
/// `events.k8s.io/v1`.
fn last_time(event: &Value) -> Option<Timestamp> {
    let times = ["lastTimestamp", "eventTime", "firstTimestamp"].iter();
    times.filter_map(|key| event[key].as_str()).find(|time| !time.is_empty())?.parse().ok()
}

fn reported_event(event: &Value) -> ReportedEvent {
    let text = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
    let count = [&event["count"], &event["series"]["count"]].into_iter().find_map(Value::as_u64);
    ReportedEvent {
        warning: event["type"] == "Warning",
        reason: text("reason"),
        message: text("message"),
        count: count.unwrap_or(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_ending_if_it_has_ended_or_is_being_deleted() {
        for (phase, deleted, expected) in [
            ("Pending", Value::Null, (true, false)),
            ("Running", Value::Null, (false, false)),
            ("Running", json!("2026-01-01T00:00:00Z"), (false, true)),
            ("Succeeded", Value::Null, (false, true)),
            ("Failed", Value::Null, (false, true)),
        ] {
            let object = json!({"metadata": {"name": "p", "deletionTimestamp": deleted}, "status": {"phase": phase}});
            let pod = scheduled_pod(serde_json::from_value(object).expect("a pod"));
            assert_eq!((pod.is_pending, pod.is_ending), expected, "{phase}");
        }
    }
}
