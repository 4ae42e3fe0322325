//! Several attachments of one pod, added in any order and repeatedly.

use crate::configuration::{exclude_1337, excludedns, istio_cni, story};
use crate::dialect::Dialect;
use crate::expectations::*;
use crate::istio::{Dns, ruleset};
use crate::pod::{APP_PROCESS, PROXY, VAULT_INIT};
use crate::world::*;
use std::path::PathBuf;

fn world() -> (World, PathBuf) {
    let world = World::new(Families::Both);
    let manifests = story(&world, Dns::Captured, &[]);
    (world, manifests)
}

fn rules(world: &World) -> Vec<Ruleset> {
    world.families().iter().map(|&family| world.iptables_save(family)).collect()
}

/// Returns all rules as text, for comparison.
fn rules_text(world: &World, dialect: Dialect) -> Vec<String> {
    match dialect {
        Dialect::Iptables => rules(world).iter().map(ToString::to_string).chain(world.native_tables()).collect(),
        Dialect::Nftables => world.native_tables(),
    }
}

fn one_chain(dialect: Dialect) -> Vec<String> {
    let (world, manifests) = world();
    world.add(&dialect.of(exclude_1337(&manifests)));
    rules_text(&world, dialect)
}

in_both_dialects! {
    fn istio_cni_then_excludedns_equals_one_sub_plugin_chain(dialect) {
        let (world, manifests) = world();
        world.call("ADD", &dialect.of(istio_cni(&manifests))).interface("net1").run().done();
        world.call("ADD", &dialect.of(excludedns())).interface("net2").run().done();
        assert_eq!(rules_text(&world, dialect), one_chain(dialect));
        dns_is_direct(&world, VAULT_INIT, RESOLVER);
        dns_is_captured(&world, APP_PROCESS, RESOLVER);
    }

    fn excludedns_then_istio_cni_equals_one_sub_plugin_chain(dialect) {
        let (world, manifests) = world();
        world.call("ADD", &dialect.of(excludedns())).interface("net1").run().done();
        world.call("ADD", &dialect.of(istio_cni(&manifests))).interface("net2").run().done();
        assert_eq!(rules_text(&world, dialect), one_chain(dialect));
        a_query_leaves_one_replied_entry(&world, VAULT_INIT, RESOLVER);
    }

    fn a_repeated_add_changes_nothing(dialect) {
        let (world, manifests) = world();
        world.add(&dialect.of(exclude_1337(&manifests)));
        let first = rules_text(&world, dialect);
        world.add(&dialect.of(exclude_1337(&manifests)));
        assert_eq!(rules_text(&world, dialect), first);
    }
}

#[test]
fn del_of_one_attachment_removes_only_its_rules() {
    let (world, manifests) = world();
    world.call("ADD", &istio_cni(&manifests)).interface("net1").run().done();
    world.call("ADD", &excludedns()).interface("net2").run().done();
    world.call("DEL", &excludedns()).interface("net2").run().done();
    for (&family, rules) in world.families().iter().zip(rules(&world)) {
        assert_eq!(rules, ruleset(family, Dns::Captured, PROXY.uid));
    }
    world.call("DEL", &istio_cni(&manifests)).interface("net1").run().done();
    assert!(rules(&world).iter().all(Ruleset::is_empty), "{:?}", rules(&world));
}

#[test]
fn check_succeeds_until_a_rule_is_removed() {
    let (world, manifests) = world();
    let configuration = exclude_1337(&manifests);
    world.add(&configuration);
    world.call("CHECK", &configuration).run().done();
    let (deleted, printed) = world.iptables(Family::V6, &["-t", "nat", "-D", "ISTIO_OUTPUT", "-j", "ISTIO_REDIRECT"]);
    assert!(deleted, "{printed}");
    assert_eq!(world.call("CHECK", &configuration).run().refused().0, 103);
}

#[test]
fn a_pod_in_an_excluded_namespace_is_skipped_without_facts() {
    let world = World::new(Families::Both);
    let nowhere = PathBuf::from("/nonexistent");
    let arguments = "IgnoreUnknown=1;K8S_POD_NAMESPACE=kube-system;K8S_POD_NAME=web-0";
    world.call("ADD", &exclude_1337(&nowhere)).env("CNI_ARGS", arguments).run().done();
    assert!(rules(&world).iter().all(Ruleset::is_empty), "{:?}", rules(&world));
}

/// Multus requires an empty result in the version of the call (SPEC.md, "Success").
#[test]
fn without_a_prev_result_the_result_is_empty() {
    let (world, manifests) = world();
    let output = world.call("ADD", &exclude_1337(&manifests)).run().done();
    assert_eq!(output.stdout["cniVersion"], "1.0.0");
    assert!(output.stdout.get("interfaces").is_none_or(|i| i == &serde_json::json!([])), "{}", output.stdout);
}

#[test]
fn add_warns_about_a_misspelled_annotation() {
    let world = World::new(Families::V4);
    let manifests = story(&world, Dns::Captured, &[("detour.io/exclude-uid", "7"), ("sidecar.istio.io/proxyCPU", "1")]);
    let output = world.call("ADD", &istio_cni(&manifests)).run().done();
    let wanted = r#"unknown, ignored; did you mean \"detour.io/exclude-uids\"?"#;
    assert_eq!(output.stderr.matches(wanted).count(), 1, "{}", output.stderr);
    assert!(!output.stderr.contains("proxyCPU"), "{}", output.stderr);
}
