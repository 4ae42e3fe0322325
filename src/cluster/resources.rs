//! Kubernetes resources as plain values: names, NetworkAttachmentDefinitions, tokens, permissions, Events and
//! scheduled pods, each with the fields that this program uses.

use crate::pod::Pod;
use crate::pod::well_known::RESOURCE_NAME;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

/// The name of a namespaced object. `Display` gives `NAMESPACE/NAME`.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ObjectRef {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A NetworkAttachmentDefinition.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Definition {
    /// Its namespace and name.
    pub object: ObjectRef,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
    /// `spec.config`, byte for byte; empty if the object has no such field.
    pub config: String,
}

impl Definition {
    /// The largest `spec.config`, in bytes: the limit for all annotations of an object. A larger one is truncated
    /// one character after this limit, so that its length still shows that it is too large.
    pub const MAX_CONFIG: usize = 256 << 10;

    /// Returns the name of the device plugin's resource that the definition requests.
    #[must_use]
    pub fn resource_name(&self) -> Option<&str> {
        self.annotations.get(RESOURCE_NAME).map(String::as_str)
    }
}

/// A definition to look up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DefinitionQuery {
    /// Its namespace and name.
    pub object: ObjectRef,
    /// Whether to retry for a short time while the definition does not exist, because it may be about to be created.
    /// Otherwise the first "not found" is the result.
    pub awaited: bool,
}

/// The result of looking up a definition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lookup {
    /// The definition exists.
    Found(Definition),
    /// The definition does not exist; the text names the source, the time spent and the response.
    Missing(String),
}

/// A service account's bearer token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// The value for the `Authorization` header.
    pub text: String,
    /// The time from which the API server refuses it.
    pub expires: Timestamp,
}

/// Claims of a token (RFC 7519). The subject of a service account is `system:serviceaccount:NAMESPACE:NAME`; `exp` may have
/// a fraction.
#[derive(Deserialize)]
pub(super) struct TokenClaims {
    #[serde(default)]
    sub: String,
    exp: Option<f64>,
}

impl TokenClaims {
    /// Returns the claims of a JSON Web Token (RFC 7515, section 7.1); `None` if `token` is not one. The signature is not
    /// verified: only the API server can do that.
    pub(super) fn of(token: &str) -> Option<Self> {
        let [_, claims, _] = token.split('.').collect::<Vec<_>>()[..] else { return None };
        serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(claims).ok()?).ok()
    }

    /// Returns when the token expires, in seconds since 1970; `None` if it does not expire. The cast saturates.
    pub(super) fn expires(&self) -> Option<i64> {
        self.exp.map(|seconds| seconds as i64)
    }
}

impl Token {
    /// Parses `text` as a token of the service account `name` in `namespace`; `None` if it is not one.
    #[must_use]
    pub fn of_account(text: &str, namespace: &str, name: &str) -> Option<Self> {
        let claims =
            TokenClaims::of(text).filter(|it| it.sub == format!("system:serviceaccount:{namespace}:{name}"))?;
        let expires = Timestamp::from_second(claims.expires()?).ok()?;
        Some(Self { text: text.to_owned(), expires })
    }
}

/// A permission in all namespaces, in the terms of an RBAC rule. `Display` gives it as `kubectl auth can-i` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permission {
    /// `get`, `list`, `patch`, `create`.
    pub verb: &'static str,
    /// The API group; empty for the core group.
    pub group: &'static str,
    /// The resource, in the plural.
    pub resource: &'static str,
    /// The subresource, such as `status`.
    pub subresource: Option<&'static str>,
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if let Some(subresource) = self.subresource {
            write!(f, "/{subresource}")?;
        }
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        f.write_str(" in all namespaces")
    }
}

/// An Event of a pod to record; `kubectl describe pod` shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Event {
    /// Whether the type is `Warning` instead of `Normal`.
    pub warning: bool,
    /// The reason, one word for programs.
    pub reason: Cow<'static, str>,
    /// The message for people.
    pub message: String,
}

/// A pod that is scheduled to a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScheduledPod {
    /// The pod.
    pub pod: Pod,
    /// The workload that manages it; `None` for a pod without a controller.
    pub workload: Option<Workload>,
    /// Whether its containers have not started.
    pub is_pending: bool,
    /// Whether its containers have ended, or it is being deleted.
    pub is_ending: bool,
}

/// The object with a pod's template.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Workload {
    /// `kind`.
    pub kind: String,
    /// `metadata.name`.
    pub name: String,
}

impl Workload {
    /// Returns the workload of a pod with this controller. A Deployment names its ReplicaSets by adding the pods' label
    /// `pod-template-hash` to its own name.
    pub(super) fn of(kind: &str, name: &str, template_hash: Option<&str>) -> Self {
        let deployment = template_hash.and_then(|hash| name.strip_suffix(hash)?.strip_suffix('-'));
        let (kind, name) = match deployment.filter(|_| kind == "ReplicaSet") {
            Some(deployment) => ("Deployment", deployment),
            None => (kind, name),
        };
        Self { kind: kind.to_owned(), name: name.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_recognized_by_its_subject() {
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

    #[test]
    fn the_expiry_is_read_from_the_claims() {
        let expiry = |token: &str| TokenClaims::of(token).and_then(|claims| claims.expires());
        // {"exp":1893456000,"aud":["??>"]}
        assert_eq!(expiry("e30.eyJleHAiOjE4OTM0NTYwMDAsImF1ZCI6WyI_Pz4iXX0.c2ln"), Some(1_893_456_000));
        for none in ["opaque", "e30.e30.c2ln", "a.b", "e30.%%.c", "e30.eyJleHAiOjF9.c.d"] {
            assert_eq!(expiry(none), None, "{none}");
        }
    }
}
