//! Exclusions for pods that istio-init or the real istio-cni redirects, before or after detour's call; removing the
//! exclusions leaves the redirection unchanged.

use crate::configuration::{chain, exclude_1337, story};
use crate::expectations::*;
use crate::istio::{Dns, redirected_world, rules};
use crate::pod::{APP_PROCESS, PROXY, VAULT_INIT};
use crate::world::*;
use serde_json::{Value, json};

/// Returns a configuration with exclusions only, and with facts about the pod.
fn exclusions(world: &World, dns: Dns) -> Value {
    let sub_plugins = json!([{ "type": "uid-exclude", "uids": [1337] }, { "type": "dns-exclude", "uids": [1337] }]);
    chain(&story(world, dns, &[]), sub_plugins)
}

fn redirect(world: &World, dns: Dns) {
    for &family in world.families() {
        world.iptables_restore(family, &rules(family, dns, PROXY.uid));
    }
}

fn saved(world: &World) -> Vec<Ruleset> {
    world.families().iter().map(|&family| world.iptables_save(family)).collect()
}

#[track_caller]
fn is_excluded(world: &World, dns: Dns) {
    tcp_is_direct(world, VAULT_INIT);
    dns_is_direct(world, VAULT_INIT, RESOLVER);
    tcp_is_captured(world, APP_PROCESS);
    match dns {
        Dns::Captured => dns_is_captured(world, APP_PROCESS, RESOLVER),
        Dns::Left => the_rest_is_direct(world, APP_PROCESS),
    }
    tcp_is_direct(world, PROXY);
    dns_is_direct(world, PROXY, RESOLVER);
    inbound_is_captured(world);
}

/// Asserts that the other tool's rules are as before, and that detour only added its exclusions.
#[track_caller]
fn only_exclusions_are_added(world: &World, before: &[Ruleset]) {
    assert_eq!(saved(world), before);
    assert_eq!(world.native_tables().len(), 1);
    assert_eq!(world.native_redirection(), [""; 0]);
}

fn added_to_a_redirected_world(dns: Dns, configuration: impl Fn(&World) -> Value) {
    let world = redirected_world(dns);
    let before = saved(&world);
    let configuration = configuration(&world);
    world.add(&configuration);
    only_exclusions_are_added(&world, &before);
    a_query_leaves_one_replied_entry(&world, VAULT_INIT, RESOLVER);
    is_excluded(&world, dns);
    world.add(&configuration);
    only_exclusions_are_added(&world, &before);
    world.call("DEL", &configuration).run().done();
    assert_eq!(saved(&world), before);
}

/// The other tool's redirection stays, and detour does not add a second one.
#[test]
fn an_existing_redirection_is_not_duplicated() {
    added_to_a_redirected_world(Dns::Captured, |world| exclude_1337(&story(world, Dns::Captured, &[])));
}

/// The pod disables DNS capture, but the other tool captures DNS. Excluded queries get through; the next ADD adds
/// zones so that each is tracked as one connection, and CHECK warns about it.
#[test]
fn exclusions_work_if_dns_is_captured_against_the_pods_annotation() {
    const WARNING: &str = "add this attachment after the redirection";
    let world = World::new(Families::Both);
    let configuration = exclusions(&world, Dns::Left);
    world.add(&configuration);
    redirect(&world, Dns::Captured);
    is_excluded(&world, Dns::Captured);
    let output = world.call("CHECK", &configuration).run().done();
    assert!(output.stderr.contains(WARNING), "{}", output.stderr);
    world.add(&configuration);
    let output = world.call("CHECK", &configuration).run().done();
    assert!(!output.stderr.contains(WARNING), "{}", output.stderr);
}
