//! The requests to the Kubernetes API, one constructor each: what is sent, and what an error message about it names.

use crate::cluster::resources::{Event, NodeTaints, ObjectRef, Permission, PolicyCondition};
use crate::cni::{Code, Error, is_dns_subdomain};
use crate::pod::well_known::{NETWORK_STATUS, POLICY_CONDITION};
use crate::pod::{Pod, PodRef};
use crate::printable::{cut, line};
use hyper::Request;
use k8s_openapi::jiff::Timestamp;
use kube::api::{
    DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams, Preconditions, Request as RequestBuilder,
    WatchParams,
};
use serde_json::{Value, json};
use std::fmt::Display;
use std::time::Duration;

/// A request to the API, and the texts for errors about it.
#[derive(Debug, Clone)]
pub(super) struct ApiRequest {
    /// What is sent.
    pub(super) http: Request<Vec<u8>>,
    /// The object, for messages: kind and name.
    pub(super) subject: String,
    /// The permission that the request needs, as `kubectl auth can-i` spells it.
    pub(super) permission: String,
    /// The command that shows whether the object exists.
    pub(super) kubectl: String,
    /// The name that a response with status 404 must contain to count as "not found": a server that does not serve
    /// all resources yet, or a proxy in front of it, answers 404 as well.
    pub(super) confirmed_by: Option<String>,
}

/// The collection of NetworkAttachmentDefinitions in the API.
const DEFINITIONS: &str = "network-attachment-definitions";
const DEFINITIONS_API: &str = "/apis/k8s.cni.cncf.io/v1";

/// Starts a watch at the version in the API server's cache (kubernetes.io, "API Concepts", "Get State and Start at
/// Any"). The server must not have to wait: a watch without a version waits for etcd's latest. Both forms, if they
/// request bookmarks, fail with 500 if etcd reports no progress on request (kube-apiserver 1.35 with etcd 3.4.23).
const ANY_VERSION: &str = "0";

/// The maximum length of an Event's message in bytes; `events.k8s.io` rejects longer ones (`NoteLengthLimit`).
const MAX_EVENT_MESSAGE: usize = 1024;

impl ApiRequest {
    /// Gets a pod.
    pub(super) fn pod(PodRef { namespace, name, .. }: &PodRef) -> Result<Self, Error> {
        check_names("CNI_ARGS", [namespace, name])?;
        let http = namespaced(namespace, "pods").get(name, &GetParams::default());
        Self::of_pod(http, (namespace, name), "get pods")
    }

    /// Gets the namespace of a pod.
    pub(super) fn namespace(PodRef { namespace, name, .. }: &PodRef) -> Result<Self, Error> {
        check_names("CNI_ARGS", [namespace])?;
        let http = RequestBuilder::new("/api/v1/namespaces").get(namespace, &GetParams::default());
        let kubectl = format!("kubectl get namespace {namespace}");
        Self::new(http, format!("pod {namespace}/{name}"), "get namespaces".to_owned(), kubectl)
    }

    /// Gets a NetworkAttachmentDefinition.
    pub(super) fn definition(object: &ObjectRef) -> Result<Self, Error> {
        let ObjectRef { namespace, name } = object;
        check_names("NetworkAttachmentDefinition", [namespace, name])?;
        let collection = RequestBuilder::new(format!("{DEFINITIONS_API}/namespaces/{namespace}/{DEFINITIONS}"));
        let http = collection.get(name, &GetParams::default());
        let permission = format!("get {DEFINITIONS}.k8s.cni.cncf.io in namespace {namespace}");
        let kubectl = format!("kubectl get {DEFINITIONS} -A");
        Self::new(http, format!("NetworkAttachmentDefinition {object}"), permission, kubectl)
    }

