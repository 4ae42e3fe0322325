//! A client for objects of any kind, as JSON.

use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::config::AuthInfo;
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Config};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// A refused request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) code: u16,
    pub(crate) message: String,
}

pub(crate) struct Client {
    runtime: Runtime,
    client: kube::Client,
}

impl Client {
    pub(crate) fn with_certificate(server: &str, authority: &str, certificate: &str, key: &str) -> Self {
        let data = |text: &str| {
            let bytes = k8s_openapi::ByteString(text.as_bytes().to_vec());
            serde_json::to_value(bytes).expect("base64").as_str().expect("text").to_owned()
        };
        let who = AuthInfo {
            client_certificate_data: Some(data(certificate)),
            client_key_data: Some(data(key).into()),
            ..AuthInfo::default()
        };
        Self::new(server, authority, who)
    }

    pub(crate) fn with_token(server: &str, authority: &str, token: &str) -> Self {
        Self::new(server, authority, AuthInfo { token: Some(token.to_owned().into()), ..AuthInfo::default() })
    }

    fn new(server: &str, authority: &str, who: AuthInfo) -> Self {
        let mut config = Config::new(server.parse().expect("a URL"));
        let ca: String = authority.lines().filter(|line| !line.starts_with('-')).collect();
        let der: k8s_openapi::ByteString = serde_json::from_value(json!(ca)).expect("base64");
        config.root_cert = Some(vec![der.0]);
        config.auth_info = who;
        config.read_timeout = Some(Duration::from_secs(120));
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let client = {
            let _inside = runtime.enter();
            kube::Client::try_from(config).expect("a client")
        };
        Self { runtime, client }
    }

