//! Credentials of a kubectl user: credential plugins, passwords, providers, impersonation.

use crate::scene::directory;
use crate::server::{Answer, Request, Server};
use crate::support::program::write_executable;
use crate::tls::{authority, config, for_names};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use detour_cni::cluster::UserApi;
use detour_cni::cni::Error;
use rcgen::KeyPair;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Answers a list of nodes in two pages.
fn two_pages(request: &Request) -> Answer {
    let more = if request.line.contains("continue=") { "" } else { "more" };
    Answer::json(200, &json!({"metadata": {"continue": more}, "items": [{"metadata": {"name": "node-1"}}]}))
}

/// Lists the nodes of `server` as this user.
fn nodes(directory: &Path, cluster: &Value, user: &Value) -> Result<usize, Error> {
    let path = directory.join("config");
    let kubeconfig = json!({
        "current-context": "c", "clusters": [{"name": "k", "cluster": cluster}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}], "users": [{"name": "u", "user": user}],
    });
    fs::write(&path, kubeconfig.to_string()).expect("written");
    UserApi::open(Some(&path), None)?.nodes(None).map(|nodes| nodes.len())
}

/// Writes a credential plugin.
fn plugin(directory: &Path, script: &str) -> PathBuf {
    let path = directory.join("plugin");
    write_executable(&path, &format!("#!/bin/sh\n{script}\n"));
    path
}

fn sent(server: &Server, header: &str) -> Vec<String> {
    server.requests().iter().map(|request| request.headers.get(header).cloned().unwrap_or_default()).collect()
}

#[test]
fn the_token_of_a_credential_plugin_is_renewed_before_it_expires() {
    let server = Server::plain(two_pages);
    let directory = directory("plugin-token");
    plugin(
        &directory,
        "echo \"$KUBERNETES_EXEC_INFO\" >>\"$0.calls\"\n\
         printf 'status:\\n  token: \"%s-%s-%s\"\\n  expirationTimestamp: %s\\n' \
         \"$1\" \"$OF\" \"$(wc -l <\"$0.calls\")\" \"$EXPIRY\"",
    );
    let user = |expiry: &str| {
        json!({"exec": {
            "apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "args": ["first"],
            "env": [{"name": "OF", "value": "user"}, {"name": "EXPIRY", "value": expiry}],
            "interactiveMode": "Never", "provideClusterInfo": true,
        }})
    };
    let cluster = json!({"server": server.http()});
    assert_eq!(nodes(&directory, &cluster, &user("2020-01-01T00:00:00Z")).expect("nodes"), 2);
    assert_eq!(sent(&server, "authorization"), ["Bearer first-user-2", "Bearer first-user-3"]);
    let calls = fs::read_to_string(directory.join("plugin.calls")).expect("calls");
    let info: Value = serde_json::from_str(calls.lines().next().expect("a call")).expect("JSON");
    assert_eq!(
        info,
        json!({
            "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
            "spec": {"interactive": false, "cluster": {"server": server.http()}},
        })
    );

    assert_eq!(nodes(&directory, &cluster, &user("2120-01-01T00:00:00Z")).expect("nodes"), 2);
    assert_eq!(sent(&server, "authorization")[2..], ["Bearer first-user-4", "Bearer first-user-4"]);
}

