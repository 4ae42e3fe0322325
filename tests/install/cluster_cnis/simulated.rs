//! The agent beside simulated cluster CNIs, each of which writes, removes or defends its list as the real one does.

use crate::cluster_cnis::agent_process::{Agent, READY};
use crate::cluster_cnis::cluster_cni::{ClusterCni, Method};
use crate::cluster_cnis::golden::{FLAG, node};
use crate::cluster_cnis::runtime::{self, OWN_LIST, Runtime, compact, used};
use crate::support::background::Repeated;
use crate::support::wait::until;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A list that podman's package installs. It is valid, and no runtime may use it.
const PODMAN: (&str, &str) =
    ("87-podman-bridge.conflist", r#"{"cniVersion":"0.4.0","name":"podman","plugins":[{"type":"bridge"}]}"#);

#[test]
fn each_way_to_replace_a_file_is_followed_while_a_runtime_reads() {
    let ways = [
        ("calico", Method::InPlace),
        ("aws", Method::Rename("10-aws.conflist.tmp".into())),
        ("kindnet", Method::Recreate),
        ("flannel", Method::Symlink),
    ];
    for (name, method) in ways {
        let cni = ClusterCni::named(name);
        let (scene, directory) = node(&cni, "ways");
        fs::write(directory.join(PODMAN.0), PODMAN.1).expect("written");
        let agent = Agent::start(&scene, "a", &[FLAG]);
        agent.wait_for_log(READY);
        let versions = [cni.upgraded(&cni.text()), cni.text()];
        let runtime = Runtime::start(&directory, &[&versions[0], &versions[1]]);
        for text in versions.iter().cycle().take(6) {
            method.write(&directory, &cni.file, text);
            until(&format!("{name}: {method:?}"), || used(&directory) == Some(compact(text)));
        }
        runtime.end();
        assert!(!agent.logged().iter().any(|line| line.contains("keeps reverting")), "{name}: {method:?}");
    }
}

#[test]
fn multus_that_comes_and_goes_always_calls_the_plugin() {
    let flannel = ClusterCni::named("flannel");
    let (scene, directory) = node(&flannel, "multus");
    let multus = ClusterCni::named("multus").before()["00-multus.conf"].clone();
    let agent = Agent::start(&scene, "a", &[FLAG]);
    agent.wait_for_log(READY);
    let changes = Arc::new(AtomicU32::new(0));
    let (changed, read) = (Arc::clone(&changes), directory.clone());
    let list = flannel.file.clone();
    // Multus calls the list of the cluster network.
    let runtime = Repeated::start(Duration::from_micros(100), move || {
        let change = changed.load(Ordering::SeqCst);
        let choice = runtime::read(&read).choice.expect("a list");
        let called = if choice.file == "00-multus.conf" {
            fs::read_to_string(read.join(&list)).expect("the list of flannel")
        } else {
            choice.list.to_string()
        };
        // A moment later, the directory may be the next one already: then the own list has the entry.
        let is_called = called.contains("\"detour\"")
            || runtime::read(&read).choice.is_some_and(|choice| choice.file == OWN_LIST)
            // This thread was so slow that Multus has come or gone meanwhile.
            || changed.load(Ordering::SeqCst) != change;
        assert!(is_called, "{}: {called}", choice.file);
    });
    for _ in 0..3 {
        changes.fetch_add(1, Ordering::SeqCst);
        fs::write(directory.join("00-multus.conf"), &multus).expect("written");
        until("the list is edited", || !directory.join(OWN_LIST).exists());
        assert!(fs::read_to_string(directory.join(&flannel.file)).expect("the list").contains("\"detour\""));
        changes.fetch_add(1, Ordering::SeqCst);
        fs::remove_file(directory.join("00-multus.conf")).expect("removed");
        until("the own list", || directory.join(OWN_LIST).exists());
        until("the list is restored", || {
            fs::read_to_string(directory.join(&flannel.file)).is_ok_and(|text| !text.contains("\"detour\""))
        });
    }
    runtime.end();
    drop(agent);
}
