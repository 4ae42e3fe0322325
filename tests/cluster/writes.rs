//! Reports to the cluster: a pod's network status and its Events.

use crate::scene::{api, directory, kubeconfig, manifests, status};
use crate::server::{Answer, Server};
use detour_cni::cluster::{self, Cluster, Event};
use detour_cni::cni::Code;
use detour_cni::pod::Pod;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn pod() -> Pod {
    Pod { namespace: "shop".into(), name: "web-0".into(), uid: Some("uid-1".into()), ..Pod::default() }
}

fn event() -> Event {
    Event { warning: true, reason: "NoNetworkFound".into(), message: "no \"x\"".into() }
}

fn source(test: &str, server: &str) -> Box<dyn Cluster> {
    let path = kubeconfig(&format!("writes-{test}"), &json!({"server": server}), &json!({}));
    cluster::source(&api(&path, Duration::from_secs(120))).expect("a source")
}

fn body(server: &Server) -> Value {
    serde_json::from_slice(&server.requests()[0].body).expect("JSON")
}

#[test]
fn the_status_is_a_merge_patch_with_the_pods_uid() {
    let server = Server::plain(|_| Answer::json(200, &json!({})));
    let value = "[{\n    \"name\": \"ovn\"\n}]";
    source("status", &server.http()).report(&pod(), Some(value), &[]).expect("written");
    assert_eq!(server.lines(), ["PATCH /api/v1/namespaces/shop/pods/web-0/status? HTTP/1.1"]);
    assert_eq!(server.requests()[0].headers["content-type"], "application/merge-patch+json");
    let wanted = json!({"metadata": {"uid": "uid-1", "annotations": {"k8s.v1.cni.cncf.io/network-status": value}}});
    assert_eq!(body(&server), wanted);
}

#[test]
fn an_event_is_created_in_the_pods_namespace() {
    let server = Server::plain(|_| Answer::json(201, &json!({})));
    source("event", &server.http()).report(&pod(), None, &[event()]).expect("written");
    assert_eq!(server.lines(), ["POST /api/v1/namespaces/shop/events? HTTP/1.1"]);
    let body = body(&server);
    let object = json!({"apiVersion": "v1", "kind": "Pod", "namespace": "shop", "name": "web-0", "uid": "uid-1"});
    assert_eq!(body["involvedObject"], object);
    assert_eq!(body["metadata"], json!({"generateName": "web-0.", "namespace": "shop"}));
    assert_eq!(
        (&body["type"], &body["reason"], &body["message"]),
        (&json!("Warning"), &json!("NoNetworkFound"), &json!("no \"x\""))
    );
    let time = body["firstTimestamp"].as_str().expect("a time");
    assert!(time.len() == 20 && time.ends_with('Z') && &time[10..11] == "T", "{time}");
    assert_eq!(body["firstTimestamp"], body["lastTimestamp"]);
}

#[test]
fn a_report_about_a_deleted_or_replaced_pod_is_not_retried() {
    for (test, answer, code) in
        [("gone", 404, Code::PodUnknown), ("another", 409, Code::PodUnknown), ("right", 403, Code::Forbidden)]
    {
        let server = Server::plain(move |_| status(answer, "reason"));
        let started = Instant::now();
        let error = source(test, &server.http()).report(&pod(), Some("[]"), &[]).expect_err("refused");
        assert_eq!(error.code, code, "{error}");
        let wanted = "pod shop/web-0: PATCH http://";
        assert!(error.msg.starts_with(wanted) && error.details.contains("reason"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(60));
        assert_eq!(server.requests().len(), 1);
    }
}

#[test]
fn manifests_are_not_written_to() {
    let dir = directory("writes-manifests");
    let source = cluster::source(&manifests(&dir)).expect("a source");
    source.report(&pod(), Some("[]"), &[]).expect("nothing to do");
    source.report(&pod(), None, &[event()]).expect("nothing to do");
    assert_eq!(std::fs::read_dir(&dir).expect("readable").count(), 0);
}