#[test]
fn a_credential_plugin_may_supply_a_client_certificate() {
    let ca = authority();
    let server = Server::tls(config(&ca, &for_names(&["127.0.0.1"]), Some(&ca)), two_pages);
    let key = KeyPair::generate().expect("a key");
    let certificate = for_names(&[]).signed_by(&key, &ca).expect("a certificate").pem();
    let directory = directory("plugin-certificate");
    let status = json!({"clientCertificateData": certificate, "clientKeyData": key.serialize_pem()});
    fs::write(directory.join("answer"), json!({"status": status}).to_string()).expect("written");
    let program = plugin(&directory, "cat \"${0%/*}/answer\"");
    let cluster = json!({"server": server.https(), "certificate-authority-data": BASE64_STANDARD.encode(ca.pem())});
    assert_eq!(nodes(&directory, &cluster, &json!({"exec": {"command": program}})).expect("nodes"), 2);
    assert_eq!(sent(&server, "authorization"), ["", ""]);
    // The API server may require both.
    let mut both = status;
    both["token"] = "t".into();
    fs::write(directory.join("answer"), json!({"status": both}).to_string()).expect("written");
    assert_eq!(nodes(&directory, &cluster, &json!({"exec": {"command": program}})).expect("nodes"), 2);
    assert_eq!(sent(&server, "authorization")[2..], ["Bearer t", "Bearer t"]);
    // A certificate that expires is renewed, as a token is.
    both["expirationTimestamp"] = "2020-01-01T00:00:00Z".into();
    fs::write(directory.join("answer"), json!({"status": both}).to_string()).expect("written");
    let program = plugin(&directory, "echo >>\"$0.calls\"; cat \"${0%/*}/answer\"");
    assert_eq!(nodes(&directory, &cluster, &json!({"exec": {"command": program}})).expect("nodes"), 2);
    assert_eq!(fs::read_to_string(directory.join("plugin.calls")).expect("calls").lines().count(), 3);
}

#[test]
fn a_credential_plugin_that_fails_is_named_with_its_error() {
    let cluster = json!({"server": "http://127.0.0.1:1"});
    for (test, script, expected) in [
        ("fails", "echo 'not logged in' >&2; exit 3", "exit status: 3: not logged in"),
        ("silent", "", "expected an ExecCredential with a status"),
        ("no-json", "echo '{]'", "line 1"),
        ("wrong-type", "echo 'status: {token: [1]}'", "status.token: invalid type: sequence"),
        (
            "control",
            "printf '%s' '{\"status\": {\"token\": \"a\\u0007b\"}}'",
            "token: expected visible ASCII characters",
        ),
    ] {
        let directory = directory(&format!("plugin-{test}"));
        let program = plugin(&directory, script);
        let user = json!({"exec": {"command": program, "interactiveMode": "Never"}});
        let error = nodes(&directory, &cluster, &user).expect_err(test).to_string();
        assert!(error.contains(expected) && error.contains("config: can't be used"), "{test}: {error}");
    }
    let directory = directory("plugin-absent");
    let error = nodes(&directory, &cluster, &json!({"exec": {"command": "./absent"}})).expect_err("absent").to_string();
    assert!(error.contains("/absent: No such file or directory"), "{error}");
}

#[test]
fn passwords_tokens_of_providers_and_token_files_are_sent() {
    let directory = directory("users");
    fs::write(directory.join("token"), "of-file\n").expect("written");
    for (user, expected) in [
        (json!({"username": "me", "password": "secret"}), "Basic bWU6c2VjcmV0"),
        (json!({"auth-provider": {"name": "oidc", "config": {"id-token": "of-provider"}}}), "Bearer of-provider"),
        (json!({"tokenFile": "token"}), "Bearer of-file"),
        (json!({}), ""),
    ] {
        let server = Server::plain(two_pages);
        nodes(&directory, &json!({"server": server.http()}), &user).expect("nodes");
        assert_eq!(sent(&server, "authorization"), [expected, expected]);
    }
    let removed = json!({"auth-provider": {"name": "gcp", "config": {"cmd-path": "/bin/true"}}});
    let error = nodes(&directory, &json!({"server": "http://127.0.0.1:1"}), &removed).expect_err("removed").to_string();
    assert!(error.contains("auth-provider gcp") && error.contains("expected a credential plugin (exec)"), "{error}");
}

#[test]
fn a_user_may_act_as_another() {
    let server = Server::plain(two_pages);
    let user = json!({
        "token": "t", "as": "jane", "as-uid": "7", "as-groups": ["a"], "as-user-extra": {"example.com/x": ["1"]},
    });
    nodes(&directory("impersonation"), &json!({"server": server.http()}), &user).expect("nodes");
    for (header, value) in [
        ("authorization", "Bearer t"),
        ("impersonate-user", "jane"),
        ("impersonate-uid", "7"),
        ("impersonate-group", "a"),
        ("impersonate-extra-example.com%2fx", "1"),
    ] {
        assert_eq!(sent(&server, header), [value, value], "{header}");
    }
}
