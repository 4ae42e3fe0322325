//! One object that the API is asked for, and what each outcome means to whoever waits for it.

use super::certificate;
use super::retry::{Failure, GaveUp};
use crate::cni::{Code, Error};
use crate::pod::PodRef;
use serde::Deserialize;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// Which object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Object {
    /// The pod.
    Pod,
    /// The pod's namespace.
    Namespace,
}

/// A GET for a pod's sake.
#[derive(Debug, Clone, Copy)]
pub(super) struct Query<'a> {
    /// What is asked for.
    pub(super) object: Object,
    /// The pod that it is about.
    pub(super) wanted: &'a PodRef,
    /// The API server's address, without a slash at its end.
    pub(super) server: &'a str,
    /// The kubeconfig that names it.
    pub(super) kubeconfig: &'a Path,
}

impl Query<'_> {
    /// The collection's path and the object's name in it.
    pub(super) fn path(&self) -> (String, &str) {
        let PodRef { namespace, name, .. } = self.wanted;
        match self.object {
            Object::Pod => (format!("/api/v1/namespaces/{namespace}/pods"), name),
            Object::Namespace => ("/api/v1/namespaces".to_owned(), namespace),
        }
    }

    /// The right that is needed, as `kubectl auth can-i` spells it.
    fn right(&self) -> String {
        match self.object {
            Object::Pod => format!("get pods in namespace {}", self.wanted.namespace),
            Object::Namespace => "get namespaces".to_owned(),
        }
    }

    fn error(&self, code: Code, what: impl fmt::Display) -> Error {
        Error::new(code, format!("{self}: {what}"))
    }

    /// A response other than 200.
    pub(super) fn refused(&self, status: u16, retry_after: Option<&str>, body: &[u8]) -> Failure {
        let said = message(body);
        let kubeconfig = self.kubeconfig.display();
        let answer = if said.is_empty() { status.to_string() } else { format!("{status}, {said}") };
        let hopeless = |error: Error| Failure::Hopeless(error.with_details(said));
        match status {
            404 => Failure::Missing(answer),
            408 | 429 | 500.. => Failure::Trouble {
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
            _ => hopeless(self.error(
                Code::InvalidConfig,
                format!("{status}, which is not the answer of a Kubernetes API: correct server in {kubeconfig}"),
            )),
        }
    }

    /// A response of 200 that isn't the object.
    pub(super) fn garbled(&self, error: &serde_json::Error) -> Failure {
        Failure::Trouble { cause: format!("200, but the body is not the object: {error}"), after: None }
    }

    /// No response.
    pub(super) fn failed(&self, error: &kube::Error) -> Failure {
        let cause = causes(error);
        match certificate::next_step(&cause) {
            Some(step) => Failure::Hopeless(self.error(Code::InvalidConfig, step).with_details(cause)),
            None => Failure::Trouble { cause, after: None },
        }
    }

    /// The end of all tries.
    pub(super) fn gave_up(&self, GaveUp { last, tries, waited }: GaveUp) -> Error {
        let PodRef { namespace, name, .. } = self.wanted;
        let count = if tries == 1 { "1 try".to_owned() } else { format!("{tries} tries") };
        let effort = format!("{count} within {:.1} s", waited.as_secs_f32());
        match last {
            Failure::Hopeless(error) => error,
            Failure::Missing(cause) => {
                let step = match self.object {
                    Object::Pod => format!("see kubectl get pod -n {namespace} {name}"),
                    Object::Namespace => format!("see kubectl get namespace {namespace}"),
                };
                let what = format!("not found in {effort}: it is gone, or the kubeconfig is another cluster's; {step}");
                self.error(Code::PodUnknown, what).with_details(cause)
            }
            Failure::Trouble { cause, .. } => {
                let what = format!("no usable answer in {effort}: see whether this node reaches the API server");
                self.error(Code::TryAgain, what).with_details(cause)
            }
        }
    }
}

impl fmt::Display for Query<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PodRef { namespace, name, .. } = self.wanted;
        let (collection, object) = self.path();
        let (server, kubeconfig) = (self.server, self.kubeconfig.display());
        write!(f, "pod {namespace}/{name}: GET {server}{collection}/{object} (kubeconfig {kubeconfig})")
    }
}

/// What the server said of its refusal: the message of a `Status`, else the body's beginning.
fn message(body: &[u8]) -> String {
    const LONGEST: usize = 300;
    #[derive(Deserialize)]
    struct Status {
        message: String,
    }
    let text = match serde_json::from_slice::<Status>(body) {
        Ok(status) => status.message,
        Err(_) => String::from_utf8_lossy(body).into_owned(),
    };
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(LONGEST).collect()
}

/// The error and its sources in one line, each text once; kube's own words add nothing.
fn causes(error: &kube::Error) -> String {
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
