//! TLS: server and client certificates.

use crate::scene::{facts_by, has_both, kubeconfig};
use crate::server::Server;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use detour_cni::cni::{Code, Error};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::{Value, json};
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    let started = Instant::now();
    let error = facts_by(&kubeconfig(test, cluster, user)).expect_err("an error");
    assert_eq!(error.code, Code::InvalidConfig, "{error}");
    assert!(error.msg.contains("shop/web-0") && error.msg.contains(&server.https()), "{error}");
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
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
