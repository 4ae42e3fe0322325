//! Facts from an API server: requests, kubeconfigs, credentials.

use crate::scene::{GET_NAMESPACE, GET_POD, api, directory, facts_by, has_both, kubeconfig, wanted};
use crate::server::{Answer, Request, Server};
use detour_cni::cluster;
use serde_json::json;
use std::fs;
use std::sync::Barrier;
use std::time::Duration;

#[test]
fn only_pod_and_namespace_are_requested() {
    let server = Server::plain(has_both);
    let path = kubeconfig("both", &json!({"server": server.http()}), &json!({"token": "secret"}));
    let facts = facts_by(&path).expect("facts");
    assert_eq!((facts.pod.namespace.as_str(), facts.pod.name.as_str()), ("shop", "web-0"));
    assert_eq!(facts.pod.uid.as_deref(), Some("uid-1"));
    assert!(facts.pod.proxy().is_some());
    assert_eq!(facts.namespace.expect("a namespace").annotations["a"], "1");
    assert_eq!(server.lines(), [GET_NAMESPACE, GET_POD]);
    assert!(server.requests().iter().all(|r| r.headers["authorization"] == "Bearer secret"));
}

#[test]
fn the_namespace_is_requested_only_if_needed() {
    let server = Server::plain(has_both);
    let path = kubeconfig("pod-only", &json!({"server": server.http()}), &json!({}));
    let source = cluster::source(&api(&path, Duration::from_secs(1))).expect("a source");
    assert_eq!(source.facts(&wanted(), false).expect("facts").namespace, None);
    assert_eq!(server.lines(), [GET_POD]);
    assert!(!server.requests()[0].headers.contains_key("authorization"));
}

#[test]
fn pod_and_namespace_are_requested_concurrently() {
    let meeting = Barrier::new(2);
    let server = Server::plain(move |request| {
        meeting.wait();
        has_both(request)
    });
    let path = kubeconfig("same-time", &json!({"server": server.http()}), &json!({}));
    facts_by(&path).expect("facts");
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn a_source_reads_and_connects_to_nothing_before_its_first_request() {
    let server = Server::plain(has_both);
    let path = kubeconfig("lazy", &json!({"server": server.http()}), &json!({}));
    let source = cluster::source(&api(&path, Duration::from_secs(1))).expect("a source");
    assert_eq!(server.connections(), 0);
    fs::remove_file(path).expect("the file");
    assert!(source.facts(&wanted(), true).is_err(), "it was read before");
    assert!(cluster::source(&api("".as_ref(), Duration::ZERO)).is_none());
}

#[test]
fn a_token_file_beside_the_kubeconfig_is_read_for_each_source() {
    let server = Server::plain(has_both);
    let user = json!({"token": "old", "tokenFile": "token"});
    let path = kubeconfig("token-file", &json!({"server": server.http()}), &user);
    for token in ["first", "second"] {
        fs::write(path.with_file_name("token"), format!("{token}\n")).expect("a file");
        facts_by(&path).expect("facts");
        let last = server.requests().pop().expect("a request");
        assert_eq!(last.headers["authorization"], format!("Bearer {token}"));
    }
    fs::remove_file(path.with_file_name("token")).expect("the file");
    facts_by(&path).expect("facts");
    assert_eq!(server.requests().pop().expect("a request").headers["authorization"], "Bearer old");
}

/// istio-cni's install-cni puts an IPv4 address in brackets too (cni/pkg/install/kubeconfig.go, up to 1.24).
#[test]
fn a_kubeconfig_as_istio_cni_writes_it() {
    let server = Server::plain(has_both);
    let path = directory("istio").join("ZZZ-istio-cni-kubeconfig");
    let text = format!(
        "# a comment\napiVersion: v1\nkind: Config\nclusters:\n- name: local\n  cluster:\n    server: http://[{}]:{}\n    \
         insecure-skip-tls-verify: true\nusers:\n- name: istio-cni\n  user:\n    token: \"t\"\ncontexts:\n\
         - name: istio-cni-context\n  context:\n    cluster: local\n    user: istio-cni\n\
         current-context: istio-cni-context\n",
        server.address.ip(),
        server.address.port()
    );
    fs::write(&path, text).expect("a file");
    facts_by(&path).expect("facts");
    assert_eq!(server.requests()[0].headers["authorization"], "Bearer t");
}

#[test]
fn a_kubeconfig_as_kubectl_writes_it() {
    let server = Server::plain(|request| {
        let line = request.line.replace("/base/", "/");
        if request.line.contains("/base/") { has_both(&Request { line, ..request.clone() }) } else { Answer::Close }
    });
    let path = directory("kubectl").join("config");
    let text = format!(
        "apiVersion: v1\nclusters:\n- cluster:\n    server: http://wrong.invalid\n  name: other\n- cluster:\n    \
         extensions:\n    - extension:\n        provider: x\n      name: info\n    server: {}/base/\n  name: k\ncontexts:\n\
         - context:\n    cluster: k\n    namespace: x\n    user: u\n  name: u@k\ncurrent-context: u@k\nkind: Config\n\
         preferences: {{}}\nusers:\n- name: u\n  user:\n    token: t\n",
        server.http()
    );
    fs::write(&path, text).expect("a file");
    facts_by(&path).expect("facts");
}

#[test]
fn the_proxy_in_the_kubeconfig_is_used() {
    let proxy = Server::plain(|request| match request.line.split(' ').next() {
        Some("CONNECT") => Answer::text(200, ""),
        _ => has_both(request),
    });
    let cluster = json!({"server": "http://192.0.2.1:6443", "proxy-url": proxy.http()});
    facts_by(&kubeconfig("proxy", &cluster, &json!({}))).expect("facts");
    assert!(proxy.lines().contains(&"CONNECT 192.0.2.1:6443 HTTP/1.1".to_owned()), "{:?}", proxy.lines());
}
