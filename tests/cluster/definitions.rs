//! NetworkAttachmentDefinitions from an API server and from a directory of manifests; reports to the cluster: a pod's network
//! status and its Events.

use crate::scene::{api, directory, kubeconfig, manifests, status};
use crate::server::{Answer, Request, Server};
use detour_cni::cluster::{self, Cluster, DefinitionQuery, Event, Lookup, ObjectRef};
use detour_cni::cni::{Code, Error};
use detour_cni::pod::Pod;
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};

const PATH: &str = "/apis/k8s.cni.cncf.io/v1";
const CONFIG: &str = "{ \"type\":\"bridge\" ,\n\t\"mtu\": 1e3}";

fn object(namespace: &str, name: &str) -> DefinitionQuery {
    DefinitionQuery { object: ObjectRef { namespace: namespace.into(), name: name.into() }, awaited: true }
}

fn get(namespace: &str, name: &str) -> String {
    format!("GET {PATH}/namespaces/{namespace}/network-attachment-definitions/{name} HTTP/1.1")
}

fn definition(namespace: &str, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition", "spec": spec,
        "metadata": {"namespace": namespace, "name": name, "annotations": {"k8s.v1.cni.cncf.io/resourceName": "r"}},
    })
}

fn source(test: &str, server: &Server, timeout: Duration) -> Box<dyn Cluster> {
    let path = kubeconfig(&format!("definitions-{test}"), &json!({"server": server.http()}), &json!({}));
    cluster::source(&api(&path, timeout)).expect("a source")
}

/// Answers with every definition of the namespace `shop`.
fn has_shops(request: &Request) -> Answer {
    let name = request.line.strip_prefix(&format!("GET {PATH}/namespaces/shop/network-attachment-definitions/"));
    match name.and_then(|rest| rest.split(' ').next()) {
        Some(name) => Answer::json(200, &definition("shop", name, &json!({"config": CONFIG}))),
        None => status(404, "network-attachment-definitions.k8s.cni.cncf.io \"x\" not found"),
    }
}

const LONG: Duration = Duration::from_secs(120);
const BRIEF: Duration = Duration::from_secs(2);

#[test]
fn definitions_arrive_in_order_with_their_exact_configuration() {
    let server = Server::plain(has_shops);
    let wanted = [object("shop", "b.c"), object("shop", "a")];
    let found = source("order", &server, LONG).definitions(&wanted).expect("definitions");
    for (wanted, found) in wanted.iter().zip(found) {
        let Lookup::Found(found) = found else { panic!("{found:?}") };
        assert_eq!((&found.object, &*found.config), (&wanted.object, CONFIG));
        assert_eq!(found.resource_name(), Some("r"));
    }
    assert_eq!(server.lines(), [get("shop", "a"), get("shop", "b.c")]);
}

#[test]
fn no_request_is_sent_for_an_empty_list_or_an_invalid_name() {
    let server = Server::plain(has_shops);
    let source = source("nothing", &server, LONG);
    assert_eq!(source.definitions(&[]), Ok(vec![]));
    for wrong in [object("shop", "../secrets/x"), object("a/b", "x"), object("shop", "")] {
        assert_eq!(source.definitions(&[wrong]).expect_err("no name").code, Code::Environment);
    }
    assert_eq!(server.connections(), 0);
}

#[test]
fn a_missing_definition_is_retried_for_two_seconds_and_named() {
    let server = Server::plain(has_shops);
    let started = Instant::now();
    let found = source("missing", &server, LONG).definitions(&[object("shop", "a"), object("other", "x")]);
    let [Lookup::Found(_), Lookup::Missing(why)] = &found.expect("an answer")[..] else { panic!("one of two exists") };
    for part in ["NetworkAttachmentDefinition other/x: GET http://", "/namespaces/other/", "\"x\" not found"] {
        assert!(why.contains(part), "{part}: {why}");
    }
    assert!(started.elapsed() > Duration::from_millis(1800));
}

