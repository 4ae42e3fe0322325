//! `capture_secondary_networks`: whether what comes and goes by another interface than the cluster
//! network's is the sidecar's.

use crate::configuration::{chain, story};
use crate::istio::Dns;
use crate::world::*;
use serde_json::json;

fn rules_beside(interface: &str, captured: bool) -> String {
    let world = World::new(Families::V4);
    world.ip(&["link", "add", interface, "type", "veth", "peer", "name", "far"]);
    let manifests = story(&world, Dns::Left, &[]);
    let configuration =
        chain(&manifests, json!([{ "type": "istio-redirect", "capture_secondary_networks": captured }]));
    world.add(&configuration);
    world.call("CHECK", &configuration).run().expect_success();
    let rules = format!("{:?}", world.iptables_save(Family::V4));
    // An interface that comes later is no drift.
    world.ip(&["link", "add", "later0", "type", "veth", "peer", "name", "later1"]);
    world.call("CHECK", &configuration).run().expect_success();
    rules
}

#[test]
fn they_are_captured_unless_told_otherwise() {
    assert!(!rules_beside("data0", true).contains("data0"));
}

#[test]
fn those_in_the_namespace_and_those_that_the_pod_selects_are_spared() {
    let rules = rules_beside("data0", false);
    for rule in ["-i data0 -j RETURN", "-o data0 -j RETURN", "-o net1 -j RETURN"] {
        assert!(rules.contains(rule), "{rule}: {rules}");
    }
    assert!(!rules.contains("eth0"), "{rules}");
}
