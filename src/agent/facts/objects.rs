//! The watched kinds of objects. Only the parts that the agent uses are parsed, and only some of them are cached.

use crate::cluster::resources::{DefinitionSpec, Metadata, Object, PodSpec, PodStatus};
use crate::cluster::{Definition, Kind};
use crate::pod::well_known::{
    DATAPLANE_MODE, DISABLE_ENVOY, DNS_CAPTURE, INJECT, INVALID_DROP, PROXY_CONTAINER, VALIDATION_CONTAINER,
};
use crate::pod::{Container, Namespace, Pod};
use k8s_openapi::api::core::v1::ContainerStatus;
use serde::de::{DeserializeOwned, IgnoredAny};
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
    /// Whether the init container that Istio injects to validate the redirection has found that traffic is not redirected,
    /// and has not succeeded since.
    pub validation_failed: bool,
    /// Whether labels, annotations or containers are missing because the agent's memory has no room for them.
    pub incomplete: bool,
}

impl ObservedPod {
    /// Returns `NAMESPACE/NAME`.
    pub(in crate::agent) fn full_name(&self) -> String {
        format!("{}/{}", self.pod.namespace, self.pod.name)
    }
}

/// The parts of an object that the agent reads. All others, such as `metadata.managedFields`, take no memory.
pub(super) type Sent<T> = Object<<T as WatchedKind>::Spec, <T as WatchedKind>::Status>;

/// A watched kind: the cached part of an object.
pub(super) trait WatchedKind: Sized + Send + Sync + 'static {
    /// The read parts of the specification and of the status.
    type Spec: DeserializeOwned + Clone + Send + 'static;
    type Status: DeserializeOwned + Clone + Send + 'static;
    /// The plural in log messages.
    const PLURAL: &str;
    /// The value of the metrics' label `kind`.
    const METRICS_KIND: &str;
    /// The kind of the objects.
    const KIND: Kind;
    /// Whether the agent needs only `metadata` of the objects.
    const METADATA_ONLY: bool = false;

    /// Extracts the cached part.
    fn from_sent(sent: Sent<Self>) -> Self;
    /// The maximum weight of an ordinary object: there is room for as many as are supported.
    const MAX_WEIGHT: usize;
    /// Returns about how many bytes of memory the object takes.
    fn weight(&self) -> usize;
    /// Returns an incomplete object, with what has a small limit: no author of an object can make it so large that the agent
    /// neither repairs a pod nor ends its bypasses.
    fn minimal(&self) -> Self;
}

impl WatchedKind for ObservedPod {
    type Spec = PodSpec;
    type Status = PodStatus;
    const PLURAL: &str = "pods of this node";
    const METRICS_KIND: &str = "pods";
    const KIND: Kind = Kind::POD;

    fn from_sent(mut sent: Sent<Self>) -> Self {
        trim(&mut sent.metadata);
        let (status, metadata) = (sent.status.take().unwrap_or_default(), &mut sent.metadata);
        let (is_deleting, controlled) = (metadata.is_deleting(), metadata.controller().is_some());
        let resource_version = std::mem::take(&mut metadata.resource_version);
        let mut pod: Pod = sent.into();
        pod.ephemeral_containers.clear();
        pod.containers.iter_mut().chain(&mut pod.init_containers).for_each(trim_container);
        Self {
            owned: controlled && !pod.is_mirror(),
            pod,
            resource_version,
            has_ended: status.has_ended(),
            is_deleting,
            addresses: status.addresses(),
            validation_failed: status.init_container_statuses.iter().any(has_failed_validation),
            incomplete: false,
        }
    }

    // The largest supported number of pods of a node (512) fits into the cache.
    const MAX_WEIGHT: usize = 48 << 10;

    fn minimal(&self) -> Self {
        let mut minimal = Self { incomplete: true, ..self.clone() };
        let Pod { annotations, labels, dns_nameservers, containers, init_containers, .. } = &mut minimal.pod;
        shorten(annotations);
        labels.retain(|key, _| [INJECT, DATAPLANE_MODE].contains(&key.as_str()));
        labels.values_mut().for_each(cut);
        dns_nameservers.clear();
        containers.retain(|container| container.name == PROXY_CONTAINER);
        init_containers.retain(|container| container.name == PROXY_CONTAINER);
        minimal
    }

