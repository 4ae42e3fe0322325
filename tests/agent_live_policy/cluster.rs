//! A real API server with an agent that has the rights for live policy.

use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::pod::Pod;
use crate::scene::{Scene, scene_of};
use serde_json::{Value, json};

/// Runs `work` with an API server and a node of its cluster.
pub(crate) fn cluster(work: impl FnOnce(&ControlPlane, &Scene<'_>) + Send) {
    let plane = ControlPlane::start();
    let admin = plane.admin();
    let rules = json!([
        {"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    ]);
    let group = "rbac.authorization.k8s.io";
    for object in [
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}),
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "detour"}}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": "shop", "name": "default"}}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": "detour", "name": "agent"}}),
        json!({"apiVersion": format!("{group}/v1"), "kind": "ClusterRole", "metadata": {"name": "agent"}, "rules": rules}),
        json!({
            "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "agent"},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "agent"},
            "subjects": [{"kind": "ServiceAccount", "namespace": "detour", "name": "agent"}],
        }),
    ] {
        admin.apply(&object).expect("accepted");
    }
    let token = admin.token("detour", "agent");
    scene_of(&plane.server(), &plane.authority(), &token, |scene| work(&plane, scene));
}

/// Creates a pod in the cluster and on the node, and calls ADD for it.
pub(crate) fn added(admin: &Client, scene: &Scene<'_>, name: &str, spec: &Value) -> Pod {
    let mut pod = Pod::new(scene, name);
    let mut object = pod.object();
    object["metadata"].as_object_mut().expect("an object").remove("uid");
    object["spec"].as_object_mut().expect("an object").extend(spec.as_object().cloned().unwrap_or_default());
    let status = object.as_object_mut().expect("an object").remove("status").expect("one");
    let created = admin.apply(&object).expect("accepted");
    pod.uid = created["metadata"]["uid"].as_str().expect("text").to_owned();
    pod.call(scene, "ADD").unwrap_or_else(|error| panic!("pod {name}: {error}"));
    admin.merge_status(&created, &json!({"status": status})).expect("accepted");
    pod
}

/// Returns the reference of an object in the namespace.
pub(crate) fn reference(kind: &str, name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": kind, "metadata": {"namespace": "shop", "name": name}})
}

/// Changes the annotations of the namespace of the pods.
pub(crate) fn annotate_namespace(admin: &Client, annotations: &Value) {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}});
    admin.merge(&namespace, &json!({"metadata": {"annotations": annotations}})).expect("accepted");
}
