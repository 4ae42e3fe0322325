//! What a running pod's policy is evaluated from again, and what it is compared with.

use super::*;
use crate::istio::redirected_world;
use crate::world::Families;

const UIDS: &str = "detour.io/exclude-uids";

fn app_uid() -> (&'static str, String) {
    (UIDS, APP_PROCESS.uid.to_string())
}

/// Returns the saved record of the first attachment.
fn record(world: &World) -> String {
    let path = format!("/run/detour/attachments/{}/istio-cni@net1.json", world.name);
    std::fs::read_to_string(path).expect("readable")
}

/// Asserts that the pod's policy is current with these manifests: another ADD changes neither rules nor records.
#[track_caller]
fn is_current(world: &World, manifests: &Path) {
    let before = record(world);
    let repeated = follow(world, manifests).expect("repeated");
    assert!(!repeated.has_committed && repeated.change.is_empty(), "{repeated:?}");
    assert_eq!(record(world), before);
}

in_both_dialects! {
    fn an_adaptation_to_another_redirection_is_no_change_and_remains(dialect) {
        let world = redirected_world(Dns::Captured);
        let state = written(&world, Dns::Left, &[]);
        world.add(&dialect.of(exclude_1337(&state)));
        is_current(&world, &state);
        let changed = written(&world, Dns::Left, &[app_uid()]);
        follow(&world, &changed).expect("applied");
        is_current(&world, &changed);
        tcp_is_direct(&world, APP_PROCESS);
        a_query_leaves_one_replied_entry(&world, APP_PROCESS, RESOLVER);
        follow(&world, &state).expect("applied");
        tcp_is_captured(&world, APP_PROCESS);
    }

    fn interfaces_of_secondary_networks_are_no_change(dialect) {
        let world = World::new(Families::V4);
        world.ip(&["link", "add", "data0", "type", "veth", "peer", "name", "far"]);
        let state = written(&world, Dns::Left, &[]);
        let sub_plugins =
            json!([{"type": "istio-redirect", "capture_secondary_networks": false}, {"type": "uid-exclude"}]);
        world.add(&dialect.of(chain(&state, sub_plugins)));
        is_current(&world, &state);
        let changed = written(&world, Dns::Left, &[app_uid()]);
        follow(&world, &changed).expect("applied");
        is_current(&world, &changed);
        assert!(record(&world).contains("data0"));
    }

    fn exclusions_are_added_to_a_pod_that_only_another_tool_redirects(dialect) {
        let world = World::new(Families::Both);
        let state = written(&world, Dns::Left, &[]);
        let configuration = dialect.of(chain(&state, json!([{"type": "uid-exclude"}, {"type": "dns-exclude"}])));
        world.add(&configuration);
        assert!(!follow(&world, &state).expect("repeated").has_rules);
        is_current(&world, &state);
        for &family in world.families() {
            world.iptables_restore(family, &crate::istio::rules(family, Dns::Left, PROXY.uid));
        }
        tcp_is_captured(&world, APP_PROCESS);
        let changed = written(&world, Dns::Left, &[app_uid()]);
        follow(&world, &changed).expect("applied");
        is_current(&world, &changed);
        tcp_is_direct(&world, APP_PROCESS);
        world.call("CHECK", &configuration).run().done();
        assert_eq!(world.native_redirection(), [""; 0]);
    }
}

#[test]
fn an_installed_configuration_replaces_the_recorded_one() {
    let world = World::new(Families::Both);
    let state = written(&world, Dns::Left, &[]);
    world.add(&exclude_1337(&state));
    let facts = facts(&state);
    let chain = json!([{"type": "istio-redirect"}, {"type": "uid-exclude", "uids": [APP_PROCESS.uid]}]);
    let installed = json!({"cniVersion": "1.0.0", "name": "istio-cni", "type": "detour", "chain": chain}).to_string();
    let repeat_with = |installed: &str| {
        let conf = NetConf::parse(installed.as_bytes(), CniCommand::Add, "").expect("valid");
        repeat(&world, &facts, &[&conf]).expect("applied")
    };
    assert!(repeat_with(&installed).change.contains(&format!("excluded: UID {}", APP_PROCESS.uid)));
    tcp_is_direct(&world, APP_PROCESS);
    // Another network's configuration does not apply.
    let change = repeat_with(&installed.replace("\"istio-cni\"", "\"other\"")).change;
    assert!(change.contains("no longer excluded"), "{change}");
    tcp_is_captured(&world, APP_PROCESS);
    // Its exclusions end in a namespace that is excluded now, and the redirection stays.
    let excluded = installed.replace("\"type\":\"detour\"", "\"type\":\"detour\",\"exclude_namespaces\":[\"shop\"]");
    repeat_with(&excluded);
    tcp_is_captured(&world, APP_PROCESS);
    tcp_is_captured(&world, VAULT_INIT);
}

#[test]
fn the_facts_of_another_pod_are_refused() {
    let world = World::new(Families::V4);
    let state = written(&world, Dns::Left, &[]);
    world.add(&exclude_1337(&state));
    let mut facts = facts(&state);
    facts.pod.uid = Some("another".to_owned());
    let error = repeat(&world, &facts, &[]).expect_err("another pod");
    assert!(error.msg.contains("the pod was replaced"), "{error}");
}
