//! Faults of TLS and of name resolution on the way to the API server.

use super::expected::{Expected, fails, works};
use super::server::{Connection, Server, healthy, kubeconfig};
use super::{try_all, with_sources};
use crate::call::Call;
use crate::subject::{Mode, Subject, Verb};
use crate::table::Table;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use std::fs;
use std::net::UdpSocket;
use std::sync::Arc;

const MODES: [(Mode, &str); 1] = [(Mode::Redirect, "nftables")];
const LATE: &str = "no answer within 1.0 s";
const RESOLV_CONF: &str = "/etc/resolv.conf";

type Authority = CertifiedIssuer<'static, KeyPair>;

/// The entry of the server in a kubeconfig, the node's resolv.conf if it is another one, and what an ADD must answer.
struct Fault {
    cluster: Value,
    resolv_conf: Option<&'static str>,
    expected: Expected,
}

fn authority() -> Authority {
    let mut params = CertificateParams::new(Vec::new()).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA")
}

/// Starts a healthy server with a certificate of an authority for this name.
fn serving(authority: &Authority, name: &str, change: fn(&mut CertificateParams)) -> Server {
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
    change(&mut params);
    let certificate = params.signed_by(&key, authority).expect("a certificate");
    let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
    let config = ServerConfig::builder().with_no_client_auth();
    let config = config.with_single_cert(vec![certificate.der().clone()], key).expect("a certificate and its key");
    let script = |connection: &mut Connection| connection.serve(|request| Some(healthy(&request.line)));
    Server::tls(config, Arc::new(script))
}

/// Starts a server that answers a handshake with these bytes.
fn answering(bytes: &'static [u8], end: fn(&mut Connection)) -> Server {
    let script = move |connection: &mut Connection| {
        connection.read_some();
        connection.send(bytes);
        end(connection);
    };
    Server::start_as("https", Arc::new(script))
}

fn unusable(part: &str) -> Expected {
    fails(11, &["no usable answer in", "check that this node can reach", part])
}

fn handshakes() -> Vec<(String, Fault)> {
    let (own, other) = (authority(), authority());
    let not_before = |params: &mut CertificateParams| params.not_before = date_time_ymd(2090, 1, 1);
    let expired = |params: &mut CertificateParams| params.not_after = date_time_ymd(2020, 1, 1);
    let is_ca = |params: &mut CertificateParams| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let address = "127.0.0.1";
    let another = fails(7, &["certificate-authority(-data)", "copy the cluster's current CA there"]);
    let faults = [
        ("a correct certificate", serving(&own, address, |_| {}), works()),
        ("another CA", serving(&other, address, |_| {}), another),
        ("an expired certificate", serving(&own, address, expired), fails(7, &["has expired", "renew it"])),
        ("a certificate of the future", serving(&own, address, not_before), fails(7, &["correct this node's clock"])),
        ("another name", serving(&own, "api.example", |_| {}), fails(7, &["for other names", "tls-server-name"])),
        ("a CA as server certificate", serving(&own, address, is_ca), fails(7, &["CA:FALSE"])),
        ("the version is refused", answering(b"\x15\x03\x01\0\x02\x02\x46", |_| {}), unusable("ProtocolVersion")),
        ("the server speaks HTTP", answering(b"HTTP/1.1 400 Bad Request\r\n\r\n", |_| {}), unusable("")),
        ("the handshake hangs", answering(b"", Connection::hang), unusable(LATE)),
        ("the handshake stops", answering(b"\x16\x03\x03\x40\0\x02", Connection::hang), unusable(LATE)),
        ("the handshake is reset", answering(b"", Connection::reset), unusable("")),
    ];
    let trusted = BASE64_STANDARD.encode(own.pem());
    let of = |(name, server, expected): (&str, Server, Expected)| {
        let cluster = json!({"server": server.url(), "certificate-authority-data": trusted});
        (format!("TLS: {name}"), Fault { cluster, resolv_conf: None, expected })
    };
    faults.map(of).into()
}

fn resolvers() -> Vec<(String, Fault)> {
    let faults = [
        ("the name does not exist", "nameserver 127.9.9.8\n", ""),
        ("the resolver does not answer", "nameserver 127.9.9.9\n", LATE),
        ("resolv.conf is empty", "", ""),
    ];
    let of = |(name, resolv_conf, part)| {
        let cluster = json!({"server": "http://api.example:6443"});
        (format!("DNS: {name}"), Fault { cluster, resolv_conf: Some(resolv_conf), expected: unusable(part) })
    };
    faults.map(of).into()
}

fn attempt(name: &str, fault: &Fault, subject: &Subject, table: &mut Table) {
    let Fault { cluster, resolv_conf, expected } = fault;
    let server = cluster["server"].as_str().expect("text");
    let expected = expected.clone().with_if_it_fails(&[server]);
    let make = |call: Call| {
        let path = kubeconfig(subject.directory(), cluster);
        let call = with_sources(call, json!({"kubeconfig": path}), &expected);
        let Some(text) = resolv_conf else { return call.run() };
        // In the private mount namespace of the node.
        let own = subject.directory().join("resolv.conf");
        fs::write(&own, text).expect("writable");
        mount(Some(&*own), RESOLV_CONF, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("needs root");
        let ended = call.run();
        umount2(RESOLV_CONF, MntFlags::MNT_DETACH).expect("it is mounted");
        ended
    };
    subject.attempt(table, Verb::Add, (name, ""), make, |ended| expected.check(ended));
}

#[test]
fn each_fault_of_tls_and_of_names_is_answered_in_time() {
    let _silent = UdpSocket::bind("127.9.9.9:53").expect("root");
    try_all("API", &MODES, &handshakes().into_iter().chain(resolvers()).collect::<Vec<_>>(), attempt);
}