    fn weight(&self) -> usize {
        let texts = |texts: &[String]| texts.iter().map(|text| PER_TEXT + text.len()).sum::<usize>();
        let containers = self.pod.containers.iter().chain(&self.pod.init_containers);
        let container = |it: &Container| {
            let env = it.env.iter().map(|(name, value)| 2 * PER_TEXT + name.len() + value.len()).sum::<usize>();
            PER_OBJECT + it.name.len() + texts(&it.args) + env
        };
        PER_OBJECT
            + map_weight(&self.pod.labels)
            + map_weight(&self.pod.annotations)
            + texts(&self.pod.dns_nameservers)
            + containers.map(container).sum::<usize>()
    }
}

/// The exit code of Istio's validation container if traffic is not redirected.
const VALIDATION_FAILED: i32 = 126;
/// About how many bytes of memory a text takes besides its characters, and an object besides its texts.
const PER_TEXT: usize = 40;
const PER_OBJECT: usize = 150;

fn map_weight(map: &BTreeMap<String, String>) -> usize {
    map.iter().map(|(key, value)| 2 * PER_TEXT + key.len() + value.len()).sum()
}

/// Whether a container is that of the validation, and has ended with its exit code: now, or before it was started again.
fn has_failed_validation(status: &ContainerStatus) -> bool {
    let codes = [&status.state, &status.last_state].map(|state| Some(state.as_ref()?.terminated.as_ref()?.exit_code));
    let last = codes.into_iter().flatten().find(|code| *code != 0);
    status.name == VALIDATION_CONTAINER && codes[0] != Some(0) && last == Some(VALIDATION_FAILED)
}

impl WatchedKind for Namespace {
    type Spec = IgnoredAny;
    type Status = IgnoredAny;
    const PLURAL: &str = "namespaces";
    const METRICS_KIND: &str = "namespaces";
    const KIND: Kind = Kind::NAMESPACE;
    const METADATA_ONLY: bool = true;

    fn from_sent(mut sent: Sent<Self>) -> Self {
        trim(&mut sent.metadata);
        sent.into()
    }

    const MAX_WEIGHT: usize = 8 << 10;

    fn minimal(&self) -> Self {
        let mut dataplane_mode = self.dataplane_mode.clone();
        dataplane_mode.iter_mut().for_each(cut);
        Self { name: self.name.clone(), dataplane_mode, incomplete: true, ..Self::default() }
    }

    fn weight(&self) -> usize {
        let label = self.dataplane_mode.as_ref().map_or(0, |value| PER_TEXT + value.len());
        PER_OBJECT + map_weight(&self.annotations) + map_weight(&self.labels) + label
    }
}

impl WatchedKind for Definition {
    type Spec = DefinitionSpec;
    type Status = IgnoredAny;
    const PLURAL: &str = "network attachment definitions";
    const METRICS_KIND: &str = "definitions";
    const KIND: Kind = Kind::DEFINITION;

    fn from_sent(mut sent: Sent<Self>) -> Self {
        trim(&mut sent.metadata);
        sent.into()
    }

    const MAX_WEIGHT: usize = 48 << 10;

