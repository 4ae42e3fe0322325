//! The shipped manifests, and a cluster to which they are applied.

use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::support::wait::until;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) const NAMESPACE: &str = "kube-system";
const CRDS: &str = include_str!("crds.yaml");

pub(crate) fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests")
}

pub(crate) fn objects(text: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_saphyr::from_multiple(text).expect("YAML");
    all.into_iter().filter(|object| !object.is_null()).collect()
}

/// Returns the objects of a kustomize base.
pub(crate) fn base(platform: &str) -> Vec<Value> {
    objects(&fs::read_to_string(manifests().join(platform).join("rendered.yaml")).expect("readable"))
}

/// Returns the path of helm.
pub(crate) fn helm() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("tools").join("helm")
}

/// Returns the objects of the chart, rendered with these values.
pub(crate) fn chart(values: &[&str]) -> Vec<Value> {
    chart_with_files(&[], values)
}

/// Returns the objects of the chart, rendered with these files of values and single values.
pub(crate) fn chart_with_files(files: &[&Path], values: &[&str]) -> Vec<Value> {
    render("1.33.0", files, values)
}

/// Returns the objects of the chart for a version of Kubernetes, rendered with these values.
pub(crate) fn chart_for(version: &str, values: &[&str]) -> Vec<Value> {
    render(version, &[], values)
}

fn render(version: &str, files: &[&Path], values: &[&str]) -> Vec<Value> {
    let helm = helm();
    let mut command = Command::new(&helm);
    command.args(["template", "detour"]).arg(manifests().join("chart"));
    command.args(["--kube-version", version, "--namespace", NAMESPACE]);
    command.args(["--api-versions", "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy"]);
    command.args(["--set", "hub=registry.example/mesh"]);
    for file in files {
        command.arg("--values").arg(file);
    }
    for value in values {
        command.args(["--set", value]);
    }
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}: hack/test.sh --test apiserver builds it", helm.display()));
    assert!(output.status.success(), "{values:?}: {}", String::from_utf8_lossy(&output.stderr));
    objects(&String::from_utf8(output.stdout).expect("text"))
}

pub(crate) fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    objects.iter().find(|object| object["kind"] == kind).unwrap_or_else(|| panic!("{kind} not found"))
}

/// Applies all objects, which must be accepted.
#[track_caller]
pub(crate) fn apply(client: &Client, objects: &[Value]) {
    for object in objects {
        // helm deletes the pod of the last test first; most fields of a pod can't change.
        if object["kind"] == "Pod" && client.get(object).is_ok() {
            client.delete(object).expect("deleted");
        }
        if let Err(refused) = client.apply(object) {
            panic!("{} {}: {refused:?}", object["kind"], object["metadata"]["name"]);
        }
    }
}

/// Returns the namespaces of the cluster.
pub(crate) fn namespaces() -> Vec<Value> {
    let namespace = |name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    [NAMESPACE, "default", "shop"].map(namespace).to_vec()
}

/// Returns the custom resource definitions.
pub(crate) fn types() -> Vec<Value> {
    objects(CRDS)
}

/// Waits until the types are served.
pub(crate) fn established(client: &Client, types: &[Value]) {
    let established = |crd: &Value| {
        let conditions = client.get(crd).expect("there")["status"]["conditions"].take();
        let mut conditions = conditions.as_array().into_iter().flatten();
        conditions.any(|condition| condition["type"] == "Established" && condition["status"] == "True")
    };
    types.iter().for_each(|crd| until("the types are served", || established(crd)));
}

/// Creates the namespaces and the types.
pub(crate) fn prepare(client: &Client) {
    apply(client, &namespaces());
    apply(client, &types());
    established(client, &types());
}

/// Starts a cluster with the base for Kubernetes.
pub(crate) fn cluster() -> ControlPlane {
    cluster_with(&base("kubernetes"))
}

/// Starts a cluster with these objects.
pub(crate) fn cluster_with(objects: &[Value]) -> ControlPlane {
    let plane = ControlPlane::start();
    let admin = plane.admin();
    prepare(&admin);
    apply(&admin, objects);
    plane
}
