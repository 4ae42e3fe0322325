//! The requests besides those for facts: those of the agent as its pod's service account, and those of `doctor` and
//! `audit`.

use super::request::{ApiRequest, Collection, Failure, Kind, Target, event, in_namespace};
use super::{Api, WRITE_TIMEOUT};
use crate::cluster::resources::{Event, ObjectRef, Permission, ScheduledPod, Token, Workload};
use crate::cluster::wire::{DaemonSetObject, NamespaceObject, NodeSpec, Object, PodObject};
use crate::cni::Error;
use crate::pod::{Namespace, Pod, PodRef};
use futures_util::TryStreamExt;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::Event as ApiEvent;
use k8s_openapi::jiff::Timestamp;
use kube::api::{
    DeleteParams, ListParams, ObjectList, Patch, PatchParams, PostParams, Preconditions, Request, WatchEvent,
};
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use std::time::Duration;

/// The timeout for creating a token, including retries, and for reading a DaemonSet.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(5);
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

    /// Replaces the taints of a node with what `change` returns (`get nodes`, `patch nodes`). Returns false if that is
    /// `None`.
    ///
    /// # Errors
    /// The node does not exist, or the API does not answer; [`crate::cni::Code::PodUnknown`] if another process changed or
    /// deleted the node meanwhile.
    pub async fn change_taints(
        &self,
        name: &str,
        change: impl FnOnce(&[Value]) -> Option<Vec<Value>>,
    ) -> Result<bool, Error> {
        let node: Object<NodeSpec> = self.sent(&ApiRequest::get(Kind::NODE, None, name)?, Ok).await?;
        let Some(taints) = change(&node.spec.unwrap_or_default().taints) else { return Ok(false) };
        // The API server refuses the patch if the node has another version.
        let metadata = json!({"resourceVersion": node.metadata.resource_version});
        let patch = Patch::Merge(json!({"metadata": metadata, "spec": {"taints": taints}}));
        let request = ApiRequest::of_object("patch", "nodes", Target(Kind::NODE, None, name), |nodes| {
            nodes.patch(name, &PatchParams::default(), &patch)
        });
        self.change(request).await.map(|()| true)
    }

    async fn change(&self, request: Result<ApiRequest, Error>) -> Result<(), Error> {
        self.within(WRITE_TIMEOUT).sent(&request?, |_: IgnoredAny| Ok(())).await
    }

    /// Returns whether a DaemonSet exists and is not being deleted; retries for `timeout`. A list is requested, because "not
    /// found" can also come from a server that does not serve all resources yet, or from a proxy in front of it.
    ///
    /// # Errors
    /// The API rejects the request, or does not answer.
    pub async fn has(&self, daemon_set: &ObjectRef, timeout: Duration) -> Result<bool, Error> {
        let exists = |found: ObjectList<DaemonSetObject>| Ok(found.items.iter().any(|one| !one.metadata.is_deleting()));
        self.within(timeout).sent(&ApiRequest::list(&only(daemon_set), of(daemon_set))?, exists).await
    }

    /// Watches a DaemonSet for some minutes. Calls `report` with whether it exists, first at once and then after each
    /// change. For tasks of the connection's event loop.
    ///
    /// # Errors
    /// As [`Self::token`].
    pub async fn watch(&self, daemon_set: &ObjectRef, mut report: impl FnMut(bool)) -> Result<(), Error> {
        let (session, collection) = (self.session()?, only(daemon_set));
        let request = ApiRequest::list(&collection, of(daemon_set))?;
        let failed = |failure: Failure| session.error(&request, failure);
        let mut exists = false;
        let found = |object: DaemonSetObject| exists = !object.metadata.is_deleting();
        let version = session.list(&collection, true, TOKEN_TIMEOUT, found).await.map_err(failed)?;
        report(exists);
        let mut events = session.watch::<DaemonSetObject>(&collection, &version).await.map_err(failed)?;
        while let Some(event) = events.try_next().await.map_err(failed)? {
            match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => report(!object.metadata.is_deleting()),
                WatchEvent::Deleted(_) => report(false),
                WatchEvent::Bookmark(_) | WatchEvent::Error(_) => {}
            }
        }
        Ok(())
    }
}

/// Returns the collection of this DaemonSet only.
fn only(ObjectRef { namespace, name }: &ObjectRef) -> Collection {
    let named = Collection::new(Kind::DAEMON_SET, Some(namespace), Some(("metadata.name", name)));
    Collection { metadata_only: true, ..named }
}

fn of(daemon_set: &ObjectRef) -> String {
    format!("DaemonSet {daemon_set}")
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
        let version = |found: Value| Ok(found["gitVersion"].as_str().unwrap_or("of an unknown version").to_owned());
        self.wait_for(self.sent(&request, version))
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
        self.wait_for(self.sent(&request, |review: Value| Ok(review["status"]["allowed"] == true)))
    }

    /// Returns the Events about the pods of that name, the latest last.
    ///
    /// # Errors
    /// The request failed.
    pub fn events(&self, PodRef { namespace, name, .. }: &PodRef) -> Result<Vec<ApiEvent>, Error> {
        let of_pod =
            Collection::new(Kind::EVENT, Some(namespace), Some(("involvedObject.kind=Pod,involvedObject.name", name)));
        let mut events = self.wait_for(self.all(&of_pod, format!("events of pod {namespace}/{name}")))?;
        events.sort_by_key(last_time);
        Ok(events)
    }

    /// Returns the pods that are scheduled to a node, in `namespace` or in all namespaces.
    ///
    /// # Errors
    /// A request failed.
    pub fn pods_of_node(&self, node: &str, namespace: Option<&str>) -> Result<Vec<ScheduledPod>, Error> {
        let of_node = Collection::new(Kind::POD, namespace, Some(("spec.nodeName", node)));
        let pods = self.wait_for(self.all(&of_node, format!("pods on node {node}{}", in_namespace(namespace))))?;
        Ok(pods.into_iter().map(scheduled_pod).collect())
    }

    /// Returns the namespaces: the one that is named, or all.
    ///
    /// # Errors
    /// A request failed.
    pub fn namespaces(&self, name: Option<&str>) -> Result<Vec<Namespace>, Error> {
        if let Some(name) = name {
            let request = ApiRequest::get(Kind::NAMESPACE, None, name)?;
            return self.wait_for(self.sent(&request, |found: NamespaceObject| Ok(vec![found.into()])));
        }
        let found: Vec<NamespaceObject> =
            self.wait_for(self.all(&Collection::new(Kind::NAMESPACE, None, None), "namespaces".to_owned()))?;
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
fn last_time(event: &ApiEvent) -> Option<Timestamp> {
    let last = event.last_timestamp.as_ref().map(|time| time.0).or(event.event_time.as_ref().map(|time| time.0));
    last.or(event.first_timestamp.as_ref().map(|time| time.0))
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
