//! The example pod on OpenShift after Istio's injection, its configurations, and the rules that istio-cni writes for it. The
//! namespace's UID range is 1000650000/10000, the proxy has its last UID, and a Vault init container is fixed at 1337.

use crate::world::{Families, Family, Process, Ruleset, World};
use serde_json::{Value, json};
use std::path::Path;

/// `metadata.uid`.
pub(crate) const UID: &str = "8e5bd6a4-9a35-4f0e-9d2b-1c33a5b0a001";

pub(crate) const APP_PROCESS: Process = Process { uid: 1_000_650_000, gid: 1_000_650_000 };
pub(crate) const PROXY: Process = Process { uid: 1_000_659_999, gid: 1_000_659_999 };
pub(crate) const VAULT_INIT: Process = Process { uid: 1337, gid: 1_000_650_000 };

pub(crate) const NAMESPACE: &str = r"
apiVersion: v1
kind: Namespace
metadata:
  name: shop
  annotations:
    openshift.io/sa.scc.uid-range: 1000650000/10000
    openshift.io/sa.scc.supplemental-groups: 1000650000/10000
";

/// Returns the pod, with annotations (`key: value`) in addition to the injector's.
pub(crate) fn manifest(dns_capture: bool, proxy: Process, annotations: &[(&str, &str)]) -> String {
    let annotations: String = annotations.iter().map(|(key, value)| format!("    {key}: \"{value}\"\n")).collect();
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata:
  name: web-0
  namespace: shop
  uid: {UID}
  annotations:
    k8s.v1.cni.cncf.io/networks: default/istio-cni
    sidecar.istio.io/status: '{{"revision":"default"}}'
{annotations}spec:
  nodeName: node-1
  initContainers:
  - name: vault-agent-init
    image: vault
    securityContext: {{ runAsUser: {init_uid} }}
  containers:
  - name: web
    image: web
    securityContext: {{ runAsUser: {app_uid} }}
  - name: istio-proxy
    image: proxyv2
    args: [proxy, sidecar]
    env:
    - {{ name: ISTIO_META_DNS_CAPTURE, value: "{dns_capture}" }}
    securityContext: {{ runAsUser: {uid}, runAsGroup: {gid} }}
"#,
        init_uid = VAULT_INIT.uid,
        app_uid = APP_PROCESS.uid,
        uid = proxy.uid,
        gid = proxy.gid,
    )
}

/// Returns a configuration of `detour` with this sub-plugin chain and facts from manifests.
pub(crate) fn chain(manifests: &Path, chain: Value) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "istio-cni",
        "type": "detour",
        "kubernetes": { "manifests_dir": manifests, "exclude_namespaces": ["istio-system", "kube-system"] },
        "chain": chain,
    })
}

/// Replaces the sub-plugin chain by one that excludes UID 1337 with its DNS.
pub(crate) fn exclude_1337(manifests: &Path) -> Value {
    let sub_plugins = json!([
        { "type": "istio-redirect" },
        { "type": "uid-exclude", "uids": ["1337"] },
        { "type": "dns-exclude", "uids": ["1337"] },
    ]);
    chain(manifests, sub_plugins)
}

/// Returns the configuration that istio-cni's agent writes on OpenShift, with facts from manifests.
pub(crate) fn istio_cni(manifests: &Path) -> Value {
    json!({
        "cniVersion": "0.3.1",
        "name": "istio-cni",
        "type": "istio-cni",
        "plugin_log_level": "info",
        "kubernetes": { "manifests_dir": manifests },
        "exclude_namespaces": ["kube-system"],
    })
}

/// Returns the configuration of the shell plugin that detour replaces: no cniVersion, no source of facts.
pub(crate) fn excludedns() -> Value {
    json!({
        "kubernetes": { "cni_bin_dir": "/var/lib/cni/bin", "exclude_namespaces": ["istio-system", "kube-system"] },
        "name": "excludedns",
        "type": "excludedns",
    })
}

/// Writes the manifests of the example pod, with annotations in addition to the injector's.
pub(crate) fn story(world: &World, dns: Dns, annotations: &[(&str, &str)]) -> std::path::PathBuf {
    let pod = manifest(dns == Dns::Captured, PROXY, annotations);
    world.manifests(&[NAMESPACE, &pod])
}

/// Istio's default proxy UID and GID.
pub(crate) const DEFAULT_OWNER: u32 = 1337;

/// Whether Istio captures the pod's DNS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dns {
    Captured,
    Left,
}

/// Returns the rules of one family for a proxy whose UID and GID are both `owner`.
pub(crate) fn rules(family: Family, dns: Dns, owner: u32) -> String {
    let golden = match (family, dns) {
        (Family::V4, Dns::Left) => include_str!("../golden/istio.v4.rules"),
        (Family::V6, Dns::Left) => include_str!("../golden/istio.v6.rules"),
        (Family::V4, Dns::Captured) => include_str!("../golden/istio-dns.v4.rules"),
        (Family::V6, Dns::Captured) => include_str!("../golden/istio-dns.v6.rules"),
    };
    golden.replace(&format!("-owner {DEFAULT_OWNER}"), &format!("-owner {owner}"))
}

/// Returns the same rules, for comparison with a pod's.
pub(crate) fn ruleset(family: Family, dns: Dns, owner: u32) -> Ruleset {
    Ruleset::parse(&rules(family, dns, owner))
}

/// Creates a world whose pod another tool has redirected like istio-cni, to an OpenShift proxy.
pub(crate) fn redirected_world(dns: Dns) -> World {
    let world = World::new(Families::Both);
    for &family in world.families() {
        world.iptables_restore(family, &rules(family, dns, PROXY.uid));
    }
    world
}
