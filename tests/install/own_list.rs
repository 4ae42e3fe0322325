//! `--own-list=true`: the plugin's entry is in a copy of the cluster network's configuration list, which runtimes use
//! instead.

use crate::agent_process::{Agent, READY, SETTLED};
use crate::scene::{CALICO, LIST, OWN, Scene};
use crate::support::health::{get, is_ready};
use crate::support::wait::until;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;

const OWN_LIST: &str = "--own-list=true";
const HEALTH: &str = "--health-address=127.0.0.1:0";
/// The file of another network, as Podman installs it.
const PODMAN: &str = "etc/cni/net.d/87-podman-bridge.conflist";

/// Returns the types of the plugins in a list.
pub(crate) fn types(scene: &Scene, list: &str) -> Vec<String> {
    let list = scene.json(list);
    let plugins = list["plugins"].as_array().expect("a list").iter();
    plugins.map(|plugin| plugin["type"].as_str().expect("a type").to_owned()).collect()
}

/// Returns another list of the cluster network, with this name.
pub(crate) fn list(name: &str) -> String {
    CALICO.replace("k8s-pod-network", name)
}

/// Returns the name of the network in a list.
pub(crate) fn network(scene: &Scene, list: &str) -> Value {
    scene.json(list)["name"].clone()
}

/// cluster_cnis/golden has the list, its mode, and the uninstallation.
#[test]
fn a_dry_run_shows_the_own_list_which_is_a_copy_with_the_entry() {
    let scene = Scene::with("own-copy", "10-calico.conflist", CALICO);
    let before = scene.files();
    let diff = scene.ok("install", &[OWN_LIST, "--dry-run"]);
    assert!(diff.contains("--- /dev/null\n+++ b/etc/cni/net.d/00-detour.conflist\n"), "{diff}");
    assert!(!diff.contains("10-calico.conflist"), "{diff}");
    assert_eq!(scene.files(), before);
    scene.ok("install", &[OWN_LIST]);
    assert_eq!(scene.read(LIST), CALICO);
    let entry = scene.json(OWN)["plugins"].as_array_mut().expect("a list").pop().expect("the entry");
    assert_eq!((&entry["type"], &entry["cni_conf_dir"]), (&json!("detour"), &json!("/etc/cni/net.d")));
    assert_eq!(scene.ok("install", &[OWN_LIST]), "nothing to do\n");
}

#[test]
fn an_edited_renamed_or_deleted_own_list_is_restored() {
    let scene = Scene::with("own-restore", "10-calico.conflist", CALICO);
    let agent = Agent::settled(&scene, "a", &[OWN_LIST]);
    let installed = scene.files();
    let own = scene.path(OWN);
    let renamed = own.with_file_name("00-detour.conflist.cilium_bak");
    for change in [
        &|| fs::remove_file(&own).expect("removed"),
        &|| scene.write(OWN, CALICO),
        // As Cilium does with `cni.exclusive=true`.
        &|| fs::rename(&own, &renamed).expect("renamed"),
    ] as [&dyn Fn(); 3]
    {
        change();
        agent.wait_for_log("write /etc/cni/net.d/00-detour.conflist");
        agent.wait_for_log(SETTLED);
        let _ = fs::remove_file(&renamed);
        assert_eq!(scene.files(), installed);
    }
}

#[test]
fn without_its_source_the_last_copy_stays_and_the_node_is_not_ready() {
    let scene = Scene::with("own-missing", "10-calico.conflist", CALICO);
    let agent = Agent::start(&scene, "a", &[OWN_LIST, HEALTH]);
    let address = agent.address();
    agent.wait_for_log(READY);
    let copy = scene.read(OWN);
    for unusable in [None, Some(""), Some(&CALICO[..CALICO.len() / 2])] {
        match unusable {
            None => fs::remove_file(scene.path(LIST)).expect("removed"),
            Some(text) => scene.write(LIST, text),
        }
        // A later list does not take the place of one that is just being written.
        if unusable.is_some() {
            scene.write(PODMAN, &list("podman"));
        }
        until("the node is not ready", || !is_ready(&address));
        let answer = get(&address, "/readyz").1;
        let wanted = "missing: a valid 10-calico.conflist in /etc/cni/net.d; pods start with the last copy of it";
        assert!(answer.contains(wanted), "{answer}");
        assert!(answer.contains("to copy another list now, delete /etc/cni/net.d/00-detour.conflist"), "{answer}");
        assert_eq!(scene.read(OWN), copy);
        scene.write(LIST, CALICO);
        until("the node is ready again", || is_ready(&address));
        assert_eq!(scene.read(OWN), copy);
    }
    fs::remove_file(scene.path(LIST)).expect("removed");
    until("the node is not ready", || !is_ready(&address));
    assert_eq!(scene.read(OWN), copy);
    fs::remove_file(scene.path(OWN)).expect("removed");
    until("the other file is copied at once", || scene.path(OWN).exists() && network(&scene, OWN) == "podman");
    until("the node is ready again", || is_ready(&address));
    scene.write(LIST, CALICO);
    until("the first file is copied", || network(&scene, OWN) == "k8s-pod-network");
}

