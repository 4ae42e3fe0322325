//! Lists in pages: large objects, and lists that do not end.

use crate::scene::directory;
use crate::server::{Answer, Request, Server};
use detour_cni::cluster::Api;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Duration;

fn api(server: &Server, test: &str) -> Api {
    let path = directory(test).join("config");
    let kubeconfig = json!({
        "current-context": "c", "clusters": [{"name": "k", "cluster": {"server": server.http()}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": ""}}],
    });
    fs::write(&path, kubeconfig.to_string()).expect("written");
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
    let namespaces = api(&server, "large-pages").namespaces(None).expect("all namespaces");
    assert_eq!(namespaces.len(), LARGE);
    assert_eq!(server.requests().len(), 1 + LARGE, "a page, and then each object");
}

#[test]
fn a_list_that_does_not_end_is_an_error() {
    let server = Server::plain(|_| {
        Answer::json(200, &json!({"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "n"}}]}))
    });
    let error = api(&server, "endless-list").namespaces(None).expect_err("no end");
    assert!(
        error.msg.starts_with("namespaces: ") && error.details == "expected at most 6000 pages, got more",
        "{error}"
    );
}
