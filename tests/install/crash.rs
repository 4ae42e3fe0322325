//! An installation that is killed: at each of its system calls that could change a file.

use crate::scene::{CALICO, DETOUR, Scene};
use serde_json::Value;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

const CALLS: &str = "open,openat,creat,write,fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink,unlinkat,\
                     mkdir,mkdirat,chmod,fchmod,fchown,ftruncate,flock";

/// Runs a command and kills it when it enters its `count`th call of those; whether it came so far.
fn killed(scene: &Scene, command: &str, more: &[&str], count: usize) -> bool {
    let status = Command::new("strace")
        .args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={CALLS}")])
        .args(["-e", &format!("inject={CALLS}:signal=KILL:when={count}")])
        .arg(DETOUR)
        .args(scene.arguments(command, more))
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .output()
        .expect("strace starts")
        .status;
    let killed = status.signal() == Some(9) || status.code() == Some(137);
    assert!(killed || status.success(), "{command}, call {count}: {status}");
    killed
}

/// Runtimes find a valid configuration, and whatever program that names is whole.
fn whole(scene: &Scene, conf_dir: &str, bin_dir: &str, when: &str) {
    let program = fs::read(DETOUR).expect("read");
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

fn leftovers(scene: &Scene) -> Vec<String> {
    let files = scene.files().into_keys().map(|path| path.display().to_string());
    files.filter(|path| path.contains(".tmp")).collect()
}

fn kill_everywhere(scene: &Scene, more: &[&str], conf_dir: &str, bin_dir: &str) {
    let before = scene.files();
    let mut installs = 0;
    while killed(scene, "install", more, installs + 1) {
        installs += 1;
        whole(scene, conf_dir, bin_dir, &format!("install, call {installs}"));
        if installs % 7 == 0 {
            scene.ok("uninstall", &[]);
            assert_eq!(scene.files(), before, "taken back after call {installs}");
        }
    }
    let _ = scene.run("install", more);
    let installed = scene.files();
    assert_eq!(leftovers(scene), [""; 0]);
    let mut removals = 0;
    while killed(scene, "uninstall", &[], removals + 1) {
        removals += 1;
        whole(scene, conf_dir, bin_dir, &format!("uninstall, call {removals}"));
        if removals % 7 == 0 {
            scene.ok("install", more);
            assert_eq!(scene.files(), installed, "installed again after call {removals}");
        }
    }
    assert_eq!(scene.files(), before);
    assert!(installs > 20 && removals > 10, "{installs} and {removals} instants");
}

#[test]
fn in_a_list() {
    let scene = Scene::with("crash-list", "10-calico.conflist", CALICO);
    kill_everywhere(&scene, &[], "etc/cni/net.d", "opt/cni/bin");
}

#[test]
fn in_a_single_configuration_that_becomes_a_list() {
    let single = "{ \"cniVersion\": \"0.3.1\", \"name\": \"weave\", \"type\": \"weave-net\" }\n";
    let scene = Scene::with("crash-single", "10-weave.conf", single);
    kill_everywhere(&scene, &[], "etc/cni/net.d", "opt/cni/bin");
}

#[test]
fn in_a_file_of_its_own_where_another_stood_with_its_program() {
    let scene = Scene::with("crash-own", "10-calico.conflist", CALICO);
    scene.write(
        "etc/cni/multus/net.d/istio-cni.conf",
        r#"{"cniVersion":"0.3.1","name":"istio-cni","type":"istio-cni"}"#,
    );
    scene.write("var/lib/cni/bin/istio-cni", "another's program");
    let more = ["--platform=openshift", "--name=istio-cni"];
    kill_everywhere(&scene, &more, "etc/cni/multus/net.d", "var/lib/cni/bin");
}
