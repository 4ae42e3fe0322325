//! Fixtures: directories, kubeconfigs, configurations, a pod.

use crate::server::{Answer, Request};
use crate::support::api::kubeconfig_of;
use detour_cni::cluster;
use detour_cni::cni::{self, Error};
use detour_cni::pod::{Facts, PodRef};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The pod of all tests.
pub(crate) fn wanted() -> PodRef {
    PodRef { namespace: "shop".into(), name: "web-0".into(), uid: Some("uid-1".into()) }
}

pub(crate) const GET_POD: &str = "GET /api/v1/namespaces/shop/pods/web-0 HTTP/1.1";
pub(crate) const GET_NAMESPACE: &str = "GET /api/v1/namespaces/shop HTTP/1.1";

pub(crate) fn pod(uid: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web-0", "namespace": "shop", "uid": uid},
        "spec": {"containers": [{"name": "istio-proxy"}]}
    })
}

pub(crate) fn namespace() -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop", "annotations": {"a": "1"}}})
}

pub(crate) fn status(code: u16, message: &str) -> Answer {
    Answer::json(code, &json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}))
}

/// Answers like an API server that has the pod and its namespace.
pub(crate) fn has_both(request: &Request) -> Answer {
    match request.line.as_str() {
        GET_POD => Answer::json(200, &pod("uid-1")),
        GET_NAMESPACE => Answer::json(200, &namespace()),
        _ => status(404, "no such thing"),
    }
}

/// Creates a new directory for the test.
pub(crate) fn directory(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cluster").join(test);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("a directory");
    dir
}

/// Writes a kubeconfig with these values of its cluster and its user.
pub(crate) fn kubeconfig(test: &str, cluster: &Value, user: &Value) -> PathBuf {
    let path = directory(test).join("kubeconfig");
    fs::write(&path, kubeconfig_of(cluster, user)).expect("a file");
    path
}

/// A configuration without a source of facts.
pub(crate) fn settings(timeout: Duration) -> cni::Kubernetes {
    cni::Kubernetes {
        kubeconfig: None,
        agent_socket: None,
        manifests_dir: None,
        exclude_namespaces: Vec::new(),
        cni_bin_dir: None,
        timeout,
        agent_namespace: None,
        agent_pod_prefixes: Vec::new(),
        cluster_dns: Vec::new(),
    }
}

/// A configuration with a kubeconfig.
pub(crate) fn api(kubeconfig: &Path, timeout: Duration) -> cni::Kubernetes {
    cni::Kubernetes { kubeconfig: Some(kubeconfig.to_owned()), ..settings(timeout) }
}

/// A configuration with a directory of manifests.
pub(crate) fn manifests(dir: &Path) -> cni::Kubernetes {
    cni::Kubernetes { manifests_dir: Some(dir.to_owned()), ..settings(Duration::ZERO) }
}

/// Returns the facts of the pod and its namespace.
pub(crate) fn facts(conf: &cni::Kubernetes) -> Result<Facts, Error> {
    cluster::source(conf).expect("a source").facts(&wanted(), true)
}

/// Returns the facts of the pod and its namespace, from a kubeconfig, within a minute.
pub(crate) fn facts_by(kubeconfig: &Path) -> Result<Facts, Error> {
    facts(&api(kubeconfig, Duration::from_secs(60)))
}
