//! Configurations that plugins are called with.

use crate::istio::Dns;
use crate::pod;
use crate::world::World;
use serde_json::{Value, json};
use std::path::Path;

/// `detour` with this chain, and facts from manifests.
pub(crate) fn chain(manifests: &Path, chain: Value) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "istio-cni",
        "type": "detour",
        "kubernetes": { "manifests_dir": manifests, "exclude_namespaces": ["istio-system", "kube-system"] },
        "chain": chain,
    })
}

/// The chain that solves the story: 1337 and its DNS go around the sidecar.
pub(crate) fn exclude_1337(manifests: &Path) -> Value {
    let sub_plugins = json!([
        { "type": "istio-redirect" },
        { "type": "uid-exclude", "uids": ["1337"] },
        { "type": "dns-exclude", "uids": ["1337"] },
    ]);
    chain(manifests, sub_plugins)
}

/// What istio-cni's agent writes on OpenShift, with facts from manifests.
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

/// The file of the home-made plugin that this one replaces: no cniVersion, no source of facts.
pub(crate) fn excludedns() -> Value {
    json!({
        "kubernetes": { "cni_bin_dir": "/var/lib/cni/bin", "exclude_namespaces": ["istio-system", "kube-system"] },
        "name": "excludedns",
        "type": "excludedns",
    })
}

/// The manifests of the story's pod, with more annotations than the injector's.
pub(crate) fn story(world: &World, dns: Dns, annotations: &[(&str, &str)]) -> std::path::PathBuf {
    let pod = pod::manifest(dns == Dns::Captured, pod::PROXY, annotations);
    world.manifests(&[pod::NAMESPACE, &pod])
}
