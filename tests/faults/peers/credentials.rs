//! Faults between the plugin and an API server that answers: TLS, the server's name, and the files of the credentials.

use super::case::{Case, case, run};
use super::scene::{Expected, Mode, Scene, TOKEN, fails, works};
use super::server::{Connection, Server, healthy};
use crate::table::is_complete;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use nix::mount::{MsFlags, mount};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::chown;
use std::sync::Arc;

type Authority = CertifiedIssuer<'static, KeyPair>;

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
    Server::tls(
        config,
        Arc::new(|connection: &mut Connection| connection.serve(|request| Some(healthy(&request.line)))),
    )
}

/// Returns the entry of a kubeconfig for a server with an authority.
fn trusting(server: &str, authority: &Authority) -> Value {
    json!({"server": server, "certificate-authority-data": BASE64_STANDARD.encode(authority.pem())})
}

/// Calls the plugin after `prepare` has written the kubeconfig.
fn calls(fault: &str, expected: Expected, prepare: impl Fn(&Scene) + Send + Sync + 'static) -> Case<'static> {
    case(fault, move |name| {
        Scene::run(name, |scene| {
            prepare(scene);
            for mode in Mode::BOTH.into_iter().take(if is_complete() { 2 } else { 1 }) {
                let timeout = expected.within.as_secs();
                let kubernetes = json!({"kubeconfig": scene.root.join("kubeconfig"), "timeout_seconds": timeout});
                let conf = scene.conf(mode, &kubernetes);
                scene.expect("ADD", mode, &conf, &expected);
                scene.expect("DEL", mode, &conf, &works());
            }
        })
    })
}

fn with_token(scene: &Scene, cluster: &Value) {
    scene.kubeconfig_with(cluster, &json!({"token": TOKEN}));
}

fn tls() -> Vec<Case<'static>> {
    let (own, other) = (authority(), authority());
    let mut cases = Vec::new();
    let mut add = |fault: &str, server: Server, trusted: &Authority, expected: Expected| {
        let cluster = trusting(&server.url(), trusted);
        let expected = if expected.codes.is_empty() { expected } else { expected.with(&[&server.url()]) };
        cases.push(calls(fault, expected, move |scene| with_token(scene, &cluster)));
    };
    let not_before = |params: &mut CertificateParams| params.not_before = date_time_ymd(2090, 1, 1);
    let expired = |params: &mut CertificateParams| params.not_after = date_time_ymd(2020, 1, 1);
    let is_ca = |params: &mut CertificateParams| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    add("TLS: a correct certificate", serving(&own, "127.0.0.1", |_| {}), &own, works());
    let expected = fails(7, &["certificate-authority(-data)", "copy the cluster's current CA there"]);
    add("TLS: another CA", serving(&own, "127.0.0.1", |_| {}), &other, expected);
    let expected = fails(7, &["has expired", "renew it"]);
    add("TLS: an expired certificate", serving(&own, "127.0.0.1", expired), &own, expected);
    let expected = fails(7, &["not valid yet", "correct this node's clock"]);
    add("TLS: a certificate of the future", serving(&own, "127.0.0.1", not_before), &own, expected);
    let expected = fails(7, &["for other names", "tls-server-name"]);
    add("TLS: a certificate for another name", serving(&own, "api.example", |_| {}), &own, expected);
    add("TLS: a CA as server certificate", serving(&own, "127.0.0.1", is_ca), &own, fails(7, &["CA:FALSE"]));
    let unusable = |part: &str| fails(11, &["no usable answer in", "check that this node can reach", part]);
    // ServerHello of TLS 1.0, and the alert "protocol version".
    let hello = [&b"\x16\x03\x01\0\x2a\x02\0\0\x26\x03\x01"[..], &[7; 32], b"\0\xc0\x13\0"].concat();
    for (fault, bytes, part) in [
        ("TLS: the server knows only TLS 1.0", hello, ""),
        ("TLS: the server refuses the version", b"\x15\x03\x01\0\x02\x02\x46".to_vec(), "ProtocolVersion"),
        ("TLS: the server speaks HTTP", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), ""),
    ] {
        let script = move |connection: &mut Connection| {
            connection.read_some();
            connection.send(&bytes);
        };
        add(fault, Server::start_as("https", Arc::new(script)), &own, unusable(part));
    }
    let hangs = |connection: &mut Connection| {
        connection.read_some();
        connection.hang();
    };
    add(
        "TLS: the handshake hangs",
        Server::start_as("https", Arc::new(hangs)),
        &own,
        unusable("no answer within 1.0 s"),
    );
    let half = |connection: &mut Connection| {
        connection.read_some();
        connection.send(b"\x16\x03\x03\x40\0\x02");
        connection.hang();
    };
    add(
        "TLS: the handshake stops",
        Server::start_as("https", Arc::new(half)),
        &own,
        unusable("no answer within 1.0 s"),
    );
    let resets = |connection: &mut Connection| {
        connection.read_some();
        connection.reset();
    };
    add("TLS: the handshake is reset", Server::start_as("https", Arc::new(resets)), &own, unusable(""));
    cases
}

