//! An API client that reads no more of a response than a Kubernetes API sends.
//!
//! The API server takes objects of at most 1.5 MiB, as etcd stores them (`--max-request-bytes`); as JSON
//! one can have six times that, if all of it needs escapes. Responses are not compressed.
//!
//! What is sent to the API to change something, or to ask for more than an object.

use crate::pod::well_known::NETWORK_STATUS;
use crate::printable::{cut, line};
use crate::{cluster, pod};
use hyper::body::{Body, Bytes, Frame, SizeHint};
use hyper::{Request, Response};
use k8s_openapi::jiff::Timestamp;
use kube::client::ClientBuilder;
use kube::{Client, Config};
use serde_json::{Value, json};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tower::{BoxError, Layer, Service};

/// The most bytes of an object, or of an unpaged list, and of an event of a watch.
const OBJECT: u64 = 16 << 20;
/// The most bytes of a page of a list. The agent asks for [`PAGE`] objects each.
const LIST: u64 = 64 << 20;
/// How many objects a page has: objects of ordinary size stay below the limit together.
pub(crate) const PAGE: u32 = 40;

/// A client of the API that `config` describes.
pub(super) fn client(config: Config) -> kube::Result<Client> {
    Ok(ClientBuilder::try_from(config)?.with_layer(&Limited(())).build())
}

/// A response that is too large.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{request}: expected {part} of at most {limit} bytes, got more")]
pub(super) struct TooLarge {
    request: String,
    part: &'static str,
    limit: u64,
}

impl TooLarge {
    /// The reason for a failed request, if it is this one.
    pub(super) fn of<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Self> {
        let mut errors = std::iter::successors(Some(error), |error| error.source());
        errors.find_map(|error| error.downcast_ref())
    }
}

/// Limits the responses of a service; the value is the service, or nothing in a layer.
#[derive(Debug, Clone)]
struct Limited<S>(S);

impl<S> Layer<S> for Limited<()> {
    type Service = Limited<S>;

    fn layer(&self, service: S) -> Self::Service {
        Limited(service)
    }
}

impl<S, B, R> Service<Request<R>> for Limited<S>
where
    S: Service<Request<R>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = Response<LimitedBody<B>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<R>) -> Self::Future {
        let has = |parameter: &str| {
            let query = request.uri().query().unwrap_or_default();
            query.split('&').any(|pair| pair.split('=').next() == Some(parameter))
        };
        let (part, limit, by_line) = match (has("watch"), has("limit")) {
            (true, _) => ("an event", OBJECT, true),
            (_, true) => ("a page", LIST, false),
            _ => ("a response", OBJECT, false),
        };
        let request_line = format!("{} {}", request.method(), request.uri().path());
        let response = self.0.call(request);
        Box::pin(async move {
            let too_large = TooLarge { request: request_line, part, limit };
            Ok(response.await?.map(|body| LimitedBody { body, by_line, read: 0, too_large }))
        })
    }
}

/// A body that ends with an error at its limit.
struct LimitedBody<B> {
    body: B,
    /// Whether the limit is that of a line, not of the whole.
    by_line: bool,
    /// As many bytes of the whole, or of a line, were read.
    read: u64,
    too_large: TooLarge,
}

