//! The own list: a copy of the cluster network's configuration list, which an agent keeps current. There is no agent
//! here that corrects it.

use crate::compare;
use crate::faults::{LIST, chained, istio_cni};
use crate::scene::{Plan, Scene, line, scene};
use serde_json::{Value, json};
use std::fs;

const OWN: &str = "etc/cni/multus/net.d/00-detour.conflist";
const DIRECTORY: &str = "etc/cni/multus/net.d";

fn plan() -> Plan {
    let mut plan = Plan::new();
    chained(&mut plan);
    plan.install.push("--own-list=true".into());
    plan
}

/// Checks that only this line fails, that it contains these texts, and that its next step contains `next`.
#[track_caller]
fn assert_fails(scene: &Scene, id: &str, found: &str, next: &str) {
    let report = scene.report(&["--node"]);
    let failed: Vec<&Value> =
        report["checks"].as_array().expect("checks").iter().filter(|line| line["outcome"] == "fail").collect();
    assert_eq!(failed.len(), 1, "{failed:#?}");
    let text = |key: &str| failed[0][key].as_str().expect("text");
    assert_eq!(text("id"), id, "{failed:#?}");
    assert!(text("found").contains(found) && text("next").contains(next), "{failed:#?}");
}

fn edit_source(scene: &Scene, change: impl FnOnce(&mut Value)) {
    let mut list = scene.json(LIST);
    change(&mut list);
    scene.write(LIST, &list.to_string());
}

#[test]
fn a_current_copy_is_healthy_and_its_entry_is_the_configuration() {
    let mut plan = plan();
    // An entry of another tool whose type is one of detour's too.
    plan.lists[0].1["plugins"].as_array_mut().expect("a list").push(istio_cni());
    scene(plan, |scene| {
        let report = scene.report(&["--node"]);
        assert_eq!(report["healthy"], true, "{report:#}");
        let own = line(&report, "own-list");
        assert_eq!(own, ("pass", "00-detour.conflist is a copy of 10-cluster.conflist", ""));
        assert_eq!(line(&report, "configuration-picked").1, "00-detour.conflist is the first file");
        let text = "network c, type detour in 00-detour.conflist: istio-redirect, uid-exclude, dns-exclude";
        assert_eq!(line(&report, "configuration-valid").1, text);
        compare("own-list", &scene.printed(&["--node"]));
    });
}

#[test]
fn an_older_copy_is_reported() {
    scene(plan(), |scene| {
        let found = "is no copy of 10-cluster.conflist: it is older";
        edit_source(scene, |list| list["plugins"] = json!([{"type": "bridge"}, {"type": "portmap"}]));
        assert_fails(scene, "own-list", found, "why the agent on this node does not write the own list");
        compare("own-list-older", &scene.printed(&["--node"]));
        edit_source(scene, |list| {
            list["plugins"] = json!([{"type": "bridge"}]);
            list["cniVersion"] = "0.4.0".into();
        });
        assert_fails(scene, "own-list", found, "run detour install");
    });
}

/// An installation writes one; the record can have more.
#[test]
fn each_recorded_own_list_is_compared() {
    const RECORD: &str = "var/lib/cni/detour/install.json";
    scene(plan(), |scene| {
        let other = format!("{DIRECTORY}/00-other.conflist");
        fs::copy(scene.path(OWN), scene.path(&other)).expect("copied");
        let mut record = scene.json(RECORD);
        let mut second = record["files"][format!("/{OWN}")].clone();
        second["source"] = "11-missing.conflist".into();
        record["files"][format!("/{other}")] = second;
        scene.write(RECORD, &record.to_string());
        assert_fails(scene, "own-list", "00-other.conflist is no copy of 11-missing.conflist", "run detour install");
    });
}

#[test]
fn a_missing_or_invalid_source_is_the_cluster_networks_problem() {
    scene(plan(), |scene| {
        scene.write(LIST, "{\"name\":");
        assert_fails(
            scene,
            "own-list",
            "is no copy of 10-cluster.conflist: 10-cluster.conflist: invalid JSON",
            "why the agent on this node does not write the own list",
        );
        fs::remove_file(scene.path(LIST)).expect("removed");
        let found = "is no copy of 10-cluster.conflist: 10-cluster.conflist not found";
        assert_fails(scene, "own-list", found, "run detour install again");
    });
}