/// A runtime uses such a file: the copy of another one would attach pods to another network.
#[test]
fn a_list_that_is_too_large_or_not_utf_8_is_not_passed_over() {
    let large = CALICO.replace("k8s-pod-network", &"x".repeat(2 << 20)).into_bytes();
    let latin = [CALICO.replace("k8s-pod-network", "name").into_bytes(), b" ".to_vec()].concat();
    let latin: Vec<u8> = latin.into_iter().map(|byte| if byte == b'm' { 0xe9 } else { byte }).collect();
    for contents in [large, latin] {
        let scene = Scene::with("own-large", "10-calico.conflist", "");
        fs::write(scene.path(LIST), &contents).expect("written");
        scene.write(PODMAN, &list("podman"));
        scene.reports(
            1,
            "install",
            &[OWN_LIST],
            &["10-calico.conflist: skipped: expected UTF-8 text of at most 1 MiB"],
        );
        assert!(!scene.path(OWN).exists());

        scene.write(LIST, CALICO);
        let agent = Agent::settled(&scene, "a", &[OWN_LIST]);
        let copy = scene.read(OWN);
        fs::write(scene.path(LIST), &contents).expect("written");
        agent.wait_for_log("expected UTF-8 text of at most 1 MiB");
        assert_eq!(scene.read(OWN), copy);
    }
}

#[test]
fn agents_of_both_modes_take_over_from_each_other_without_a_fight() {
    let scene = Scene::with("own-rollout", "10-calico.conflist", CALICO);
    let first = Agent::settled(&scene, "first", &[OWN_LIST]);
    let second = Agent::start(&scene, "second", &[]);
    second.wait_for_log("this agent is on standby");
    assert_eq!(scene.read(LIST), CALICO);
    for i in 0..5 {
        let name = format!("changed-{i}");
        scene.write(LIST, &list(&name));
        until("the copy follows", || network(&scene, OWN) == json!(name));
    }
    let changes = |line: &String| line.contains("write ") || line.contains("remove ");
    assert!(!second.logged().iter().any(changes), "the second agent is on standby");
    assert!(!first.logged().iter().any(|line| line.contains("keeps reverting")));
    first.end(Signal::SIGKILL);
    second.wait_for_log("remove /etc/cni/net.d/00-detour.conflist");
    second.wait_for_log(SETTLED);
    assert_eq!(network(&scene, LIST), "changed-4");
    assert!(types(&scene, LIST).contains(&"detour".to_owned()) && !scene.path(OWN).exists());
}

#[test]
fn symbolic_links_without_a_file_are_skipped_with_a_note() {
    let scene = Scene::with("own-links", "10-calico.conflist", CALICO);
    for (target, link) in [("/no/such.conflist", "05-gone.conflist"), ("/no", "99-last.conf")] {
        symlink(target, scene.path("etc/cni/net.d").join(link)).expect("linked");
    }
    let gone = "05-gone.conflist: skipped: not a file, or a symbolic link to one that is not here";
    let stderr = scene.reports(0, "install", &[OWN_LIST], &[gone]);
    assert!(!stderr.contains("99-last.conf"), "{stderr}");
    assert_eq!(network(&scene, OWN), "k8s-pod-network");
}

#[test]
fn a_list_of_another_owner_with_the_name_of_the_own_list_is_refused() {
    let scene = Scene::with("own-foreign", "10-calico.conflist", CALICO);
    scene.write(OWN, &list("other"));
    let before = scene.files();
    let wanted = "can't write /etc/cni/net.d/00-detour.conflist: it belongs to another owner";
    scene.reports(1, "install", &[OWN_LIST], &[wanted, "--own-list=false"]);
    assert_eq!(scene.files(), before);
    // Runtimes use this list.
    scene.ok("install", &[]);
    assert_eq!(types(&scene, OWN), ["calico", "portmap", "bandwidth", "detour"]);
    assert_eq!(scene.read(LIST), CALICO);
}