    /// Lists a page of the NetworkAttachmentDefinitions named `name` in all namespaces.
    pub(super) fn definitions_named(name: &str, page: Page<'_>) -> Result<Self, Error> {
        check_names("NetworkAttachmentDefinition", [name])?;
        let collection = RequestBuilder::new(format!("{DEFINITIONS_API}/{DEFINITIONS}"));
        let http = collection.list(&page.of(ListParams::default().fields(&format!("metadata.name={name}"))));
        let permission = format!("list {DEFINITIONS}.k8s.cni.cncf.io");
        let kubectl = format!("kubectl get {DEFINITIONS} -A");
        Self::new(http, format!("NetworkAttachmentDefinitions named {name}"), permission, kubectl)
    }

    /// Sets a pod's network-status annotation. With the pod's UID in the patch, the API answers with a conflict if
    /// another pod of the same name has replaced it (apimachinery: `metadata.uid` is a precondition of an update).
    pub(super) fn network_status(pod: &Pod, status: &str) -> Result<Self, Error> {
        let mut metadata = json!({"annotations": {NETWORK_STATUS: status}});
        if let Some(uid) = &pod.uid {
            metadata["uid"] = json!(uid);
        }
        Self::patch_pod_status(pod, json!({"metadata": metadata}))
    }

    /// Sets a label of a pod that still has this `resourceVersion`.
    pub(super) fn label(pod: &Pod, resource_version: &str, (key, value): (&str, &str)) -> Result<Self, Error> {
        let metadata = json!({"uid": pod.uid, "resourceVersion": resource_version, "labels": {key: value}});
        Self::patch_pod_status(pod, json!({"metadata": metadata}))
    }

    /// Sets the condition `detour.io/policy` of a pod. The pod's UID is a precondition. If the status has changed, the
    /// time of the transition is the current time; otherwise it remains.
    pub(super) fn policy_condition(
        pod: &PodRef,
        condition: &PolicyCondition,
        has_changed_status: bool,
    ) -> Result<Self, Error> {
        let status = if condition.is_current { "True" } else { "False" };
        // Escaped because `kubectl describe` prints it to a terminal.
        let message = line(&condition.message);
        let mut body = json!({
            "type": POLICY_CONDITION, "status": status, "reason": condition.reason,
            "message": cut(&message, MAX_EVENT_MESSAGE),
        });
        if has_changed_status {
            body["lastTransitionTime"] = json!(now());
        }
        let PodRef { namespace, name, uid } = pod;
        // A merge patch would replace the other conditions.
        let patch = Patch::Strategic(json!({"metadata": {"uid": uid}, "status": {"conditions": [body]}}));
        Self::patch_status(namespace, name, &patch)
    }

    fn patch_pod_status(Pod { namespace, name, .. }: &Pod, patch: Value) -> Result<Self, Error> {
        Self::patch_status(namespace, name, &Patch::Merge(patch))
    }

    fn patch_status(namespace: &str, name: &str, patch: &Patch<Value>) -> Result<Self, Error> {
        check_names("pod", [namespace, name])?;
        let pods = namespaced(namespace, "pods");
        let http = pods.patch_subresource("status", name, &PatchParams::default(), patch);
        Self::of_pod(http, (namespace, name), "patch pods/status")
    }

    /// Deletes a pod that still has this `resourceVersion`.
    pub(super) fn deletion(pod: &Pod, resource_version: &str) -> Result<Self, Error> {
        let Pod { namespace, name, uid, .. } = pod;
        check_names("pod", [namespace, name])?;
        let preconditions = Preconditions { uid: uid.clone(), resource_version: Some(resource_version.to_owned()) };
        let http = namespaced(namespace, "pods").delete(name, &DeleteParams::default().preconditions(preconditions));
        Self::of_pod(http, (namespace, name), "delete pods")
    }

    /// Creates an Event (k8s.io/api, `core/v1`) about a pod, with the current time.
    pub(super) fn event(pod: &Pod, event: &Event) -> Result<Self, Error> {
        let Pod { namespace, name, .. } = pod;
        check_names("pod", [namespace, name])?;
        let body = event_body(pod, event).to_string();
        let http = namespaced(namespace, "events").create(&PostParams::default(), body.into());
        Self::of_pod(http, (namespace, name), "create events")
    }

