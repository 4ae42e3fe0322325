//! The configuration on stdin, understood as far as it isn't a sub-plugin's.

use super::Block;
use serde_json::{Map, Value};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// A network configuration. Sub-plugins' blocks stay raw: [`crate::chain`] understands them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetConf {
    /// `cniVersion`; absent or empty is `0.1.0` (SPEC.md).
    pub cni_version: String,
    /// `name`: the network's.
    pub name: String,
    /// `type`: `detour`, `istio-cni`, `excludedns`.
    pub kind: String,
    /// `log_level`, or istio-cni's `plugin_log_level`.
    pub log_level: LogLevel,
    /// `log_file`: a file that log lines are appended to, besides stderr.
    pub log_file: Option<PathBuf>,
    /// `kubernetes`: where facts come from.
    pub kubernetes: Kubernetes,
    /// `dialect`.
    pub dialect: Dialect,
    /// `chain`, or what `type` stands for where there is none.
    pub chain: Vec<Block>,
    /// `args.cni`: what Multus passes on from a pod's annotation, by sub-plugin.
    pub args: Map<String, Value>,
    /// `runtimeConfig`.
    pub runtime_config: Map<String, Value>,
    /// `prevResult`, as it came.
    pub prev_result: Option<Value>,
    /// `cni.dev/valid-attachments`, for GC; `None` where the key is absent.
    pub valid_attachments: Option<Vec<ValidAttachment>>,
    /// What was ignored and should be looked at, one line each.
    pub warnings: Vec<String>,
}

/// How the rules are written into the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// The first of the two that the kernel accepts.
    Auto,
    /// What iptables-nft itself would write.
    Iptables,
    /// A native `inet` table.
    Nftables,
}

/// From which severity on a line is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    /// Nothing (istio-cni's `none`).
    Off,
    /// Failures.
    Error,
    /// What should be looked at.
    Warn,
    /// What was decided, one line a call.
    Info,
    /// How it came about.
    Debug,
}

/// An attachment that the runtime still knows (SPEC.md, "GC").
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ValidAttachment {
    /// `containerID`.
    pub container_id: String,
    /// `ifname`.
    pub ifname: String,
}

/// The `kubernetes` block: where facts of pods come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubernetes {
    /// `kubeconfig`, or `istio-cni-kubeconfig` in istio-cni's `cni_agent_run_dir`.
    pub kubeconfig: Option<PathBuf>,
    /// `agent_socket`.
    pub agent_socket: Option<PathBuf>,
    /// `manifests_dir`: YAML and JSON files instead of an API.
    pub manifests_dir: Option<PathBuf>,
    /// `exclude_namespaces`, here or at the top level.
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
