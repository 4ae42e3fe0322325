//! Several releases on one node: they share the program and the node configuration, and own everything else.

use crate::agent_process::{Agent, SETTLED};
use crate::scene::{CALICO, Scene, program};
use crate::server::{Answer, Request, Server};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Logged when the node becomes ready.
const READY: &str = "the plugin is ready on this node";
const LIST: &str = "etc/cni/net.d/10-calico.conflist";
const NODE: &str = "var/lib/cni/detour/node.json";
const PROGRAM: &str = "opt/cni/bin/detour";
const OTHER_CONF: &str = "etc/cni/multus/net.d/excludedns.conf";
const OTHER_KUBECONFIG: &str = "var/lib/cni/detour/kubeconfig.excludedns";
/// The release with a configuration file of its own.
const OTHER: [&str; 5] = [
    "--release=excludedns",
    "--chained=false",
    "--conf-dir=/etc/cni/multus/net.d",
    "--name=excludedns",
    "--exclude-namespaces=other",
];
/// The release `detour`, in the cluster network's plugin list.
const FIRST: [&str; 2] = ["--chained=true", "--name=excludedns"];

/// A node with a program of another vendor and one attachment for the release `excludedns`.
fn scene(name: &str) -> Scene {
    let scene = Scene::with(name, "10-calico.conflist", CALICO);
    scene.write("opt/cni/bin/excludedns", "another's program");
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

fn install_other(scene: &Scene) {
    scene.ok("install", &[&OTHER[..], &[&attachments(scene)]].concat());
}

/// Writes a copy of the program that has this version. Returns its path.
fn program_of_version(scene: &Scene, version: &str) -> PathBuf {
    let own = env!("CARGO_PKG_VERSION");
    assert_eq!(version.len(), own.len());
    let mut bytes = fs::read(program()).expect("readable");
    let mut at = 0;
    while let Some(found) = bytes[at..].windows(own.len()).position(|bytes| bytes == own.as_bytes()) {
        at += found;
        bytes[at..at + own.len()].copy_from_slice(version.as_bytes());
    }
    let path = scene.path(&format!("program-{version}"));
    fs::write(&path, bytes).expect("written");
    fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("set");
    path
}

fn is_same(a: &Path, b: &Path) -> bool {
    fs::read(a).expect("readable") == fs::read(b).expect("readable")
}

#[test]
fn uninstalling_one_release_leaves_what_the_other_needs_in_either_order() {
    let alone = |name: &str, install: &dyn Fn(&Scene)| {
        let scene = scene(name);
        install(&scene);
        scene.files()
    };
    let first_alone = alone("releases-first", &|scene| drop(scene.ok("install", &FIRST)));
    let other_alone = alone("releases-other", &install_other);
    for is_reversed in [false, true] {
        for other_ends_first in [false, true] {
            let scene = scene(&format!("releases-{is_reversed}-{other_ends_first}"));
            let before = scene.files();
            if is_reversed {
                install_other(&scene);
                scene.ok("install", &FIRST);
            } else {
                scene.ok("install", &FIRST);
                install_other(&scene);
            }
            assert!(scene.json(LIST).to_string().contains("\"detour\"") && scene.path(OTHER_CONF).exists());
            let (ends, stays) = if other_ends_first { ("excludedns", "detour") } else { ("detour", "excludedns") };
            scene.ok("uninstall", &[&format!("--release={ends}")]);
            let mut left = scene.files();
            // Only the digests of shared files in its record may differ.
            let mut expected = if other_ends_first { first_alone.clone() } else { other_alone.clone() };
            for files in [&mut left, &mut expected] {
                files.retain(|path, _| !path.to_string_lossy().contains("detour/install."));
            }
            assert_eq!(left, expected, "{ends} ended");
            scene.ok("uninstall", &[&format!("--release={stays}")]);
            assert_eq!(scene.files(), before);
            assert!(!scene.has_lock());
        }
    }
}

#[test]
fn uninstall_without_a_release_reverts_all_and_the_dry_run_shows_it() {
    let scene = scene("releases-all");
    let before = scene.files();
    scene.ok("install", &FIRST);
    install_other(&scene);
    let all = scene.files();
    let shown = scene.ok("uninstall", &["--dry-run"]);
    for path in [LIST, NODE, PROGRAM, OTHER_CONF, OTHER_KUBECONFIG, "var/lib/cni/detour/kubeconfig"] {
        assert!(shown.contains(&format!("/{path}")), "{path}: {shown}");
    }
    let shown = scene.ok("uninstall", &["--dry-run", "--release=excludedns"]);
    assert!(shown.contains(OTHER_CONF) && !shown.contains(PROGRAM) && !shown.contains(LIST), "{shown}");
    assert_eq!(scene.files(), all);
    assert_eq!(scene.ok("uninstall", &["--release=unknown"]), "nothing to do\n");
    scene.ok("uninstall", &[]);
    assert_eq!(scene.files(), before);
    assert!(!scene.has_lock());
}

#[test]
fn the_node_configuration_has_the_parts_of_all_releases() {
    let scene = scene("releases-node");
    scene.write("pinned.json", r#"{"type": "excludedns", "log_file": "/var/log/x", "chain": [{"type": "dns-exclude", "pod_overrides": false}]}"#);
    let pinned = format!("--config={}", scene.path("pinned.json").display());
    scene.ok("install", &[&OTHER[..], &[&pinned, &attachments(&scene), "--agent-namespace=mesh"]].concat());
    let alone = scene.read(NODE);
    assert_eq!(scene.json(NODE)["kubernetes"]["kubeconfig"], "/var/lib/cni/detour/kubeconfig.excludedns");
    assert_eq!(
        scene.json(NODE)["kubernetes"]["agent_pod_prefixes"],
        json!(["excludedns-agent-", "detour-agent-", "istio-cni-node-"])
    );
    scene.ok("install", &[&FIRST[..], &["--agent-namespace=mesh"]].concat());
    let node = scene.json(NODE);
    let kubernetes = &node["kubernetes"];
    assert_eq!(kubernetes["kubeconfig"], "/var/lib/cni/detour/kubeconfig", "the release of the cluster network leads");
    assert_eq!(kubernetes["exclude_namespaces"], json!(["istio-system", "kube-system"]));
    assert_eq!(kubernetes["agent_pod_prefixes"], json!(["detour-agent-", "istio-cni-node-", "excludedns-agent-"]));
    assert_eq!(node["networks"], json!({"excludedns": {"exclude_namespaces": ["other"]}}));
    assert_eq!((&node["pinned"], &node["primary"]), (&json!(["dns-exclude"]), &json!(false)));
    assert_eq!(node.get("log_file"), None);
    // The other release changes its part.
    let attachments = attachments(&scene);
    let changed = [&OTHER[..4], &[&attachments, "--agent-namespace=mesh"]].concat();
    scene.ok("install", &changed);
    assert_eq!((scene.json(NODE).get("networks"), &scene.json(NODE)["pinned"]), (None, &json!([])));
    scene.ok("install", &[&OTHER[..], &[&pinned, &attachments, "--agent-namespace=mesh"]].concat());
    scene.ok("uninstall", &["--release=detour"]);
    assert_eq!(scene.read(NODE), alone);
    assert!(scene.path(OTHER_KUBECONFIG).exists());
}

#[test]
fn what_belongs_to_another_release_is_refused_and_not_changed() {
    let scene = scene("releases-owned");
    scene.ok("install", &FIRST);
    install_other(&scene);
    let installed = scene.files();
    let third = ["--release=third", "--chained=false", "--conf-dir=/etc/cni/multus/net.d", "--name=excludedns"];
    for (arguments, what) in [
        (
            [&third[..], &[&attachments(&scene)]].concat(),
            "file /etc/cni/multus/net.d/excludedns.conf belongs to release \"excludedns\"",
        ),
        (
            vec!["--release=third", "--chained=true"],
            "the entry of the plugin \"detour\" in /etc/cni/net.d/10-calico.conflist belongs to release \"detour\"",
        ),
    ] {
        let stderr = scene.fails("install", &arguments);
        assert!(stderr.contains(what) && stderr.contains("detour uninstall --release"), "{stderr}");
        assert_eq!(scene.files(), installed);
    }
    // An entry of another type has its own place in the list.
    scene.write("type.json", r#"{"type": "excludedns"}"#);
    let config = format!("--config={}", scene.path("type.json").display());
    scene.ok("install", &["--release=third", "--chained=true", "--name=excludedns", &config]);
    let kinds: Vec<_> =
        scene.json(LIST)["plugins"].as_array().expect("a list").iter().map(|p| p["type"].clone()).collect();
    assert_eq!(kinds, ["calico", "portmap", "bandwidth", "detour", "excludedns"]);
    scene.ok("uninstall", &["--release=detour"]);
    assert!(scene.read(LIST).contains("excludedns") && !scene.read(LIST).contains("\"detour\""));
    scene.ok("uninstall", &["--release=third"]);
    assert_eq!(scene.read(LIST), CALICO);
}

#[test]
fn a_file_or_network_of_another_release_is_refused_under_another_path_too() {
    let scene = scene("releases-aliases");
    install_other(&scene);
    scene.ok("install", &FIRST);
    symlink("net.d", scene.path("etc/cni/multus/alias")).expect("linked");
    symlink("net.d", scene.path("etc/cni/alias.d")).expect("linked");
    let installed = scene.files();
    let attachments = attachments(&scene);
    let third = ["--release=third", "--name=excludedns", "--chained=false"];
    for (arguments, what) in [
        (
            [&third[..], &["--conf-dir=/etc/cni/multus/alias", &attachments]].concat(),
            "file /etc/cni/multus/alias/excludedns.conf, which is the same file as \
             /etc/cni/multus/net.d/excludedns.conf, belongs to release \"excludedns\"",
        ),
        (
            [&third[..], &["--conf-dir=/etc/cni/multus/third", &attachments]].concat(),
            "network \"excludedns\" belongs to release \"excludedns\"",
        ),
        (
            vec!["--release=third", "--chained=true", "--conf-dir=/etc/cni/alias.d"],
            "the entry of the plugin \"detour\" in /etc/cni/alias.d/10-calico.conflist belongs to release \"detour\"",
        ),
    ] {
        let stderr = scene.fails("install", &arguments);
        assert!(stderr.contains(what) && stderr.contains("detour uninstall --release"), "{stderr}");
        assert_eq!(scene.files(), installed);
    }
    // Another name in the same directory is accepted.
    attach(&scene, &json!([{"name": "third"}]));
    scene.ok("install", &[&third[..], &["--conf-dir=/etc/cni/multus/alias", &attachments]].concat());
    scene.ok("uninstall", &["--release=third"]);
    assert!(scene.path(OTHER_CONF).exists());
}

#[test]
fn a_converted_configuration_is_restored_by_the_last_release_of_its_list() {
    let single = "{\n  \"cniVersion\": \"0.3.1\", \"name\": \"weave\", \"type\": \"weave-net\"\n}\n";
    let scene = Scene::with("releases-single", "10-weave.conf", single);
    let before = scene.files();
    scene.ok("install", &[]);
    scene.write("type.json", r#"{"type": "excludedns"}"#);
    let config = format!("--config={}", scene.path("type.json").display());
    scene.ok("install", &["--release=b", "--name=excludedns", &config]);
    fs::remove_file(scene.path("type.json")).expect("removed");
    scene.ok("uninstall", &["--release=detour"]);
    assert!(scene.read("etc/cni/net.d/10-weave.conflist").contains("excludedns"));
    scene.ok("uninstall", &["--release=b"]);
    assert_eq!(scene.files(), before);
}

#[test]
fn the_newest_program_stays_and_every_release_accepts_it() {
    let scene = scene("releases-version");
    let newer = program_of_version(&scene, "9.9.9");
    let run = |program: &Path, arguments: &[&str]| {
        let output = Command::new(program).args(scene.arguments("install", arguments)).env_clear().output();
        let output = output.expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    scene.ok("install", &FIRST);
    let attachments = attachments(&scene);
    let other = [&OTHER[..], &[&attachments]].concat();
    run(&newer, &other);
    assert!(is_same(&scene.path(PROGRAM), &newer));
    assert_eq!(scene.ok("install", &FIRST), "nothing to do\n", "the newer program is accepted");
    fs::remove_file(scene.path(PROGRAM)).expect("removed");
    scene.ok("install", &FIRST);
    assert!(is_same(&scene.path(PROGRAM), program()), "any program is better than none");
    assert_eq!(run(&newer, &other), "copy this program to /opt/cni/bin/detour\n");
    // The release that stays restores its own program, and recognizes the other one as its own.
    scene.ok("uninstall", &["--release=excludedns"]);
    assert!(is_same(&scene.path(PROGRAM), &newer), "no instant without a program");
    scene.ok("install", &FIRST);
    assert!(is_same(&scene.path(PROGRAM), program()));
    run(&newer, &other);
    scene.ok("uninstall", &["--release=excludedns"]);
    scene.ok("uninstall", &[]);
    assert!(!scene.path(PROGRAM).exists());
    assert_eq!(scene.read("opt/cni/bin/excludedns"), "another's program");
}

#[test]
fn a_release_that_version_0_1_0_installed_is_the_oldest_and_has_its_part_of_the_node_configuration() {
    let scene = scene("releases-old");
    let old = program_of_version(&scene, "0.0.0");
    scene.ok("install", &FIRST);
    let alone = scene.read(NODE);
    let mut record = scene.json("var/lib/cni/detour/install.json");
    for key in ["program_version", "node"] {
        record.as_object_mut().expect("an object").remove(key).expect("written");
    }
    scene.write("var/lib/cni/detour/install.json", &record.to_string());
    let attachments = attachments(&scene);
    let other = [&OTHER[..], &[&attachments]].concat();
    let output = Command::new(&old).args(scene.arguments("install", &other)).env_clear().output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
    assert!(is_same(&scene.path(PROGRAM), &old), "any version is newer");
    assert_eq!(scene.json(NODE)["kubernetes"]["kubeconfig"], "/var/lib/cni/detour/kubeconfig");
    assert_eq!(scene.json(NODE)["networks"]["excludedns"], json!({"exclude_namespaces": ["other"]}));
    scene.ok("uninstall", &["--release=excludedns"]);
    assert_eq!(scene.read(NODE), alone);
}

#[test]
fn an_invalid_release_or_list_of_attachments_is_refused() {
    let scene = scene("releases-invalid");
    let before = scene.files();
    for name in ["", "A", "a/b", "..", "-a"] {
        let stderr = scene.ends(2, "install", &[&format!("--release={name}")]);
        assert!(stderr.contains("--release"), "{stderr}");
        scene.ends(2, "uninstall", &[&format!("--release={name}")]);
    }
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
            r#"[{"name": "a", "kubernetes": {"kubeconfg": "/x"}}]"#,
            "[0]: kubernetes.kubeconfg: unknown key; did you mean \"kubeconfig\"?",
        ),
        (r#"[{"name": "a", "name": "b"}]"#, "key \"name\" occurs twice"),
        (&format!(r#"[{{"name": "{}"}}]"#, "a".repeat(64)), "[0].name: expected at most 63 characters, got 64"),
        (
            r#"[{"name": "a", "kubernetes": {"kubeconfig": "/missing"}}]"#,
            "attachments.json: attachment \"a\": kubernetes.kubeconfig /missing: ",
        ),
        (r#"[{"name": "a", "chain": [{"type": "x"}]}]"#, "attachment \"a\": "),
        (r#"[{"name": "a", "clusterNetwork": "b"}]"#, "attachment \"a\": "),
    ] {
        fs::write(&list, text).expect("written");
        let stderr = scene.ends(2, "install", &["--chained=false", &attachments(&scene)]);
        assert!(stderr.contains(why) && stderr.contains("--attachments"), "{text}: {stderr}");
    }
    let long = |flag: &str, length: usize| format!("--{flag}={}", "a".repeat(length));
    for (argument, why) in [
        (long("network", 175), "expected at most 174 bytes, got 175"),
        (long("conf-name", 240), "expected at most 239 bytes, got 240"),
        (long("name", 240), "expected at most 239 bytes, got 240"),
    ] {
        let stderr = scene.ends(2, "install", &["--chained=false", &argument]);
        assert!(stderr.contains(why), "{stderr}");
    }
    fs::write(&list, before[Path::new("config/attachments.json")].0.clone()).expect("written");
    assert_eq!(scene.files(), before);
}

#[test]
fn the_longest_accepted_names_can_be_installed_and_a_recorded_name_that_is_too_long_is_skipped() {
    const RECORD: &str = "var/lib/cni/detour/install.json";
    let scene = scene("releases-long");
    let before = scene.files();
    let long = |flag: &str, length: usize, end: &str| format!("--{flag}={}{end}", "a".repeat(length - end.len()));
    let names = [long("network", 174, ""), long("conf-name", 239, ".conf"), long("name", 239, "")];
    scene.ok("install", &[&["--chained=false"], &names.each_ref().map(String::as_str)[..]].concat());
    let mut record = scene.json(RECORD);
    record["files"][format!("/etc/cni/net.d/{}.conf", "a".repeat(253))] =
        json!({"role": "configuration", "ours": [], "before": "nothing"});
    scene.write(RECORD, &record.to_string());
    scene.ok("uninstall", &[]);
    assert_eq!(scene.files(), before);
}

#[test]
fn each_attachment_has_a_file_and_a_chained_release_has_both() {
    let scene = scene("releases-attachments");
    let before = scene.files();
    scene.write("etc/cni/multus/net.d/b.conf", r#"{"type": "another"}"#);
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
    assert_eq!(scene.json(NODE)["networks"], json!({"a": {"exclude_namespaces": ["x"]}}));
    // With an empty list, only the cluster network's entry is left.
    attach(&scene, &json!([]));
    scene.ok("install", &chained);
    assert_eq!(scene.read("etc/cni/multus/net.d/b.conf"), r#"{"type": "another"}"#);
    assert!(!scene.path("etc/cni/multus/net.d/a.conf").exists());
    assert_eq!(scene.json(NODE).get("networks"), None);
    scene.ok("install", &["--chained=false", "--conf-dir=/etc/cni/multus/net.d", &attachments(&scene)]);
    assert!(scene.path("etc/cni/multus/net.d/istio-cni.conf").exists(), "as without the flag");
    assert_eq!(scene.read(LIST), CALICO);
    scene.ok("uninstall", &[]);
    assert_eq!(scene.files().len(), before.len() + 2);
}

/// Starts the agent of the release `excludedns`.
fn start_other(scene: &Scene, name: &str, program: &Path, more: &[&str]) -> Agent {
    let attachments = attachments(scene);
    let arguments = scene.arguments("agent", &[&OTHER[..], &[&attachments], more].concat());
    Agent::spawn_program(program, &[("HOSTNAME", name)], &arguments)
}

#[test]
fn two_agents_keep_their_releases_installed_and_the_newest_program_in_place() {
    let scene = scene("releases-agents");
    let before = scene.files();
    let newer = program_of_version(&scene, "9.9.9");
    let first = Agent::start(&scene, "a", &[&FIRST[..], &["--on-exit=remove"]].concat());
    first.wait_for_log(SETTLED);
    let other = start_other(&scene, "other", program(), &["--on-exit=remove"]);
    other.wait_for_log(SETTLED);
    // Each agent restores its own files, and either one restores shared files.
    fs::remove_file(scene.path(OTHER_CONF)).expect("removed");
    other.wait_for_log("write /etc/cni/multus/net.d/excludedns.conf");
    scene.write(LIST, CALICO);
    first.wait_for_log("write /etc/cni/net.d/10-calico.conflist");
    // An upgrade of one release; the agent of the other one accepts its program.
    let upgraded = start_other(&scene, "upgraded", &newer, &["--on-exit=remove"]);
    upgraded.wait_for_log(SETTLED);
    assert!(is_same(&scene.path(PROGRAM), &newer));
    scene.write("sa/token", "second-token\n");
    first.wait_for_log("write /var/lib/cni/detour/kubeconfig");
    first.wait_for_log(SETTLED);
    assert!(is_same(&scene.path(PROGRAM), &newer));
    assert!(other.end(Signal::SIGTERM).success());
    // The agent that stays replaces the program of the release that ends.
    assert!(upgraded.end(Signal::SIGTERM).success());
    assert!(!scene.path(OTHER_CONF).exists() && !scene.path(OTHER_KUBECONFIG).exists());
    first.wait_for_log("copy this program to /opt/cni/bin/detour");
    first.wait_for_log(SETTLED);
    assert!(is_same(&scene.path(PROGRAM), program()));
    assert!(!first.logged().iter().any(|line| line.contains("keeps reverting") || line.contains("taken over")));
    assert!(first.end(Signal::SIGTERM).success());
    fs::remove_file(&newer).expect("removed");
    scene.write("sa/token", "first-token\n");
    assert_eq!(scene.files(), before);
}

#[test]
fn an_agent_follows_the_list_of_attachments_and_keeps_the_last_valid_one() {
    let scene = scene("releases-follow");
    let other = start_other(&scene, "other", program(), &["--config=/dev/null", "--health-address=127.0.0.1:0"]);
    other.wait_for_log("--config");
    drop(other);
    let other = start_other(&scene, "other", program(), &["--health-address=127.0.0.1:0"]);
    other.wait_for_log(SETTLED);
    attach(&scene, &json!([{"name": "excludedns", "type": "excludedns"}, {"name": "second"}]));
    other.wait_for_log("write /etc/cni/multus/net.d/second.conf");
    other.wait_for_log(SETTLED);
    let installed = scene.read(OTHER_CONF);
    attach(&scene, &json!([{"name": "second", "chain": [{"type": "uid-exclude", "uids": ["x"]}]}]));
    let line = other.wait_for_log("attachment \\\"second\\\"");
    assert!(line.contains("the last accepted configuration stays in use"), "{line}");
    assert_eq!(scene.read(OTHER_CONF), installed);
    attach(&scene, &json!([{"name": "second"}]));
    other.wait_for_log("remove /etc/cni/multus/net.d/excludedns.conf");
    other.wait_for_log(SETTLED);
    assert!(scene.path("etc/cni/multus/net.d/second.conf").exists());
}

#[test]
fn an_agent_whose_configuration_file_belongs_to_another_release_is_not_ready_until_that_is_gone() {
    let scene = scene("releases-wait");
    install_other(&scene);
    let installed = scene.files();
    let attachments = attachments(&scene);
    let third = ["--release=third", "--chained=false", "--conf-dir=/etc/cni/multus/net.d", "--name=excludedns"];
    let agent = Agent::start(&scene, "a", &[&third[..], &[&attachments]].concat());
    agent.wait_for_log("belongs to release");
    let mut left = scene.files();
    left.retain(|path, _| path.extension().is_none_or(|extension| extension != "present"));
    assert_eq!(left, installed);
    scene.ok("uninstall", &["--release=excludedns"]);
    agent.wait_for_log("write /etc/cni/multus/net.d/excludedns.conf");
    agent.wait_for_log(SETTLED);
}

#[test]
fn a_node_configuration_that_the_plugin_would_refuse_is_not_written() {
    let scene = scene("releases-large");
    let before = scene.files();
    let excluded = |i: usize| (0..40).map(|n| format!("namespace-with-a-long-name-{i}-{n}")).collect::<Vec<_>>();
    let list = (0..99).map(|i| json!({"name": format!("n{i}"), "kubernetes": {"exclude_namespaces": excluded(i)}}));
    attach(&scene, &list.collect());
    let stderr = scene.fails("install", &["--chained=true", &attachments(&scene)]);
    assert!(stderr.contains("node.json: expected at most 65536 bytes"), "{stderr}");
    let list = (0..101).map(|i| json!({"name": format!("n{i}")}));
    attach(&scene, &list.collect());
    let stderr = scene.ends(2, "install", &["--chained=true", &attachments(&scene)]);
    assert!(stderr.contains("expected at most 100 attachments, got 101"), "{stderr}");
    attach(&scene, &json!([{"name": "excludedns", "type": "excludedns"}]));
    assert_eq!(scene.files(), before);
}

#[test]
fn the_taint_stays_until_every_running_release_is_ready() {
    const KEY: &str = "cni.istio.io/not-ready";
    let changes = Arc::new(Mutex::new(vec![json!([])]));
    let changed = Arc::clone(&changes);
    let api = Server::plain(move |request| {
        let mut changes = changed.lock().expect("unpoisoned");
        if request.line.starts_with("PATCH /api/v1/nodes/node-1") {
            let body: Value = serde_json::from_slice(&request.body).expect("JSON");
            changes.push(body["spec"]["taints"].clone());
        } else if !request.line.starts_with("GET /api/v1/nodes/node-1") {
            return Answer::json(404, &json!({"kind": "Status", "message": "no such thing"}));
        }
        let metadata = json!({"name": "node-1", "resourceVersion": changes.len().to_string()});
        Answer::json(200, &json!({"metadata": metadata, "spec": {"taints": changes.last()}}))
    });
    let taints = || changes.lock().expect("unpoisoned").clone();
    let until = |expected: &[Value]| {
        let start = Instant::now();
        while taints() != expected {
            assert!(start.elapsed() < Duration::from_secs(120), "{:?}", taints());
            thread::park_timeout(Duration::from_millis(5));
        }
    };
    let scene = scene("releases-taint");
    let authority = rcgen::generate_simple_self_signed(["client.invalid".to_owned()]).expect("a certificate");
    scene.write("sa/ca.crt", &authority.cert.pem());
    let server = format!("--api-server={}", api.http());
    let common =
        ["agent", "--node-name=node-1", "--taint=cni.istio.io/not-ready", "--socket=", "--repair=off", &server];
    let place = [("--root", ""), ("--service-account", "sa")];
    let place = place.map(|(flag, path)| format!("{flag}={}", scene.path(path).display()));
    let start = |name: &str, more: &[&str]| {
        let arguments = common.iter().chain(more).map(ToString::to_string).chain(place.clone());
        let pod = [("HOSTNAME", name), ("POD_NAMESPACE", "mesh"), ("POD_NAME", name), ("POD_UID", "uid")];
        Agent::spawn_with(&pod, &arguments.collect::<Vec<_>>())
    };
    let first = start("a", &FIRST);
    first.wait_for_log(READY);
    // Its entry in the list belongs to the other release.
    let second = start("b", &["--release=second", "--chained=true"]);
    second.wait_for_log("belongs to release");
    let is_event = |request: &Request| {
        let text = String::from_utf8_lossy(&request.body);
        request.line.starts_with("POST /api/v1/namespaces/mesh/events")
            && text.contains("DetourNotInstalled")
            && text.contains("belongs to release")
    };
    let start_of_wait = Instant::now();
    while !api.requests().iter().any(is_event) {
        assert!(start_of_wait.elapsed() < Duration::from_secs(120), "no Event of the agent's pod");
        thread::park_timeout(Duration::from_millis(5));
    }
    let tainted = json!([{"key": KEY, "effect": "NoSchedule"}]);
    until(&[json!([]), tainted.clone()]);
    assert!(first.end(Signal::SIGTERM).success());
    let first = start("c", &FIRST);
    first.wait_for_log(READY);
    fs::remove_file(scene.path(PROGRAM)).expect("removed");
    first.wait_for_log("copy this program to /opt/cni/bin/detour");
    first.wait_for_log(SETTLED);
    assert_eq!(taints(), [json!([]), tainted.clone()], "the other release is not ready");
    second.end(Signal::SIGKILL);
    until(&[json!([]), tainted, json!([])]);
}
