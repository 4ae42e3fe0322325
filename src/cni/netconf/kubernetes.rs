//! The `kubernetes` block: the sources of pod facts, and the pods that are skipped.

use super::keys::{self, absolute, text};
use crate::cni::block::BlockReader;
use crate::cni::block::ItemList;
use crate::cni::error::Error;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The name of the kubeconfig that istio-cni's agent writes to `cni_agent_run_dir`.
const ISTIO_KUBECONFIG: &str = "istio-cni-kubeconfig";

/// The name prefixes of agent pods: this project's and istio-cni's.
pub const DEFAULT_AGENT_PREFIXES: [&str; 2] = ["detour-agent-", "istio-cni-node-"];

/// The default timeout for the facts of an ADD, in seconds.
const TIMEOUT: u32 = 10;

/// The `kubernetes` block: the sources of pod facts, and the pods that are skipped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Kubernetes {
    /// `kubeconfig`, or `istio-cni-kubeconfig` in istio-cni's `cni_agent_run_dir`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// `agent_socket`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_socket: Option<PathBuf>,
    /// `manifests_dir`: a directory of YAML and JSON files that replaces the API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifests_dir: Option<PathBuf>,
    /// `exclude_namespaces` of this block and of the top level.
    pub exclude_namespaces: Vec<String>,
    /// `cni_bin_dir`: searched for executables before `CNI_PATH`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cni_bin_dir: Option<PathBuf>,
    /// `timeout_seconds`: the timeout of each lookup (pod with namespace, definitions), all attempts included.
    #[serde(rename = "timeout_seconds", serialize_with = "seconds")]
    pub timeout: Duration,
    /// `agent_namespace`, or istio-cni's `pod_namespace`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_namespace: Option<String>,
    /// `agent_pod_prefixes`.
    pub agent_pod_prefixes: Vec<String>,
    /// `cluster_dns`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cluster_dns: Vec<IpAddr>,
}

impl Default for Kubernetes {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            agent_socket: None,
            manifests_dir: None,
            exclude_namespaces: Vec::new(),
            cni_bin_dir: None,
            timeout: Duration::from_secs(TIMEOUT.into()),
            agent_namespace: None,
            agent_pod_prefixes: DEFAULT_AGENT_PREFIXES.map(Into::into).into(),
            cluster_dns: Vec::new(),
        }
    }
}

impl Kubernetes {
    /// Returns whether pods of this namespace are skipped; `*` excludes all namespaces.
    #[must_use]
    pub fn excludes(&self, namespace: &str) -> bool {
        self.exclude_namespaces.iter().any(|excluded| excluded == namespace || excluded == "*")
    }

    /// Reads the block, if present, and istio-cni's keys at the top level. Unknown keys are warnings, except for those
    /// of maistra's plugin, which have no effect here.
    pub(in crate::cni) fn read(top: &BlockReader<'_>, warnings: &mut Vec<String>) -> Result<Self, Error> {
        let absent = Value::Object(Map::new());
        let own = match top.block("kubernetes")? {
            Some(own) => own,
            None => BlockReader::new("kubernetes", &absent)?,
        };
        let read = Self::read_keys(&own, top)?;
        warnings.extend(keys::in_kubernetes(&own.unknown(), || own.known()));
        Ok(read)
    }

    fn read_keys(own: &BlockReader<'_>, top: &BlockReader<'_>) -> Result<Self, Error> {
        let run_dir = absolute(top, "cni_agent_run_dir")?;
        let mut exclude_namespaces = items(own.list("exclude_namespaces")?);
        exclude_namespaces.extend(items(top.list("exclude_namespaces")?));
        let pod_namespace = text(top, "pod_namespace")?;
        let timeout = own.number("timeout_seconds", 1, 300)?.map(|seconds| Duration::from_secs(seconds.into()));
        let default = Self::default();
        Ok(Self {
            kubeconfig: absolute(own, "kubeconfig")?.or_else(|| run_dir.map(|dir| dir.join(ISTIO_KUBECONFIG))),
            agent_socket: absolute(own, "agent_socket")?,
            manifests_dir: absolute(own, "manifests_dir")?,
            exclude_namespaces,
            cni_bin_dir: absolute(own, "cni_bin_dir")?,
            timeout: timeout.unwrap_or(default.timeout),
            agent_namespace: text(own, "agent_namespace")?.or(pod_namespace).map(Into::into),
            agent_pod_prefixes: own.list("agent_pod_prefixes")?.map_or(default.agent_pod_prefixes, |list| list.items),
            cluster_dns: addresses(own.list("cluster_dns")?)?,
        })
    }
}

fn seconds<S: Serializer>(timeout: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(timeout.as_secs())
}

fn items(list: Option<ItemList>) -> Vec<String> {
    list.map(|list| list.items).unwrap_or_default()
}

