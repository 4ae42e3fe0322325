//! What a running pod's policy is evaluated from again, and what it is compared with.

use super::*;
use crate::istio::redirected_world;
use crate::world::Families;

const UIDS: &str = "detour.io/exclude-uids";

fn app_uid() -> (&'static str, String) {
    (UIDS, APP_PROCESS.uid.to_string())
}

/// Asserts that the pod's policy is current with these manifests, and that applying it changes no record.
#[track_caller]
fn is_current(world: &World, manifests: &Path) {
    let (pod, facts) = (running(world), facts(manifests));
    let policies = policies(&pod, &facts).expect("valid");
    assert!(pod.has_applied(&policies), "{pod:#?} {policies:#?}");
    pod.apply(Path::new(NODE), &policies).expect("applied");
    assert_eq!(running(world), pod);
}

in_both_dialects! {
    fn an_add_leaves_a_current_policy(dialect) {
        let world = World::new(Families::Both);
        let state = written(&world, Dns::Captured, &annotations(true));
        world.add(&dialect.of(exclude_1337(&state)));
        is_current(&world, &state);
        assert!(running(&world).has_inputs() && running(&world).has_rules());
    }

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

    fn interfaces_of_secondary_networks_are_no_change_and_remain(dialect) {
        let world = World::new(Families::V4);
        world.ip(&["link", "add", "data0", "type", "veth", "peer", "name", "far"]);
        let state = written(&world, Dns::Left, &[]);
        let sub_plugins =
            json!([{"type": "istio-redirect", "capture_secondary_networks": false}, {"type": "uid-exclude"}]);
        world.add(&dialect.of(chain(&state, sub_plugins)));
        is_current(&world, &state);
        world.ip(&["link", "del", "data0"]);
        let changed = written(&world, Dns::Left, &[app_uid()]);
        follow(&world, &changed).expect("applied");
        is_current(&world, &changed);
        let saved = std::fs::read_to_string(format!("/run/detour/attachments/{}/istio-cni@net1.json", world.name));
        assert!(saved.expect("readable").contains("data0"));
    }

    fn the_union_of_the_attachments_decides(dialect) {
        let world = World::new(Families::Both);
        let state = written(&world, Dns::Left, &[app_uid()]);
        world.add(&dialect.of(exclude_1337(&state)));
        let other = dialect.of(chain(&state, json!([{"type": "uid-exclude", "uids": [APP_PROCESS.uid]}])));
        world.call("ADD", &other).interface("net2").run().done();
        let before = world.native_tables();
        // The second attachment excludes the UID still.
        let without = written(&world, Dns::Left, &[]);
        follow(&world, &without).expect("applied");
        is_current(&world, &without);
        tcp_is_direct(&world, APP_PROCESS);
        assert_eq!(world.native_tables(), before);
        world.call("DEL", &other).interface("net2").run().done();
        tcp_is_captured(&world, APP_PROCESS);
    }

    fn exclusions_are_added_to_a_pod_that_only_another_tool_redirects(dialect) {
        let world = World::new(Families::Both);
        let state = written(&world, Dns::Left, &[]);
        let configuration = dialect.of(chain(&state, json!([{"type": "uid-exclude"}, {"type": "dns-exclude"}])));
        world.add(&configuration);
        assert!(!running(&world).has_rules());
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

/// Returns the policies of the attachment with an installed configuration.
fn desired_with(world: &World, facts: &Facts, installed: &str) -> Vec<(Attachment, Policy)> {
    let conf = NetConf::parse(installed.as_bytes(), CniCommand::Add, "").expect("valid");
    running(world).desired(Path::new(NODE), facts, &[&conf]).expect("valid").policies
}

#[test]
fn an_installed_configuration_replaces_the_recorded_one() {
    let world = World::new(Families::Both);
    let state = written(&world, Dns::Left, &[]);
    world.add(&exclude_1337(&state));
    let facts = facts(&state);
    let chain = json!([{"type": "istio-redirect"}, {"type": "uid-exclude", "uids": [APP_PROCESS.uid]}]);
    let installed = json!({"cniVersion": "1.0.0", "name": "istio-cni", "type": "detour", "chain": chain}).to_string();
    let desired = desired_with(&world, &facts, &installed);
    running(&world).apply(Path::new(NODE), &desired).expect("applied");
    tcp_is_direct(&world, APP_PROCESS);
    assert!(running(&world).has_applied(&desired));
    // Another network's configuration does not apply.
    let other = desired_with(&world, &facts, &installed.replace("\"istio-cni\"", "\"other\""));
    assert_ne!(other, desired);
    let excluded = installed.replace("\"type\":\"detour\"", "\"type\":\"detour\",\"exclude_namespaces\":[\"shop\"]");
    assert_eq!(desired_with(&world, &facts, &excluded)[0].1, Policy::default());
}

#[test]
fn a_pod_that_nothing_redirects_gets_no_exclusions() {
    let world = World::new(Families::V4);
    let of = |annotations: &[(&str, &str)]| {
        let text = pod::manifest(false, PROXY, annotations).replace("sidecar.istio.io/status", "other");
        world.manifests(&[pod::NAMESPACE, &text])
    };
    let (state, changed) = (of(&[]), of(&[(UIDS, "7")]));
    world.add(&chain(&state, json!([{"type": "istio-redirect"}, {"type": "uid-exclude"}])));
    let (pod, facts) = (running(&world), facts(&changed));
    assert!(pod.has_applied(&policies(&pod, &facts).expect("valid")));
    let desired = pod.desired(Path::new(NODE), &facts, &[]).expect("valid").policies;
    assert!(!pod.has_applied(&desired) && pod.following(&facts, &desired, LivePolicyScope::All) == desired);
}

#[test]
fn a_record_of_an_earlier_version_has_no_inputs() {
    let world = World::new(Families::V4);
    let state = written(&world, Dns::Left, &[]);
    world.add(&exclude_1337(&state));
    let path = format!("/run/detour/attachments/{}/istio-cni@net1.json", world.name);
    let mut record: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).expect("readable")).expect("JSON");
    record.as_object_mut().expect("an object").remove("inputs").expect("inputs");
    std::fs::write(&path, record.to_string()).expect("writable");
    let pod = running(&world);
    assert!(!pod.has_inputs() && pod.pod.is_none() && pod.has_rules());
    let error = pod.desired(Path::new(NODE), &facts(&state), &[]).expect_err("unknown inputs");
    assert!(error.msg.contains("recreate the pod"), "{error}");
    // A repeated ADD saves them.
    world.add(&exclude_1337(&state));
    is_current(&world, &state);
}

#[test]
fn the_facts_of_another_pod_are_refused() {
    let world = World::new(Families::V4);
    let state = written(&world, Dns::Left, &[]);
    world.add(&exclude_1337(&state));
    let mut facts = facts(&state);
    facts.pod.uid = Some("another".to_owned());
    let error = policies(&running(&world), &facts).expect_err("another pod");
    assert!(error.msg.contains("the pod was replaced"), "{error}");
}