    /// Lists a page of the Events about a pod.
    pub(super) fn events_of(PodRef { namespace, name, .. }: &PodRef, page: Page<'_>) -> Result<Self, Error> {
        check_names("pod", [namespace, name])?;
        let fields = format!("involvedObject.kind=Pod,involvedObject.name={name}");
        let http = namespaced(namespace, "events").list(&page.of(ListParams::default().fields(&fields)));
        let permission = format!("list events in namespace {namespace}");
        let kubectl = format!("kubectl get namespace {namespace}");
        Self::new(http, format!("events of pod {namespace}/{name}"), permission, kubectl)
    }

    /// Lists the pods that are scheduled to a node, page by page.
    pub(super) fn pods_of_node(node: &str, namespace: Option<&str>, page: Page<'_>) -> Result<Self, Error> {
        check_names("pods", [node].into_iter().chain(namespace))?;
        let within = namespace.map(|name| format!(" in namespace {name}")).unwrap_or_default();
        let collection = match namespace {
            Some(namespace) => namespaced(namespace, "pods"),
            None => RequestBuilder::new("/api/v1/pods"),
        };
        let http = collection.list(&page.of(ListParams::default().fields(&format!("spec.nodeName={node}"))));
        Self::new(http, format!("pods on node {node}{within}"), format!("list pods{within}"), "kubectl get pods".into())
    }

    /// Lists the namespaces, page by page.
    pub(super) fn namespaces(page: Page<'_>) -> Result<Self, Error> {
        let http = RequestBuilder::new("/api/v1/namespaces").list(&page.of(ListParams::default()));
        Self::new(http, "namespaces".to_owned(), "list namespaces".to_owned(), "kubectl get namespaces".to_owned())
    }

    /// Gets a node.
    pub(super) fn node(name: &str) -> Result<Self, Error> {
        check_names("node", [name])?;
        let http = RequestBuilder::new("/api/v1/nodes").get(name, &GetParams::default());
        Self::of_node(http, name, "get nodes")
    }

    /// Replaces the taints of a node that still has its `resource_version`.
    pub(super) fn taints(NodeTaints { name, resource_version, taints }: &NodeTaints) -> Result<Self, Error> {
        check_names("node", [name])?;
        let patch = json!({"metadata": {"resourceVersion": resource_version}, "spec": {"taints": taints}});
        let nodes = RequestBuilder::new("/api/v1/nodes");
        let http = nodes.patch(name, &PatchParams::default(), &Patch::Merge(patch));
        Self::of_node(http, name, "patch nodes")
    }

