//! The shipped manifests, and a cluster to which they are applied.

use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::support::chart::template;
pub(crate) use crate::support::chart::{manifests, objects_in as objects, of_kind};
use crate::support::wait::until;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

pub(crate) const NAMESPACE: &str = "kube-system";
const CRDS: &str = include_str!("crds.yaml");

/// Returns the objects of a kustomize base.
pub(crate) fn base(platform: &str) -> Vec<Value> {
    objects(&fs::read_to_string(manifests().join(platform).join("rendered.yaml")).expect("readable"))
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
    let policies = "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy";
    let mut arguments =
        vec!["--kube-version", version, "--api-versions", policies, "--set", "hub=registry.example/mesh"];
    arguments.extend(files.iter().flat_map(|file| ["--values", file.to_str().expect("UTF-8")]));
    arguments.extend(values.iter().flat_map(|value| ["--set", *value]));
    let rendered = template(&manifests().join("chart"), &arguments, "");
    objects(&rendered.unwrap_or_else(|error| panic!("{values:?}: {error}")))
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