#[test]
fn the_original_list_is_edited_as_soon_as_multus_is_installed() {
    let scene = Scene::with("own-program", "10-calico.conflist", CALICO);
    scene.ok("install", &[OWN_LIST]);
    // Multus arrives: its program is installed before it looks for the cluster network's file.
    let agent = Agent::settled(&scene, "a", &[OWN_LIST]);
    scene.write("opt/cni/bin/multus-shim", "");
    agent.wait_for_log("remove /etc/cni/net.d/00-detour.conflist");
    assert!(types(&scene, LIST).contains(&"detour".to_owned()));
    agent.wait_for_log("runtimes would bypass Multus (/opt/cni/bin/multus-shim)");
}

/// The copy is root's, and runtimes read it instead.
#[test]
fn a_list_that_another_user_can_change_is_not_copied() {
    use std::os::unix::fs::{PermissionsExt, chown};
    let scene = Scene::with("own-untrusted", "10-calico.conflist", CALICO);
    scene.write("etc/cni/net.d/20-bridge.conf", r#"{"name":"n","type":"bridge"}"#);
    let own = |uid| chown(scene.path(LIST), Some(uid), None).expect("root");
    let writable = |mode| fs::set_permissions(scene.path("etc/cni/net.d"), fs::Permissions::from_mode(mode));
    let refused = |reason: &str, arguments: &[&str]| {
        scene.reports(1, "install", arguments, &["missing: a list that can be ", reason]);
    };
    let foreign = "10-calico.conflist (another user can change the file: /etc/cni/net.d/10-calico.conflist is owned by \
                   UID 1001; expected root; run chown root:root /etc/cni/net.d/10-calico.conflist)";
    own(1001);
    refused(foreign, &[OWN_LIST]);
    assert!(!scene.path(OWN).exists());
    own(0);
    writable(0o777).expect("changed");
    refused("/etc/cni/net.d has mode 0777; expected one that only root can write to", &[OWN_LIST]);
    assert!(!scene.path(OWN).exists());
    writable(0o755).expect("changed");
    scene.ok("install", &[OWN_LIST]);

    // The last copy stays.
    let copy = scene.read(OWN);
    scene.write(LIST, &list("changed"));
    own(1001);
    refused("; pods start with the last copy; change or remove this file", &[OWN_LIST]);
    assert_eq!(scene.read(OWN), copy);
    scene.ok("uninstall", &[]);

    // A list is edited in place and stays the user's; a list that replaces a single plugin would be root's.
    let owner = || std::os::unix::fs::MetadataExt::uid(&fs::metadata(scene.path(LIST)).expect("there"));
    scene.ok("install", &[]);
    assert_eq!((types(&scene, LIST).last().map(String::as_str), owner()), (Some("detour"), 1001));
    scene.ok("uninstall", &[]);
    chown(scene.path("etc/cni/net.d/20-bridge.conf"), Some(1001), None).expect("root");
    refused("20-bridge.conf (another user can change", &["--conf-name=20-bridge.conf"]);
    assert!(!scene.path("etc/cni/net.d/20-bridge.conflist").exists());
}

#[test]
fn a_list_that_the_plugin_can_t_be_part_of_is_reported_and_not_passed_over() {
    let unsupported = CALICO.replace("\"0.3.1\"", "\"2.0.0\"");
    assert_ne!(unsupported, CALICO);
    let beside = r#"{"cniVersion": "1.0.0", "name": "podnet"}"#;
    for (name, text, reason) in [
        ("own-version", unsupported.as_str(), "unsupported cniVersion \"2.0.0\"; expected one of 0.1.0, "),
        ("own-beside", beside, "expected plugins in the list itself, got a list with files in the directory"),
    ] {
        let scene = Scene::with(name, "10-calico.conflist", text);
        scene.write("etc/cni/net.d/podnet/10-bridge.conf", r#"{"type": "bridge"}"#);
        scene.write("etc/cni/net.d/podnet/readme", "");
        scene.write(PODMAN, &list("podman"));
        let lists = || (scene.read(LIST), scene.read(PODMAN), scene.path(OWN).exists());
        let before = lists();
        for (arguments, changed) in [(&[][..], "extended"), (&[OWN_LIST][..], "copied")] {
            let wanted = format!("missing: a list that can be {changed}: runtimes may use /{LIST} ({reason}");
            scene.reports(1, "install", arguments, &[&wanted]);
            assert_eq!(lists(), before);
        }
    }
}
