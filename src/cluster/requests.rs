//! What the node's agent asks for its own sake: a token for the plugin, and whether it is to come back.
//!
//! What the node's agent does to objects of the cluster; the plugin's calls never do.
//!
//! A service account's token.
//!
//! What somebody may do in the cluster.
//!
//! What the cluster's users are told about a pod.

use super::kubeconfig::base64;
use super::{Cluster, ObjectRef, ServiceAccount};
use crate::cni::Error;
use crate::pod::Pod;
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

/// How long an answer may take that nobody else waits for, all tries together.
const WATCH_TIMEOUT: Duration = Duration::from_secs(5);

/// Credentials are read anew for each question: they change while the agent stays.
impl ServiceAccount {
    /// A new token of the service account `of`, for about `lifetime`: the API server may shorten that.
    /// It is bound to no pod (k8s.io/api, `authentication/v1`, `BoundObjectReference`).
    ///
    /// # Errors
    /// What the API refuses, or that it gives no answer within five seconds.
    pub fn token(&self, of: &ObjectRef, lifetime: Duration) -> Result<Token, Error> {
        self.api(WATCH_TIMEOUT).token(of, lifetime)
    }

    /// Whether a DaemonSet is there and nobody has deleted it; `within` that time.
    ///
    /// # Errors
    /// What the API refuses, or that it gives no answer.
    pub fn has(&self, daemon_set: &ObjectRef, within: Duration) -> Result<bool, Error> {
        self.api(within).has(daemon_set)
    }

    /// Tells whether that DaemonSet is there, at once and whenever that changes, until some minutes are
    /// over or it is not there any more.
    ///
    /// # Errors
    /// As [`Self::token`]; the connection ends.
    pub fn watch(&self, daemon_set: &ObjectRef, tell: impl FnMut(bool)) -> Result<(), Error> {
        self.api(WATCH_TIMEOUT).watch(daemon_set, tell)
    }
}

/// How long each request may take, all tries together.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(10);

/// A node, as far as its taints need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeTaints {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.resourceVersion`.
    pub resource_version: String,
    /// `spec.taints`, each as it came.
    pub taints: Vec<Value>,
}

/// Credentials are read anew for each thing that is done: they change while the agent stays.
impl ServiceAccount {
    /// Records an event of a pod (`create events`).
    ///
    /// # Errors
    /// As [`Cluster::report`].
    pub fn tell(&self, pod: &Pod, event: &Event) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).report(pod, None, std::slice::from_ref(event))
    }

    /// Deletes a pod, if it still is the one of this UID and `resourceVersion` (`delete pods`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`]: it is gone or is not as it was; else as
    /// [`Cluster::report`].
    pub fn delete(&self, pod: &Pod, resource_version: &str) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).delete(pod, resource_version)
    }

    /// Gives a pod a label, if it still is the one of this UID and `resourceVersion` (`patch
    /// pods/status`).
    ///
    /// # Errors
    /// As [`ServiceAccount::delete`].
    pub fn label(&self, pod: &Pod, resource_version: &str, label: (&str, &str)) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).label(pod, resource_version, label)
    }

    /// A node (`get nodes`).
    ///
    /// # Errors
    /// It is not there, or can't be known.
    pub fn node(&self, name: &str) -> Result<NodeTaints, Error> {
        self.api(CONTROL_TIMEOUT).node(&name.to_owned())
    }

    /// Gives a node these taints, all of them, if it still has its `resource_version` (`patch nodes`).
    ///
    /// # Errors
    /// [`crate::cni::Code::PodUnknown`]: another process changed it meanwhile, or it is gone; else as
    /// [`ServiceAccount::node`].
    pub fn taint(&self, node: &NodeTaints) -> Result<(), Error> {
        self.api(CONTROL_TIMEOUT).taint(node)
    }
}

/// A bearer token, and until when it is accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// What a request carries.
    pub text: String,
    /// From when on it is refused.
    pub expires: Timestamp,
}

/// What such a token says of itself (RFC 7519; the subject is `system:serviceaccount:NAMESPACE:NAME`).
#[derive(Deserialize)]
struct TokenClaims {
    sub: String,
    exp: i64,
}

impl Token {
    /// The token `text`, if it is one of the service account `name` in `namespace`. Only the API server
    /// can tell whether it is genuine.
    #[must_use]
    pub fn of_account(text: &str, namespace: &str, name: &str) -> Option<Self> {
        let claims = text.split('.').nth(1)?.replace('-', "+").replace('_', "/");
        let padding = "=".repeat((4 - claims.len() % 4) % 4);
        let claims: TokenClaims = serde_json::from_slice(&base64(&(claims + &padding)).ok()?).ok()?;
        let subject = format!("system:serviceaccount:{namespace}:{name}");
        let expires = Timestamp::from_second(claims.exp).ok()?;
        (claims.sub == subject).then(|| Self { text: text.to_owned(), expires })
    }
}

/// A right, in the words of a Role's rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Right {
    /// `get`, `list`, `patch`, `create`.
    pub verb: &'static str,
    /// The API group; empty for the core's.
    pub group: &'static str,
    /// The resource, plural.
    pub resource: &'static str,
    /// `status`.
    pub subresource: Option<&'static str>,
    /// In which namespace; `None` is in all.
    pub namespace: Option<String>,
}

impl fmt::Display for Right {
    /// As `kubectl auth can-i` spells it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if let Some(subresource) = self.subresource {
            write!(f, "/{subresource}")?;
        }
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        match &self.namespace {
            Some(namespace) => write!(f, " in namespace {namespace}"),
            None => f.write_str(" in all namespaces"),
        }
    }
}

/// An event of a pod, as `kubectl describe pod` shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Event {
    /// Whether something should be looked at (`type: Warning`).
    pub warning: bool,
    /// Why, in one word for programs.
    pub reason: Cow<'static, str>,
    /// What happened, for people.
    pub message: String,
}

/// An event as others told it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedEvent {
    /// Whether something should be looked at (`type: Warning`).
    pub warning: bool,
    /// Why, in one word for programs.
    pub reason: String,
    /// What happened, for people.
    pub message: String,
    /// Who told it (`source.component`, or `reportingComponent`).
    pub by: String,
    /// When it was told last, in seconds since 1970; 0 where it does not say.
    pub last: i64,
    /// How often.
    pub count: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_known_by_its_subject() {
        // {"sub":"system:serviceaccount:kube-system:detour-plugin","exp":1800000000,"a":"??>>"}
        let text = "e30.eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6a3ViZS1zeXN0ZW06ZGV0b3VyLXBsdWdpbiIsImV4cCI6MTgwMDAwMDAwMC\
                    wiYSI6Ij8_Pj4ifQ.c2ln";
        let token = Token::of_account(text, "kube-system", "detour-plugin").expect("its token");
        assert_eq!((token.text.as_str(), token.expires.as_second()), (text, 1_800_000_000));
        assert_eq!(Token::of_account(text, "kube-system", "detour-agent"), None);
        for other in ["", "first-token", "a.b.c", "a.e30.c"] {
            assert_eq!(Token::of_account(other, "kube-system", "detour-plugin"), None, "{other}");
        }
    }
}
