//! `--attachments`: a configuration file for each attachment, and their parts of the node configuration.

use crate::agent_process::{Agent, SETTLED};
use crate::scene::{CALICO, LIST, NODE, Scene};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const DIRECTORY: &str = "etc/cni/multus/net.d";
const OWN: [&str; 2] = ["--chained=false", "--conf-dir=/etc/cni/multus/net.d"];

/// A node with one attachment.
fn scene(name: &str) -> Scene {
    let scene = Scene::with(name, "10-calico.conflist", CALICO);
    attach(&scene, &json!([{"name": "excludedns", "type": "excludedns"}]));
    scene
}

fn attach(scene: &Scene, attachments: &Value) {
    // Atomically, as kubelets do.
    scene.write("new.json", &attachments.to_string());
    fs::create_dir_all(scene.path("config")).expect("made");
    fs::rename(scene.path("new.json"), scene.path("config/attachments.json")).expect("renamed");
}

fn attachments(scene: &Scene) -> String {
    format!("--attachments={}", scene.path("config/attachments.json").display())
}

#[test]
fn an_invalid_list_of_attachments_or_name_is_refused() {
    let scene = scene("attachments-invalid");
    let before = scene.files();
    let list = scene.path("config/attachments.json");
    for (text, why) in [
        ("{", "expected a JSON array of objects"),
        ("{}", "expected a JSON array of objects"),
        ("[1]", "expected a JSON array of objects"),
        ("[{}]", "[0].name: expected the name of a NetworkAttachmentDefinition, got null"),
        (r#"[{"name": "../x"}]"#, "[0].name: expected the name of a NetworkAttachmentDefinition, got \"../x\""),
        (r#"[{"name": "a"}, {"name": "a"}]"#, "[1].name: \"a\" occurs twice"),
        (r#"[{"name": "a", "type": "b"}]"#, "[0]: type: expected detour, got \"b\"; add --name b"),
        (r#"[{"name": "a", "chian": []}]"#, "[0]: chian: unknown key; did you mean \"chain\"?"),
        (r#"[{"name": "a", "namespace": "x"}]"#, "[0]: namespace: unknown key; remove it"),
        (r#"[{"name": "a", "namespaces": ["x"]}]"#, "[0]: namespaces: unknown key; remove it"),
        (
            r#"[{"name": "a", "kubernetes": {"kubeconfig": "/missing"}}]"#,
            "attachments.json: attachment \"a\": kubernetes.kubeconfig /missing: ",
        ),
        (r#"[{"name": "a", "chain": [{"type": "x"}]}]"#, "attachment \"a\": "),
        (r#"[{"name": "a", "clusterNetwork": "b"}]"#, "attachment \"a\": "),
    ] {
        fs::write(&list, text).expect("written");
        scene.reports(2, "install", &["--chained=false", &attachments(&scene)], &[why, "--attachments"]);
    }
    fs::write(&list, before[Path::new("config/attachments.json")].0.clone()).expect("written");
    assert_eq!(scene.files(), before);
}

#[test]
fn each_attachment_has_a_file_beside_the_entry_in_the_list() {
    let scene = scene("attachments-files");
    let before = scene.files();
    scene.write("config.json", r#"{"log_level": "warn", "kubernetes": {"timeout_seconds": 3}}"#);
    let config = format!("--config={}", scene.path("config.json").display());
    attach(
        &scene,
        &json!([
            {"name": "a", "kubernetes": {"exclude_namespaces": ["x"]}},
            {"name": "b", "log_level": "debug", "chain": [{"type": "uid-exclude", "uids": ["1"]}]},
        ]),
    );
    let chained = ["--chained=true", &config, &attachments(&scene)];
    scene.ok("install", &chained);
    let [a, b] = ["a", "b"].map(|name| scene.json(&format!("etc/cni/multus/net.d/{name}.conf")));
    assert_eq!((&a["name"], &a["log_level"], &b["log_level"]), (&json!("a"), &json!("warn"), &json!("debug")));
    assert_eq!(
        (&a["kubernetes"]["timeout_seconds"], &a["kubernetes"]["exclude_namespaces"]),
        (&json!(3), &json!(["x"]))
    );
    assert_eq!(b["chain"], json!([{"type": "uid-exclude", "uids": ["1"]}]));
    assert!(scene.read(LIST).contains("\"detour\""));
    let chain = &scene.json(NODE)["chain"];
    let excluded = ["istio-system", "kube-system"];
    let networks = json!({
        "a": {"exclude_namespaces": ["x"], "chain": chain}, "b": {"exclude_namespaces": excluded, "chain": b["chain"]},
    });
    assert_eq!(scene.json(NODE)["networks"], networks);
    // With an empty list, only the cluster network's entry is left.
    attach(&scene, &json!([]));
    scene.ok("install", &chained);
    assert!(["a", "b"].iter().all(|name| !scene.path(&format!("etc/cni/multus/net.d/{name}.conf")).exists()));
    assert_eq!(scene.json(NODE).get("networks"), None);
    scene.ok("install", &["--chained=false", "--conf-dir=/etc/cni/multus/net.d", &attachments(&scene)]);
    assert!(scene.path("etc/cni/multus/net.d/istio-cni.conf").exists(), "as without the flag");
    assert!(!scene.read(LIST).contains("\"detour\""));
    scene.ok("uninstall", &[]);
    assert_eq!(scene.files().len(), before.len() + 1);
}

#[test]
fn an_agent_follows_the_list_of_attachments_and_keeps_the_last_valid_one() {
    let scene = scene("attachments-follow");
    attach(&scene, &json!([{"name": "excludedns"}]));
    let attachments = attachments(&scene);
    let start = |more: &[&str]| Agent::start(&scene, "a", &[&OWN[..], &[&attachments], more].concat());
    start(&["--config=/dev/null"]).wait_for_log("--config");
    let other = start(&[]);
    other.wait_for_log(SETTLED);
    attach(&scene, &json!([{"name": "excludedns"}, {"name": "second"}]));
    other.wait_for_log("write /etc/cni/multus/net.d/second.conf");
    other.wait_for_log(SETTLED);
    let installed = scene.read(&format!("{DIRECTORY}/excludedns.conf"));
    attach(&scene, &json!([{"name": "second", "chain": [{"type": "uid-exclude", "uids": ["x"]}]}]));
    let line = other.wait_for_log("attachment \\\"second\\\"");
    assert!(line.contains("the last accepted configuration stays in use"), "{line}");
    assert_eq!(scene.read(&format!("{DIRECTORY}/excludedns.conf")), installed);
    attach(&scene, &json!([{"name": "second"}]));
    other.wait_for_log("remove /etc/cni/multus/net.d/excludedns.conf");
    other.wait_for_log(SETTLED);
    assert!(scene.path("etc/cni/multus/net.d/second.conf").exists());
}

#[test]
fn a_node_configuration_that_the_plugin_would_refuse_is_not_written() {
    let scene = scene("attachments-large");
    let before = scene.files();
    let excluded = |i: usize| (0..40).map(|n| format!("namespace-with-a-long-name-{i}-{n}")).collect::<Vec<_>>();
    let list = (0..99).map(|i| json!({"name": format!("n{i}"), "kubernetes": {"exclude_namespaces": excluded(i)}}));
    attach(&scene, &list.collect());
    scene.reports(
        2,
        "install",
        &["--chained=true", &attachments(&scene)],
        &["node.json: expected at most 65536 bytes"],
    );
    attach(&scene, &json!([{"name": "excludedns", "type": "excludedns"}]));
    assert_eq!(scene.files(), before);
}
