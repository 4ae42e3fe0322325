//! The OCI hook: a flag installs it, several releases share it, and without the flag it is removed.

use crate::agent_process::Agent;
use crate::scene::{CALICO, Scene, program};
use nix::sys::signal::Signal;
use serde_json::json;
use std::fs;
use std::path::Path;
use std::process::Command;

const HOOK: &str = "etc/containers/oci/hooks.d/90-detour.json";
const PROGRAM: &str = "opt/cni/bin/detour-hook";
const FLAG: &str = "--oci-hooks-dir";
const OTHER: [&str; 4] = ["--release=other", "--chained=false", "--conf-dir=/etc/cni/multus/net.d", "--network=other"];
const LOGGED: &str = "the plugin is ready on this node";

fn scene(name: &str) -> Scene {
    Scene::with(&format!("hook-{name}"), "10-calico.conflist", CALICO)
}

fn is_program(scene: &Scene) -> bool {
    fs::read(scene.path(PROGRAM)).is_ok_and(|text| text == fs::read(program()).expect("readable"))
}

#[track_caller]
fn assert_installed(scene: &Scene, is_installed: bool) {
    assert_eq!((scene.path(HOOK).exists(), scene.path(PROGRAM).exists()), (is_installed, is_installed));
}

#[test]
fn the_hook_is_installed_with_the_flag_and_removed_without_it() {
    let scene = scene("flag");
    scene.ok("install", &[]);
    assert_installed(&scene, false);
    let before = scene.files();
    scene.ok("install", &[FLAG]);
    assert!(is_program(&scene));
    let expected = json!({
        "version": "1.0.0",
        "hook": {"path": "/opt/cni/bin/detour-hook", "args": ["detour-hook"], "timeout": 10},
        "when": {"always": true},
        "stages": ["createRuntime", "poststop"],
    });
    assert_eq!((scene.json(HOOK), scene.mode(HOOK), scene.mode(PROGRAM)), (expected, 0o600, 0o755));
    assert_eq!(scene.ok("install", &[FLAG]), "nothing to do\n");
    // Runtimes run the installed file: without a state, it refuses as the hook does.
    let output = Command::new(scene.path(PROGRAM)).output().expect("it starts");
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("detour-hook: invalid container state"), "{output:?}");
    let changes = scene.ok("install", &[]);
    let removed = |line: &str| changes.lines().position(|other| other == line).unwrap_or_else(|| panic!("{changes}"));
    let [hook, file] = [format!("remove /{HOOK}"), format!("remove /{PROGRAM}")];
    assert!(removed(&hook) < removed(&file), "the runtime never finds a hook without its program: {changes}");
    assert_eq!(scene.files(), before);
    scene.ok("install", &["--oci-hooks-dir=/run/hooks.d"]);
    assert!(scene.path("run/hooks.d/90-detour.json").exists() && !scene.path(HOOK).exists());
    scene.ok("uninstall", &[]);
    assert!(!scene.path("run/hooks.d/90-detour.json").exists() && !scene.path(PROGRAM).exists());
}

#[test]
fn a_dry_run_shows_the_hook_and_changes_nothing() {
    let scene = scene("dry");
    let before = scene.files();
    let shown = scene.ok("install", &["--dry-run", FLAG]);
    assert_eq!(scene.files(), before);
    assert!(shown.contains("# copy this program to /opt/cni/bin/detour-hook\n"), "{shown}");
    assert!(shown.contains(&format!("+++ b/{HOOK}\n")), "{shown}");
    assert!(shown.contains("+    \"path\": \"/opt/cni/bin/detour-hook\",\n"), "{shown}");
    let [program, hook] = ["/opt/cni/bin/detour-hook\n", HOOK].map(|text| shown.find(text).expect("shown"));
    assert!(program < hook, "{shown}");
    scene.ok("install", &[FLAG]);
    let shown = scene.ok("uninstall", &["--dry-run"]);
    assert!(shown.contains(&format!("--- a/{HOOK}\n+++ /dev/null\n")), "{shown}");
}