/// Replaces a file in the private mount namespace of the scene.
fn replace(scene: &Scene, file: &str, text: &str) {
    let own = scene.root.join("replaced");
    fs::write(&own, text).expect("writable");
    mount(Some(&*own), file, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("needs root");
}

fn resolvers() -> Vec<Case<'static>> {
    let unusable = |part: &str| fails(11, &["no usable answer in", "http://api.example:6443", part]);
    let uses = |scene: &Scene| with_token(scene, &json!({"server": "http://api.example:6443"}));
    let silent = Arc::new(UdpSocket::bind("127.9.9.9:53").expect("root"));
    vec![
        calls("DNS: the name does not exist", unusable(""), move |scene| {
            replace(scene, "/etc/resolv.conf", "nameserver 127.9.9.8\n");
            uses(scene);
        }),
        calls("DNS: the resolver does not answer", unusable("no answer within 1.0 s"), move |scene| {
            let _ = &silent;
            replace(scene, "/etc/resolv.conf", "nameserver 127.9.9.9\n");
            uses(scene);
        }),
        calls("DNS: resolv.conf is empty", unusable(""), move |scene| {
            replace(scene, "/etc/resolv.conf", "");
            uses(scene);
        }),
    ]
}

fn token_files() -> Vec<Case<'static>> {
    let server = Arc::new(Server::healthy());
    let with_file = |fault: &str, expected: Expected, write: fn(&Scene)| {
        let server = Arc::clone(&server);
        calls(fault, expected, move |scene| {
            write(scene);
            scene.kubeconfig_with(&json!({"server": server.url()}), &json!({"tokenFile": "token"}));
        })
    };
    fn writes(scene: &Scene, bytes: &[u8]) {
        fs::write(scene.root.join("token"), bytes).expect("writable");
    }
    let invalid = || fails(7, &["tokenFile: invalid token; expected visible ASCII characters"]);
    vec![
        with_file("token file: a newline at the end", works(), |scene| writes(scene, format!("{TOKEN}\n").as_bytes())),
        with_file("token file: missing", fails(7, &["tokenFile: ", "token can't be read", "No such file"]), |_| {}),
        with_file("token file: empty", invalid(), |scene| writes(scene, b"")),
        with_file("token file: only blanks", invalid(), |scene| writes(scene, b" \n\n")),
        with_file("token file: two lines", invalid(), |scene| writes(scene, format!("{TOKEN}\n{TOKEN}").as_bytes())),
        with_file("token file: binary", fails(7, &["tokenFile", "expected UTF-8"]), |scene| {
            writes(scene, &[0xff, 0, 0xfe])
        }),
        with_file("token file: a control character", invalid(), |scene| {
            writes(scene, format!("{TOKEN}\u{1b}").as_bytes())
        }),
        with_file("token file: 1 MB", fails(7, &["tokenFile"]), |scene| writes(scene, &[b'x'; 1_000_000])),
        with_file("token file: of another user", fails(7, &["tokenFile", "is not used", "expected root"]), |scene| {
            writes(scene, TOKEN.as_bytes());
            chown(scene.root.join("token"), Some(12345), None).expect("root");
        }),
        with_file("token file: a directory", fails(7, &["tokenFile"]), |scene| {
            fs::create_dir(scene.root.join("token")).expect("made");
        }),
        with_file("token file: a FIFO without writer", fails(7, &["tokenFile"]), |scene| {
            let mode = nix::sys::stat::Mode::S_IRUSR;
            nix::unistd::mkfifo(&scene.root.join("token"), mode).expect("made");
        }),
    ]
}

#[test]
fn each_fault_of_tls_names_and_token_files_is_answered_in_time() {
    run("API", &[tls(), resolvers(), token_files()].into_iter().flatten().collect::<Vec<_>>());
}
