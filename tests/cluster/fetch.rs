//! Facts from an API server: requests, kubeconfigs, credentials, TLS, and environment variables that the plugin inherits and
//! must ignore.

use crate::scene::{GET_NAMESPACE, GET_POD, api, directory, facts_by, has_both, kubeconfig, status, wanted};
use crate::server::{Answer, Request, Server};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use detour_cni::cluster;
use detour_cni::cni::{Code, Error};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Barrier};
use std::time::Duration;
use std::{env, fs};

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
    let source = cluster::source(&api(&path, Duration::from_secs(60))).expect("a source");
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

/// The path of the kubeconfig for the child process.
const KUBECONFIG: &str = "TEST_KUBECONFIG";

#[test]
fn proxy_variables_and_kubeconfig_are_ignored_and_no_thread_is_started() {
    if let Some(path) = env::var_os(KUBECONFIG) {
        let before = threads();
        facts_by(Path::new(&path)).expect("facts");
        assert_eq!(threads(), before);
        return;
    }
    let server = Server::plain(has_both);
    let proxy = Server::plain(|_| status(502, "a proxy"));
    let path = kubeconfig("environment", &json!({"server": server.http()}), &json!({}));
    for (variable, value) in [
        ("HTTPS_PROXY", proxy.http()),
        ("HTTPS_PROXY", "not a URL".to_owned()),
        ("HTTP_PROXY", proxy.http()),
        ("ALL_PROXY", proxy.http()),
        ("https_proxy", proxy.http()),
        ("http_proxy", proxy.http()),
        ("all_proxy", proxy.http()),
        ("NO_PROXY", "[::1".to_owned()),
        ("KUBECONFIG", "/absent".to_owned()),
    ] {
        let test = "fetch::proxy_variables_and_kubeconfig_are_ignored_and_no_thread_is_started";
        let child = Command::new(env::current_exe().expect("this test"))
            .args(["--exact", test, "--nocapture"])
            .env(KUBECONFIG, &path)
            .env(variable, &value)
            .output()
            .expect("a child");
        let output = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && output.contains("1 passed"), "{variable}={value}: {output}");
    }
    assert_eq!(proxy.connections(), 0);
    assert_eq!(server.requests().len(), 18);
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").expect("procfs").count()
}

pub(crate) type Authority = CertifiedIssuer<'static, KeyPair>;

pub(crate) fn authority() -> Authority {
    let mut params = CertificateParams::new(Vec::new()).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA")
}

pub(crate) fn for_names(names: &[&str]) -> CertificateParams {
    CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).expect("names")
}

/// A server certificate of `authority`.
pub(crate) fn serving(authority: &Authority, params: &CertificateParams) -> ServerConfig {
    config(authority, params, None)
}

pub(crate) fn config(authority: &Authority, params: &CertificateParams, clients: Option<&Authority>) -> ServerConfig {
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, authority).expect("a certificate");
    let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
    let builder = match clients {
        None => ServerConfig::builder().with_no_client_auth(),
        Some(clients) => {
            let mut roots = RootCertStore::empty();
            roots.add(clients.der().clone()).expect("a root");
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().expect("a verifier");
            ServerConfig::builder().with_client_cert_verifier(verifier)
        }
    };
    builder.with_single_cert(vec![certificate.der().clone()], key).expect("a certificate and its key")
}

fn trusting(server: &Server, authority: &Authority) -> Value {
    json!({"server": server.https(), "certificate-authority-data": BASE64_STANDARD.encode(authority.pem())})
}

/// Expects an error without retries: at most one connection for each of the two objects.
fn fails_at_once(test: &str, server: &Server, cluster: &Value, user: &Value) -> Error {
    let error = facts_by(&kubeconfig(test, cluster, user)).expect_err("an error");
    assert_eq!(error.code, Code::InvalidConfig, "{error}");
    assert!(error.msg.contains("shop/web-0") && error.msg.contains(&server.https()), "{error}");
    assert!(server.connections() <= 2);
    assert_eq!(server.lines(), [""; 0]);
    error
}

#[test]
fn the_ca_is_read_from_inline_data_or_a_file_beside_the_kubeconfig() {
    let ca = authority();
    let server = Server::tls(serving(&ca, &for_names(&["127.0.0.1"])), has_both);
    facts_by(&kubeconfig("ca-data", &trusting(&server, &ca), &json!({"token": "t"}))).expect("facts");

    let cluster = json!({"server": server.https(), "certificate-authority": "ca.crt"});
    let path = kubeconfig("ca-file", &cluster, &json!({}));
    let two = format!("another one first\n{}{}", authority().pem(), ca.pem());
    fs::write(path.with_file_name("ca.crt"), two).expect("a file");
    facts_by(&path).expect("facts");
}

#[test]
fn the_server_name_can_be_configured() {
    let ca = authority();
    let server = Server::tls(serving(&ca, &for_names(&["kubernetes.default.svc"])), has_both);
    let mut cluster = trusting(&server, &ca);
    let error = fails_at_once("name-wrong", &server, &cluster, &json!({}));
    assert!(error.msg.contains("tls-server-name") && error.details.contains("kubernetes.default.svc"), "{error}");
    cluster["tls-server-name"] = json!("kubernetes.default.svc");
    facts_by(&kubeconfig("name-right", &cluster, &json!({}))).expect("facts");
}

#[test]
fn a_certificate_of_an_unknown_ca_is_an_error_without_retry() {
    let (ca, other) = (authority(), authority());
    let server = Server::tls(serving(&ca, &for_names(&["127.0.0.1"])), has_both);
    let error = fails_at_once("ca-wrong", &server, &trusting(&server, &other), &json!({}));
    assert!(error.msg.contains("certificate-authority"), "{error}");
    let cluster = json!({"server": server.https(), "insecure-skip-tls-verify": true});
    facts_by(&kubeconfig("insecure", &cluster, &json!({}))).expect("facts");
}

#[test]
fn a_client_certificate_is_sent_from_inline_data_or_files() {
    let ca = authority();
    let server = Server::tls(config(&ca, &for_names(&["127.0.0.1"]), Some(&ca)), has_both);
    let key = KeyPair::generate().expect("a key");
    let certificate = for_names(&[]).signed_by(&key, &ca).expect("a certificate").pem();
    let key = key.serialize_pem();

    let inline = json!({"client-certificate-data": BASE64_STANDARD.encode(&certificate), "client-key-data": BASE64_STANDARD.encode(&key)});
    facts_by(&kubeconfig("client-inline", &trusting(&server, &ca), &inline)).expect("facts");

    let files = json!({"client-certificate": "client.crt", "client-key": "client.key"});
    let path = kubeconfig("client-files", &trusting(&server, &ca), &files);
    fs::write(path.with_file_name("client.crt"), certificate).expect("a file");
    fs::write(path.with_file_name("client.key"), key).expect("a file");
    facts_by(&path).expect("facts");
}
