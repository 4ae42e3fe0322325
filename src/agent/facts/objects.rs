//! The watched kinds of objects. Only the parts that the agent uses are parsed, and only some of them are cached.

use super::reduced::{cut, minimize_pod, reduce_namespace, reduce_pod};
use crate::cluster::wire::{ContainerStatus, DefinitionObject, Metadata, NamespaceObject, PodObject};
use crate::cluster::{Definition, Kind, ObjectRef};
use crate::pod::well_known::PROXY_CONTAINER;
use crate::pod::{Container, Namespace, Pod};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// A pod of the node, as the watch observed it last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObservedPod {
    /// The properties that decide about its traffic.
    pub pod: Pod,
    /// `metadata.resourceVersion`, the precondition for changing or deleting it.
    pub resource_version: String,
    /// Whether a controller replaces it when it is deleted (`metadata.ownerReferences` with `controller: true`, except
    /// for the mirror of a static pod).
    pub owned: bool,
    /// Whether its containers have ended.
    pub has_ended: bool,
    /// Whether it is being deleted. Its containers run until they end, at the latest after a time that its author selects.
    pub is_deleting: bool,
    /// `status.podIPs`, sorted.
    pub addresses: Vec<IpAddr>,
    /// The containers of `status.initContainerStatuses` that have ended at least once.
    pub ended_init_containers: Vec<EndedContainer>,
    /// Whether labels, annotations or containers are missing because the agent's memory has no room for them.
    pub incomplete: bool,
}

impl ObservedPod {
    /// Returns `NAMESPACE/NAME`.
    pub(in crate::agent) fn full_name(&self) -> String {
        format!("{}/{}", self.pod.namespace, self.pod.name)
    }
}

/// How an init container ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EndedContainer {
    /// The name of the container.
    pub name: String,
    /// Whether its last run succeeded (`state.terminated.exitCode` is 0).
    pub succeeded: bool,
    /// The exit code of its last failure, from `state.terminated` or else `lastState.terminated`.
    pub last_failure: Option<i32>,
    /// The `message` of that failure.
    pub message: String,
}

/// A watched kind: the cached part of an object.
pub(super) trait WatchedKind: Sized + Send + Sync + 'static {
    /// The read parts of the object as the API server sends it. All others, such as `metadata.managedFields`, take no
    /// memory.
    type Sent: DeserializeOwned + Clone + Send + 'static;
    /// The plural in log messages.
    const PLURAL: &str;
    /// The value of the metrics' label `kind`.
    const METRICS_KIND: &str;
    /// The kind of the objects.
    const KIND: Kind;
    /// Whether the agent needs only `metadata` of the objects.
    const METADATA_ONLY: bool = false;

    /// Returns the metadata.
    fn metadata(sent: &Self::Sent) -> &Metadata;
    /// Extracts the cached part.
    fn from_sent(sent: Self::Sent) -> Self;
    /// Returns the name of the object, with an empty namespace for a cluster-scoped one.
    fn name(&self) -> ObjectRef;
    /// The maximum weight of a cached object. A heavier one is reduced.
    const MAX_WEIGHT: usize;
    /// Returns about how many bytes of memory the object takes.
    fn weight(&self) -> usize;
    /// Returns all that the agent's decisions need of an object that is too heavy; `None` if they need nothing.
    fn reduced(&self) -> Option<Self>;
    /// Returns an incomplete object, with what has a small limit; `None` if the agent's decisions need nothing.
    fn minimal(&self) -> Option<Self>;
}

impl WatchedKind for ObservedPod {
    type Sent = PodObject;
    const PLURAL: &str = "pods of this node";
    const METRICS_KIND: &str = "pods";
    const KIND: Kind = Kind::POD;

    fn metadata(sent: &PodObject) -> &Metadata {
        &sent.metadata
    }

    fn from_sent(mut sent: PodObject) -> Self {
        trim(&mut sent.metadata);
        let (status, metadata) = (sent.status.take().unwrap_or_default(), &mut sent.metadata);
        let (is_deleting, controlled) = (metadata.is_deleting(), metadata.controller().is_some());
        let resource_version = std::mem::take(&mut metadata.resource_version);
        let mut pod: Pod = sent.into();
        pod.ephemeral_containers.clear();
        // Only those of the proxy decide about the pod's traffic.
        for container in pod.containers.iter_mut().chain(&mut pod.init_containers) {
            if container.name != PROXY_CONTAINER {
                (container.env, container.args) = (Vec::new(), Vec::new());
            }
        }
        Self {
            owned: controlled && !pod.is_mirror(),
            pod,
            resource_version,
            has_ended: status.has_ended(),
            is_deleting,
            addresses: status.addresses(),
            ended_init_containers: status.init_container_statuses.into_iter().filter_map(ended).collect(),
            incomplete: false,
        }
    }

    fn name(&self) -> ObjectRef {
        ObjectRef { namespace: self.pod.namespace.clone(), name: self.pod.name.clone() }
    }

    // The largest supported number of pods of a node (512) fits into the cache.
    const MAX_WEIGHT: usize = 48 << 10;

