//! One thing that the API is asked for or told, and what each outcome means to whoever waits for it.

use super::body::TooLarge;
use super::retry::{AttemptError, RetriesExhausted};
use super::{Event, NodeTaints, ObjectRef, Right, certificate};
use crate::cni::{Code, Error};
use crate::pod::{Pod, PodRef};
use serde::Deserialize;
use serde_json::Value;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// What is asked for or told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Object<'a> {
    /// A pod.
    Pod(&'a PodRef),
    /// The namespace of a pod.
    PodNamespace(&'a PodRef),
    /// A definition.
    Definition(&'a ObjectRef),
    /// The definitions of this name, in all namespaces.
    DefinitionsNamed(&'a str),
    /// The value of a pod's network-status annotation.
    NetworkStatus(&'a Pod, &'a str),
    /// An event of a pod.
    Event(&'a Pod, &'a Event),
    /// A new token of a service account, valid for so long.
    Token(&'a ObjectRef, Duration),
    /// A DaemonSet.
    DaemonSet(&'a ObjectRef),
    /// The end of a pod that still has this `resourceVersion`.
    Deletion(&'a Pod, &'a str),
    /// A label of a pod that still has this `resourceVersion`: key and value.
    Label(&'a Pod, &'a str, (&'a str, &'a str)),
    /// A node.
    Node(&'a String),
    /// All taints of a node that still is as it was read.
    Taints(&'a NodeTaints),
    /// The server's version.
    Version,
    /// Whether whoever asks has a right.
    Review(&'a Right),
    /// The events about a pod.
    EventsOf(&'a PodRef),
    /// The pods of a namespace on a node.
    PodsOn {
        /// The namespace.
        namespace: &'a String,
        /// The node.
        node: &'a str,
    },
}

/// A request about an object.
#[derive(Debug, Clone, Copy)]
pub(super) struct Query<'a> {
    /// What it is about.
    pub(super) object: Object<'a>,
    /// The API server's address, without a slash at its end.
    pub(super) server: &'a str,
    /// The kubeconfig that names it.
    pub(super) kubeconfig: &'a Path,
}

impl<'a> Object<'a> {
    fn method(self) -> &'static str {
        match self {
            Object::NetworkStatus(..) | Object::Label(..) | Object::Taints(_) => "PATCH",
            Object::Event(..) | Object::Token(..) | Object::Review(_) => "POST",
            Object::Deletion(..) => "DELETE",
            _ => "GET",
        }
    }

    fn path(self) -> String {
        let collection = self.collection();
        match self {
            Object::Pod(PodRef { name, .. })
            | Object::Definition(ObjectRef { name, .. })
            | Object::DaemonSet(ObjectRef { name, .. }) => format!("{collection}/{name}"),
            Object::Token(account, _) => format!("{collection}/{}/token", account.name),
            Object::PodNamespace(pod) => format!("{collection}/{}", pod.namespace),
            Object::NetworkStatus(pod, _) | Object::Label(pod, ..) => format!("{collection}/{}/status", pod.name),
            Object::Deletion(pod, _) => format!("{collection}/{}", pod.name),
            Object::Node(name) | Object::Taints(NodeTaints { name, .. }) => format!("{collection}/{name}"),
            Object::DefinitionsNamed(_)
            | Object::Event(..)
            | Object::Version
            | Object::Review(_)
            | Object::EventsOf(_)
            | Object::PodsOn { .. } => collection,
        }
    }

    /// The collection's path.
    pub(super) fn collection(self) -> String {
        let of = |namespace: &str, kind: &str| format!("/api/v1/namespaces/{namespace}/{kind}");
        match self {
            Object::Pod(pod) => of(&pod.namespace, "pods"),
            Object::PodNamespace(_) => "/api/v1/namespaces".to_owned(),
            Object::Definition(object) => format!("{DEFINITIONS}/namespaces/{}/{KIND}", object.namespace),
            Object::DefinitionsNamed(_) => format!("{DEFINITIONS}/{KIND}"),
            Object::NetworkStatus(pod, _) | Object::Deletion(pod, _) | Object::Label(pod, ..) => {
                of(&pod.namespace, "pods")
            }
            Object::Node(_) | Object::Taints(_) => "/api/v1/nodes".to_owned(),
            Object::Event(pod, _) => of(&pod.namespace, "events"),
            Object::Token(account, _) => of(&account.namespace, "serviceaccounts"),
            Object::DaemonSet(object) => format!("/apis/apps/v1/namespaces/{}/daemonsets", object.namespace),
            Object::Version => "/version".to_owned(),
            Object::Review(_) => "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews".to_owned(),
            Object::EventsOf(pod) => of(&pod.namespace, "events"),
            Object::PodsOn { namespace, .. } => of(namespace, "pods"),
        }
    }

    /// The object, where there is one: what it is and how it is called.
    fn about(self) -> String {
        match self {
            Object::Pod(PodRef { namespace, name, .. }) | Object::PodNamespace(PodRef { namespace, name, .. }) => {
                format!("pod {namespace}/{name}")
            }
            Object::NetworkStatus(Pod { namespace, name, .. }, _)
            | Object::Event(Pod { namespace, name, .. }, _)
            | Object::Deletion(Pod { namespace, name, .. }, _)
            | Object::Label(Pod { namespace, name, .. }, ..) => format!("pod {namespace}/{name}"),
            Object::Node(name) | Object::Taints(NodeTaints { name, .. }) => format!("node {name}"),
            Object::Definition(object) => format!("NetworkAttachmentDefinition {object}"),
            Object::DefinitionsNamed(name) => format!("NetworkAttachmentDefinitions called {name}"),
            Object::Token(account, _) => format!("ServiceAccount {account}"),
            Object::DaemonSet(object) => format!("DaemonSet {object}"),
            Object::Version => "the API server".to_owned(),
            Object::Review(right) => format!("the right to {right}"),
            Object::EventsOf(PodRef { namespace, name, .. }) => format!("events of pod {namespace}/{name}"),
            Object::PodsOn { namespace, node } => format!("pods of namespace {namespace} on node {node}"),
        }
    }
}

/// The API of definitions, and their resource in it.
const DEFINITIONS: &str = "/apis/k8s.cni.cncf.io/v1";
const KIND: &str = "network-attachment-definitions";

impl Query<'_> {
    /// The right that is needed, as `kubectl auth can-i` spells it.
    fn right(&self) -> String {
        match self.object {
            Object::Pod(pod) => format!("get pods in namespace {}", pod.namespace),
            Object::PodNamespace(_) => "get namespaces".to_owned(),
            Object::Definition(ObjectRef { namespace, .. }) => {
                format!("get {KIND}.k8s.cni.cncf.io in namespace {namespace}")
            }
            Object::DefinitionsNamed(_) => format!("list {KIND}.k8s.cni.cncf.io"),
            Object::NetworkStatus(pod, _) | Object::Label(pod, ..) => {
                format!("patch pods/status in namespace {}", pod.namespace)
            }
            Object::Deletion(pod, _) => format!("delete pods in namespace {}", pod.namespace),
            Object::Node(_) => "get nodes".to_owned(),
            Object::Taints(_) => "patch nodes".to_owned(),
            Object::Event(pod, _) => format!("create events in namespace {}", pod.namespace),
            Object::Token(ObjectRef { namespace, name }, _) => {
                format!("create serviceaccounts/token of {name} in namespace {namespace}")
            }
            Object::DaemonSet(ObjectRef { namespace, name }) => {
                format!("get and watch daemonsets.apps called {name} in namespace {namespace}")
            }
            Object::Version => "get /version".to_owned(),
            Object::Review(_) => "create selfsubjectaccessreviews.authorization.k8s.io".to_owned(),
            Object::EventsOf(pod) => format!("list events in namespace {}", pod.namespace),
            Object::PodsOn { namespace, .. } => format!("list pods in namespace {namespace}"),
        }
    }

    fn error(&self, code: Code, what: impl fmt::Display) -> Error {
        Error::new(code, format!("{self}: {what}"))
    }

    /// A response other than 200.
    pub(super) fn refused(&self, status: u16, retry_after: Option<&str>, body: &[u8]) -> AttemptError {
        let said = message(body);
        let kubeconfig = self.kubeconfig.display();
        let answer = if said.is_empty() { status.to_string() } else { format!("{status}, {said}") };
        let hopeless = |error: Error| AttemptError::Hopeless(error.with_details(said));
        match status {
            // A server that does not serve all yet, or something before it, knows of nothing.
            404 if matches!(&self.object, Object::DaemonSet(object) if !is_missing(&object.name, body)) => {
                AttemptError::Trouble { cause: answer, after: None }
            }
            404 => AttemptError::Missing(answer),
            408 | 429 | 500.. => AttemptError::Trouble {
                cause: answer,
                after: retry_after.and_then(|seconds| seconds.trim().parse().ok()).map(Duration::from_secs),
            },
            401 => hopeless(self.error(
                Code::Forbidden,
                format!(
                    "401, the credentials in {kubeconfig} are not accepted: have them renewed by what writes that file"
                ),
            )),
            403 => hopeless(self.error(
                Code::Forbidden,
                format!(
                    "403, the credentials in {kubeconfig} lack the right to {}: grant it in a ClusterRole",
                    self.right()
                ),
            )),
            409 | 422 => hopeless(
                self.error(Code::PodUnknown, format!("{status}, it is not as it was, or another one of its name")),
            ),
            _ => hopeless(self.error(
                Code::InvalidConfig,
                format!("{status}, which is not the answer of a Kubernetes API: correct server in {kubeconfig}"),
            )),
        }
    }

    /// What would be worth another try, but not here.
    pub(super) fn not_again(&self, cause: &str) -> AttemptError {
        AttemptError::Hopeless(self.error(Code::TryAgain, "it can't be done now").with_details(cause))
    }

    /// What was there and can't come again.
    pub(super) fn gone(&self, cause: &str) -> AttemptError {
        AttemptError::Hopeless(self.error(Code::PodUnknown, "it is gone").with_details(cause))
    }

    /// What is not there, and how it was looked for.
    pub(super) fn missing(&self, RetriesExhausted { last, tries, waited }: RetriesExhausted) -> String {
        let cause = match last {
            AttemptError::Missing(cause) | AttemptError::Trouble { cause, .. } => cause,
            AttemptError::Hopeless(error) => error.to_string(),
        };
        format!("{self}: not found in {}: {cause}", effort(tries, waited))
    }

    /// A response of 200 that isn't the object.
    pub(super) fn garbled(&self, error: &serde_json::Error) -> AttemptError {
        AttemptError::Trouble { cause: format!("200, but the body is not the object: {error}"), after: None }
    }

    /// No response.
    pub(super) fn failed(&self, error: &kube::Error) -> AttemptError {
        if let Some(too_large) = TooLarge::of(error) {
            let step =
                format!("this is not the answer of a Kubernetes API: correct server in {}", self.kubeconfig.display());
            return AttemptError::Hopeless(self.error(Code::InvalidConfig, format!("{too_large}; {step}")));
        }
        let cause = causes(error);
        match certificate::next_step(&cause) {
            Some(step) => AttemptError::Hopeless(self.error(Code::InvalidConfig, step).with_details(cause)),
            None => AttemptError::Trouble { cause, after: None },
        }
    }

    /// The end of all tries.
    pub(super) fn gave_up(&self, RetriesExhausted { last, tries, waited }: RetriesExhausted) -> Error {
        let effort = effort(tries, waited);
        match last {
            AttemptError::Hopeless(error) => error,
            AttemptError::Missing(cause) => {
                let step = match self.object {
                    Object::PodNamespace(pod) => format!("see kubectl get namespace {}", pod.namespace),
                    Object::Pod(PodRef { namespace, name, .. })
                    | Object::NetworkStatus(Pod { namespace, name, .. }, _)
                    | Object::Event(Pod { namespace, name, .. }, _)
                    | Object::Deletion(Pod { namespace, name, .. }, _)
                    | Object::Label(Pod { namespace, name, .. }, ..) => {
                        format!("see kubectl get pod -n {namespace} {name}")
                    }
                    Object::Node(name) | Object::Taints(NodeTaints { name, .. }) => {
                        format!("see kubectl get node {name}")
                    }
                    Object::Definition(_) | Object::DefinitionsNamed(_) => format!("see kubectl get {KIND} -A"),
                    Object::Token(ObjectRef { namespace, .. }, _) => {
                        format!("see kubectl get serviceaccounts -n {namespace}")
                    }
                    Object::DaemonSet(ObjectRef { namespace, .. }) => {
                        format!("see kubectl get daemonsets -n {namespace}")
                    }
                    Object::Version | Object::Review(_) => "see kubectl version".to_owned(),
                    Object::EventsOf(PodRef { namespace, .. }) | Object::PodsOn { namespace, .. } => {
                        format!("see kubectl get namespace {namespace}")
                    }
                };
                let what = format!("not found in {effort}: it is gone, or the kubeconfig is another cluster's; {step}");
                self.error(Code::PodUnknown, what).with_details(cause)
            }
            AttemptError::Trouble { cause, .. } => {
                let what = format!("no usable answer in {effort}: see whether this node reaches the API server");
                self.error(Code::TryAgain, what).with_details(cause)
            }
        }
    }
}

impl fmt::Display for Query<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (about, server, kubeconfig) = (self.object.about(), self.server, self.kubeconfig.display());
        write!(f, "{about}: {} {server}{} (kubeconfig {kubeconfig})", self.object.method(), self.object.path())
    }
}

fn effort(tries: u32, waited: Duration) -> String {
    let count = if tries == 1 { "1 try".to_owned() } else { format!("{tries} tries") };
    format!("{count} within {:.1} s", waited.as_secs_f32())
}

/// What the server said of its refusal: the message of a `Status`, else the body's beginning.
fn message(body: &[u8]) -> String {
    const LONGEST: usize = 300;
    #[derive(Deserialize)]
    struct ApiStatus {
        message: String,
    }
    let text = match serde_json::from_slice::<ApiStatus>(body) {
        Ok(status) => status.message,
        Err(_) => String::from_utf8_lossy(body).into_owned(),
    };
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(LONGEST).collect()
}

/// Whether the server says of the object `name` that there is none (apimachinery, `errors.NewNotFound`).
fn is_missing(name: &str, body: &[u8]) -> bool {
    let said: Value = serde_json::from_slice(body).unwrap_or_default();
    said["reason"] == "NotFound" && said["details"]["name"] == name
}

/// The error and its sources in one line, each text once; kube's own words add nothing.
pub(crate) fn causes(error: &kube::Error) -> String {
    let mut line = String::new();
    let mut next = std::error::Error::source(error);
    while let Some(source) = next {
        let text = source.to_string();
        if !line.contains(&text) {
            line = if line.is_empty() { text } else { format!("{line}: {text}") };
        }
        next = source.source();
    }
    if line.is_empty() { error.to_string() } else { line }
}
