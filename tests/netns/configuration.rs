//! Plugin configurations for the tests.

use crate::istio::Dns;
use crate::pod;
use crate::world::World;
use serde_json::{Value, json};
use std::path::Path;

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
    let pod = pod::manifest(dns == Dns::Captured, pod::PROXY, annotations);
    world.manifests(&[pod::NAMESPACE, &pod])
}
