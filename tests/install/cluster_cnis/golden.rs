//! Golden files: the directory of each cluster CNI with the own list. Set `UPDATE_GOLDEN` to write them.

use crate::cluster_cnis::agent_process::Agent;
use crate::cluster_cnis::cluster_cni::{CLUSTER_CNIS, ClusterCni, GOLDEN, snapshot};
use crate::cluster_cnis::runtime::{self, OWN_LIST};
use crate::cluster_cnis::scene::Scene;
use crate::support::golden::{cases, update};
use crate::support::wait::until;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::thread;

pub(crate) const DIRECTORY: &str = "etc/cni/net.d";
pub(crate) const FLAG: &str = "--own-list=true";

/// Returns a node with this cluster CNI, and its configuration directory.
pub(crate) fn node(cni: &ClusterCni, test: &str) -> (Scene, PathBuf) {
    let scene = Scene::with_account(&format!("own-list-{test}-{}", cni.name));
    let directory = scene.path(DIRECTORY);
    cni.install(&directory);
    (scene, directory)
}

/// Returns the files that differ from those of the cluster CNI.
fn changed(cni: &ClusterCni, directory: &BTreeMap<String, (String, u32)>) -> BTreeMap<String, String> {
    let before = cni.before();
    let differs = |(name, (text, _)): (&String, &(String, u32))| {
        (before.get(name) != Some(text)).then(|| (name.clone(), text.clone()))
    };
    directory.iter().filter_map(differs).collect()
}

/// Returns the configurations without their formatting.
fn values(directory: &BTreeMap<String, (String, u32)>) -> BTreeMap<&str, (Option<Value>, u32)> {
    directory.iter().map(|(name, (text, mode))| (name.as_str(), (serde_json::from_str(text).ok(), *mode))).collect()
}

/// Runs `test` for each cluster CNI.
fn for_each(test: impl Fn(&ClusterCni) + Sync) {
    for pair in CLUSTER_CNIS.chunks(2) {
        thread::scope(|scope| pair.iter().for_each(|cni| drop(scope.spawn(|| test(cni)))));
    }
}

#[test]
fn the_own_list_is_the_cluster_networks_list_with_the_entry_and_uninstall_restores_the_directory() {
    for_each(|cni| {
        let (scene, directory) = node(cni, "install");
        let before = snapshot(&directory);
        scene.ok("install", &[FLAG]);
        let installed = snapshot(&directory);
        let (after, changed) = (format!("{}/after/", cni.name), changed(cni, &installed));
        update(GOLDEN, &after, &changed);
        assert_eq!(changed, cases(GOLDEN, &after), "{}, from {}", cni.name, cni.source);
        assert_eq!(installed.len(), before.len() + usize::from(changed.contains_key(OWN_LIST)), "{}", cni.name);
        if let Some((_, mode)) = installed.get(OWN_LIST) {
            assert_eq!(*mode, 0o600, "{}", cni.name);
        }
        scene.ok("install", &[FLAG]);
        assert_eq!(snapshot(&directory), installed, "{}: a second time", cni.name);
        scene.ok("uninstall", &[]);
        // A list that is edited is formatted anew.
        if cni.name != "multus" && cni.name != "sorts-first" {
            assert_eq!(snapshot(&directory), before, "{}", cni.name);
        }
        assert_eq!(values(&snapshot(&directory)), values(&before), "{}", cni.name);
    });
}

#[test]
fn the_agent_follows_an_upgrade_of_the_cluster_cni_and_uninstall_leaves_the_upgraded_file() {
    for_each(|cni| {
        let (scene, directory) = node(cni, "upgrade");
        let agent = Agent::settled(&scene, "a", &[FLAG]);
        let golden = cases(GOLDEN, &format!("{}/after/", cni.name));
        let (name, text) = golden.iter().next().expect("one file");
        assert_eq!((golden.len(), &scene.read(&format!("{DIRECTORY}/{name}"))), (1, text), "{}", cni.name);
        let upgraded = cni.upgraded(text);
        cni.rewrite(&directory, &cni.upgraded(&cni.text()));
        until(&cni.name, || fs::read_to_string(directory.join(name)).is_ok_and(|text| text == upgraded));
        let found = runtime::read(&directory);
        if name == OWN_LIST {
            assert_eq!(found.choice.expect("a list").file, OWN_LIST, "{}", cni.name);
        }
        assert!(!agent.logged().iter().any(|line| line.contains("keeps reverting")), "{}", cni.name);
        agent.end(Signal::SIGKILL);
        scene.ok("uninstall", &[]);
        let (other, own) = node(cni, "upgraded");
        cni.rewrite(&own, &cni.upgraded(&cni.text()));
        assert_eq!(values(&snapshot(&directory)), values(&snapshot(&own)), "{}", cni.name);
        drop(other);
    });
}