    fn minimal(&self) -> Self {
        Self { object: self.object.clone(), ..Self::default() }
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
/// The variables of `istio-proxy` that decide about a pod's traffic.
const VARIABLES: [&str; 3] = [DISABLE_ENVOY, DNS_CAPTURE, INVALID_DROP];
/// The number of arguments of `istio-proxy` that decide: the command and the type of the proxy.
const ARGUMENTS: usize = 2;
/// The number of annotations of an incomplete object, and the maximum length of a value, in bytes.
const MAX_ANNOTATIONS: usize = 64;
const MAX_VALUE: usize = 512;
/// Stands for a value that is too long. It is invalid for each of the annotations.
const TOO_LONG: &str = "(too long for the agent)";

fn is_read(annotation: &str) -> bool {
    let domain = annotation.split('/').next().unwrap_or_default();
    let is_of = |read: &&str| domain.strip_suffix(*read).is_some_and(|sub| sub.is_empty() || sub.ends_with('.'));
    READ_DOMAINS.iter().any(is_of)
}

/// Removes the annotations that are large and not read.
fn trim(Metadata { annotations, .. }: &mut Metadata) {
    annotations.remove(LAST_APPLIED);
    for (_, value) in annotations.iter_mut().filter(|(key, value)| value.len() > MAX_OTHER_VALUE && !is_read(key)) {
        *value = String::new();
    }
}

/// Removes the variables and arguments that are not read.
fn trim_container(container: &mut Container) {
    if container.name != PROXY_CONTAINER {
        (container.env, container.args) = (Vec::new(), Vec::new());
        return;
    }
    let variable = |name: &&str| Some(((*name).to_owned(), container.env(name)?.to_owned()));
    container.env = VARIABLES.iter().filter_map(variable).collect();
    container.args.truncate(ARGUMENTS);
    container.env.iter_mut().map(|(_, value)| value).chain(&mut container.args).for_each(cut);
}

/// Leaves of the annotations the first ones that are read, and replaces long values.
fn shorten(annotations: &mut BTreeMap<String, String>) {
    let read = std::mem::take(annotations).into_iter().filter(|(key, _)| is_read(key)).take(MAX_ANNOTATIONS);
    annotations.extend(read);
    annotations.values_mut().for_each(cut);
}

/// Replaces a value that is too long.
fn cut(value: &mut String) {
    if value.len() > MAX_VALUE {
        *value = TOO_LONG.to_owned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::resources::PodObject;
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
                {"name": "istio-proxy", "args": ["y", "z", "-"], "env": [
                    {"name": "A", "value": "1"}, {"name": DNS_CAPTURE, "value": "0"}, {"name": DNS_CAPTURE, "value": "1"}
                ]}
            ]},
            "status": {
                "phase": "Running", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}, {"ip": "?"}],
                "initContainerStatuses": [{"name": "istio-validation", "state": {"terminated": {"exitCode": 126}}}]
            }
        }));
        let pod: Pod = from_value::<PodObject>(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"l": "1"}, "annotations": {"a": "2"}},
            "spec": {"hostNetwork": true, "containers": [
                {"name": "c"},
                {"name": "istio-proxy", "args": ["y", "z"], "env": [{"name": DNS_CAPTURE, "value": "1"}]}
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
            validation_failed: true,
            incomplete: false,
        };
        assert_eq!(read, expected);
    }

    #[test]
    fn a_failed_validation_is_recognized_by_name_and_exit_code() {
        let ended = |code: i32| json!({"terminated": {"exitCode": code}});
        let table = [
            ("istio-validation", ended(126), Value::Null, true),
            ("istio-validation", json!({"waiting": {}}), ended(126), true),
            ("istio-validation", ended(0), ended(126), false),
            ("istio-validation", ended(1), ended(126), false),
            ("istio-validation", json!({"running": {}}), Value::Null, false),
            ("other", ended(126), Value::Null, false),
        ];
        for (name, state, last, expected) in table {
            let statuses = json!([{"name": name, "state": state, "lastState": last}]);
            let pod = observed(json!({"metadata": {"name": "p"}, "status": {"initContainerStatuses": statuses}}));
            assert_eq!(pod.validation_failed, expected, "{statuses}");
        }
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
    fn what_decides_about_traffic_remains_of_a_pod_that_is_too_large() {
        let long = "x".repeat(MAX_VALUE + 1);
        let mut annotations: BTreeMap<String, String> =
            (0..99).map(|number| (format!("z.detour.io/{number}"), String::new())).collect();
        let decisive = [("detour.io/exclude-uids", "7"), ("detour.io/exclude-dns", &long), ("example.com/other", "1")];
        annotations.extend(decisive.map(|(key, value)| (key.to_owned(), value.to_owned())));
        let pod = observed(json!({
            "metadata": {"name": "p", "annotations": annotations, "labels": {INJECT: "true", "app": "web"}},
            "spec": {"containers": [{"name": "app"}, {"name": "istio-proxy", "args": ["proxy", "sidecar"]}]}
        }));
        let minimal = pod.minimal();
        let annotations = &minimal.pod.annotations;
        assert_eq!((&*annotations["detour.io/exclude-uids"], &*annotations["detour.io/exclude-dns"]), ("7", TOO_LONG));
        assert_eq!(
            (annotations.len(), minimal.pod.labels.len(), minimal.pod.containers.len()),
            (MAX_ANNOTATIONS, 1, 1)
        );
        assert!(minimal.incomplete && minimal.pod.proxy().is_some() && !pod.incomplete);
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
