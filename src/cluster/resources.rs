//! Kubernetes objects: the fields that this program reads, in the format of the API and of manifests (k8s.io/api,
//! `core/v1`), and the plain values that they become. `null` is accepted for an absent value everywhere, because Go writes
//! empty lists and maps as `null`.

use crate::cni::null_is_empty;
use crate::pod::well_known::{DATAPLANE_MODE, RESOURCE_NAME};
use crate::pod::{self, Pod};
use k8s_openapi::api::core::v1::{ContainerStatus, EnvVar, PodDNSConfig, PodIP};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

/// The namespace of a manifest without one, for kubectl and the API.
pub(super) const DEFAULT_NAMESPACE: &str = "default";

/// The metadata of an object (apimachinery, `ObjectMeta`).
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Metadata {
    pub(crate) name: String,
    pub(crate) namespace: Option<String>,
    uid: Option<String>,
    #[serde(default, deserialize_with = "null_is_empty")]
    pub(crate) resource_version: String,
    deletion_timestamp: Option<IgnoredAny>,
    #[serde(default, deserialize_with = "null_is_empty")]
    pub(crate) labels: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "null_is_empty")]
    pub(crate) annotations: BTreeMap<String, String>,
    owner_references: Option<Vec<OwnerReference>>,
}

impl Metadata {
    /// Whether the object is being deleted: with `--cascade=foreground` it exists until the objects that it owns are
    /// deleted.
    pub(crate) const fn is_deleting(&self) -> bool {
        self.deletion_timestamp.is_some()
    }

    /// Returns the controller that replaces the object when it is deleted.
    pub(crate) fn controller(&self) -> Option<&OwnerReference> {
        self.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
    }
}

/// An object: its metadata, and the parts of its specification and its status that are read.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Object<S = IgnoredAny, T = IgnoredAny> {
    pub(crate) metadata: Metadata,
    pub(super) spec: Option<S>,
    pub(crate) status: Option<T>,
}

pub(crate) type PodObject = Object<PodSpec, PodStatus>;
pub(crate) type NamespaceObject = Object;
pub(crate) type DefinitionObject = Object<DefinitionSpec>;
pub(super) type DaemonSetObject = Object;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodSpec {
    node_name: Option<String>,
    host_network: Option<bool>,
    host_users: Option<bool>,
    security_context: Option<SecurityContext>,
    dns_config: Option<PodDNSConfig>,
    init_containers: Option<Vec<ContainerObject>>,
    containers: Option<Vec<ContainerObject>>,
    ephemeral_containers: Option<Vec<ContainerObject>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SecurityContext {
    run_as_user: Option<i64>,
    run_as_group: Option<i64>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerObject {
    name: String,
    args: Option<Vec<String>>,
    env: Option<Vec<EnvVar>>,
    security_context: Option<SecurityContext>,
    restart_policy: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodStatus {
    #[serde(default, deserialize_with = "null_is_empty")]
    pub(super) phase: String,
    #[serde(rename = "podIP")]
    address: Option<String>,
    #[serde(rename = "podIPs")]
    addresses: Option<Vec<PodIP>>,
    #[serde(default, deserialize_with = "null_is_empty")]
    pub(crate) init_container_statuses: Vec<ContainerStatus>,
}

impl PodStatus {
    /// Returns whether all containers have ended and are not started again.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.phase.as_str(), "Succeeded" | "Failed")
    }

    /// Returns the valid addresses, sorted.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        let all = self.address.iter().chain(self.addresses.iter().flatten().map(|address| &address.ip));
        let mut addresses: Vec<IpAddr> = all.filter_map(|text| text.parse().ok()).collect();
        addresses.sort();
        addresses.dedup();
        addresses
    }
}

impl From<PodObject> for Pod {
    fn from(PodObject { metadata, spec, status }: PodObject) -> Self {
        let spec = spec.unwrap_or_default();
        let context = spec.security_context.unwrap_or_default();
        let all = |containers: Option<Vec<ContainerObject>>| containers.into_iter().flatten().map(Into::into).collect();
        Self {
            addresses: status.map(|status| status.addresses()).unwrap_or_default(),
            namespace: metadata.namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()),
            name: metadata.name,
            uid: metadata.uid,
            labels: metadata.labels,
            annotations: metadata.annotations,
            node_name: spec.node_name,
            host_network: spec.host_network == Some(true),
            has_own_users: spec.host_users == Some(false),
            run_as_user: context.run_as_user,
            run_as_group: context.run_as_group,
            dns_nameservers: spec.dns_config.and_then(|dns| dns.nameservers).unwrap_or_default(),
            init_containers: all(spec.init_containers),
            containers: all(spec.containers),
            ephemeral_containers: all(spec.ephemeral_containers),
        }
    }
}

impl From<ContainerObject> for pod::Container {
    fn from(container: ContainerObject) -> Self {
        let context = container.security_context.unwrap_or_default();
        let literal = |v: EnvVar| v.value_from.is_none().then(|| (v.name, v.value.unwrap_or_default()));
        Self {
            name: container.name,
            args: container.args.unwrap_or_default(),
            env: container.env.into_iter().flatten().filter_map(literal).collect(),
            run_as_user: context.run_as_user,
            run_as_group: context.run_as_group,
            restarts_always: container.restart_policy.as_deref() == Some("Always"),
        }
    }
}

