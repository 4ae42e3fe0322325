//! Installations that are killed at each of the system calls that can change a file.

use crate::scene::{CALICO, Scene, program};
use serde_json::Value;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

/// The system calls that change a file, as regular expressions of strace because of their names on other architectures.
const CALLS: [&str; 6] = ["/^mkdir", "/^copy_file_range$", "/^write$", "/^rename", "/^link", "/^unlink"];
/// A single configuration.
const SINGLE: &str = "{ \"cniVersion\": \"0.3.1\", \"name\": \"weave\", \"type\": \"weave-net\" }\n";
/// Those that change what a runtime finds. The others write temporary files, in the same way for each configuration.
const VISIBLE: [&str; 3] = ["/^rename", "/^link", "/^unlink"];

/// Runs a command and kills it at the `count`th entry of `call`. Returns whether it got that far.
fn killed(scene: &Scene, command: &str, more: &[&str], call: &str, count: usize) -> bool {
    let status = Command::new("strace")
        .args(["-qq", "-o", "/dev/null", "-e", &format!("trace={call}")])
        .args(["-e", &format!("inject={call}:signal=KILL:when={count}")])
        .arg(program())
        .args(scene.arguments(command, more))
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .output()
        .expect("strace starts")
        .status;
    let killed = status.signal() == Some(9);
    assert!(killed || status.success(), "{command}, call {count} of {call}: {status}");
    killed
}

/// Checks that runtimes find a valid configuration, and that its program is complete.
fn whole(scene: &Scene, conf_dir: &str, bin_dir: &str, when: &str) {
    let program = fs::read(program()).expect("read");
    let mut valid = 0;
    for entry in fs::read_dir(scene.path(conf_dir)).expect("readable") {
        let path = entry.expect("readable").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if name.starts_with(".detour-") {
            assert!(name.ends_with(".tmp"), "{name} is no configuration for any runtime");
            continue;
        }
        let text = fs::read_to_string(&path).expect("readable");
        let conf: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{when}: {name}: {error}: {text}"));
        valid += 1;
        if text.contains("\"detour\"") {
            let installed = fs::read(scene.path(bin_dir).join("detour")).unwrap_or_else(|e| panic!("{when}: {e}"));
            assert!(installed == program, "{when}: the program is whole");
            assert!(scene.json("var/lib/cni/detour/kubeconfig").is_object(), "{when}");
        }
        assert!(conf["name"].is_string(), "{when}");
    }
    assert!(valid > 0, "{when}: there is a configuration");
}

fn kill_everywhere(scene: &Scene, calls: &[&str], more: &[&str], conf_dir: &str, bin_dir: &str) {
    scene.ok("install", more);
    let installed = scene.files();
    scene.ok("uninstall", &[]);
    // A list of another owner is formatted anew.
    let before = scene.files();
    let mut instants = 0;
    for (command, arguments) in [("install", more), ("uninstall", &[])] {
        for call in calls {
            for count in 1.. {
                if command == "uninstall" {
                    scene.ok("install", more);
                }
                if !killed(scene, command, arguments, call, count) {
                    scene.ok("uninstall", &[]);
                    break;
                }
                instants += 1;
                whole(scene, conf_dir, bin_dir, &format!("{command}, call {count} of {call}"));
                if count % 2 == 0 {
                    scene.ok("install", more);
                    assert_eq!(scene.files(), installed, "finished after call {count} of {call}");
                }
                scene.ok("uninstall", &[]);
                assert_eq!(scene.files(), before, "taken back after call {count} of {call}");
            }
        }
    }
    assert!(instants > 2 * calls.len(), "{instants} instants");
}

#[test]
fn a_killed_installation_in_a_list_leaves_valid_files() {
    let scene = Scene::with("crash-list", "10-calico.conflist", CALICO);
    kill_everywhere(&scene, &CALLS, &[], "etc/cni/net.d", "opt/cni/bin");
}

#[test]
fn a_killed_conversion_to_a_list_leaves_valid_files() {
    for count in 1.. {
        let scene = Scene::with("crash-single", "10-weave.conf", SINGLE);
        let killed = VISIBLE.map(|call| killed(&scene, "install", &[], call, count));
        whole(&scene, "etc/cni/net.d", "opt/cni/bin", &format!("call {count}"));
        scene.ok("install", &[]);
        assert!(first_list(&scene).contains("\"detour\"") && !scene.path("etc/cni/net.d/10-weave.conf").exists());
        scene.ok("uninstall", &[]);
        assert!(!first_list(&scene).contains("\"detour\""));
        if !killed.contains(&true) {
            assert!(count > 3, "{count} instants");
            break;
        }
    }
}

#[test]
fn a_killed_installation_of_the_own_list_leaves_valid_files() {
    let scene = Scene::with("crash-own-list", "10-calico.conflist", CALICO);
    kill_everywhere(&scene, &VISIBLE, &["--own-list=true"], "etc/cni/net.d", "opt/cni/bin");
}

/// Returns the text of the configuration that a runtime uses.
fn first_list(scene: &Scene) -> String {
    let entries = fs::read_dir(scene.path("etc/cni/net.d")).expect("readable");
    let paths = entries.map(|entry| entry.expect("readable").path());
    let first = paths.filter(|path| path.extension().is_none_or(|extension| extension != "tmp")).min();
    fs::read_to_string(first.expect("a list")).expect("readable")
}

#[test]
fn a_killed_change_between_the_own_and_the_original_list_leaves_the_entry_in_the_first_list() {
    let scene = Scene::with("crash-change", "10-calico.conflist", CALICO);
    scene.ok("install", &[]);
    scene.ok("uninstall", &[]);
    let before = scene.files();
    let mut instants = 0;
    for (from, to) in [(&[][..], &["--own-list=true"][..]), (&["--own-list=true"], &[])] {
        for call in ["/^rename", "/^unlink"] {
            for count in 1.. {
                scene.ok("install", from);
                let was_killed = killed(&scene, "install", to, call, count);
                let when = format!("{to:?}, call {count} of {call}");
                assert!(first_list(&scene).contains("\"detour\""), "{when}");
                if count % 2 == 0 {
                    scene.ok("install", to);
                    assert!(first_list(&scene).contains("\"detour\""), "{when}");
                }
                scene.ok("uninstall", &[]);
                assert_eq!(scene.files(), before, "{when}");
                if !was_killed {
                    break;
                }
                instants += 1;
            }
        }
    }
    assert!(instants > 6, "{instants} instants");
}