    /// Creates a token of a service account (`TokenRequest`, k8s.io/api, `authentication/v1`) for the API itself, bound to
    /// `node`.
    pub(super) fn token(account: &ObjectRef, node: Option<&str>, lifetime: Duration) -> Result<Self, Error> {
        let ObjectRef { namespace, name } = account;
        check_names("ServiceAccount", [namespace, name])?;
        let mut body = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [], "expirationSeconds": lifetime.as_secs()},
        });
        if let Some(node) = node {
            body["spec"]["boundObjectRef"] = json!({"kind": "Node", "apiVersion": "v1", "name": node});
        }
        let accounts = namespaced(namespace, "serviceaccounts");
        let http = accounts.create_subresource("token", name, &PostParams::default(), body.to_string().into());
        let permission = format!("create serviceaccounts/token of {name} in namespace {namespace}");
        let kubectl = format!("kubectl get serviceaccounts -n {namespace}");
        Self::new(http, format!("ServiceAccount {account}"), permission, kubectl)
    }

    /// Gets a DaemonSet. A 404 counts as "not found" only if it names the DaemonSet.
    pub(super) fn daemon_set(object: &ObjectRef) -> Result<Self, Error> {
        let http = daemon_sets(object)?.get(&object.name, &GetParams::default());
        Self::of_daemon_set(http, object)
    }

    /// Watches the metadata of a DaemonSet for `seconds`.
    ///
    /// The watch starts at [`ANY_VERSION`]: the object's own version may be older than the API server's watch cache,
    /// which is empty after each start of the server. Such a watch starts with the object, so no change is missed.
    pub(super) fn watch_daemon_set(object: &ObjectRef, seconds: u32) -> Result<Self, Error> {
        let params = WatchParams::default().disable_bookmarks().fields(&format!("metadata.name={}", object.name));
        let http = daemon_sets(object)?.watch_metadata(&params.timeout(seconds), ANY_VERSION);
        Self::of_daemon_set(http, object)
    }

    /// Gets the server's version.
    pub(super) fn version() -> Result<Self, Error> {
        let http = RequestBuilder::new("/version").list(&ListParams::default());
        Self::new(http, "the API server".to_owned(), "get /version".to_owned(), "kubectl version".to_owned())
    }

    /// Checks a permission of the client (`SelfSubjectAccessReview`, k8s.io/api, `authorization/v1`).
    pub(super) fn access_review(permission: &Permission) -> Result<Self, Error> {
        let mut attributes =
            json!({"verb": permission.verb, "group": permission.group, "resource": permission.resource});
        if let Some(subresource) = permission.subresource {
            attributes["subresource"] = json!(subresource);
        }
        if let Some(namespace) = &permission.namespace {
            attributes["namespace"] = json!(namespace);
        }
        let body = json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        });
        let reviews = RequestBuilder::new("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews");
        let http = reviews.create(&PostParams::default(), body.to_string().into());
        let needed = "create selfsubjectaccessreviews.authorization.k8s.io".to_owned();
        Self::new(http, format!("the permission to {permission}"), needed, "kubectl version".to_owned())
    }

    fn new(
        http: Result<Request<Vec<u8>>, impl Display>,
        subject: String,
        permission: String,
        kubectl: String,
    ) -> Result<Self, Error> {
        let http = http.map_err(|error| Error::new(Code::Internal, format!("{subject}: invalid request: {error}")))?;
        Ok(Self { http, subject, permission, kubectl, confirmed_by: None })
    }

    fn of_pod(
        http: Result<Request<Vec<u8>>, impl Display>,
        (namespace, name): (&str, &str),
        permission: &str,
    ) -> Result<Self, Error> {
        let permission = format!("{permission} in namespace {namespace}");
        Self::new(http, format!("pod {namespace}/{name}"), permission, format!("kubectl get pod -n {namespace} {name}"))
    }

    fn of_node(http: Result<Request<Vec<u8>>, impl Display>, name: &str, permission: &str) -> Result<Self, Error> {
        Self::new(http, format!("node {name}"), permission.to_owned(), format!("kubectl get node {name}"))
    }

    fn of_daemon_set(http: Result<Request<Vec<u8>>, impl Display>, object: &ObjectRef) -> Result<Self, Error> {
        let ObjectRef { namespace, name } = object;
        let permission = format!("get and watch daemonsets.apps called {name} in namespace {namespace}");
        let kubectl = format!("kubectl get daemonsets -n {namespace}");
        let request = Self::new(http, format!("DaemonSet {object}"), permission, kubectl)?;
        Ok(Self { confirmed_by: Some(name.clone()), ..request })
    }
}

/// A collection of the core API in a namespace.
fn namespaced(namespace: &str, resource: &str) -> RequestBuilder {
    RequestBuilder::new(format!("/api/v1/namespaces/{namespace}/{resource}"))
}

fn daemon_sets(ObjectRef { namespace, name }: &ObjectRef) -> Result<RequestBuilder, Error> {
    check_names("DaemonSet", [namespace, name])?;
    Ok(RequestBuilder::new(format!("/apis/apps/v1/namespaces/{namespace}/daemonsets")))
}

