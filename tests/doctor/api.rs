//! What the API server of the scene knows.

use crate::server::{Answer, Request};
use serde_json::{Value, json};
use std::collections::BTreeMap;

pub(crate) const UID: &str = "8e5bd6a4-9a35-4f0e-9d2b-1c33a5b0a001";
pub(crate) const PROXY: u32 = 1_000_659_999;

/// The cluster.
#[derive(Debug, Clone)]
pub(crate) struct Cluster {
    pub(crate) pod: Value,
    pub(crate) namespace: Value,
    /// Other pods of the cluster.
    pub(crate) more_pods: Vec<Value>,
    /// `spec.config` by namespace and name.
    pub(crate) definitions: BTreeMap<(String, String), String>,
    /// `VERB RESOURCE` of the rights that the plugin lacks.
    pub(crate) denied: Vec<&'static str>,
    pub(crate) events: Vec<Value>,
}

impl Cluster {
    /// One that has everything.
    pub(crate) fn new() -> Self {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "web-0", "namespace": "shop", "uid": UID,
                "annotations": {
                    "k8s.v1.cni.cncf.io/networks": "default/istio-cni",
                    "sidecar.istio.io/status": "{}",
                },
            },
            "spec": {
                "nodeName": "node-1",
                "initContainers": [{ "name": "vault-agent-init", "securityContext": { "runAsUser": 1337 } }],
                "containers": [
                    { "name": "web", "securityContext": { "runAsUser": 1_000_650_000 } },
                    {
                        "name": "istio-proxy", "args": ["proxy", "sidecar"],
                        "env": [{ "name": "ISTIO_META_DNS_CAPTURE", "value": "true" }],
                        "securityContext": { "runAsUser": PROXY, "runAsGroup": PROXY },
                    },
                ],
            },
            "status": { "phase": "Running", "containerStatuses": [{ "name": "web", "state": { "running": {} } }] },
        });
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": { "name": "shop", "annotations": { "openshift.io/sa.scc.uid-range": "1000650000/10000" } },
        });
        Self {
            pod,
            namespace,
            definitions: [(("default".to_owned(), "istio-cni".to_owned()), String::new())].into(),
            more_pods: Vec::new(),
            denied: Vec::new(),
            events: Vec::new(),
        }
    }

    /// One that knows nothing of the pod.
    pub(crate) fn empty() -> Self {
        Self { pod: Value::Null, namespace: Value::Null, ..Self::new() }
    }

    pub(crate) fn annotate(&mut self, key: &str, value: impl Into<Value>) {
        self.pod["metadata"]["annotations"][key] = value.into();
    }

    /// The page of a list: one pod per page, so that every list has several.
    fn pods(&self, path: &str, query: &str) -> Value {
        let parameter = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(&format!("{name}=")));
        let node = parameter("fieldSelector").and_then(|text| text.strip_prefix("spec.nodeName%3D")).expect("a node");
        let is_here = |pod: &&Value| {
            pod["spec"]["nodeName"] == node && (path == "/api/v1/pods" || pod["metadata"]["namespace"] == "shop")
        };
        let all: Vec<&Value> = [&self.pod].into_iter().chain(&self.more_pods).filter(is_here).collect();
        let at: usize = parameter("continue").map_or(0, |text| text.parse().expect("a number"));
        let more = if at + 1 < all.len() { (at + 1).to_string() } else { String::new() };
        json!({"kind": "PodList", "metadata": {"continue": more}, "items": all.into_iter().skip(at).take(1).collect::<Vec<_>>()})
    }

    pub(crate) fn answer(&self, request: &Request) -> Answer {
        let path = request.line.split(' ').nth(1).unwrap_or_default();
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let missing = || Answer::json(404, &json!({"kind": "Status", "message": format!("{path} not found")}));
        let found = |object: Value| Answer::json(200, &object);
        let (definitions, kind) = ("/apis/k8s.cni.cncf.io/v1", "network-attachment-definitions");
        match path {
            "/version" => found(json!({"gitVersion": "v1.33.0"})),
            "/api/v1/namespaces/shop/pods/web-0" if self.pod.is_object() => found(self.pod.clone()),
            "/api/v1/namespaces/shop" if self.namespace.is_object() => found(self.namespace.clone()),
            "/api/v1/namespaces/shop/events" => found(json!({"kind": "EventList", "items": self.events})),
            "/api/v1/pods" | "/api/v1/namespaces/shop/pods" | "/api/v1/namespaces"
                if self.denied.contains(&"list pods") =>
            {
                Answer::json(403, &json!({"kind": "Status", "message": "pods is forbidden", "code": 403}))
            }
            "/api/v1/namespaces" => found(json!({"kind": "NamespaceList", "items": [self.namespace]})),
            "/api/v1/pods" | "/api/v1/namespaces/shop/pods" => found(self.pods(path, query)),
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews" => {
                let review: Value = serde_json::from_slice(&request.body).expect("JSON");
                let right = &review["spec"]["resourceAttributes"];
                let text = |key: &str| right[key].as_str().unwrap_or_default();
                let spelled = format!("{} {}", text("verb"), text("resource"));
                found(json!({"status": {"allowed": !self.denied.contains(&spelled.as_str())}}))
            }
            _ if path == format!("{definitions}/{kind}") => {
                let item =
                    |(namespace, name): &(String, String)| json!({"metadata": {"namespace": namespace, "name": name}});
                found(json!({"items": self.definitions.keys().map(item).collect::<Vec<_>>()}))
            }
            _ => {
                let of = |(namespace, name): &(String, String)| {
                    format!("{definitions}/namespaces/{namespace}/{kind}/{name}")
                };
                match self.definitions.iter().find(|(key, _)| of(key) == path) {
                    Some(((namespace, name), config)) => {
                        found(json!({"metadata": {"namespace": namespace, "name": name}, "spec": {"config": config}}))
                    }
                    None => missing(),
                }
            }
        }
    }
}

/// An event of the pod's.
pub(crate) fn event(reason: &str, message: &str) -> Value {
    json!({
        "type": "Warning", "reason": reason, "message": message, "count": 7,
        "source": {"component": "kubelet"}, "lastTimestamp": "2026-01-01T00:00:00Z",
    })
}

/// A JSON Web Token that ends at `exp`, in seconds since 1970.
pub(crate) fn token(exp: i64) -> String {
    let part = |value: &Value| {
        let bytes = k8s_openapi::ByteString(value.to_string().into_bytes());
        let text = serde_json::to_value(bytes).expect("base64").as_str().expect("text").to_owned();
        text.trim_end_matches('=').replace('+', "-").replace('/', "_")
    };
    format!(
        "{}.{}.c2lnbmF0dXJlLW9mLXRoZS1wbGFudGVkLXRva2Vu",
        part(&json!({"alg": "RS256"})),
        part(&json!({"exp": exp}))
    )
}