/// Beside a single plugin, runtimes ignore the directory of the network's name; the copy says so.
#[test]
fn a_copy_of_a_single_plugin_is_healthy_beside_files_of_other_tools() {
    let mut plan = plan();
    plan.lists = vec![("10-cluster.conf", json!({"cniVersion": "1.0.0", "name": "c", "type": "bridge"}))];
    scene(plan, |scene| {
        fs::create_dir(scene.path(&format!("{DIRECTORY}/c"))).expect("made");
        scene.write(&format!("{DIRECTORY}/c/10-broken.conf"), "{");
        fs::create_dir(scene.path(&format!("{DIRECTORY}/00-a.conflist"))).expect("made");
        let report = scene.report(&["--node"]);
        assert_eq!(report["healthy"], true, "{report:#}");
        assert_eq!(line(&report, "own-list").1, "00-detour.conflist is a copy of 10-cluster.conf");
        assert_eq!(line(&report, "configuration-picked").1, "00-detour.conflist is the first file");
        assert_eq!(scene.json(OWN)["loadOnlyInlinedPlugins"], true);
    });
}

/// The agent does not copy it.
#[test]
fn a_source_that_another_user_can_change_is_reported() {
    scene(plan(), |scene| {
        std::os::unix::fs::chown(scene.path(LIST), Some(1001), None).expect("root");
        let found = format!("is no copy of 10-cluster.conflist: /{LIST} is owned by UID 1001");
        assert_fails(scene, "own-list", &found, "run detour install again");
    });
}

#[test]
fn a_list_before_the_own_list_or_multus_beside_it_is_found() {
    scene(plan(), |scene| {
        let text = fs::read_to_string(scene.path(LIST)).expect("readable");
        let first = format!("{DIRECTORY}/00-a.conflist");
        scene.write(&first, &text);
        let next = "the agent on this node does not add detour to that list";
        assert_fails(scene, "configuration-picked", "runtimes use 00-a.conflist, whose plugins are bridge", next);
        fs::remove_file(scene.path(&first)).expect("removed");
        let multus = json!({"cniVersion": "1.0.0", "name": "m", "type": "multus-shim"});
        scene.write(&format!("{DIRECTORY}/00-multus.conf"), &multus.to_string());
        let found = "00-multus.conf is a configuration of Multus, which it bypasses";
        assert_fails(scene, "own-list", found, "run detour install again");
    });
}

/// Thin Multus copies the cluster network's list into its own file when it starts.
#[test]
fn a_copy_of_the_cluster_network_in_the_file_of_multus_without_the_plugin_is_found() {
    let mut plan = Plan::new();
    chained(&mut plan);
    scene(plan, |scene| {
        let file = format!("{DIRECTORY}/00-multus.conf");
        let write = |plugins: &Value| {
            let multus = json!({"cniVersion": "1.0.0", "name": "m", "type": "multus", "delegates": [
                {"cniVersion": "1.0.0", "name": "c", "plugins": plugins},
            ]});
            scene.write(&file, &multus.to_string());
        };
        write(&json!([{"type": "bridge"}]));
        let found = "runtimes use 00-multus.conf, whose plugins are bridge";
        assert_fails(scene, "configuration-picked", found, "restart Multus");
        write(&scene.json(LIST)["plugins"]);
        assert_eq!(scene.report(&["--node"])["healthy"], true);
    });
}

#[test]
fn a_renamed_own_list_has_the_hint_for_cilium() {
    scene(plan(), |scene| {
        let own = scene.path(OWN);
        fs::rename(&own, own.with_file_name("00-detour.conflist.cilium_bak")).expect("renamed");
        assert_fails(
            scene,
            "configuration-present",
            "00-detour.conflist not found",
            "cni.exclusive of Cilium to false",
        );
        compare("own-list-renamed", &scene.printed(&["--node"]));
    });
}

#[test]
fn an_edited_own_list_is_a_changed_installation() {
    scene(plan(), |scene| {
        let mut own = scene.json(OWN);
        own["plugins"][1]["log_level"] = "debug".into();
        scene.write(OWN, &own.to_string());
        assert_fails(scene, "installation", "00-detour.conflist: edited after the installation", "detour install");
    });
}
