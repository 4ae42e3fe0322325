//! Changes that fail or are interrupted: the pod has all of its old rules or all of its new ones.

use super::*;
use crate::world::Ruleset;
use detour_cni::cni::Code;
use std::collections::BTreeMap;

const STATE: &str = "/run/detour/attachments";

/// The pod's rules and its saved state.
#[derive(Debug, PartialEq)]
struct Snapshot {
    rules: (Vec<Ruleset>, Vec<String>),
    records: BTreeMap<PathBuf, Vec<u8>>,
}

fn rules(world: &World) -> (Vec<Ruleset>, Vec<String>) {
    (world.families().iter().map(|family| world.iptables_save(*family)).collect(), world.native_tables())
}

fn snapshot(world: &World) -> Snapshot {
    let directory = Path::new(STATE).join(&world.name);
    let paths = std::fs::read_dir(directory).expect("saved state").map(|entry| entry.expect("readable").path());
    // A temporary file that can't be removed is ignored, and removed with the last record.
    let is_record = |path: &PathBuf| path.extension().is_some() && !path.to_string_lossy().contains("/.");
    let records = paths.filter(is_record).map(|path| (path.clone(), std::fs::read(path).expect("readable"))).collect();
    Snapshot { rules: rules(world), records }
}

/// Returns the path of the record of an attachment.
fn record(world: &World) -> PathBuf {
    Path::new(STATE).join(&world.name).join("istio-cni@net1.json")
}

#[test]
fn a_deleted_pod_gets_neither_rules_nor_saved_state_again() {
    let world = World::new(Families::Both);
    let states = [false, true].map(|excludes| written(&world, Dns::Left, &annotations(excludes)));
    let configuration = exclude_1337(&states[0]);
    world.add(&configuration);
    world.call("DEL", &configuration).run().done();
    let before = rules(&world);
    let error = follow(&world, &states[1]).expect_err("the pod is gone");
    assert_eq!(error.code, Code::NoAdd, "{error}");
    assert!(!Path::new(STATE).join(&world.name).exists());
    assert_eq!(rules(&world), before);
}

#[test]
fn the_network_namespace_of_another_pod_is_not_changed() {
    let world = World::new(Families::Both);
    let states = [false, true].map(|excludes| written(&world, Dns::Left, &annotations(excludes)));
    world.add(&exclude_1337(&states[0]));
    let text = std::fs::read_to_string(record(&world)).expect("readable");
    let mut changed: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    changed["netns_id"]["inode"] = json!(changed["netns_id"]["inode"].as_u64().expect("a number") + 1);
    std::fs::write(record(&world), changed.to_string()).expect("writable");
    let before = snapshot(&world);
    let error = follow(&world, &states[1]).expect_err("another network namespace");
    assert!(error.code == Code::InvalidNetns && error.msg.contains("replaced"), "{error}");
    assert_eq!(snapshot(&world), before);
    std::fs::write(record(&world), text).expect("writable");
    follow(&world, &states[1]).expect("applied");
    new_traffic_follows(&world, true);
}
