//! What is sent to the API to change something, or to ask for more than an object.

use crate::cluster;
use crate::pod;
use crate::printable::{cut, line};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::time::Duration;

/// The merge patch of a pod that sets its network-status annotation. With its UID, a pod of the
/// same name that came after it answers with a conflict (apimachinery: `metadata.uid` is a
/// precondition of an update).
pub(super) fn network_status(pod: &pod::Pod, status: &str) -> Value {
    let mut metadata = json!({"annotations": {"k8s.v1.cni.cncf.io/network-status": status}});
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
