//! `--own-list=true`: the plugin's entry is in a copy of the cluster network's plugin list, which runtimes use instead.

use crate::agent_process::{Agent, SETTLED};
use crate::scene::{CALICO, Scene};
use serde_json::{Value, json};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

const SOURCE: &str = "etc/cni/net.d/10-calico.conflist";
const OWN: &str = "etc/cni/net.d/00-detour.conflist";
const OWN_LIST: &str = "--own-list=true";
/// Generous, for a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Waits until a condition is true.
#[track_caller]
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        thread::park_timeout(Duration::from_millis(5));
    }
}

/// Returns the types of the plugins in a list.
fn types(scene: &Scene, list: &str) -> Vec<String> {
    let list = scene.json(list);
    let plugins = list["plugins"].as_array().expect("a list").iter();
    plugins.map(|plugin| plugin["type"].as_str().expect("a type").to_owned()).collect()
}

/// Returns another list of the cluster network, with this name.
fn list(name: &str) -> String {
    CALICO.replace("k8s-pod-network", name)
}

/// Returns the name of the network in a list.
fn network(scene: &Scene, list: &str) -> Value {
    scene.json(list)["name"].clone()
}

#[test]
fn the_own_list_is_a_copy_with_the_entry_and_uninstall_removes_it() {
    let scene = Scene::with("own-copy", "10-calico.conflist", CALICO);
    let before = scene.files();
    let diff = scene.ok("install", &[OWN_LIST, "--dry-run"]);
    assert!(diff.contains("--- /dev/null\n+++ b/etc/cni/net.d/00-detour.conflist\n"), "{diff}");
    assert!(!diff.contains("10-calico.conflist"), "{diff}");
    assert_eq!(scene.files(), before);
    let output = scene.run("install", &[OWN_LIST]);
    assert!(output.status.success() && String::from_utf8_lossy(&output.stderr).contains("`detour agent` follows"));
    assert_eq!(scene.read(SOURCE), CALICO);
    assert_eq!(types(&scene, OWN), ["calico", "portmap", "bandwidth", "detour"]);
    assert_eq!(scene.mode(OWN), 0o600);
    let mut own = scene.json(OWN);
    let entry = own["plugins"].as_array_mut().expect("a list").pop().expect("the entry");
    assert_eq!(own, serde_json::from_str::<Value>(CALICO).expect("JSON"));
    assert_eq!(entry["cni_conf_dir"], "/etc/cni/net.d");
    let installed = scene.files();
    assert_eq!(scene.ok("install", &[OWN_LIST]).trim(), "nothing to do");
    assert_eq!(scene.files(), installed);
    scene.ok("uninstall", &[]);
    assert_eq!(scene.files(), before);
}

#[test]
fn the_agent_follows_the_source_and_this_is_no_repair() {
    let scene = Scene::with("own-follow", "10-calico.conflist", CALICO);
    let agent = Agent::start(&scene, "a", &[OWN_LIST]);
    agent.wait_for_log(SETTLED);
    for i in 0..10 {
        let name = format!("changed-{i}");
        scene.write(SOURCE, &list(&name));
        wait_until("the copy follows", || network(&scene, OWN) == json!(name));
        assert_eq!(types(&scene, OWN).last().map(String::as_str), Some("detour"));
    }
    assert!(!agent.logged().iter().any(|line| line.contains("keeps reverting")));
}

#[test]
fn an_edited_renamed_or_deleted_own_list_is_restored() {
    let scene = Scene::with("own-restore", "10-calico.conflist", CALICO);
    let agent = Agent::start(&scene, "a", &[OWN_LIST]);
    agent.wait_for_log(SETTLED);
    let installed = scene.files();
    let own = scene.path(OWN);
    let back = |doing: &dyn Fn()| {
        doing();
        agent.wait_for_log("write /etc/cni/net.d/00-detour.conflist");
        agent.wait_for_log(SETTLED);
        assert_eq!(scene.files(), installed);
    };
    back(&|| fs::remove_file(&own).expect("removed"));
    back(&|| scene.write(OWN, CALICO));
    // As Cilium does with `cni.exclusive=true`.
    back(&|| fs::rename(&own, own.with_file_name("00-detour.conflist.cilium_bak")).expect("renamed"));
}
