//! Full and read-only file systems.

use crate::scene::{CALICO, Scene, program};
use std::process::Command;

/// Runs commands and an installation, which must fail, in a new mount namespace. Returns stderr.
fn after(scene: &Scene, commands: &str) -> String {
    let arguments = scene.arguments("install", &[]).join(" ");
    let output = Command::new("unshare")
        .args(["--mount", "--propagation=private", "sh", "-e", "-c"])
        .arg(format!("cd {}; {commands}; {} {arguments}", scene.root.display(), program().display()))
        .output()
        .expect("unshare starts");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    stderr
}

#[test]
fn a_full_disk_is_reported_and_no_configuration_changes() {
    let scene = Scene::with("full", "10-calico.conflist", CALICO);
    let stderr = after(&scene, "mkdir -p opt/cni/bin; mount -t tmpfs -o size=64k none opt/cni/bin");
    assert!(stderr.contains("can't write /opt/cni/bin/detour: No space left on device"), "{stderr}");
    assert!(stderr.contains("free some space"), "{stderr}");
    assert_eq!(scene.read("etc/cni/net.d/10-calico.conflist"), CALICO);
}

#[test]
fn a_full_disk_leaves_no_temporary_file() {
    let scene = Scene::with("full-conf", "10-calico.conflist", CALICO);
    let fill = "mount -t tmpfs -o size=16k none etc/cni/net.d; printf '%s' '{\"name\":\"n\",\"plugins\":[{\"type\":\"a\"}]}' \
                > etc/cni/net.d/10-x.conflist; dd if=/dev/zero of=etc/cni/net.d/filler bs=1k 2>dd || true";
    let look = "trap 'ls -A etc/cni/net.d > seen' EXIT";
    let stderr = after(&scene, &format!("{fill}; {look}"));
    assert!(stderr.contains("can't write /etc/cni/net.d/10-x.conflist: No space left on device"), "{stderr}");
    assert_eq!(scene.read("seen"), "10-x.conflist\nfiller\n");
}

#[test]
fn a_read_only_directory_is_reported() {
    let scene = Scene::with("read-only", "10-calico.conflist", CALICO);
    let stderr = after(&scene, "mount --bind etc/cni/net.d etc/cni/net.d; mount -o remount,bind,ro etc/cni/net.d");
    assert!(stderr.contains("can't write /etc/cni/net.d/10-calico.conflist: Read-only file system"), "{stderr}");
    assert!(stderr.contains("mount it writable, or select another directory"), "{stderr}");
    assert_eq!(scene.read("etc/cni/net.d/10-calico.conflist"), CALICO);
}
