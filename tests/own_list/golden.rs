//! Golden files: the directory of each cluster CNI with the own list. Set `UPDATE_GOLDEN` to write them.

use crate::agent_process::{Agent, SETTLED};
use crate::cluster_cni::{CLUSTER_CNIS, ClusterCni, files, snapshot};
use crate::runtime::{self, OWN_LIST};
use crate::scene::Scene;
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

pub(crate) const DIRECTORY: &str = "etc/cni/net.d";
pub(crate) const FLAG: &str = "--own-list=true";

/// Returns a node with this cluster CNI, and its configuration directory.
pub(crate) fn node(cni: &ClusterCni, test: &str) -> (Scene, PathBuf) {
    let scene = Scene::new(&format!("own-list-{test}-{}", cni.name));
    scene.write("sa/ca.crt", "-----BEGIN CERTIFICATE-----\n");
    scene.write("sa/token", "first-token\n");
    let directory = scene.path(DIRECTORY);
    cni.install(&directory);
    (scene, directory)
}

/// Waits until `reached` returns true.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !reached() {
        assert!(Instant::now() < end, "not within 60 s: {what}");
        thread::park_timeout(Duration::from_millis(2));
    }
}

/// Returns the files that differ from those of the cluster CNI.
fn changed(cni: &ClusterCni, directory: &BTreeMap<String, (String, u32)>) -> BTreeMap<String, String> {
    let before = files(&cni.golden().join("before"));
    let differs = |(name, (text, _)): (&String, &(String, u32))| {
        (before.get(name) != Some(text)).then(|| (name.clone(), text.clone()))
    };
    directory.iter().filter_map(differs).collect()
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
        let (after, changed) = (cni.golden().join("after"), changed(cni, &installed));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            let _ = fs::remove_dir_all(&after);
            fs::create_dir_all(&after).expect("made");
            changed.iter().for_each(|(name, text)| fs::write(after.join(name), text).expect("written"));
        }
        assert_eq!(changed, files(&after), "{}, from {}", cni.name, cni.source);
        assert_eq!(installed.len(), before.len() + usize::from(changed.contains_key(OWN_LIST)), "{}", cni.name);
        if let Some((_, mode)) = installed.get(OWN_LIST) {
            assert_eq!(*mode, 0o600, "{}", cni.name);
        }
        scene.ok("install", &[FLAG]);
        assert_eq!(snapshot(&directory), installed, "{}: a second time", cni.name);
        scene.ok("uninstall", &[]);
        assert_eq!(snapshot(&directory), before, "{}", cni.name);
    });
}

#[test]
fn the_agent_follows_an_upgrade_of_the_cluster_cni_and_uninstall_leaves_the_upgraded_file() {
    for_each(|cni| {
        let (scene, directory) = node(cni, "upgrade");
        let agent = Agent::start(&scene, "a", &[FLAG]);
        agent.wait_for_log(SETTLED);
        let golden = files(&cni.golden().join("after"));
        let (name, text) = golden.iter().next().expect("one file");
        assert_eq!((golden.len(), &scene.read(&format!("{DIRECTORY}/{name}"))), (1, text), "{}", cni.name);
        let upgraded = cni.upgraded(text);
        cni.rewrite(&directory, &cni.upgraded(&cni.text()));
        wait_until(cni.name, || fs::read_to_string(directory.join(name)).is_ok_and(|text| text == upgraded));
        let found = runtime::read(&directory);
        if name == OWN_LIST {
            assert_eq!(found.choice.expect("a list").file, OWN_LIST, "{}", cni.name);
        }
        assert!(!agent.logged().iter().any(|line| line.contains("keeps reverting")), "{}", cni.name);
        agent.end(Signal::SIGKILL);
        scene.ok("uninstall", &[]);
        let (other, own) = node(cni, "upgraded");
        cni.rewrite(&own, &cni.upgraded(&cni.text()));
        assert_eq!(snapshot(&directory), snapshot(&own), "{}", cni.name);
        drop(other);
    });
}
