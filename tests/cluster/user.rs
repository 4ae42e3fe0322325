//! Kubeconfigs of a user of kubectl: several files, relative paths, YAML. Each test runs in child processes, because a
//! process can't change its environment safely.

use crate::scene::directory;
use crate::server::{Answer, Server};
use crate::tls::{authority, for_names, serving};
use detour_cni::cluster::UserApi;
use serde_json::json;
use std::env;
use std::fs;
use std::process::Command;

/// Runs a test of this module again with a value of `KUBECONFIG`; returns what it printed.
fn with_kubeconfig(test: &str, value: &str) -> String {
    let child = Command::new(env::current_exe().expect("this test"))
        .args(["--exact", &format!("user::{test}"), "--nocapture"])
        .env_clear()
        .env("CHILD", "1")
        .env("KUBECONFIG", value)
        .output()
        .expect("a child");
    String::from_utf8_lossy(&child.stdout).into_owned()
}

/// In a child process, prints the nodes or the error of the kubeconfigs; returns whether this is one.
fn is_child() -> bool {
    let is_child = env::var_os("CHILD").is_some();
    if is_child {
        let found = UserApi::open(None, None).and_then(|api| api.nodes(None).map(|nodes| (api, nodes)));
        match found {
            Ok((api, nodes)) => println!("{} in {}", nodes[0].name, api.namespace()),
            Err(error) => println!("error: {error}"),
        }
    }
    is_child
}

const DOCUMENTS: &str = "\u{feff}# the first document has only a user
apiVersion: v1
kind: Config
current-context: ''
users:
- name: u
  user:
    tokenFile: secrets/token
---
---
contexts:
- {name: c, context: {cluster: k, user: u, namespace: shop}}
- {name: other, context: {cluster: k, user: none}}
clusters: null
";

#[test]
fn kubeconfigs_are_merged_and_their_paths_are_relative_to_each_of_them() {
    if is_child() {
        return;
    }
    let ca = authority();
    let server = Server::tls(serving(&ca, &for_names(&["127.0.0.1"])), |_| {
        Answer::json(200, &json!({"items": [{"metadata": {"name": "node-1"}}]}))
    });
    let (one, two) = (directory("user-one"), directory("user-two"));
    fs::create_dir(one.join("secrets")).expect("made");
    fs::write(one.join("secrets/token"), "of-one").expect("written");
    fs::write(one.join("config"), DOCUMENTS).expect("written");
    fs::write(two.join("ca.crt"), ca.pem()).expect("written");
    let other = json!({
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": server.https(), "certificate-authority": "ca.crt"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "none", "namespace": "ignored"}}],
        "users": [{"name": "u", "user": {"token": "ignored"}}],
    });
    fs::write(two.join("config"), other.to_string()).expect("written");
    let list = format!("/missing:{}:{}", one.join("config").display(), two.join("config").display());
    let output = with_kubeconfig("kubeconfigs_are_merged_and_their_paths_are_relative_to_each_of_them", &list);
    assert!(output.contains("node-1 in shop"), "{output}");
    assert_eq!(server.requests()[0].headers["authorization"], "Bearer of-one");
}

#[test]
fn an_error_names_the_file_and_the_place_in_it_but_no_secret() {
    if is_child() {
        return;
    }
    for (text, expected) in [
        ("users: [\n  a: b: secret\n", "line 2"),
        (
            "clusters:\n- {name: k}\nusers:\n- name: u\n- {name: v, user: {token: {secret: 1}}}\n",
            "users[1].user.token: ",
        ),
        ("contexts:\n- {name: [1]}\n", "contexts[0].name: invalid type: sequence, expected a string"),
        ("current-context: [1]\n", "invalid type: sequence, expected a string"),
        ("hello\n", "invalid type: string, expected an object"),
        ("", "current context"),
    ] {
        let path = directory("user-invalid").join("config");
        fs::write(&path, text).expect("written");
        let path = path.display().to_string();
        let output = with_kubeconfig("an_error_names_the_file_and_the_place_in_it_but_no_secret", &path);
        let line = output.lines().find(|line| line.contains("error: ")).unwrap_or_else(|| panic!("{output}"));
        assert!(line.contains(expected) && !line.contains("secret"), "{text}: {line}");
        assert!(line.contains(&format!("kubeconfig {path}: can't be used")), "{line}");
    }
}
