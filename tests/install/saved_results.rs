//! Uninstallation while the runtime has saved configuration lists that name the program. CRI-O deletes a pod with the
//! configuration list that libcni saved at its ADD.

use crate::agent_process::Agent;
use crate::scene::{CALICO, LIST, NODE, OWN, PROGRAM, RECORD, Scene};
use crate::support::called::Called;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

/// Writes the result of an ADD as libcni does.
fn save(scene: &Scene, directory: &str, container: &str, config: &str) -> String {
    let file = format!("{directory}/k8s-pod-network-{container}-eth0");
    let cached = json!({
        "kind": "cniCacheV1", "containerId": container, "config": BASE64_STANDARD.encode(config),
        "ifName": "eth0", "networkName": "k8s-pod-network", "cniArgs": [], "result": {},
        "netns": format!("/var/run/netns/{}", if container.starts_with("of-containerd") { "cni-7" } else { "7" }),
    });
    fs::create_dir_all(scene.path(directory)).expect("made");
    scene.write(&file, &cached.to_string());
    file
}

/// Runs the installed program as CRI-O does to delete a pod: with the saved entry.
fn delete_pod(scene: &Scene, list: &Value) {
    let mut entry = list["plugins"].as_array().expect("a list").last().expect("an entry").clone();
    (entry["name"], entry["cniVersion"]) = (list["name"].clone(), list["cniVersion"].clone());
    let kubeconfig = scene.path("var/lib/cni/detour/kubeconfig");
    assert!(!kubeconfig.exists());
    entry["kubernetes"]["kubeconfig"] = kubeconfig.to_str().expect("text").into();
    let mut program = Command::new(scene.path(PROGRAM));
    program.env_clear().envs([
        ("CNI_COMMAND", "DEL"),
        ("CNI_CONTAINERID", "install-saved-results"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_NETNS", ""),
        ("CNI_PATH", "/opt/cni/bin"),
        ("CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web"),
    ]);
    Called::run(&mut program, &entry).done();
}

#[test]
fn an_uninstallation_names_the_pods_that_keep_the_guard() {
    let scene = Scene::with("guarded", "10-calico.conflist", CALICO);
    scene.ok("install", &[]);
    let record = |name: &str, policy: Value| {
        let record = json!({"version": 1, "policy": policy, "inputs": {"pod": {"namespace": "shop", "name": name}}});
        let directory = format!("run/detour/attachments/{name}");
        fs::create_dir_all(scene.path(&directory)).expect("made");
        scene.write(&format!("{directory}/n@eth0.json"), &record.to_string());
    };
    let ambient = json!({"Ambient": {"dns": false, "inbound": true, "probes": []}});
    record("web-0", json!({"interception": "Unsaid", "guard": ambient}));
    record("web-1", json!({"interception": "Unsaid"}));
    scene.reports(0, "uninstall", &[], &["if their redirection is lost: shop/web-0; recreate"]);
}

#[test]
fn a_program_stays_until_the_pods_that_need_it_are_deleted() {
    let scene = Scene::with("saved-results", "10-calico.conflist", CALICO);
    let before = scene.files();
    scene.ok("install", &["--own-list=true", "--name=istio-cni"]);
    let list = scene.json(OWN);
    let results = "var/lib/cni/results";
    // Neither names the program, or is used to delete the pod.
    let others = [save(&scene, results, "c0", CALICO), save(&scene, results, "of-containerd", &list.to_string())];
    let needing = [
        save(&scene, results, "c1", &list.to_string()),
        save(&scene, results, "c2", &list.to_string()),
        // The same container with another interface, and an attachment that Multus added.
        save(&scene, "var/lib/cni/multus/results", "c2", r#"{"name": "a", "type": "detour"}"#),
    ];
    scene.write(&format!("{results}/no-result"), "{");

    let dry_run = scene.ends(0, "uninstall", &["--dry-run"]);
    let kept = "/opt/cni/bin/detour is not reverted: the runtime needs it to delete pods whose saved configuration lists name it \
                (pods: 2)";
    let uninstall = scene.reports(0, "uninstall", &[], &[kept, "then run `detour uninstall` again"]);
    assert_eq!(dry_run, uninstall);
    assert!(!scene.path(OWN).exists() && !scene.path("opt/cni/bin/istio-cni").exists());
    assert!(!scene.path("var/lib/cni/detour/node.json").exists());
    let record = scene.json(RECORD);
    assert_eq!(record["files"].as_object().expect("files").keys().collect::<Vec<_>>(), ["/opt/cni/bin/detour"]);
    delete_pod(&scene, &list);

    // The pods are deleted one after the other.
    fs::remove_file(scene.path(&needing[0])).expect("removed");
    scene.reports(0, "uninstall", &[], &["(pods: 1)"]);
    for file in &needing[1..] {
        fs::remove_file(scene.path(file)).expect("removed");
    }
    scene.ok("uninstall", &[]);
    assert!(others.iter().all(|other| scene.path(other).exists()));
    fs::remove_dir_all(scene.path(results)).expect("removed");
    fs::remove_dir_all(scene.path("var/lib/cni/multus")).expect("removed");
    assert_eq!(scene.files(), before);
}

#[test]
fn an_edited_program_that_pods_need_fails_the_uninstallation() {
    let scene = Scene::with("saved-results-edited", "10-calico.conflist", CALICO);
    scene.ok("install", &["--own-list=true"]);
    save(&scene, "var/lib/cni/results", "c1", &scene.read(OWN));
    scene.write(PROGRAM, "edited");
    scene.reports(1, "uninstall", &[], &["/opt/cni/bin/detour is not reverted: another process changed it"]);
}

#[test]
fn an_agent_that_removes_the_plugin_keeps_the_program_for_running_pods() {
    let scene = Scene::with("saved-results-agent", "10-calico.conflist", CALICO);
    let agent = Agent::settled(&scene, "a", &["--on-exit=remove"]);
    let file = save(&scene, "var/lib/cni/results", "c1", &scene.read(LIST));
    assert!(agent.end(Signal::SIGTERM).success());
    assert_eq!(scene.json(LIST), serde_json::from_str::<Value>(CALICO).expect("JSON"));
    assert!(scene.path(PROGRAM).exists() && scene.path(RECORD).exists());
    // A later installation takes the program over.
    let agent = Agent::settled(&scene, "b", &["--on-exit=remove"]);
    fs::remove_file(scene.path(&file)).expect("removed");
    assert!(agent.end(Signal::SIGTERM).success());
    assert!(!scene.path(PROGRAM).exists() && !scene.path(RECORD).exists());
}

#[test]
fn a_program_name_that_an_upgrade_drops_stays_for_running_pods() {
    let scene = Scene::with("saved-results-name", "10-calico.conflist", CALICO);
    scene.ok("install", &["--name=istio-cni"]);
    let istio = r#"{"name": "a", "plugins": [{"type": "istio-cni"}]}"#;
    let file = save(&scene, "var/lib/cni/results", "c1", istio);
    scene.reports(0, "install", &[], &["/opt/cni/bin/istio-cni is not reverted: the runtime needs it"]);
    assert!(scene.path("opt/cni/bin/istio-cni").exists());
    fs::remove_file(scene.path(&file)).expect("removed");
    scene.ok("install", &[]);
    assert!(!scene.path("opt/cni/bin/istio-cni").exists());
}

/// libcni saves only the list's own text, without the plugins of the directory with its name.
#[test]
fn the_program_stays_for_pods_of_multus_auxiliary_chain_and_not_for_sandboxes_that_are_gone() {
    let scene = Scene::with("saved-results-chain", "10-calico.conflist", CALICO);
    scene.ok("install", &["--platform=openshift", "--multus-chain=/run/multus/cni/net.d/chain"]);
    let results = "var/lib/cni/multus/results";
    let passthru = r#"{"name": "k8s-pod-network", "plugins": [{"type": "passthru"}]}"#;
    save(&scene, results, "c1", passthru);
    save(&scene, results, "c2", passthru);
    // The plugin's record of one of the two, for the same network.
    scene.write("run/detour/attachments/c2/k8s-pod-network@eth0.json", "{}");
    scene.reports(0, "uninstall", &[], &["/var/lib/cni/bin/detour is not reverted: ", "(pods: 1)"]);
    // The pod sandbox is gone; its result stayed.
    fs::create_dir_all(scene.path("var/run/netns")).expect("made");
    scene.ok("uninstall", &[]);
    assert!(!scene.path("var/lib/cni/bin/detour").exists() && !scene.path(RECORD).exists());
}

#[test]
fn the_program_stays_while_results_cannot_be_read() {
    let scene = Scene::with("saved-results-unread", "10-calico.conflist", CALICO);
    let before = scene.files();
    scene.ok("install", &[]);
    // A file instead of the directory, and a directory instead of a file.
    scene.write("var/lib/cni/results", "");
    fs::create_dir_all(scene.path("var/lib/cni/multus/results/directory")).expect("made");
    let note = "there may be such pods: can't read the cached result";
    let places = ["in /var/lib/cni/results: ", "result /var/lib/cni/multus/results/directory: "];
    scene.reports(0, "uninstall", &[], &[note, places[0], places[1]]);
    assert!(scene.path(PROGRAM).exists() && scene.path(RECORD).exists());
    fs::remove_file(scene.path("var/lib/cni/results")).expect("removed");
    fs::remove_dir_all(scene.path("var/lib/cni/multus")).expect("removed");
    scene.ok("uninstall", &[]);
    assert_eq!(scene.files(), before);
}

#[test]
fn an_edited_node_configuration_stays() {
    let scene = Scene::with("node-before", "10-calico.conflist", CALICO);
    let own = "{ \"pinned\": \"uid-exclude\" }\n";
    scene.ok("install", &["--primary=false"]);
    assert_eq!(scene.json(NODE)["primary"], json!(false));
    scene.write(NODE, own);
    let why = "/var/lib/cni/detour/node.json is not reverted: another process changed it after the installation";
    scene.reports(1, "uninstall", &[], &[why]);
    assert_eq!(scene.read(NODE), own);
}
