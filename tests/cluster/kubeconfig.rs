//! Errors for invalid kubeconfigs.

use crate::scene::{directory, facts_by, kubeconfig};
use detour_cni::cluster::KubeconfigSummary;
use detour_cni::cni::Code;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;

#[test]
fn a_missing_kubeconfig_is_a_temporary_error() {
    let path = directory("absent").join("kubeconfig");
    let error = facts_by(&path).expect_err("no file");
    assert_eq!(error.code, Code::TryAgain);
    assert!(error.msg.contains(path.to_str().expect("a path")) && error.msg.contains("agent"), "{error}");
}

#[test]
fn links_below_another_root_are_resolved_as_on_the_node() {
    let root = directory("other-root");
    fs::create_dir_all(root.join("var")).expect("made");
    fs::create_dir_all(root.join("run")).expect("made");
    symlink("/run", root.join("var/run")).expect("linked");
    fs::write(root.join("run/token"), "of-the-node").expect("written");
    let read = |file: &str| {
        let path =
            kubeconfig("below-other-root", &json!({"server": "http://127.0.0.1:1"}), &json!({"tokenFile": file}));
        KubeconfigSummary::read(&root, &path).map(|summary| summary.token)
    };
    assert_eq!(read("/var/run/token").expect("read").as_deref(), Some("of-the-node"));
    let error = read("/var/../../token").expect_err("refused");
    assert!(error.code == Code::InvalidConfig && error.details.contains("without \"..\""), "{error}");
}

#[test]
fn an_error_names_the_entry_or_the_line() {
    let rows = [
        ("syntax", "clusters: [\n  a: b: c\n", "line"),
        ("empty", "", "current-context"),
        ("json", "{\"clusters\": [{]}", "line"),
        ("scalar", "hello", "invalid kubeconfig"),
        (
            "wrong-type",
            "apiVersion: v1\nclusters:\n- name: k\n  cluster: {server: [1]}\n",
            "clusters[0].cluster.server: invalid type",
        ),
        ("no-context", "clusters: null\nusers: null\ncontexts:\n- {name: a}\n- {name: b}\n", "expected one of: a, b"),
        ("context", "current-context: x\ncontexts:\n- {name: a}\n", "current-context"),
        (
            "cluster",
            "current-context: a\ncontexts: [{name: a, context: {cluster: x}}]\nclusters: [{name: k}]\n",
            "contexts[a].context.cluster: unknown cluster \"x\"; expected one of: k",
        ),
        (
            "user",
            "current-context: a\ncontexts: [{name: a, context: {cluster: k, user: x}}]\n\
             clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: u}]\n",
            "contexts[a].context.user: unknown user \"x\"; expected one of: u",
        ),
    ];
    for (test, text, expected) in rows {
        let path = directory(&format!("text-{test}")).join("kubeconfig");
        fs::write(&path, text).expect("a file");
        let error = facts_by(&path).expect_err(test);
        assert_eq!(error.code, Code::InvalidConfig, "{test}: {error}");
        let line = error.to_string();
        assert!(line.contains(path.to_str().expect("a path")) && line.contains(expected), "{test}: {line}");
        assert!(line.starts_with("pod shop/web-0: "), "{test}: {line}");
        assert_eq!(line.lines().count(), 1, "{test}: {line}");
    }
}

#[test]
fn a_syntax_error_does_not_show_the_text() {
    for (test, text) in [
        ("secret-type", "users:\n- name: u\n  user: s3cr3t\n"),
        ("secret-map", "users:\n- name: u\n  user: {token: {a: s3cr3t}}\n"),
        ("secret-syntax", "users:\n- name: u\n  user: {token: s3cr3t\n"),
        ("secret-tab", "users:\n- name: u\n  user:\n\ttoken: s3cr3t: x\n"),
    ] {
        let path = directory(test).join("kubeconfig");
        fs::write(&path, text).expect("a file");
        let error = facts_by(&path).expect_err(test).to_string();
        assert!(!error.contains("s3cr3t"), "{error}");
    }
}

#[test]
fn an_invalid_cluster_or_user_is_reported_with_its_key() {
    let table = |name: &str| -> Vec<(String, Value, String)> {
        let mut tables: Value = serde_saphyr::from_str(include_str!("invalid.yaml")).expect("YAML");
        serde_json::from_value(tables[name].take()).expect("rows")
    };
    for (test, cluster, key) in table("clusters") {
        is_invalid(&format!("cluster-{test}"), &cluster, &json!({}), &key);
    }
    let cluster = json!({"server": "https://127.0.0.1:1", "insecure-skip-tls-verify": true});
    for (test, user, key) in table("users") {
        is_invalid(&format!("user-{test}"), &cluster, &user, &key);
    }
    let error = is_invalid("user-accepted", &cluster, &json!({"exec": {}}), "exec");
    assert!(error.contains("expected token, tokenFile, or client-certificate(-data)"), "{error}");
}

fn is_invalid(test: &str, cluster: &Value, user: &Value, key: &str) -> String {
    let path = kubeconfig(test, cluster, user);
    let error = facts_by(&path).expect_err(test);
    assert_eq!(error.code, Code::InvalidConfig, "{test}: {error}");
    let line = error.to_string();
    assert!(line.contains(path.to_str().expect("a path")) && line.contains(key), "{test}: {line}");
    line
}
