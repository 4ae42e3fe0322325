//! `--multus-chain`: the plugin's file in the directory of Multus's auxiliary chain, beside files of other tools.

use crate::agent_process::{Agent, SETTLED};
use crate::scene::{CALICO, Scene};
use serde_json::json;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

const CHAIN: &str = "--multus-chain=/run/multus/cni/net.d/vendor-cni-chain";
const OPENSHIFT: [&str; 2] = ["--platform=openshift", CHAIN];
const FILE: &str = "run/multus/cni/net.d/vendor-cni-chain/detour.conf";
const FOREIGN: &str = "run/multus/cni/net.d/vendor-cni-chain/50-vendor.conf";

#[test]
fn the_chain_gets_a_file_beside_the_attachments() {
    let scene = Scene::with("chain-files", "10-calico.conflist", CALICO);
    scene.write(FOREIGN, r#"{"type": "vendor"}"#);
    let before = scene.files();
    let config = scene.config("config.json", &json!({"kubernetes": {"exclude_namespaces": ["quiet"]}}));
    scene.write("attachments.json", r#"[{"name": "istio-cni", "kubernetes": {"exclude_namespaces": ["x"]}}]"#);
    let attachments = format!("--attachments={}", scene.path("attachments.json").display());
    let arguments = [&OPENSHIFT[..], &[&config, &attachments]].concat();
    scene.ok("install", &arguments);
    let (file, attachment) = (scene.json(FILE), scene.json("etc/cni/multus/net.d/istio-cni.conf"));
    assert_eq!((&file["name"], &file["cniVersion"]), (&json!("vendor-cni-chain"), &json!("0.3.1")));
    assert_eq!(file["chain"], attachment["chain"]);
    assert_eq!((&file["auto_dialect"], &attachment["auto_dialect"]), (&json!("nftables"), &json!("nftables")));
    assert_eq!(scene.mode(FILE), 0o600);
    let node = scene.json("var/lib/cni/detour/node.json");
    assert_eq!(node["auto_dialect"], "nftables");
    assert_eq!(
        node["networks"],
        json!({"vendor-cni-chain": {"exclude_namespaces": ["quiet"], "chain": node["chain"]}})
    );
    assert!(scene.ok("install", &arguments).contains("nothing to do"));

    // Without the flag, only this file is removed.
    scene.ok("install", &["--platform=openshift", &config, &attachments]);
    assert!(!scene.path(FILE).exists() && scene.path("etc/cni/multus/net.d/istio-cni.conf").exists());
    scene.ok("install", &arguments);
    scene.ok("uninstall", &[]);
    fs::remove_file(scene.path("attachments.json")).expect("removed");
    assert_eq!(scene.files(), before);
}

/// Beside istio-cni, whose file has the name of the default attachment.
#[test]
fn exclusions_only_leave_the_file_of_istio_cni_to_it() {
    const ISTIO: &str = "etc/cni/multus/net.d/istio-cni.conf";
    let scene = Scene::with("chain-excludes", "10-calico.conflist", CALICO);
    scene.write(ISTIO, r#"{"name": "istio-cni", "type": "istio-cni"}"#);
    scene.write("attachments.json", "[]");
    let config = scene.config("config.json", &json!({"chain": [{"type": "uid-exclude"}]}));
    let attachments = format!("--attachments={}", scene.path("attachments.json").display());
    let before = scene.read(ISTIO);
    scene.ok("install", &[&OPENSHIFT[..], &[&config, &attachments]].concat());
    assert_eq!(scene.json(FILE)["chain"], json!([{"type": "uid-exclude"}]));
    assert_eq!(scene.read(ISTIO), before);
    scene.ok("uninstall", &[]);
    assert_eq!(scene.read(ISTIO), before);
    assert!(!scene.path(FILE).exists());
}

#[test]
fn a_file_that_stops_the_whole_chain_makes_the_installation_incomplete() {
    let scene = Scene::with("chain-foreign", "10-calico.conflist", CALICO);
    for (text, wanted) in [
        ("{", "50-vendor.conf: invalid JSON"),
        ("[]", "50-vendor.conf: expected a JSON object with type"),
        (r#"{"name": "x"}"#, "50-vendor.conf: expected a JSON object with type"),
        (r#"{"plugins": [{"type": "x"}]}"#, "50-vendor.conf: expected a JSON object with type"),
        (r#"{"type": 1}"#, "50-vendor.conf.type: invalid value 1"),
        (r#"{"type": "x", "name": 1}"#, "50-vendor.conf.name: invalid value 1"),
        (r#"{"type": "x", "capabilities": {"mac": "true"}}"#, "50-vendor.conf.capabilities: invalid value"),
        (r#"{"type": "x", "ipam": "dhcp"}"#, "50-vendor.conf.ipam: invalid value"),
        (r#"{"type": "x", "ipam": {"type": 5}}"#, "50-vendor.conf.ipam: invalid value"),
        (r#"{"type": "x", "dns": {"nameservers": "1.1.1.1"}}"#, "50-vendor.conf.dns: invalid value"),
        (r#"{"type": "x", "prevResult": []}"#, "50-vendor.conf.prevResult: invalid value"),
        (r#"{"type": "x", "cni.dev/valid-attachments": [5]}"#, "50-vendor.conf.cni.dev/valid-attachments: invalid"),
    ] {
        scene.write(FOREIGN, text);
        scene.reports(1, "install", &OPENSHIFT, &[wanted, "Multus skips all plugins of"]);
        assert!(scene.path(FILE).exists(), "the own file is written nevertheless");
    }
    // libcni reads each entry that is no directory.
    let foreign = scene.path(FOREIGN);
    for (make, wanted) in [
        ((|path| symlink("/missing", path).expect("linked")) as fn(&Path), "No such file or directory"),
        (|path| symlink(".", path).expect("linked"), "expected a regular file, got a directory"),
        (|path| drop(UnixListener::bind(path).expect("bound")), "No such device or address"),
    ] {
        fs::remove_file(&foreign).expect("removed");
        make(&foreign);
        scene.reports(1, "install", &OPENSHIFT, &[&format!("50-vendor.conf: {wanted}")]);
    }
    fs::remove_file(&foreign).expect("removed");
    fs::create_dir(&foreign).expect("made");
    scene.ok("install", &OPENSHIFT);
    fs::remove_dir(&foreign).expect("removed");
    scene.write(FOREIGN, r#"{"type": "x", "capabilities": {"mac": null}, "dns": {"search": null}, "prevResult": {}}"#);
    scene.write("run/multus/cni/net.d/vendor-cni-chain/notes.txt", "{");
    scene.ok("install", &OPENSHIFT);
    let found_by_doctor = || {
        let root = scene.path("");
        let doctor = Command::new(env!("CARGO_BIN_EXE_detour")).args(["doctor", "--node", "--root"]).arg(root).output();
        let lines = String::from_utf8(doctor.expect("it starts").stdout).expect("text");
        let lines: Vec<_> = lines.lines().skip_while(|line| !line.contains(" multus-chain ")).take(2).collect();
        lines.join("\n")
    };
    assert!(found_by_doctor().starts_with("  pass  multus-chain "), "{}", found_by_doctor());
    scene.write(FOREIGN, "{");
    let found = found_by_doctor();
    assert!(found.starts_with("  FAIL") && found.contains("50-vendor.conf: invalid JSON"), "{found}");
}

#[test]
fn contradictions_are_refused_before_anything_is_written() {
    let scene = Scene::with("chain-refused", "10-calico.conflist", CALICO);
    let primary = scene.config("primary.json", &json!({"clusterNetwork": "/etc/cni/net.d/10-calico.conflist"}));
    let before = scene.files();
    for (arguments, wanted) in [
        (vec!["--chained=true", CHAIN], "expected --chained=false, got true; the plugin would run twice for each pod"),
        (vec![CHAIN], "expected --chained=false, got true, the default of kubernetes"),
        (vec!["--chained=false", "--multus-chain=/"], "invalid plugin configuration: missing network name"),
        (
            vec!["--platform=openshift", CHAIN, &primary],
            "expected a configuration without clusterNetwork and delegates",
        ),
    ] {
        scene.reports(2, "install", &arguments, &[wanted]);
    }
    assert_eq!(scene.files(), before);
}

/// On a node, `/var/run` is a symbolic link to `/run`.
#[test]
fn another_path_of_the_same_directory_keeps_the_file() {
    let scene = Scene::with("chain-links", "10-calico.conflist", CALICO);
    fs::create_dir_all(scene.path("run")).expect("made");
    fs::create_dir_all(scene.path("var")).expect("made");
    symlink("../run", scene.path("var/run")).expect("linked");
    let linked = CHAIN.replace("=/run", "=/var/run");
    for flag in [&linked, CHAIN, &linked] {
        scene.ok("install", &["--platform=openshift", flag]);
        assert!(scene.path(FILE).exists(), "{flag}");
        assert!(scene.ok("install", &["--platform=openshift", flag]).contains("nothing to do"), "{flag}");
    }
    scene.ok("uninstall", &[]);
    assert!(!scene.path(FILE).exists());
}

/// The directory is on a tmpfs.
#[test]
fn the_agent_writes_the_file_again_and_reports_files_of_other_tools() {
    let scene = Scene::with("chain-agent", "10-calico.conflist", CALICO);
    let health = "--health-address=127.0.0.1:0";
    let agent = Agent::start(&scene, "a", &[&OPENSHIFT[..], &[health]].concat());
    let address = agent.address();
    agent.wait_for_log(SETTLED);
    fs::remove_dir_all(scene.path("run/multus")).expect("removed");
    agent.wait_for_log("write /run/multus/cni/net.d/vendor-cni-chain/detour.conf");
    agent.wait_for_log("the plugin is ready on this node");
    let invalid = || {
        let (_, body) = crate::support::health::fetch(&address, "/metrics");
        crate::exposition::Exposition::parse(&body).value("detour_multus_chain_invalid_files", "", &[])
    };
    assert_eq!(invalid(), Some(0.0));
    scene.write(FOREIGN, "{");
    agent.wait_for_log("50-vendor.conf: invalid JSON");
    assert_eq!(invalid(), Some(1.0));
    let (status, body) = crate::support::health::fetch(&address, "/readyz");
    assert!(status.contains("503") && body.contains("Multus skips all plugins of"), "{status} {body}");
    fs::remove_file(scene.path(FOREIGN)).expect("removed");
    agent.wait_for_log("the plugin is ready on this node");
    assert_eq!(invalid(), Some(0.0));
}
