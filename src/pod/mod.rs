//! Facts of pods and namespaces: the fields that affect a pod's traffic. [`crate::cluster`] fills them.
//!
//! The agent sends them to the plugin in this form. A new field requires a new number of the facts' format in
//! `cluster::agent`.

pub mod well_known;

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use well_known::PROXY_CONTAINER;

/// The pod of a call, from the keys of `CNI_ARGS` that container runtimes of Kubernetes pass.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct PodRef {
    /// `K8S_POD_NAMESPACE`.
    pub namespace: String,
    /// `K8S_POD_NAME`.
    pub name: String,
    /// `K8S_POD_UID`; older runtimes do not pass it.
    pub uid: Option<String>,
}

/// A pod of the cluster, or of a manifest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`; manifests may lack it.
    pub uid: Option<String>,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
    /// `spec.nodeName`; unscheduled pods and manifests may lack it.
    pub node_name: Option<String>,
    /// `spec.hostNetwork`.
    pub host_network: bool,
    /// `spec.securityContext.runAsUser`.
    pub run_as_user: Option<i64>,
    /// `spec.securityContext.runAsGroup`.
    pub run_as_group: Option<i64>,
    /// `spec.dnsConfig.nameservers`.
    pub dns_nameservers: Vec<String>,
    /// `spec.initContainers`.
    pub init_containers: Vec<Container>,
    /// `spec.containers`.
    pub containers: Vec<Container>,
    /// `status.podIP` and `status.podIPs`, without duplicates. The agent does not send them to the plugin, since a
    /// pod has no address before the ADD.
    #[serde(skip)]
    pub addresses: Vec<IpAddr>,
    /// `spec.ephemeralContainers`. Exclusions can't name them: they are added to a running pod.
    #[serde(skip)]
    pub ephemeral_containers: Vec<Container>,
    /// Whether the pod has its own user namespace (`spec.hostUsers: false`). The agent does not send it to the plugin,
    /// which finds out from the kernel that rules of iptables can't match owners there.
    #[serde(skip)]
    pub has_own_users: bool,
}

/// A container of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Container {
    /// `name`.
    pub name: String,
    /// `args`.
    pub args: Vec<String>,
    /// `env` in order, without variables that have `valueFrom`.
    pub env: Vec<(String, String)>,
    /// `securityContext.runAsUser`.
    pub run_as_user: Option<i64>,
    /// `securityContext.runAsGroup`.
    pub run_as_group: Option<i64>,
    /// `restartPolicy: Always` of an init container: a native sidecar.
    pub restarts_always: bool,
}

/// A namespace of the cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Namespace {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// The label [`well_known::DATAPLANE_MODE`] again: an earlier plugin reads only this one.
    pub dataplane_mode: Option<String>,
    /// Whether labels or annotations are missing because the agent's memory has no room for them.
    #[serde(skip)]
    pub incomplete: bool,
}

/// The facts for one ADD.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// The pod.
    pub pod: Pod,
    /// Its namespace, if the sub-plugins need it.
    pub namespace: Option<Namespace>,
}

impl Facts {
    /// Returns the value of the pod's annotation, or of its namespace's if the pod has none, with the object that has
    /// it.
    #[must_use]
    pub fn annotation(&self, key: &str) -> Option<(AnnotatedObject<'_>, &str)> {
        if let Some(value) = self.pod.annotations.get(key) {
            return Some((AnnotatedObject::Pod(&self.pod), value));
        }
        let namespace = self.namespace.as_ref()?;
        Some((AnnotatedObject::Namespace(namespace), namespace.annotations.get(key)?))
    }
}

/// The object that has an annotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnnotatedObject<'a> {
    /// The pod.
    Pod(&'a Pod),
    /// Its namespace.
    Namespace(&'a Namespace),
}

impl fmt::Display for AnnotatedObject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(pod) => write!(f, "pod {}/{}", pod.namespace, pod.name),
            Self::Namespace(namespace) => write!(f, "namespace {}", namespace.name),
        }
    }
}

/// The annotation of a static pod's mirror with the UID that the runtime uses (kubelet,
/// `pkg/kubelet/types/pod_update.go`: `ConfigHashAnnotationKey`).
pub(crate) const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// The annotation that makes a pod the mirror of a static pod (`ConfigMirrorAnnotationKey`). The kubelet starts no pod
/// of the API that has it, so the author of a pod that runs can't set it.
pub(crate) const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

impl From<PodRef> for Pod {
    /// Returns a pod of which only the names are known.
    fn from(PodRef { namespace, name, uid }: PodRef) -> Self {
        Self { namespace, name, uid, ..Self::default() }
    }
}