    fn reduced(&self) -> Option<Self> {
        let mut reduced = self.clone();
        reduce_pod(&mut reduced.pod);
        Some(reduced)
    }

    fn minimal(&self) -> Option<Self> {
        let mut minimal = Self { incomplete: true, ..self.clone() };
        minimize_pod(&mut minimal.pod);
        // A kubelet cuts messages, but other clients may write the status.
        minimal.ended_init_containers.truncate(MAX_ENDED_CONTAINERS);
        minimal.ended_init_containers.iter_mut().for_each(|it| cut(&mut it.message));
        Some(minimal)
    }

    fn weight(&self) -> usize {
        let texts = |texts: &[String]| texts.iter().map(|text| PER_TEXT + text.len()).sum::<usize>();
        let containers = self.pod.containers.iter().chain(&self.pod.init_containers);
        let container = |it: &Container| {
            let env = it.env.iter().map(|(name, value)| 2 * PER_TEXT + name.len() + value.len()).sum::<usize>();
            PER_OBJECT + it.name.len() + texts(&it.args) + env
        };
        let ended = self.ended_init_containers.iter().map(|it| 2 * PER_TEXT + it.name.len() + it.message.len());
        PER_OBJECT
            + map_weight(&self.pod.labels)
            + map_weight(&self.pod.annotations)
            + texts(&self.pod.dns_nameservers)
            + containers.map(container).chain(ended).sum::<usize>()
    }
}

/// The number of ended init containers of an incomplete pod.
const MAX_ENDED_CONTAINERS: usize = 16;
/// About how many bytes of memory a text takes besides its characters, and an object besides its texts.
const PER_TEXT: usize = 40;
const PER_OBJECT: usize = 150;

fn map_weight(map: &BTreeMap<String, String>) -> usize {
    map.iter().map(|(key, value)| 2 * PER_TEXT + key.len() + value.len()).sum()
}

/// Returns how a container ended; `None` if it has never ended.
fn ended(status: ContainerStatus) -> Option<EndedContainer> {
    let [now, before] = [status.state, status.last_state].map(|state| state.and_then(|state| state.terminated));
    if now.is_none() && before.is_none() {
        return None;
    }
    let succeeded = now.as_ref().is_some_and(|end| end.exit_code == 0);
    let failure = [now, before].into_iter().flatten().find(|end| end.exit_code != 0);
    let (last_failure, message) = failure.map(|end| (end.exit_code, end.message.unwrap_or_default())).unzip();
    Some(EndedContainer { name: status.name, succeeded, last_failure, message: message.unwrap_or_default() })
}

impl WatchedKind for Namespace {
    type Sent = NamespaceObject;
    const PLURAL: &str = "namespaces";
    const METRICS_KIND: &str = "namespaces";
    const KIND: Kind = Kind::NAMESPACE;
    const METADATA_ONLY: bool = true;

    fn metadata(sent: &NamespaceObject) -> &Metadata {
        &sent.metadata
    }

    fn from_sent(mut sent: NamespaceObject) -> Self {
        trim(&mut sent.metadata);
        sent.into()
    }

    fn name(&self) -> ObjectRef {
        ObjectRef { namespace: String::new(), name: self.name.clone() }
    }

    const MAX_WEIGHT: usize = 8 << 10;

    fn reduced(&self) -> Option<Self> {
        let mut reduced = self.clone();
        reduce_namespace(&mut reduced);
        Some(reduced)
    }

    fn minimal(&self) -> Option<Self> {
        let mut dataplane_mode = self.dataplane_mode.clone();
        dataplane_mode.iter_mut().for_each(cut);
        Some(Self { name: self.name.clone(), dataplane_mode, incomplete: true, ..Self::default() })
    }

    fn weight(&self) -> usize {
        let label = self.dataplane_mode.as_ref().map_or(0, |value| PER_TEXT + value.len());
        PER_OBJECT + map_weight(&self.annotations) + map_weight(&self.labels) + label
    }
}

impl WatchedKind for Definition {
    type Sent = DefinitionObject;
    const PLURAL: &str = "network attachment definitions";
    const METRICS_KIND: &str = "definitions";
    const KIND: Kind = Kind::DEFINITION;

    fn metadata(sent: &DefinitionObject) -> &Metadata {
        &sent.metadata
    }

    fn from_sent(mut sent: DefinitionObject) -> Self {
        trim(&mut sent.metadata);
        sent.into()
    }

    fn name(&self) -> ObjectRef {
        self.object.clone()
    }

    const MAX_WEIGHT: usize = 48 << 10;

    fn reduced(&self) -> Option<Self> {
        None
    }

    fn minimal(&self) -> Option<Self> {
        None
    }

    fn weight(&self) -> usize {
        PER_OBJECT + self.config.len() + map_weight(&self.annotations)
    }
}

