//! Facts of a pod and of its namespace: what a cluster says of them, in the few fields that
//! decide what happens to the pod's traffic. Values only; [`crate::cluster`] fills them. Between plugin
//! and agent they travel in this form: whoever adds a field raises `cluster::agent`'s number of facts.

pub mod well_known;

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;
use well_known::PROXY_CONTAINER;

/// Which pod a call is for: `CNI_ARGS`, by the keys that kubelet's runtimes pass.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct PodRef {
    /// `K8S_POD_NAMESPACE`.
    pub namespace: String,
    /// `K8S_POD_NAME`.
    pub name: String,
    /// `K8S_POD_UID`; older runtimes don't pass it.
    pub uid: Option<String>,
}

/// A pod as the cluster knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`; a manifest may have none.
    pub uid: Option<String>,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
    /// `spec.nodeName`; a pod that is not scheduled, or a manifest, may have none.
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
    /// `status.podIP` and `status.podIPs`, without duplicates. The agent does not send them to the plugin:
    /// an ADD runs before the pod has any.
    #[serde(skip)]
    pub addresses: Vec<IpAddr>,
}

/// A container of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Container {
    /// `name`.
    pub name: String,
    /// `args`.
    pub args: Vec<String>,
    /// `env`, literal values only, in order; one with `valueFrom` is left out.
    pub env: Vec<(String, String)>,
    /// `securityContext.runAsUser`.
    pub run_as_user: Option<i64>,
    /// `securityContext.runAsGroup`.
    pub run_as_group: Option<i64>,
    /// `restartPolicy: Always` on an init container: a native sidecar, which keeps running.
    pub restarts_always: bool,
}

/// A namespace as the cluster knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Namespace {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
}

/// Everything that is asked of a cluster for one ADD.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// The pod.
    pub pod: Pod,
    /// Its namespace, where the chain can use it.
    pub namespace: Option<Namespace>,
}

/// The annotation by which a static pod's mirror carries the UID that the runtime knows
/// (kubelet, `pkg/kubelet/types/pod_update.go`: `ConfigHashAnnotationKey`).
const CONFIG_HASH: &str = "kubernetes.io/config.hash";

impl Pod {
    /// Whether this is the pod that `wanted` speaks of: the same UID, a static pod's by its hash.
    /// Where either side has no UID there is nothing to compare.
    #[must_use]
    pub fn is(&self, wanted: &PodRef) -> bool {
        let (Some(wanted), Some(uid)) = (&wanted.uid, &self.uid) else { return true };
        wanted == uid || self.annotations.get(CONFIG_HASH) == Some(wanted)
    }

    /// The UID by which the node's runtime knows it: a static pod's is its hash.
    #[must_use]
    pub fn uid_on_node(&self) -> Option<&str> {
        self.annotations.get(CONFIG_HASH).or(self.uid.as_ref()).map(String::as_str)
    }

    /// Init containers, then containers.
    pub fn all_containers(&self) -> impl Iterator<Item = &Container> {
        self.init_containers.iter().chain(&self.containers)
    }

    /// The container named `istio-proxy`, as an ordinary container or a native sidecar.
    #[must_use]
    pub fn proxy(&self) -> Option<&Container> {
        self.all_containers().find(|c| c.name == PROXY_CONTAINER)
    }

    /// The UID that `container` runs as, where the pod says so: its own setting, else the pod's.
    #[must_use]
    pub fn user_of(&self, container: &Container) -> Option<i64> {
        container.run_as_user.or(self.run_as_user)
    }

    /// The GID that `container` runs as, where the pod says so: its own setting, else the pod's.
    #[must_use]
    pub fn group_of(&self, container: &Container) -> Option<i64> {
        container.run_as_group.or(self.run_as_group)
    }
}

impl Container {
    /// The literal value of an environment variable; the last one counts, as in the container.
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
    fn a_pod_is_known_by_its_uid_and_a_static_one_by_its_hash() {
        let mut pod = Pod { uid: Some("one".into()), ..Pod::default() };
        assert!(pod.is(&wanted(Some("one"))));
        assert!(pod.is(&wanted(None)));
        assert!(!pod.is(&wanted(Some("two"))));
        pod.annotations.insert(CONFIG_HASH.into(), "two".into());
        assert!(pod.is(&wanted(Some("two"))));
        pod.uid = None;
        assert!(pod.is(&wanted(Some("three"))));
    }

    #[test]
    fn a_containers_own_user_wins_over_the_pods() {
        let pod = Pod { run_as_user: Some(7), run_as_group: Some(8), ..Pod::default() };
        let mut container = Container::default();
        assert_eq!((pod.user_of(&container), pod.group_of(&container)), (Some(7), Some(8)));
        container.run_as_user = Some(0);
        assert_eq!(pod.user_of(&container), Some(0));
    }

    #[test]
    fn the_last_of_two_equal_variables_counts() {
        let env = vec![("A".into(), "1".into()), ("A".into(), "2".into())];
        assert_eq!(Container { env, ..Container::default() }.env("A"), Some("2"));
    }
}
