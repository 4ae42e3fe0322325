//! The requests to the Kubernetes API: what is sent, and the errors about it, with the object, the request, the cause and
//! the next step.

use super::failure::{Failure, tls_step};
use crate::cluster::resources::Event;
use crate::cni::{Code, Error, is_dns_subdomain};
use crate::pod::Pod;
use crate::pod::well_known::NETWORK_STATUS;
use crate::printable::{cut, line};
use hyper::Request;
use k8s_openapi::jiff::Timestamp;
use kube::api::{GetParams, ListParams, Patch, PatchParams, PostParams, Request as Builder};
use serde_json::{Value, json};
use std::fmt::Display;
use std::path::Path;

/// A kind of objects, as the API names it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    /// The kind in messages.
    name: &'static str,
    /// The API group; empty for the core group.
    group: &'static str,
    plural: &'static str,
}

impl Kind {
    pub(crate) const POD: Self = Self::core("pod", "pods");
    pub(crate) const NAMESPACE: Self = Self::core("namespace", "namespaces");
    pub(crate) const DEFINITION: Self = Self {
        name: "NetworkAttachmentDefinition",
        group: "k8s.cni.cncf.io",
        plural: "network-attachment-definitions",
    };
    pub(super) const EVENT: Self = Self::core("event", "events");
    pub(super) const DAEMON_SET: Self = Self { name: "DaemonSet", group: "apps", plural: "daemonsets" };
    pub(super) const NODE: Self = Self::core("node", "nodes");
    pub(super) const SERVICE_ACCOUNT: Self = Self::core("ServiceAccount", "serviceaccounts");
    pub(super) const ACCESS_REVIEW: Self =
        Self { name: "the permission to", group: "authorization.k8s.io", plural: "selfsubjectaccessreviews" };

    const fn core(name: &'static str, plural: &'static str) -> Self {
        Self { name, group: "", plural }
    }