impl<B> LimitedBody<B> {
    /// Whether the limit holds with this piece.
    fn admits(&mut self, piece: &[u8]) -> bool {
        let by_line = self.by_line;
        for part in piece.split_inclusive(|byte| by_line && *byte == b'\n') {
            self.read += part.len() as u64;
            if self.read > self.too_large.limit {
                return false;
            }
            if by_line && part.ends_with(b"\n") {
                self.read = 0;
            }
        }
        true
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Body for LimitedBody<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let announced = if self.by_line { 0 } else { self.body.size_hint().lower() };
        if self.read + announced > self.too_large.limit {
            return Poll::Ready(Some(Err(self.too_large.clone().into())));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        Poll::Ready(frame.map(|frame| {
            let frame = frame.map_err(Into::into)?;
            let admitted = frame.data_ref().is_none_or(|data| self.admits(data));
            if admitted { Ok(frame) } else { Err(self.too_large.clone().into()) }
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The merge patch of a pod that sets its network-status annotation. With its UID, a pod of the
/// same name that came after it answers with a conflict (apimachinery: `metadata.uid` is a
/// precondition of an update).
pub(super) fn network_status(pod: &pod::Pod, status: &str) -> Value {
    let mut metadata = json!({"annotations": {NETWORK_STATUS: status}});
    if let Some(uid) = &pod.uid {
        metadata["uid"] = json!(uid);
    }
    json!({"metadata": metadata})
}

/// The merge patch that gives a pod a label, if it still is as it was read.
pub(super) fn label(pod: &pod::Pod, resource_version: &str, (key, value): (&str, &str)) -> Value {
    json!({"metadata": {"uid": pod.uid, "resourceVersion": resource_version, "labels": {key: value}}})
}

/// The merge patch that gives a node its taints, all of them, if it still is as it was read.
pub(super) fn taints(node: &cluster::NodeTaints) -> Value {
    json!({"metadata": {"resourceVersion": node.resource_version}, "spec": {"taints": node.taints}})
}

/// How long an Event's message may be, in bytes: `events.k8s.io` refuses a longer one (`NoteLengthLimit`).
const MESSAGE_LIMIT: usize = 1024;

/// An `Event` of a pod (k8s.io/api, `core/v1`) that happens now. `kubectl describe` prints its message to a
/// terminal.
pub(super) fn event(pod: &pod::Pod, event: &cluster::Event) -> Value {
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": format!("{}.", pod.name), "namespace": pod.namespace},
        "involvedObject": {
            "apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid,
        },
        "type": if event.warning { "Warning" } else { "Normal" },
        "reason": event.reason,
        "message": cut(&line(&event.message), MESSAGE_LIMIT),
        "source": {"component": "detour"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    })
}

/// A `TokenRequest` (k8s.io/api, `authentication/v1`) for the API itself.
pub(super) fn token_request(lifetime: Duration) -> Value {
    json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [], "expirationSeconds": lifetime.as_secs()},
    })
}

/// A `SelfSubjectAccessReview` (k8s.io/api, `authorization/v1`).
pub(super) fn review(right: &cluster::Right) -> Value {
    let mut attributes = json!({"verb": right.verb, "group": right.group, "resource": right.resource});
    if let Some(subresource) = right.subresource {
        attributes["subresource"] = json!(subresource);
    }
    if let Some(namespace) = &right.namespace {
        attributes["namespace"] = json!(namespace);
    }
    json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(limit: u64, by_line: bool) -> LimitedBody<String> {
        let too_large = TooLarge { request: "GET /a".into(), part: "a page", limit };
        LimitedBody { body: String::new(), by_line, read: 0, too_large }
    }

    #[test]
    fn the_whole_is_limited_or_each_line() {
        let mut whole = body(6, false);
        assert!(whole.admits(b"ab\n") && whole.admits(b"cd\n") && !whole.admits(b"e"));
        let mut lines = body(3, true);
        assert!(lines.admits(b"ab\ncd\nef") && lines.admits(b"\nab\n") && lines.admits(b"abc") && !lines.admits(b"d"));
        assert!(!body(3, true).admits(b"a\nbcde\n"));
    }

    #[test]
    fn the_reason_is_found_behind_other_errors() {
        let reason = body(1, false).too_large;
        let error = kube::Error::Service(Box::new(reason.clone()));
        assert_eq!(TooLarge::of(&error), Some(&reason));
        assert_eq!(reason.to_string(), "GET /a: expected a page of at most 1 bytes, got more");
        assert_eq!(TooLarge::of(&kube::Error::Service("other".into())), None);
    }

    #[test]
    fn an_events_message_is_printable_and_short() {
        let message = |text: String| {
            let told = cluster::Event { message: text, ..cluster::Event::default() };
            event(&pod::Pod::default(), &told)["message"].as_str().map(str::to_owned).expect("text")
        };
        assert_eq!(message("a\u{1b}[2J\n\u{202e}".into()), "a\\u{1b}[2J\\n\\u{202e}");
        let long = message("ä\u{1b}".repeat(100_000));
        assert!(long.len() <= MESSAGE_LIMIT && long.ends_with('…'), "{long}");
    }
}
