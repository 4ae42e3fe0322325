//! What a healthy API server and healthy plugins answer about the pod `shop/web-0`.

use serde_json::{Value, json};

/// The pod, with a sidecar, and with a secondary network.
pub(crate) fn pod() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "web-0", "namespace": "shop", "uid": "uid-1", "resourceVersion": "7",
            "annotations": {"sidecar.istio.io/status": "{}", "k8s.v1.cni.cncf.io/networks": "second"},
        },
        "spec": {"nodeName": "node-1", "containers": [
            {"name": "app"},
            {"name": "istio-proxy", "args": ["proxy", "sidecar"], "securityContext": {"runAsUser": 1337}},
        ]},
    })
}

pub(crate) fn namespace() -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop", "annotations": {"a": "1"}}})
}

pub(crate) fn definition() -> Value {
    let config = json!({"cniVersion": "1.1.0", "name": "second", "type": "second"});
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": "second", "namespace": "shop"}, "spec": {"config": config.to_string()},
    })
}

/// Returns status and body of the answer to a request.
pub(crate) fn answer(line: &str) -> (u16, Value) {
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["GET", "/api/v1/namespaces/shop/pods/web-0", ..] => (200, pod()),
        ["GET", "/api/v1/namespaces/shop", ..] => (200, namespace()),
        ["GET", path, ..] if path.ends_with("/network-attachment-definitions/second") => (200, definition()),
        ["PATCH" | "POST", ..] => (200, json!({})),
        _ => (404, json!({"kind": "Status", "message": "no such thing", "reason": "NotFound", "code": 404})),
    }
}

/// The result of an ADD with one interface and one address.
pub(crate) fn result(interface: &str, address: &str) -> Value {
    json!({
        "cniVersion": "1.1.0", "interfaces": [{"name": interface, "sandbox": "/run/netns/x"}],
        "ips": [{"interface": 0, "address": address}],
    })
}