    /// Whether the server is ready; pauses briefly if not.
    pub(crate) fn is_ready(&self) -> bool {
        self.runtime.block_on(async {
            let request = kube::core::Request::new("").get("readyz", &kube::api::GetParams::default());
            let ready = self.client.request_text(request.expect("a request")).await.is_ok();
            if !ready {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            ready
        })
    }

    /// Applies an object as `kubectl apply --server-side --validate=strict` does.
    pub(crate) fn apply(&self, object: &Value) -> Result<Value, Refused> {
        let name = object["metadata"]["name"].as_str().expect("a name");
        let parameters = PatchParams::apply("test").force().validation_strict();
        self.run(self.api(object).patch(name, &parameters, &Patch::Apply(object)))
    }

    /// Replaces a part of an object.
    pub(crate) fn merge(&self, object: &Value, part: &Value) -> Result<Value, Refused> {
        let name = object["metadata"]["name"].as_str().expect("a name");
        self.run(self.api(object).patch(name, &PatchParams::default(), &Patch::Merge(part)))
    }

    /// Replaces a part of an object's status.
    pub(crate) fn merge_status(&self, object: &Value, part: &Value) -> Result<Value, Refused> {
        self.merge_subresource(object, "status", part)
    }

    /// Replaces a part of a subresource of an object.
    pub(crate) fn merge_subresource(&self, object: &Value, subresource: &str, part: &Value) -> Result<Value, Refused> {
        let name = object["metadata"]["name"].as_str().expect("a name");
        let patch = Patch::Merge(part);
        self.run(self.api(object).patch_subresource(subresource, name, &PatchParams::default(), &patch))
    }

    /// Replaces a subresource of an object by `whole`.
    pub(crate) fn replace_subresource(&self, whole: &Value, subresource: &str) -> Result<Value, Refused> {
        let name = whole["metadata"]["name"].as_str().expect("a name");
        self.run(self.api(whole).replace_subresource(subresource, name, &PostParams::default(), whole))
    }

    pub(crate) fn get(&self, object: &Value) -> Result<Value, Refused> {
        self.run(self.api(object).get(object["metadata"]["name"].as_str().expect("a name")))
    }

    pub(crate) fn list(&self, object: &Value) -> Result<Vec<Value>, Refused> {
        let api = self.api(object);
        let list = self.answer(api.list(&Default::default()))?;
        Ok(list.items.iter().map(|item| serde_json::to_value(item).expect("JSON")).collect())
    }

    /// Returns the answer to a GET request for this path.
    pub(crate) fn get_path(&self, path: &str) -> Result<Value, Refused> {
        let request = kube::core::Request::new(path).list(&ListParams::default());
        self.answer(self.client.request(request.expect("a request")))
    }

    /// Deletes an object at once.
    pub(crate) fn delete(&self, object: &Value) -> Result<(), Refused> {
        let name = object["metadata"]["name"].as_str().expect("a name");
        self.answer(self.api(object).delete(name, &DeleteParams::default().grace_period(0))).map(drop)
    }

    /// Creates an object that is not stored, such as a review.
    pub(crate) fn create(&self, object: &Value) -> Result<Value, Refused> {
        let object_text: DynamicObject = serde_json::from_value(object.clone()).expect("an object");
        self.run(self.api(object).create(&PostParams::default(), &object_text))
    }

    /// Creates an object without storing it: it only passes the admission.
    pub(crate) fn try_create(&self, object: &Value) -> Result<Value, Refused> {
        let object_text: DynamicObject = serde_json::from_value(object.clone()).expect("an object");
        self.run(self.api(object).create(&PostParams { dry_run: true, ..PostParams::default() }, &object_text))
    }

    /// A token of a service account.
    pub(crate) fn token(&self, namespace: &str, name: &str) -> String {
        self.request_token(namespace, name, &json!({"audiences": [], "expirationSeconds": 3600})).expect("a token")
    }

    /// A token of a service account that is bound to an object.
    pub(crate) fn bound_token(&self, namespace: &str, name: &str, object: &Value) -> String {
        let bound = json!({"kind": object["kind"], "apiVersion": "v1", "name": object["metadata"]["name"]});
        let spec = json!({"audiences": [], "expirationSeconds": 3600, "boundObjectRef": bound});
        self.request_token(namespace, name, &spec).expect("a token")
    }

    /// Requests a token of a service account.
    pub(crate) fn request_token(&self, namespace: &str, name: &str, spec: &Value) -> Result<String, Refused> {
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": {}, "spec": spec,
        });
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        let request = kube::core::Request::new(path).create_subresource(
            "token",
            name,
            &PostParams::default(),
            request.to_string().into(),
        );
        let granted: Value = self.answer(self.client.request(request.expect("a request")))?;
        Ok(granted["status"]["token"].as_str().expect("a token").to_owned())
    }

    fn api(&self, object: &Value) -> Api<DynamicObject> {
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
        let (group, version) = version.split_once('/').unwrap_or(("", &version));
        let plural = match kind.as_str() {
            "NetworkAttachmentDefinition" => "network-attachment-definitions".to_owned(),
            "SecurityContextConstraints" => kind.to_lowercase(),
            _ if kind.ends_with('y') => format!("{}ies", &kind.to_lowercase()[..kind.len() - 1]),
            _ if kind.ends_with('s') => format!("{}es", kind.to_lowercase()),
            _ => format!("{}s", kind.to_lowercase()),
        };
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, &kind), &plural);
        match object["metadata"]["namespace"].as_str() {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource),
            None => Api::all_with(self.client.clone(), &resource),
        }
    }

    fn run(&self, work: impl Future<Output = kube::Result<DynamicObject>>) -> Result<Value, Refused> {
        self.answer(work).map(|object| serde_json::to_value(object).expect("JSON"))
    }

    fn answer<T>(&self, work: impl Future<Output = kube::Result<T>>) -> Result<T, Refused> {
        self.runtime.block_on(work).map_err(|error| match error {
            kube::Error::Api(status) => Refused { code: status.code, message: status.message },
            other => panic!("no answer: {other:?}"),
        })
    }
}
