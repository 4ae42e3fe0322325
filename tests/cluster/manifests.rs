//! Facts from a directory of manifests, and lists of an API server in pages.

use crate::scene::{api, directory, facts, manifests, wanted};
use crate::server::{Answer, Request, Server};
use crate::support::api::kubeconfig_of;
use detour_cni::cluster;
use detour_cni::cluster::Api;
use detour_cni::cni::{Code, Error};
use detour_cni::pod::{Facts, Namespace, PodRef};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Duration;

const NAMESPACE: &str = "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, annotations: {a: '1'}}\n";
const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: web-0, namespace: shop}\n\
                   spec:\n  containers:\n  - name: istio-proxy\n";

/// Reads the facts from these files.
fn read(test: &str, files: &[(&str, &str)]) -> Result<Facts, Error> {
    let dir = directory(test);
    for (name, text) in files {
        fs::write(dir.join(name), text).expect("a file");
    }
    facts(&manifests(&dir))
}

fn is_found(test: &str, files: &[(&str, &str)]) {
    let facts = read(test, files).unwrap_or_else(|error| panic!("{test}: {error}"));
    assert_eq!((facts.pod.namespace.as_str(), facts.pod.name.as_str()), ("shop", "web-0"), "{test}");
    assert_eq!(facts.pod.containers[0].name, "istio-proxy", "{test}");
    assert_eq!(facts.namespace.expect("a namespace").annotations["a"], "1", "{test}");
}

#[test]
fn objects_are_found_in_documents_files_and_lists() {
    let service = "apiVersion: v1\nkind: Service\nmetadata: {name: web-0, namespace: shop}\nspec: 5\n";
    let both = format!("# pods\n---\n{service}---\n{POD}---\n---\n{NAMESPACE}");
    is_found("documents", &[("all.yaml", &both)]);
    is_found("two-files", &[("a.yml", POD), ("b.yaml", NAMESPACE), ("README.md", "---\n: not YAML")]);
    let indented = |text: &str| format!("- {}\n", text.trim_end().replace('\n', "\n  "));
    let list = format!("apiVersion: v1\nkind: List\nitems:\n{}{}", indented(POD), indented(NAMESPACE));
    is_found("list", &[("list.yaml", &list)]);
    let json = r#"{"kind": "PodList", "items": [{"kind": "Pod", "metadata": {"name": "web-0", "namespace": "shop"},
                   "spec": {"containers": [{"name": "istio-proxy"}]}}]}"#;
    is_found("json", &[("pods.json", json), ("n.yaml", NAMESPACE)]);
    let elsewhere = POD.replace("shop", "other").replace("istio-proxy", "x");
    is_found("namesake", &[("a.yaml", &elsewhere), ("b.yaml", POD), ("c.yaml", NAMESPACE)]);
    let knative = POD.replace("v1", "example.com/v1").replace("istio-proxy", "x");
    is_found("another-pod-kind", &[("a.yaml", &knative), ("b.yaml", POD), ("c.yaml", NAMESPACE)]);
}

#[test]
fn a_pod_without_a_namespace_is_in_default() {
    let dir = directory("default");
    fs::write(dir.join("pod.yaml"), "kind: Pod\nmetadata: {name: web-0}\n").expect("a file");
    let source = cluster::source(&manifests(&dir)).expect("a source");
    let wanted = PodRef { namespace: "default".into(), ..wanted() };
    let facts = source.facts(&wanted, false).expect("facts");
    assert_eq!((facts.pod.namespace.as_str(), facts.namespace), ("default", None));
}

#[test]
fn a_pod_with_another_uid_is_not_found() {
    let with = |uid: &str| POD.replace("namespace: shop", &format!("namespace: shop, uid: {uid}"));
    is_found("uid", &[("a.yaml", &with("uid-0")), ("b.yaml", &with("uid-1")), ("c.yaml", NAMESPACE)]);
    let error = read("uid-wrong", &[("a.yaml", &with("uid-0")), ("c.yaml", NAMESPACE)]).expect_err("another UID");
    assert_eq!(error.code, Code::PodUnknown);
    for part in ["uid-0", "uid-1", "uid-wrong"] {
        assert!(error.msg.contains(part), "{part}: {error}");
    }
}

#[test]
fn a_namespace_without_a_manifest_has_no_annotations() {
    let facts = read("no-namespace", &[("p.yaml", POD)]).expect("the pod is there");
    assert_eq!(facts.namespace, Some(Namespace { name: "shop".into(), ..Namespace::default() }));
    let error = read("broken-namespace", &[("p.yaml", POD), ("n.yaml", "a: b: c")])
        .expect_err("the broken file may contain it");
    assert_eq!(error.code, Code::InvalidConfig);
    assert!(error.msg.contains("n.yaml"), "{error}");
}