#[test]
fn the_administrators_file_is_restored_and_an_edited_hook_keeps_its_program() {
    let scene = scene("edited");
    scene.write(HOOK, "{\"version\": \"1.0.0\"}");
    scene.ok("install", &[FLAG]);
    assert_eq!(scene.json(HOOK)["hook"]["args"], json!(["detour-hook"]));
    scene.ok("uninstall", &[]);
    assert_eq!(scene.read(HOOK), "{\"version\": \"1.0.0\"}");
    // The file of an installation whose record was lost is not restored.
    scene.ok("install", &[FLAG]);
    fs::remove_dir_all(scene.path("var/lib/cni/detour")).expect("removed");
    scene.write(HOOK, &scene.read(HOOK).replace("10", "9"));
    scene.ok("install", &[FLAG]);
    scene.ok("uninstall", &[]);
    assert_installed(&scene, false);
    scene.ok("install", &[FLAG]);
    scene.write(HOOK, &scene.read(HOOK).replace("10", "9"));
    let notes = scene.fails("uninstall", &[]);
    assert!(notes.contains(&format!("/{HOOK} is not reverted: another process changed it")), "{notes}");
    assert_installed(&scene, true);
}

#[test]
fn the_last_release_that_uses_the_hook_removes_it() {
    let scene = scene("releases");
    scene.ok("install", &[FLAG]);
    let installed = scene.read(HOOK);
    scene.ok("install", &[&OTHER[..], &[FLAG]].concat());
    assert_eq!(scene.read(HOOK), installed);
    scene.ok("uninstall", &["--release=detour"]);
    assert_eq!((scene.read(HOOK), is_program(&scene)), (installed, true));
    scene.ok("install", &OTHER);
    assert_installed(&scene, false);
    scene.ok("install", &[&OTHER[..], &[FLAG]].concat());
    scene.ok("uninstall", &[]);
    assert_installed(&scene, false);
}

#[test]
fn a_second_release_with_other_programs_is_refused() {
    let scene = scene("other-dir");
    scene.ok("install", &[FLAG]);
    let before = scene.files();
    let stderr = scene.fails("install", &[&OTHER[..], &[FLAG, "--bin-dir=/opt/other"]].concat());
    assert!(stderr.contains("which runs a program in another directory, belongs to release \"detour\""), "{stderr}");
    assert_eq!(scene.files(), before);
    scene.ok("install", &[&OTHER[..], &["--oci-hooks-dir=/run/hooks.d", "--bin-dir=/opt/other"]].concat());
    assert_eq!(scene.json("run/hooks.d/90-detour.json")["hook"]["path"], "/opt/other/detour-hook");
}

#[test]
fn the_hook_of_the_newest_release_stays() {
    let scene = scene("newest");
    scene.ok("install", &[FLAG]);
    let record = "var/lib/cni/detour/install.json";
    // The record of a newer release whose hook has another text.
    let newer = scene.read(HOOK).replace("10", "20");
    scene.write(HOOK, &newer);
    let sum = Command::new("sha256sum").arg(scene.path(HOOK)).output().expect("sha256sum is needed").stdout;
    let sum = String::from_utf8_lossy(&sum).split(' ').next().expect("a digest").to_owned();
    let mut content = scene.json(record);
    content["files"][format!("/{HOOK}")]["ours"] = json!([format!("sha256:{sum}")]);
    content["program_version"] = "99.0.0".into();
    scene.write(record, &content.to_string());
    scene.ok("install", &[&OTHER[..], &[FLAG]].concat());
    assert_eq!(scene.read(HOOK), newer);
}

fn wait_until(what: &str, is_true: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !is_true() {
        assert!(std::time::Instant::now() < deadline, "{what}");
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
}

#[test]
fn the_agent_restores_the_hook_and_removes_it_when_the_flag_is_gone() {
    let scene = scene("agent");
    let agent = Agent::start(&scene, "a", &[FLAG, "--release=detour"]);
    agent.wait_for_log(LOGGED);
    for file in [HOOK, PROGRAM] {
        let intact = fs::read(scene.path(file)).expect("installed");
        fs::remove_file(scene.path(file)).expect("removed");
        wait_until(file, || fs::read(scene.path(file)).is_ok_and(|text| text == intact));
    }
    assert!(Path::new(&scene.path(HOOK)).exists());
    agent.end(Signal::SIGTERM);
    let agent = Agent::start(&scene, "b", &["--release=detour"]);
    wait_until("the hook is removed", || !scene.path(HOOK).exists() && !scene.path(PROGRAM).exists());
    agent.end(Signal::SIGTERM);
}