impl From<NamespaceObject> for pod::Namespace {
    fn from(NamespaceObject { metadata, .. }: NamespaceObject) -> Self {
        let Metadata { name, labels, annotations, .. } = metadata;
        let dataplane_mode = labels.get(DATAPLANE_MODE).cloned();
        Self { name, annotations, labels, dataplane_mode, incomplete: false }
    }
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct NodeSpec {
    /// Kept unchanged, because they are sent back.
    #[serde(default, deserialize_with = "null_is_empty")]
    pub(super) taints: Vec<Value>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct DefinitionSpec {
    config: Option<String>,
}

impl From<DefinitionObject> for Definition {
    fn from(DefinitionObject { metadata, spec, .. }: DefinitionObject) -> Self {
        let mut config = spec.and_then(|spec| spec.config).unwrap_or_default();
        if config.len() > Self::MAX_CONFIG {
            config.truncate(config.ceil_char_boundary(Self::MAX_CONFIG + 1));
            config.shrink_to_fit();
        }
        let namespace = metadata.namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
        Self { object: ObjectRef { namespace, name: metadata.name }, annotations: metadata.annotations, config }
    }
}

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
        let Self { verb, group, resource, subresource } = self;
        let subresource = subresource.map(|one| format!("/{one}")).unwrap_or_default();
        let dot = if group.is_empty() { "" } else { "." };
        write!(f, "{verb} {resource}{subresource}{dot}{group} in all namespaces")
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
    use serde_json::json;

    fn pod(value: Value) -> Pod {
        serde_json::from_value::<PodObject>(value).expect("a pod").into()
    }

    #[test]
    fn all_fields_of_a_pod_are_converted() {
        let read = pod(json!({
            "kind": "Pod",
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"l": "1"}, "annotations": {"a": "2"}},
            "spec": {
                "nodeName": "worker-1",
                "hostNetwork": true,
                "securityContext": {"runAsUser": 4_294_967_294_u32, "runAsGroup": 8, "fsGroup": 9},
                "dnsConfig": {"nameservers": ["10.0.0.10"], "searches": ["x"]},
                "initContainers": [
                    {"name": "istio-proxy", "restartPolicy": "Always", "args": ["proxy"]},
                    {"name": "init", "restartPolicy": null}
                ],
                "containers": [{
                    "name": "app",
                    "securityContext": {"runAsUser": 1, "runAsGroup": 2},
                    "env": [
                        {"name": "A", "value": "1"},
                        {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                        {"name": "C"}
                    ]
                }],
                "ephemeralContainers": [{"name": "debugger", "targetContainerName": "app"}]
            },
            "status": {"phase": "Pending"}
        }));
        let container = |name: &str| pod::Container { name: name.into(), ..pod::Container::default() };
        let expected = Pod {
            addresses: Vec::new(),
            namespace: "n".into(),
            name: "p".into(),
            uid: Some("u".into()),
            labels: [("l".into(), "1".into())].into(),
            annotations: [("a".into(), "2".into())].into(),
            node_name: Some("worker-1".into()),
            host_network: true,
            has_own_users: false,
            run_as_user: Some(4_294_967_294),
            run_as_group: Some(8),
            dns_nameservers: vec!["10.0.0.10".into()],
            init_containers: vec![
                pod::Container { args: vec!["proxy".into()], restarts_always: true, ..container("istio-proxy") },
                container("init"),
            ],
            containers: vec![pod::Container {
                env: vec![("A".into(), "1".into()), ("C".into(), String::new())],
                run_as_user: Some(1),
                run_as_group: Some(2),
                ..container("app")
            }],
            ephemeral_containers: vec![container("debugger")],
        };
        assert_eq!(read, expected);
    }

    #[test]
    fn null_and_absent_values_are_empty() {
        let bare = pod(json!({"metadata": {"name": "p"}}));
        let null = pod(json!({
            "metadata": {"name": "p", "namespace": null, "uid": null, "labels": null, "annotations": null},
            "spec": {"hostNetwork": null, "securityContext": null, "dnsConfig": null, "initContainers": null,
                     "containers": null}
        }));
        let expected = Pod { namespace: "default".into(), name: "p".into(), ..Pod::default() };
        assert_eq!((bare, null), (expected.clone(), expected));

        let null = pod(json!({
            "metadata": {"name": "p"},
            "spec": {"dnsConfig": {"nameservers": null}, "containers": [
                {"name": "c", "args": null, "env": [{"name": "A", "value": null, "valueFrom": null}],
                 "securityContext": null}
            ]}
        }));
        assert_eq!(null.containers[0].env, [("A".to_owned(), String::new())]);
    }

    #[test]
    fn a_definition_that_is_too_large_is_truncated() {
        let read = |config: &str| {
            let object = json!({"metadata": {"name": "d"}, "spec": {"config": config}});
            Definition::from(serde_json::from_value::<DefinitionObject>(object).expect("a definition"))
        };
        const LIMIT: usize = Definition::MAX_CONFIG;
        assert_eq!(read(&"x".repeat(LIMIT)).config.len(), LIMIT);
        assert_eq!(read(&"x".repeat(5 * LIMIT)).config.len(), LIMIT + 1);
        assert_eq!(read(&"\u{1f300}".repeat(LIMIT)).config.len(), LIMIT + 4);
    }

    #[test]
    fn an_object_without_a_name_is_an_error() {
        assert!(serde_json::from_value::<PodObject>(json!({"kind": "Status", "metadata": {}, "code": 200})).is_err());
        assert!(serde_json::from_value::<NamespaceObject>(json!({"metadata": {}})).is_err());
    }
}
