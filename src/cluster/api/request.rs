//! The requests to the Kubernetes API: what is sent, and the errors about it, with the object, the request, the cause and
//! the next step. `kube` hides the type of rustls' errors, so they are recognized by their text, that of rustls 0.23.

use crate::cluster::resources::Event;
use crate::cni::{Code, Error, is_dns_subdomain};
use crate::pod::Pod;
use crate::pod::well_known::NETWORK_STATUS;
use crate::printable::{cut, line, without_secrets};
use hyper::Request;
use hyper::http::response::Parts;
use k8s_openapi::jiff::Timestamp;
use kube::api::{GetParams, ListParams, Patch, PatchParams, PostParams, Request as Builder, WatchParams};
use kube::core::{Status, request};
use serde_json::{Value, json};
use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

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

    fn selector(&self) -> Option<String> {
        self.field.as_ref().map(|(name, value)| format!("{name}={value}"))
    }

    /// Lists the objects.
    pub(super) fn list(&self, params: ListParams) -> Result<Request<Vec<u8>>, request::Error> {
        let params = ListParams { field_selector: self.selector(), ..params };
        let objects = self.kind.requests(self.namespace.as_deref());
        if self.metadata_only { objects.list_metadata(&params) } else { objects.list(&params) }
    }

    /// Watches the objects from `version` on.
    pub(super) fn watch(&self, params: WatchParams, version: &str) -> Result<Request<Vec<u8>>, request::Error> {
        let params = WatchParams { field_selector: self.selector(), ..params };
        let objects = self.kind.requests(self.namespace.as_deref());
        if self.metadata_only { objects.watch_metadata(&params, version) } else { objects.watch(&params, version) }
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
        Self::of(collection.list(ListParams::default()), subject, permission)
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
        Ok(Self { http, subject, permission })
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

/// Why a request failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub(crate) struct Failure {
    /// The status of the API server's answer; 0 without one.
    pub(crate) status: u16,
    /// Whether the answer exceeds its limit.
    pub(crate) is_too_large: bool,
    /// The cause in one line.
    pub(crate) cause: String,
    /// The answer's `Retry-After`.
    pub(super) retry_after: Option<Duration>,
}

impl Failure {
    /// Returns a failure without an answer.
    pub(crate) fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), ..Self::default() }
    }

    /// Returns the failure of a request for an object that does not exist, or only an earlier one of the same name.
    pub(super) fn not_found(cause: String) -> Self {
        Self { status: 404, ..Self::new(cause) }
    }

    /// Returns the failure of a request whose answer is not what was requested.
    pub(super) fn unexpected(why: impl Display) -> Self {
        let why = without_secrets(&why.to_string());
        Self { status: 200, ..Self::new(format!("200, but the body is not the expected object: {why}")) }
    }

    /// Returns the failure of an answer that is larger than `limit`.
    pub(super) fn too_large(limit: usize) -> Self {
        Self { is_too_large: true, ..Self::new(format!("expected a response of at most {limit} bytes, got more")) }
    }

    /// Returns the failure that a `Status` reports.
    pub(crate) fn of_status(status: u16, message: &str) -> Self {
        let line = cut(message, 16 * MAX_CHARS).split_whitespace().collect::<Vec<_>>().join(" ");
        let line: String = without_secrets(&line).chars().take(MAX_CHARS).collect();
        let cause = if line.is_empty() { status.to_string() } else { format!("{status}, {line}") };
        Self { status, ..Self::new(cause) }
    }

    /// Returns the failure of an answer that is not a success.
    pub(super) fn of_answer(head: &Parts, body: &[u8]) -> Self {
        let status: Status = serde_json::from_slice(body).unwrap_or_default();
        let text = String::from_utf8_lossy(if status.message.is_empty() { body } else { status.message.as_bytes() });
        let retry_after = head.headers.get("retry-after").and_then(|value| value.to_str().ok());
        Self {
            retry_after: retry_after.and_then(|seconds| seconds.trim().parse().ok()).map(Duration::from_secs),
            ..Self::of_status(head.status.as_u16(), &text)
        }
    }

    /// Returns whether the API server may answer the same request differently later.
    pub(super) fn is_transient(&self) -> bool {
        match self.status {
            0 => !self.is_too_large && tls_step(&self.cause).is_none(),
            status => matches!(status, 200..=299 | 408 | 429 | 500..),
        }
    }
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::of_status(status.code, &status.message),
            kube::Error::SerdeError(why) => Self::unexpected(why),
            other => Self::new(causes(&other)),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(error.to_string())
    }
}

/// The maximum length of a server's text in an error.
const MAX_CHARS: usize = 300;

/// Returns the sources of an error in one line, each text once; kube's own text adds nothing to them.
fn causes(error: &kube::Error) -> String {
    let sources = std::iter::successors(std::error::Error::source(error), |error| error.source());
    let line = sources.map(ToString::to_string).fold(String::new(), |line, text| match line.contains(&text) {
        _ if line.is_empty() => text,
        true => line,
        false => format!("{line}: {text}"),
    });
    let line = if line.is_empty() { error.to_string() } else { line };
    without_secrets(&line)
}