impl Pod {
    /// Returns its name and UID.
    #[must_use]
    pub fn reference(&self) -> PodRef {
        PodRef { namespace: self.namespace.clone(), name: self.name.clone(), uid: self.uid.clone() }
    }

    /// Returns whether this is the pod of `wanted`, by its UID or, for a static pod, its hash; true if either UID is
    /// unknown.
    #[must_use]
    pub fn matches(&self, wanted: &PodRef) -> bool {
        let (Some(wanted), Some(uid)) = (&wanted.uid, &self.uid) else { return true };
        wanted == uid || self.static_uid() == Some(wanted)
    }

    /// Returns the UID that the runtime uses: for a static pod, its hash.
    #[must_use]
    pub fn uid_on_node(&self) -> Option<&str> {
        self.static_uid().or(self.uid.as_ref()).map(String::as_str)
    }

    /// Returns whether this is the mirror of a static pod, which the kubelet starts from a file of the node.
    #[must_use]
    pub fn is_mirror(&self) -> bool {
        self.annotations.contains_key(CONFIG_MIRROR)
    }

    /// Returns the hash of a static pod. Any pod's author can write the annotation; only that of a mirror counts.
    fn static_uid(&self) -> Option<&String> {
        self.annotations.get(CONFIG_HASH).filter(|_| self.is_mirror())
    }

    /// Returns init containers, then containers.
    pub fn all_containers(&self) -> impl Iterator<Item = &Container> + Clone {
        self.init_containers.iter().chain(&self.containers)
    }

    /// Returns the container `istio-proxy`, an ordinary container or a native sidecar.
    #[must_use]
    pub fn proxy(&self) -> Option<&Container> {
        self.all_containers().find(|c| c.name == PROXY_CONTAINER)
    }

    /// Returns whether an init container, ordinary or a native sidecar, has this name.
    #[must_use]
    pub fn is_init_container(&self, name: &str) -> bool {
        self.init_containers.iter().any(|container| container.name == name)
    }

    /// Returns whether the kubelet starts the container of this name before `istio-proxy`. It starts init containers,
    /// then containers, each in the order of the pod.
    #[must_use]
    pub fn starts_before_proxy(&self, name: &str) -> bool {
        let mut before = self.all_containers().take_while(|container| container.name != PROXY_CONTAINER);
        before.any(|container| container.name == name)
    }

    /// Returns the UID of `container` if the pod sets it: the container's setting, else the pod's.
    #[must_use]
    pub fn user_of(&self, container: &Container) -> Option<i64> {
        container.run_as_user.or(self.run_as_user)
    }

    /// Returns the GID of `container` if the pod sets it: the container's setting, else the pod's.
    #[must_use]
    pub fn group_of(&self, container: &Container) -> Option<i64> {
        container.run_as_group.or(self.run_as_group)
    }
}

impl Container {
    /// Returns the value of an environment variable. The last of repeated ones counts, as in the container.
    #[must_use]
    pub fn env(&self, name: &str) -> Option<&str> {
        self.env.iter().rev().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(uid: Option<&str>) -> PodRef {
        PodRef { namespace: "a".into(), name: "b".into(), uid: uid.map(Into::into) }
    }

    #[test]
    fn pods_match_by_uid_and_static_pods_by_hash() {
        let mut pod = Pod { uid: Some("one".into()), ..Pod::default() };
        assert!(pod.matches(&wanted(Some("one"))));
        assert!(pod.matches(&wanted(None)));
        assert!(!pod.matches(&wanted(Some("two"))));
        pod.annotations.insert(CONFIG_HASH.into(), "two".into());
        assert!(!pod.matches(&wanted(Some("two"))), "the author of any pod can set the hash");
        assert_eq!(pod.uid_on_node(), Some("one"));
        pod.annotations.insert(CONFIG_MIRROR.into(), "two".into());
        assert!(pod.matches(&wanted(Some("two"))));
        assert_eq!(pod.uid_on_node(), Some("two"));
        pod.uid = None;
        assert!(pod.matches(&wanted(Some("three"))));
    }

    #[test]
    fn the_user_of_a_container_takes_precedence_over_that_of_the_pod() {
        let pod = Pod { run_as_user: Some(7), run_as_group: Some(8), ..Pod::default() };
        let mut container = Container::default();
        assert_eq!((pod.user_of(&container), pod.group_of(&container)), (Some(7), Some(8)));
        container.run_as_user = Some(0);
        assert_eq!(pod.user_of(&container), Some(0));
    }

    #[test]
    fn the_last_of_repeated_variables_counts() {
        let env = vec![("A".into(), "1".into()), ("A".into(), "2".into())];
        assert_eq!(Container { env, ..Container::default() }.env("A"), Some("2"));
    }
}