#[test]
fn a_missing_definition_that_is_not_awaited_is_not_retried() {
    let server = Server::plain(has_shops);
    let wanted = DefinitionQuery { awaited: false, ..object("other", "x") };
    let found = source("at-once", &server, LONG).definitions(&[wanted]).expect("an answer");
    assert!(matches!(&found[..], [Lookup::Missing(why)] if why.contains("/other/")), "{found:?}");
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn server_errors_and_missing_rights_are_errors() {
    let fails = |test: &str, code: u16, timeout: Duration| -> Error {
        let server = Server::plain(move |request| match request.line.contains("/bad ") {
            true => status(code, "reason"),
            false => Answer::Hang,
        });
        let wanted = [object("shop", "good"), object("shop", "bad")];
        source(test, &server, timeout).definitions(&wanted).expect_err("an error")
    };
    let error = fails("forbidden", 403, LONG);
    assert_eq!(error.code, Code::Forbidden);
    let right = "get network-attachment-definitions.k8s.cni.cncf.io in namespace shop";
    assert!(
        error.msg.starts_with("NetworkAttachmentDefinition shop/bad: GET ") && error.msg.contains(right),
        "{error}"
    );
    let error = fails("trouble", 500, BRIEF);
    assert_eq!(error.code, Code::TryAgain);
}

#[test]
fn definitions_are_found_in_manifests() {
    let dir = directory("definitions-manifests");
    let yaml = "apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\nmetadata: {name: a, namespace: shop}\n\
                spec:\n  config: '{ \"type\": \"bridge\" }'\n---\napiVersion: example.com/v1\n\
                kind: NetworkAttachmentDefinition\nmetadata: {name: b, namespace: shop}\n";
    fs::write(dir.join("a.yaml"), yaml).expect("a file");
    fs::write(dir.join("b.json"), definition("default", "a", &json!({})).to_string()).expect("a file");
    let source = cluster::source(&manifests(&dir)).expect("a source");
    let found = source.definitions(&[object("shop", "a"), object("default", "a"), object("shop", "b")]);
    let [Lookup::Found(first), Lookup::Found(second), Lookup::Missing(why)] = &found.expect("an answer")[..] else {
        panic!("two are there")
    };
    assert_eq!((&*first.config, &*second.config), ("{ \"type\": \"bridge\" }", ""));
    assert!(why.contains("definitions-manifests"), "{why}");

    fs::write(dir.join("c.yaml"), "a: b: c").expect("a file");
    let error = source.definitions(&[object("shop", "a")]).expect_err("a broken file");
    assert!(error.msg.contains("c.yaml"), "{error}");
}

fn pod() -> Pod {
    Pod { namespace: "shop".into(), name: "web-0".into(), uid: Some("uid-1".into()), ..Pod::default() }
}

fn event() -> Event {
    Event { warning: true, reason: "NoNetworkFound".into(), message: "no \"x\"".into() }
}

fn writer(test: &str, server: &str) -> Box<dyn Cluster> {
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
    writer("status", &server.http()).report(&pod(), Some(value), &[]).expect("written");
    assert_eq!(server.lines(), ["PATCH /api/v1/namespaces/shop/pods/web-0/status? HTTP/1.1"]);
    assert_eq!(server.requests()[0].headers["content-type"], "application/merge-patch+json");
    let wanted = json!({"metadata": {"uid": "uid-1", "annotations": {"k8s.v1.cni.cncf.io/network-status": value}}});
    assert_eq!(body(&server), wanted);
}

#[test]
fn an_event_is_created_in_the_pods_namespace() {
    let server = Server::plain(|_| Answer::json(201, &json!({})));
    writer("event", &server.http()).report(&pod(), None, &[event()]).expect("written");
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
        let error = writer(test, &server.http()).report(&pod(), Some("[]"), &[]).expect_err("refused");
        assert_eq!(error.code, code, "{error}");
        let wanted = "pod shop/web-0: PATCH http://";
        assert!(error.msg.starts_with(wanted) && error.details.contains("reason"), "{error}");
        assert_eq!(server.requests().len(), 1);
    }
}

#[test]
fn manifests_are_not_written_to() {
    let dir = directory("writes-manifests");
    let source = cluster::source(&manifests(&dir)).expect("a source");
    source.report(&pod(), Some("[]"), &[]).expect("nothing to do");
    source.report(&pod(), None, &[event()]).expect("nothing to do");
    assert_eq!(fs::read_dir(&dir).expect("readable").count(), 0);
}
