//! STATUS, from outside: 0 where an ADD could be served, 50 and the reason where not.

use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, Stdio};

fn status(mut conf: Value) -> (Option<i32>, String) {
    conf["cniVersion"] = json!("1.1.0");
    conf["name"] = json!("status");
    conf["type"] = json!("detour");
    let mut child = Command::new(env!("CARGO_BIN_EXE_detour"))
        .env_clear()
        .env("CNI_COMMAND", "STATUS")
        .env("CNI_PATH", "/nowhere")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary starts");
    child.stdin.take().expect("a pipe").write_all(conf.to_string().as_bytes()).expect("writable");
    let output = child.wait_with_output().expect("it ends");
    (output.status.code(), String::from_utf8(output.stdout).expect("text"))
}

fn refused(conf: Value) -> String {
    let (exit, stdout) = status(conf);
    assert_eq!(exit, Some(1), "{stdout}");
    let error: Value = serde_json::from_str(&stdout).expect("an error object");
    assert_eq!(error["code"], 50, "{error}");
    error["details"].as_str().expect("details").to_owned()
}

#[test]
fn all_is_well_with_facts_at_hand_or_without_need_of_them() {
    let manifests = std::env::temp_dir().join(format!("detour-status-{}", std::process::id()));
    std::fs::create_dir_all(&manifests).expect("made");
    assert_eq!(status(json!({"kubernetes": {"manifests_dir": manifests}})), (Some(0), String::new()));
    std::fs::remove_dir(&manifests).expect("removed");
    assert_eq!(status(json!({"chain": [{"type": "uid-exclude", "uids": [1337]}]})), (Some(0), String::new()));
}

#[test]
fn what_stands_in_the_way_is_named() {
    let details = refused(json!({"kubernetes": {"manifests_dir": "/no/such/directory"}}));
    assert!(details.contains("/no/such/directory"), "{details}");
    let details = refused(json!({"kubernetes": {"kubeconfig": "/no/such/kubeconfig"}}));
    assert!(details.contains("/no/such/kubeconfig"), "{details}");
    let details = refused(json!({"ambient_enabled": true, "kubernetes": {"manifests_dir": "/no/such/directory"}}));
    assert!(details.contains("ambient_enabled") && details.contains("/no/such/directory"), "{details}");
}

#[test]
fn an_api_that_refuses_the_connection_is_named_within_two_seconds() {
    let kubeconfig = std::env::temp_dir().join(format!("detour-status-{}.kubeconfig", std::process::id()));
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    });
    std::fs::write(&kubeconfig, text.to_string()).expect("writable");
    let details = refused(json!({"kubernetes": {"kubeconfig": kubeconfig}}));
    assert!(details.contains("http://127.0.0.1:1"), "{details}");
    std::fs::remove_file(&kubeconfig).expect("removable");
}