/// What rustls' reasons for rejecting the server's certificate contain, in small letters and without spaces, with the next
/// step for each.
const SERVER_STEPS: [(&str, &str); 6] = [
    ("causedasendentity", "the server presents a CA certificate; issue a serving certificate (CA:FALSE) for it"),
    ("unknownissuer", "not signed by certificate-authority(-data); copy the cluster's current CA there"),
    ("badsignature", "not signed by certificate-authority(-data); copy the cluster's current CA there"),
    ("expired", "the server's certificate has expired; renew it, or correct this node's clock"),
    ("notvalidyet", "the server's certificate is not valid yet; correct this node's clock"),
    ("notvalidforname", "the server's certificate is for other names; set server or tls-server-name to one of them"),
];

/// Parts of the names of alerts about a client's certificate (RFC 8446, section 6).
const CLIENT_ALERTS: [&str; 3] = ["Certificate", "UnknownCA", "AccessDenied"];

/// The alerts of a server, and the text of rustls, if client and server have no parameter in common.
const NOTHING_IN_COMMON: [&str; 4] =
    ["alert: HandshakeFailure", "alert: ProtocolVersion", "alert: InsufficientSecurity", "peer is incompatible: "];

/// Returns the next step for a TLS error; `None` if a retry may help.
pub(super) fn tls_step(cause: &str) -> Option<&'static str> {
    if let Some((_, reason)) = cause.split_once("invalid peer certificate: ") {
        let reason = reason.replace(' ', "").to_lowercase();
        let known = SERVER_STEPS.iter().find(|(text, _)| reason.contains(text));
        let other = "the server's certificate can't be verified; issue one that its clients can verify: with RSA of at \
                     least 2048 bits, ECDSA P-256 or P-384, or Ed25519";
        return Some(known.map_or(other, |(_, step)| step));
    }
    if NOTHING_IN_COMMON.iter().any(|text| cause.contains(text)) {
        return Some(
            "the server offers no TLS parameters that this client supports; enable one of each on the server: TLS 1.3 or \
             1.2; X25519, P-256 or P-384; AES-GCM or ChaCha20-Poly1305 with ECDHE; a certificate with RSA of at least \
             2048 bits, ECDSA P-256 or P-384, or Ed25519",
        );
    }
    let (_, alert) = cause.split_once("received fatal alert: ")?;
    CLIENT_ALERTS.iter().any(|part| alert.contains(part)).then_some(
        "the server requires a client certificate that it accepts; renew client-certificate(-data) in the kubeconfig",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::UnixTime;
    use rustls::{AlertDescription, CertificateError, OtherError};
    use std::sync::Arc;

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

    fn step(error: &rustls::Error) -> Option<&'static str> {
        tls_step(&format!("client error (Connect): {error}"))
    }

    #[test]
    fn each_certificate_error_of_rustls_has_its_next_step() {
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let name = "localhost".try_into().expect("a name");
        let ca = OtherError(Arc::new(std::io::Error::other("CaUsedAsEndEntity")));
        let rows = [
            (CertificateError::UnknownIssuer, "not signed by"),
            (CertificateError::BadSignature, "not signed by"),
            (CertificateError::Expired, "has expired"),
            (CertificateError::ExpiredContext { time: at(2), not_after: at(1) }, "has expired"),
            (CertificateError::NotValidYet, "not valid yet"),
            (CertificateError::NotValidYetContext { time: at(1), not_before: at(2) }, "not valid yet"),
            (CertificateError::NotValidForName, "tls-server-name"),
            (CertificateError::NotValidForNameContext { expected: name, presented: vec![] }, "tls-server-name"),
            (CertificateError::Other(ca), "CA:FALSE"),
            (CertificateError::BadEncoding, "clients can verify"),
        ];
        for (reason, expected) in rows {
            let found = step(&rustls::Error::InvalidCertificate(reason.clone())).unwrap_or_default();
            assert!(found.contains(expected), "{reason:?}: {found}");
        }
    }

    #[test]
    fn a_server_without_common_parameters_has_a_next_step() {
        for error in [
            rustls::Error::AlertReceived(AlertDescription::HandshakeFailure),
            rustls::Error::AlertReceived(AlertDescription::ProtocolVersion),
            rustls::Error::PeerIncompatible(rustls::PeerIncompatible::NoKxGroupsInCommon),
        ] {
            assert!(step(&error).is_some_and(|step| step.contains("P-256 or P-384")), "{error}");
        }
    }

    #[test]
    fn only_alerts_that_a_retry_can_not_change_have_a_next_step() {
        let step = |alert| step(&rustls::Error::AlertReceived(alert));
        assert!(step(AlertDescription::CertificateRequired).is_some());
        assert!(step(AlertDescription::UnknownCA).is_some());
        assert_eq!(step(AlertDescription::InternalError), None);
        assert_eq!(tls_step("connection refused"), None);
    }
}