    /// Returns the resource, as permissions name it.
    pub(crate) fn resource(self) -> String {
        if self.group.is_empty() { self.plural.to_owned() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// Returns a builder of requests to the collection; all kinds have version v1.
    pub(super) fn requests(self, namespace: Option<&str>) -> Builder {
        let api = if self.group.is_empty() { "/api".to_owned() } else { format!("/apis/{}", self.group) };
        let within = namespace.map(|namespace| format!("/namespaces/{namespace}")).unwrap_or_default();
        Builder::new(format!("{api}/v1{within}/{}", self.plural))
    }
}

/// The objects of one kind, or some of them.
pub(crate) struct Collection {
    /// The kind.
    pub(crate) kind: Kind,
    /// The namespace; `None` for all.
    pub(crate) namespace: Option<String>,
    /// Selects the objects with this value of a field; `None` for all.
    pub(crate) field: Option<(&'static str, String)>,
    /// Whether the server sends only `metadata` of each object.
    pub(crate) metadata_only: bool,
}

impl Collection {
    /// Returns the objects of a kind, all or those with a value of a field.
    pub(crate) fn new(kind: Kind, namespace: Option<&str>, field: Option<(&'static str, &str)>) -> Self {
        let field = field.map(|(name, value)| (name, value.to_owned()));
        Self { kind, namespace: namespace.map(str::to_owned), field, metadata_only: false }
    }

    /// Returns a builder of requests, and the selector of the objects.
    pub(super) fn requests(&self) -> (Builder, Option<String>) {
        let selector = self.field.as_ref().map(|(name, value)| format!("{name}={value}"));
        (self.kind.requests(self.namespace.as_deref()), selector)
    }
}

/// The object of a request: its kind, its namespace unless it is cluster-scoped, and its name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target<'a>(pub(super) Kind, pub(super) Option<&'a str>, pub(super) &'a str);

/// A request to the API, and the texts for errors about it.
#[derive(Debug, Clone)]
pub(super) struct ApiRequest {
    /// What is sent.
    pub(super) http: Request<Vec<u8>>,
    /// The object, for messages: kind and name.
    subject: String,
    /// The permission that the request needs, as `kubectl auth can-i` spells it.
    permission: String,
    /// The name that an answer with status 404 must contain to count as "not found".
    pub(super) confirmed_by: Option<String>,
}

/// The maximum length of an Event's message in bytes; `events.k8s.io` rejects longer ones (`NoteLengthLimit`).
const MAX_EVENT_MESSAGE: usize = 1024;

impl ApiRequest {
    /// Gets an object.
    pub(super) fn get(kind: Kind, namespace: Option<&str>, name: &str) -> Result<Self, Error> {
        let target = Target(kind, namespace, name);
        Self::of_object("get", &kind.resource(), target, |objects| objects.get(name, &GetParams::default()))
    }

    /// Lists a collection. `subject` describes it in messages.
    pub(super) fn list(collection: &Collection, subject: String) -> Result<Self, Error> {
        let Collection { kind, namespace, field, .. } = collection;
        check_names(kind.name, namespace.iter().chain(field.iter().map(|(_, value)| value)).map(String::as_str))?;
        let permission = format!("list {}{}", kind.resource(), in_namespace(namespace.as_deref()));
        Self::of(collection.requests().0.list(&ListParams::default()), subject, permission)
    }

    /// Returns a request about an object. It needs the permission for `verb` and `resource`.
    pub(super) fn of_object<E: Display>(
        verb: &str,
        resource: &str,
        Target(kind, namespace, name): Target<'_>,
        build: impl FnOnce(Builder) -> Result<Request<Vec<u8>>, E>,
    ) -> Result<Self, Error> {
        check_names(kind.name, namespace.into_iter().chain([name]))?;
        let path = namespace.map(|namespace| format!("{namespace}/")).unwrap_or_default();
        let permission = format!("{verb} {resource}{}", in_namespace(namespace));
        Self::of(build(kind.requests(namespace)), format!("{} {path}{name}", kind.name), permission)
    }

    /// Returns a request with the texts for errors about it.
    pub(super) fn of(
        http: Result<Request<Vec<u8>>, impl Display>,
        subject: String,
        permission: String,
    ) -> Result<Self, Error> {
        let http = http.map_err(|error| Error::new(Code::Internal, format!("{subject}: invalid request: {error}")))?;
        Ok(Self { http, subject, permission, confirmed_by: None })
    }

    /// Returns the error for the last failure of a request: `OBJECT: REQUEST (kubeconfig FILE): CAUSE; NEXT STEP`.
    pub(super) fn error(&self, server: &str, kubeconfig: &Path, last: Failure) -> Error {
        let Failure { status, is_too_large, cause, .. } = last;
        let Self { http, subject, permission, .. } = self;
        let kubeconfig = kubeconfig.display();
        let credentials = format!("{status}, the credentials in {kubeconfig}");
        let other = format!("not the response of a Kubernetes API; correct server in {kubeconfig}");
        let (code, what) = match (status, tls_step(&cause)) {
            (0, Some(step)) => (Code::InvalidConfig, step.to_owned()),
            (0, None) if is_too_large => (Code::InvalidConfig, format!("{cause}; {other}")),
            (0 | 200..=299 | 408 | 429 | 500.., _) => {
                let next = "check that this machine can reach the API server";
                (Code::TryAgain, format!("no usable answer; {next}"))
            }
            (401, _) => {
                (Code::Forbidden, format!("{credentials} are not accepted; check the process that renews this file"))
            }
            (403, _) if cause.contains("ValidatingAdmissionPolicy") => {
                (Code::Forbidden, format!("403, an admission policy denies to {permission}"))
            }
            (403, _) => {
                let next = "grant it in a ClusterRole";
                (Code::Forbidden, format!("{credentials} lack the permission to {permission}; {next}"))
            }
            (404, _) => {
                let why = "it was deleted, or the kubeconfig is for another cluster; compare with kubectl get";
                (Code::PodUnknown, format!("not found: {why}"))
            }
            (409 | 422, _) => {
                (Code::PodUnknown, format!("{status}, the object was changed or replaced in the meantime"))
            }
            _ => (Code::InvalidConfig, format!("{status}, {other}")),
        };
        let path = http.uri().path();
        let msg = format!("{subject}: {} {server}{path} (kubeconfig {kubeconfig}): {what}", http.method());
        let details = match cause.strip_prefix(&format!("{status}, ")) {
            _ if is_too_large => "",
            // The message has the status.
            Some(message) if !matches!(status, 200..=299 | 404 | 408 | 429 | 500..) => message,
            _ => &cause,
        };
        Error::new(code, msg).with_details(details)
    }
}

/// Returns the scope of a permission, for messages.
pub(super) fn in_namespace(namespace: Option<&str>) -> String {
    namespace.map(|namespace| format!(" in namespace {namespace}")).unwrap_or_default()
}

/// Checks that names, which become part of a URL, are valid names of objects. `source` is what they name.
fn check_names<'a>(source: &str, names: impl IntoIterator<Item = &'a str>) -> Result<(), Error> {
    let Some(name) = names.into_iter().find(|name| !is_dns_subdomain(name)) else { return Ok(()) };
    let expected = "expected lower-case letters, digits, '-' and '.', with a letter or digit at both ends";
    Err(Error::new(Code::Environment, format!("{source}: invalid object name {name:?}; {expected}")))
}

/// Sets a pod's network-status annotation. With the pod's UID in the patch, the API answers with a conflict if another
/// pod of the same name has replaced it (apimachinery: `metadata.uid` is a precondition of an update).
pub(super) fn network_status(Pod { namespace, name, uid, .. }: &Pod, status: &str) -> Result<ApiRequest, Error> {
    let mut metadata = json!({"annotations": {NETWORK_STATUS: status}});
    if let Some(uid) = uid {
        metadata["uid"] = json!(uid);
    }
    let patch = Patch::Merge(json!({"metadata": metadata}));
    ApiRequest::of_object("patch", "pods/status", Target(Kind::POD, Some(namespace), name), |pods| {
        pods.patch_subresource("status", name, &PatchParams::default(), &patch)
    })
}

/// Creates an Event (k8s.io/api, `core/v1`) about a pod, with the current time.
pub(super) fn event(pod: &Pod, event: &Event) -> Result<ApiRequest, Error> {
    let body = event_body(pod, event).to_string();
    ApiRequest::of_object("create", "events", Target(Kind::POD, Some(&pod.namespace), &pod.name), |_| {
        Kind::EVENT.requests(Some(&pod.namespace)).create(&PostParams::default(), body.into())
    })
}

/// The message is escaped because `kubectl describe` prints it to a terminal. The agent's admission policy checks the
/// source, which contains the node.
fn event_body(pod: &Pod, event: &Event) -> Value {
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_names_become_part_of_a_url() {
        let check = |name: &str| check_names("pod", [name]);
        for name in ["a", "web-0", "coredns-5d78c9869d-x2x7p", "static.node1.example.com"] {
            check(name).expect("a valid name");
        }
        for name in ["", ".", "..", "a/b", "a?watch=1", "a%2f", "A", "a b", "-a", "a.", "ä"] {
            let error = check(name).expect_err("an invalid name");
            assert_eq!(error.code, Code::Environment);
            assert!(error.msg.starts_with("pod: "), "{error}");
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
