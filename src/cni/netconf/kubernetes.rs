//! The `kubernetes` block: where facts of pods come from.

use super::{absolute, text};
use crate::cni::{Block, BlockReader, Error, ItemList};
use serde_json::Map;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// How istio-cni's agent names its kubeconfig in `cni_agent_run_dir`.
pub(in crate::cni) const ISTIO_KUBECONFIG: &str = "istio-cni-kubeconfig";

/// This agent's own pods and those of istio-cni's.
const AGENT_POD_PREFIXES: [&str; 2] = ["detour-agent-", "istio-cni-node-"];

/// How long an ADD may wait for facts where nobody says so, in seconds.
const TIMEOUT: u32 = 10;

/// The `kubernetes` block: where facts of pods come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubernetes {
    /// `kubeconfig`, or `istio-cni-kubeconfig` in istio-cni's `cni_agent_run_dir`.
    pub kubeconfig: Option<PathBuf>,
    /// `agent_socket`.
    pub agent_socket: Option<PathBuf>,
    /// `manifests_dir`: YAML and JSON files instead of an API.
    pub manifests_dir: Option<PathBuf>,
    /// `exclude_namespaces`, here and at the top level together.
    pub exclude_namespaces: Vec<String>,
    /// `cni_bin_dir`: stands in front of `CNI_PATH` for executables.
    pub cni_bin_dir: Option<PathBuf>,
    /// `timeout_seconds`: how long an ADD may wait for facts, all tries together.
    pub timeout: Duration,
    /// `agent_namespace`, or istio-cni's `pod_namespace`.
    pub agent_namespace: Option<String>,
    /// `agent_pod_prefixes`.
    pub agent_pod_prefixes: Vec<String>,
    /// `cluster_dns`.
    pub cluster_dns: Vec<IpAddr>,
}

impl Kubernetes {
    /// Whether nothing is to be done for pods of this namespace. `*` stands for all.
    #[must_use]
    pub fn excludes(&self, namespace: &str) -> bool {
        self.exclude_namespaces.iter().any(|excluded| excluded == namespace || excluded == "*")
    }

    /// Reads the block, where there is one, and istio-cni's keys at the top level. Unknown keys are warnings,
    /// except those of maistra's plugin, which mean nothing here.
    pub(in crate::cni) fn read(top: &BlockReader<'_>, warnings: &mut Vec<String>) -> Result<Self, Error> {
        let absent = || Block { path: "kubernetes".to_owned(), keys: Map::new() };
        let block = top.block("kubernetes")?.unwrap_or_else(absent);
        let own = block.reader();
        let run_dir = absolute(top, "cni_agent_run_dir")?;
        let mut exclude_namespaces = items(own.list("exclude_namespaces")?);
        exclude_namespaces.extend(items(top.list("exclude_namespaces")?));
        let pod_namespace = text(top, "pod_namespace")?;
        let seconds = own.number("timeout_seconds", 1, 300)?.unwrap_or(TIMEOUT);
        let read = Self {
            kubeconfig: absolute(&own, "kubeconfig")?.or_else(|| run_dir.map(|dir| dir.join(ISTIO_KUBECONFIG))),
            agent_socket: absolute(&own, "agent_socket")?,
            manifests_dir: absolute(&own, "manifests_dir")?,
            exclude_namespaces,
            cni_bin_dir: absolute(&own, "cni_bin_dir")?,
            timeout: Duration::from_secs(seconds.into()),
            agent_namespace: text(&own, "agent_namespace")?.or(pod_namespace).map(Into::into),
            agent_pod_prefixes: match own.list("agent_pod_prefixes")? {
                Some(list) => list.items,
                None => AGENT_POD_PREFIXES.map(Into::into).into(),
            },
            cluster_dns: addresses(own.list("cluster_dns")?)?,
        };
        warnings.extend(super::unknown::in_kubernetes(&own.unknown(), &own.asked()));
        Ok(read)
    }
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
        let top = Block::new("", conf).expect("an object");
        Kubernetes::read(&top.reader(), &mut warnings).map(|read| (read, warnings))
    }

    #[test]
    fn defaults() {
        let (read, warnings) = read(&json!({})).expect("accepted");
        let wanted = Kubernetes {
            kubeconfig: None,
            agent_socket: None,
            manifests_dir: None,
            exclude_namespaces: vec![],
            cni_bin_dir: None,
            timeout: Duration::from_secs(10),
            agent_namespace: None,
            agent_pod_prefixes: vec!["detour-agent-".into(), "istio-cni-node-".into()],
            cluster_dns: vec![],
        };
        assert_eq!((read, warnings), (wanted, vec![]));
    }

    #[test]
    fn the_block_wins_over_istio_cnis_keys_and_namespaces_are_united() {
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
    fn maistras_block() {
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
    fn errors_name_the_key_and_what_is_accepted() {
        for (key, value, wanted) in [
            ("kubeconfig", json!("k"), r#"kubernetes.kubeconfig: "k" is not accepted; accepted: an absolute path"#),
            ("timeout_seconds", json!(0), "kubernetes.timeout_seconds: 0 is not accepted; accepted: a whole number"),
            ("cluster_dns", json!(["a"]), r#"kubernetes.cluster_dns: "a" is not accepted; accepted: an IPv4 or IPv6"#),
            ("agent_namespace", json!(1), "kubernetes.agent_namespace: 1 is not accepted; accepted: a string"),
        ] {
            let error = read(&json!({"kubernetes": {key: value}})).expect_err("refused");
            assert!(error.msg.starts_with(wanted), "{error}");
        }
        assert!(read(&json!({"kubernetes": []})).is_err());
        assert!(read(&json!({"cni_agent_run_dir": "run"})).is_err());
    }
}