/// The domains of the annotations that are read, with their subdomains.
const READ_DOMAINS: [&str; 6] = ["detour.io", "istio.io", "cncf.io", "openshift.io", "multus-cni.io", "kubernetes.io"];
/// The annotation of `kubectl apply` that repeats the whole object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// The maximum length of the value of another annotation, in bytes. At most, its presence is read.
const MAX_OTHER_VALUE: usize = 256;

/// Removes the annotations that are large and not read.
fn trim(Metadata { annotations, .. }: &mut Metadata) {
    annotations.remove(LAST_APPLIED);
    for (key, value) in annotations {
        let domain = key.split('/').next().unwrap_or_default();
        let is_read = |read: &&str| domain.strip_suffix(*read).is_some_and(|sub| sub.is_empty() || sub.ends_with('.'));
        if value.len() > MAX_OTHER_VALUE && !READ_DOMAINS.iter().any(is_read) {
            *value = String::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, from_value, json};

    fn observed(pod: Value) -> ObservedPod {
        ObservedPod::from_sent(from_value(pod).expect("a pod"))
    }

    #[test]
    fn every_cached_part_of_a_pod_is_read() {
        let read = observed(json!({
            "metadata": {
                "name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7", "labels": {"l": "1"},
                "annotations": {"a": "2", LAST_APPLIED: "{}"}, "managedFields": [{"manager": "m"}],
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "A", "name": "a", "uid": "1"},
                    {"apiVersion": "v1", "kind": "B", "name": "b", "uid": "2", "controller": true}
                ]
            },
            "spec": {"hostNetwork": true, "containers": [
                {"name": "c", "args": ["x"], "env": [{"name": "B", "value": "1"}]},
                {"name": "istio-proxy", "args": ["y"], "env": [{"name": "A", "value": "1"}]}
            ]},
            "status": {
                "phase": "Running", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}, {"ip": "?"}],
                "initContainerStatuses": [
                    {"name": "never", "state": {"running": {}}},
                    {"name": "fails", "state": {"terminated": {"exitCode": 126, "message": "why"}}},
                    {"name": "again", "state": {"waiting": {}}, "lastState": {"terminated": {"exitCode": 2}}},
                    {"name": "mended", "state": {"terminated": {"exitCode": 0}},
                     "lastState": {"terminated": {"exitCode": 3, "message": "old"}}}
                ]
            }
        }));
        let ended = |name: &str, succeeded, last_failure, message: &str| EndedContainer {
            name: name.into(),
            succeeded,
            last_failure,
            message: message.into(),
        };
        let pod: Pod = from_value::<PodObject>(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"l": "1"}, "annotations": {"a": "2"}},
            "spec": {"hostNetwork": true, "containers": [
                {"name": "c"}, {"name": "istio-proxy", "args": ["y"], "env": [{"name": "A", "value": "1"}]}
            ]}
        }))
        .expect("a pod")
        .into();
        let expected = ObservedPod {
            pod,
            resource_version: "7".into(),
            owned: true,
            has_ended: false,
            is_deleting: false,
            addresses: vec!["10.0.0.1".parse().expect("one"), "fd00::1".parse().expect("one")],
            ended_init_containers: vec![
                ended("fails", false, Some(126), "why"),
                ended("again", false, Some(2), ""),
                ended("mended", true, Some(3), "old"),
            ],
            incomplete: false,
        };
        assert_eq!(read, expected);
    }

    #[test]
    fn only_annotations_that_are_read_are_large_in_the_cache() {
        let long = "x".repeat(MAX_OTHER_VALUE + 1);
        let is_kept = |key: &str, value: &str| {
            let pod = observed(json!({"metadata": {"name": "p", "annotations": {key: value}}}));
            pod.pod.annotations[key] == value && pod.weight() > value.len()
        };
        for key in ["detour.io/a", "traffic.sidecar.istio.io/a", "k8s.v1.cni.cncf.io/networks"] {
            assert!(is_kept(key, &long), "{key}");
        }
        for key in ["a", "example.com/a", "notistio.io/a"] {
            assert!(!is_kept(key, &long) && is_kept(key, &long[1..]), "{key}");
        }
    }

    #[test]
    fn a_deleted_pod_has_not_ended_and_a_mirror_pod_is_not_owned() {
        let pod_with = |metadata: Value, status: Value| {
            let mut pod = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": null, "status": status});
            pod["metadata"].as_object_mut().expect("one").extend(metadata.as_object().expect("one").clone());
            observed(pod)
        };
        let at = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        let deleted = pod_with(at, json!({"phase": "Running"}));
        assert!(deleted.is_deleting && !deleted.has_ended);
        assert!(pod_with(json!({}), json!({"phase": "Failed"})).has_ended);
        assert!(pod_with(json!({}), json!({"phase": "Succeeded"})).has_ended);
        let running = pod_with(json!({}), Value::Null);
        assert!(!running.is_deleting && !running.has_ended);
        let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "1", "controller": true}]);
        let mirror = json!({"ownerReferences": owner, "annotations": {"kubernetes.io/config.mirror": "h"}});
        assert!(!pod_with(mirror, Value::Null).owned);
        assert!(pod_with(json!({"ownerReferences": owner}), Value::Null).owned);
    }
}