#[test]
fn a_broken_file_is_an_error_because_it_may_contain_any_object() {
    let broken = "kind: Pod\nmetadata: {name: web-0\nspec: }{\n";
    let files = [("a.yaml", broken), ("b.yaml", POD), ("n.yaml", NAMESPACE)];
    let error = read("broken", &files).expect_err("a broken file");
    assert_eq!(error.code, Code::InvalidConfig);
    assert!(error.msg.contains("a.yaml") && error.msg.contains("line 3"), "{error}");
}

#[test]
fn an_error_names_the_invalid_part_of_a_pod() {
    let wrong = format!("{NAMESPACE}---\n{POD}  hostNetwork: [1]\n");
    let error = read("shape", &[("a.yaml", &wrong)]).expect_err("a wrong type");
    assert_eq!(error.code, Code::InvalidConfig);
    assert!(error.msg.contains("a.yaml: Pod shop/web-0: spec.hostNetwork: invalid type: sequence"), "{error}");
    let listed = r#"{"kind": "List", "items": [{"kind": "Pod", "metadata": {"name": "web-0", "namespace": "shop"},
                     "spec": {"hostNetwork": 5}}]}"#;
    let error = read("shape-list", &[("l.json", listed)]).expect_err("a wrong type");
    assert_eq!(error.code, Code::InvalidConfig);
    assert!(
        error.msg.contains("l.json: Pod shop/web-0: spec.hostNetwork: invalid type: integer, expected a boolean"),
        "{error}"
    );
}

#[test]
fn a_missing_directory_is_an_error() {
    let dir = directory("parent").join("absent");
    let error = facts(&manifests(&dir)).expect_err("no directory");
    assert_eq!(error.code, Code::InvalidConfig);
    assert!(error.msg.contains("kubernetes.manifests_dir") && error.msg.contains("absent"), "{error}");
}

#[test]
fn manifests_take_precedence_over_a_kubeconfig_and_without_both_there_is_no_source() {
    let dir = directory("wins");
    fs::write(dir.join("p.yaml"), format!("{POD}---\n{NAMESPACE}")).expect("a file");
    let mut conf = manifests(&dir);
    conf.kubeconfig = api(Path::new("/absent"), Duration::ZERO).kubeconfig;
    facts(&conf).expect("facts");
    (conf.kubeconfig, conf.manifests_dir) = (None, None);
    assert!(cluster::source(&conf).is_none());
}

fn listing(server: &Server, test: &str) -> Api {
    let path = directory(test).join("config");
    fs::write(&path, kubeconfig_of(&json!({"server": server.http()}), &json!(null))).expect("written");
    Api::of_kubeconfig(Path::new("/"), path).within(Duration::from_secs(60)).once()
}

/// The value of a parameter of the request.
fn parameter(request: &Request, name: &str) -> Option<usize> {
    let query = request.line.split(' ').nth(1)?.split_once('?')?.1;
    query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

/// The number of namespaces of 1 MiB; a page of all of them exceeds the limit of an answer.
const LARGE: usize = 20;

/// Large namespaces, in pages.
fn large_namespaces(request: &Request) -> Answer {
    let (limit, from) = (parameter(request, "limit").expect("a limit"), parameter(request, "continue").unwrap_or(0));
    let until = (from + limit).min(LARGE);
    let node = |number| json!({"metadata": {"name": format!("n-{number}"), "labels": {"l": "x".repeat(1 << 20)}}});
    let more = if until < LARGE { until.to_string() } else { String::new() };
    let items: Vec<Value> = (from..until).map(node).collect();
    Answer::json(200, &json!({"metadata": {"continue": more}, "items": items}))
}

#[test]
fn a_page_that_is_too_large_is_requested_again_with_fewer_objects() {
    let server = Server::plain(large_namespaces);
    let namespaces = listing(&server, "large-pages").namespaces(None).expect("all namespaces");
    assert_eq!(namespaces.len(), LARGE);
    assert_eq!(server.requests().len(), 1 + LARGE, "a page, and then each object");
}

#[test]
fn a_list_that_does_not_end_is_an_error() {
    let server = Server::plain(|_| {
        Answer::json(200, &json!({"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "n"}}]}))
    });
    let error = listing(&server, "endless-list").namespaces(None).expect_err("no end");
    assert!(
        error.msg.starts_with("namespaces: ") && error.details == "expected at most 6000 pages, got more",
        "{error}"
    );
}
