//! Attacks by the author of a definition: files that another user can change are not executed as root.

use crate::pod::{Pod, conf, with};
use crate::recorders::Recorders;
use crate::support::called::Called;
use nix::unistd::{Uid, chown};
use serde_json::json;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

const ATTACKER: u32 = 12345;

fn give(path: &Path) {
    chown(path, Some(Uid::from_raw(ATTACKER)), None).expect("root");
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("set");
}

/// Calls the plugin as Multus does for a definition that names the directory and one executable there.
fn attack(pod: &Pod, command: &str, bin_dir: &Path) -> Called {
    let definition = with(conf("1.1.0", &[json!({"type": "evil"})]), &json!({"kubernetes": {"cni_bin_dir": bin_dir}}));
    pod.call(command, Path::new("/usr/lib/cni"), &definition)
}

#[track_caller]
fn refused(output: &Called, why: &str) {
    let msg = output.stdout["msg"].as_str().unwrap_or_default();
    assert_eq!((output.success, &output.stdout["code"]), (false, &json!(7)), "{output:?}");
    assert!(msg.contains("plugin \"evil\" is not executed: ") && msg.contains(why), "{msg}");
}

/// The attack fails and leaves no process, rule or state. DEL executes nothing either.
#[track_caller]
fn fails_and_leaves_nothing(recorders: &Recorders, bin_dir: &Path, why: &str) {
    let pod = Pod::new();
    refused(&attack(&pod, "ADD", bin_dir), why);
    assert!(!Path::new("/run/detour/attachments").join(&pod.name).exists());
    refused(&attack(&pod, "DEL", bin_dir), why);
    let status = attack(&pod, "STATUS", bin_dir);
    assert!(!status.success && status.stdout.to_string().contains(why), "{status:?}");
    assert_eq!(recorders.order(), [""; 0]);
    assert_eq!(pod.rules(), [""; 0]);
}

#[test]
fn files_that_another_user_can_change_are_not_executed() {
    type Attack = (fn(&Path), &'static str);
    let attacks: [Attack; 4] = [
        (|bin| give(&bin.join("evil")), "/bin/evil is owned by UID 12345; expected root; run chown"),
        (|bin| mode(bin, 0o777), "/bin has mode 0777; expected one that only root can write to"),
        (|bin| give(bin.parent().expect("a directory")), " is owned by UID 12345"),
        (
            |bin| {
                fs::rename(bin.join("evil"), bin.join("target")).expect("renamed");
                give(&bin.join("target"));
                symlink(bin.join("target"), bin.join("evil")).expect("a link");
            },
            "/bin/target is owned by UID 12345",
        ),
    ];
    for (attack, why) in attacks {
        let recorders = Recorders::new().with("evil", "");
        attack(&recorders.bin());
        fails_and_leaves_nothing(&recorders, &recorders.bin(), why);
    }
}

#[test]
fn an_untrusted_file_is_not_skipped_for_one_in_a_later_directory() {
    let (recorders, later) = (Recorders::new().with("evil", ""), Recorders::new().with("evil", ""));
    give(&recorders.bin().join("evil"));
    let pod = Pod::new();
    let path = format!("{}:{}", recorders.bin().display(), later.bin().display());
    let output = pod.call("ADD", Path::new(&path), &conf("1.0.0", &[json!({"type": "evil"})]));
    refused(&output, "is owned by UID 12345");
    assert_eq!((recorders.order(), later.order()), (vec![], vec![]));
}

/// `bridge` searches `CNI_PATH`, which includes `cni_bin_dir`, for its IPAM plugin.
#[test]
fn a_trusted_plugin_gets_no_untrusted_directory_in_cni_path() {
    let recorders = Recorders::new().with("evil-ipam", "");
    give(&recorders.bin());
    let pod = Pod::new();
    let bridge = json!({"type": "bridge", "bridge": "dtrust0", "ipam": {"type": "evil-ipam"}});
    let definition = with(conf("1.0.0", &[bridge]), &json!({"kubernetes": {"cni_bin_dir": recorders.bin()}}));
    let output = pod.call("ADD", Path::new("/usr/lib/cni"), &definition);
    let msg = output.stdout["msg"].as_str().unwrap_or_default();
    assert!(msg.starts_with("plugin \"bridge\" is not executed: "), "{output:?}");
    assert_eq!(recorders.order(), [""; 0]);
    assert!(!Path::new("/sys/class/net/dtrust0").exists(), "nothing was made on the node");

    // Another user could create a missing directory while the plugin runs.
    let missing = Recorders::new().with("first", "");
    let absent = json!({"kubernetes": {"cni_bin_dir": "/tmp/detour-not-there"}});
    let definition = with(conf("1.0.0", &[json!({"type": "first"})]), &absent);
    assert!(pod.call("ADD", &missing.bin(), &definition).success);
    assert_eq!(missing.seen()[0].environment["CNI_PATH"], missing.bin().display().to_string());
}