/// Checks that names, which become part of a URL, are valid names of objects. `source` is where they come from.
fn check_names<'a>(
    source: &str,
    names: impl IntoIterator<Item = &'a (impl AsRef<str> + ?Sized + 'a)>,
) -> Result<(), Error> {
    let mut names = names.into_iter().map(AsRef::as_ref);
    let Some(name) = names.find(|name| !is_dns_subdomain(name)) else { return Ok(()) };
    let expected = "expected lower-case letters, digits, '-' and '.', with a letter or digit at both ends";
    Err(Error::new(Code::Environment, format!("{source}: invalid object name {name:?}; {expected}")))
}

/// Returns the current time as Kubernetes writes it.
fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// The message is escaped because `kubectl describe` prints it to a terminal. The agent's admission policy checks the
/// source, which contains the node.
fn event_body(pod: &Pod, event: &Event) -> Value {
    let now = now();
    let mut source = json!({"component": "detour"});
    if let Some(node) = &pod.node_name {
        source["host"] = node.as_str().into();
    }
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": format!("{}.", pod.name), "namespace": pod.namespace},
        "involvedObject": {
            "apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid,
        },
        "type": if event.warning { "Warning" } else { "Normal" },
        "reason": event.reason,
        "message": cut(&line(&event.message), MAX_EVENT_MESSAGE),
        "source": source,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    })
}

/// The number of objects of a page of ordinary size.
pub(super) const PAGE: u32 = 250;

/// A page: the version of the list, and how it continues.
#[derive(Debug, Clone, Copy)]
pub(super) struct Page<'a> {
    /// The number of objects.
    pub(super) size: u32,
    /// The token of the page before; `None` for the first page.
    pub(super) continued: Option<&'a str>,
}

impl Page<'_> {
    /// Whether the page has several objects, so that a smaller one may be small enough.
    pub(super) const fn can_shrink(self) -> bool {
        self.size > 1
    }

    /// Whether it is the first attempt to get a list.
    pub(super) const fn is_first(self) -> bool {
        self.size == PAGE && self.continued.is_none()
    }

    /// Adds this page to the parameters of a list.
    pub(super) fn of(self, params: ListParams) -> ListParams {
        ListParams { limit: Some(self.size), continue_token: self.continued.map(str::to_owned), ..params }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_names_become_part_of_a_url() {
        let check = |name: &str| check_names("CNI_ARGS", [name]);
        for name in ["a", "web-0", "coredns-5d78c9869d-x2x7p", "static.node1.example.com"] {
            check(name).expect("a valid name");
        }
        for name in ["", ".", "..", "a/b", "a?watch=1", "a%2f", "A", "a b", "-a", "a.", "ä"] {
            let error = check(name).expect_err("an invalid name");
            assert_eq!(error.code, Code::Environment);
            assert!(error.msg.starts_with("CNI_ARGS: "), "{error}");
        }
    }

    #[test]
    fn an_events_message_is_printable_and_short() {
        let message = |text: String| {
            let event = Event { message: text, ..Event::default() };
            event_body(&Pod::default(), &event)["message"].as_str().map(str::to_owned).expect("text")
        };
        assert_eq!(message("a\u{1b}[2J\n\u{202e}".into()), "a\\u{1b}[2J\\n\\u{202e}");
        let long = message("ä\u{1b}".repeat(100_000));
        assert!(long.len() <= MAX_EVENT_MESSAGE && long.ends_with('…'), "{long}");
    }

    #[test]
    fn an_event_names_the_pods_node_as_its_source() {
        let source = |node_name: Option<&str>| {
            let pod = Pod { node_name: node_name.map(str::to_owned), ..Pod::default() };
            event_body(&pod, &Event::default())["source"].clone()
        };
        assert_eq!(source(Some("node-1")), json!({"component": "detour", "host": "node-1"}));
        assert_eq!(source(None), json!({"component": "detour"}));
    }
}