fn addresses(list: Option<ItemList>) -> Result<Vec<IpAddr>, Error> {
    let Some(list) = list else { return Ok(Vec::new()) };
    let address = |item: &String| item.parse().map_err(|_| list.reject(item, "an IPv4 or IPv6 address"));
    list.items.iter().map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(conf: &Value) -> Result<(Kubernetes, Vec<String>), Error> {
        let mut warnings = Vec::new();
        let top = BlockReader::new("", conf).expect("an object");
        Kubernetes::read(&top, &mut warnings).map(|read| (read, warnings))
    }

    #[test]
    fn the_schema_of_the_chart_has_every_key_that_the_chart_does_not_set() {
        let text = include_str!("../../../manifests/chart/values.schema.json");
        let schema: Value = serde_json::from_str(text).expect("JSON");
        let properties = &schema["definitions"]["config"]["properties"]["kubernetes"]["properties"];
        let none = json!({});
        let [own, top] = [(), ()].map(|()| BlockReader::new("", &none).expect("an object"));
        Kubernetes::read_keys(&own, &top).expect("accepted");
        // The agent writes these, or a value of the chart sets them.
        let set = ["agent_namespace", "agent_socket", "exclude_namespaces", "kubeconfig", "manifests_dir"];
        let wanted: Vec<&str> = own.known().into_iter().filter(|key| !set.contains(key)).collect();
        let mut found: Vec<&str> = properties.as_object().expect("an object").keys().map(String::as_str).collect();
        found.sort_unstable();
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_missing_block_has_all_defaults() {
        let (read, warnings) = read(&json!({})).expect("accepted");
        assert_eq!((read, warnings), (Kubernetes::default(), vec![]));
    }

    #[test]
    fn the_block_takes_precedence_over_keys_of_istio_cni_and_excluded_namespaces_are_combined() {
        let (read, _) = read(&json!({
            "cni_agent_run_dir": "/run/i", "pod_namespace": "a", "exclude_namespaces": ["x"],
            "kubernetes": {
                "kubeconfig": "/k", "agent_namespace": "b", "exclude_namespaces": "y, z",
                "timeout_seconds": 3, "cluster_dns": ["10.96.0.10", "fd00::a"], "agent_pod_prefixes": "p-",
            },
        }))
        .expect("accepted");
        assert_eq!(read.kubeconfig, Some("/k".into()));
        assert_eq!(read.agent_namespace.as_deref(), Some("b"));
        assert_eq!(read.exclude_namespaces, ["y", "z", "x"]);
        assert_eq!((read.timeout, read.cluster_dns.len()), (Duration::from_secs(3), 2));
        assert_eq!(read.agent_pod_prefixes, ["p-"]);
    }

    #[test]
    fn namespaces_are_excluded_by_name_or_all() {
        let excludes = |list: Value, namespace| {
            read(&json!({"exclude_namespaces": list})).expect("accepted").0.excludes(namespace)
        };
        assert!(excludes(json!(["a", "b"]), "b"));
        assert!(!excludes(json!(["a", "b"]), "bb"));
        assert!(excludes(json!("*"), "anything"));
        assert!(!excludes(json!([]), "a"));
    }

    #[test]
    fn the_block_of_maistra_is_accepted_without_warnings() {
        let (read, warnings) = read(&json!({
            "kubernetes": {
                "kubeconfig": "/etc/cni/multus/net.d/v2-5-istio-cni.kubeconfig", "cni_bin_dir": "/var/lib/cni/bin",
                "exclude_namespaces": ["istio-operator"], "iptables_script": "istio-iptables.sh", "node_name": "n1",
            },
        }))
        .expect("accepted");
        assert_eq!(read.cni_bin_dir, Some("/var/lib/cni/bin".into()));
        assert_eq!(warnings, [""; 0]);
    }

    #[test]
    fn errors_have_the_key_and_the_expected_values() {
        for (key, value, wanted) in [
            ("kubeconfig", json!("k"), r#"kubernetes.kubeconfig: invalid value "k"; expected an absolute path"#),
            ("timeout_seconds", json!(0), "kubernetes.timeout_seconds: invalid value 0; expected a whole number"),
            ("cluster_dns", json!(["a"]), r#"kubernetes.cluster_dns: invalid value "a"; expected an IPv4 or IPv6"#),
            ("agent_namespace", json!(1), "kubernetes.agent_namespace: invalid value 1; expected a string"),
        ] {
            let error = read(&json!({"kubernetes": {key: value}})).expect_err("refused");
            assert!(error.msg.starts_with(wanted), "{error}");
        }
        assert!(read(&json!({"kubernetes": []})).is_err());
        assert!(read(&json!({"cni_agent_run_dir": "run"})).is_err());
    }
}
