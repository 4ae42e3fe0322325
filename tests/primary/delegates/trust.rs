//! Attacks by the author of a definition. `convergence::faults::executables` has files that another user can change.

use crate::delegates::pod::{Pod, conf, with};
use crate::delegates::recorders::Recorders;
use nix::unistd::{Uid, chown};
use serde_json::json;
use std::path::Path;

const ATTACKER: u32 = 12345;

fn give(path: &Path) {
    chown(path, Some(Uid::from_raw(ATTACKER)), None).expect("root");
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
