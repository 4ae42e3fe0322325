//! A pod with `hostUsers: false`: its network namespace belongs to its own user namespace.

use crate::configuration::{exclude_1337, story};
use crate::expectations::*;
use crate::istio::Dns;
use crate::pod::{APP_PROCESS, PROXY, VAULT_INIT};
use crate::world::*;
use serde_json::json;

/// UIDs are those inside the pod, as in its manifest.
#[test]
fn auto_selects_nftables_and_traffic_is_redirected_correctly() {
    let world = World::with_own_users(Families::Both);
    let configuration = exclude_1337(&story(&world, Dns::Captured, &[]));
    world.add(&configuration);
    assert!(!world.native_redirection().is_empty());
    assert!(world.families().iter().all(|&family| world.iptables_save(family).is_empty()));
    tcp_is_captured(&world, APP_PROCESS);
    dns_is_captured(&world, APP_PROCESS, RESOLVER);
    tcp_is_direct(&world, PROXY);
    dns_is_direct(&world, PROXY, RESOLVER);
    tcp_is_direct(&world, VAULT_INIT);
    inbound_is_captured(&world);
    loopback_is_as_istio_has_it(&world, APP_PROCESS, PROXY);
    a_query_leaves_one_replied_entry(&world, VAULT_INIT, OTHER_RESOLVER);
    world.call("CHECK", &configuration).run().done();
    world.add(&configuration);
    world.call("DEL", &configuration).run().done();
    assert!(world.native_tables().is_empty());
}

#[test]
fn dialect_iptables_is_refused_with_a_hint() {
    let world = World::with_own_users(Families::V4);
    let mut configuration = exclude_1337(&story(&world, Dns::Captured, &[]));
    configuration["dialect"] = json!("iptables");
    let output = world.call("ADD", &configuration).run();
    assert_eq!(output.refused().0, 102);
    assert!(output.stdout["msg"].as_str().is_some_and(|msg| msg.contains("nftables")), "{}", output.stdout);
    configuration["dialect"] = json!("nftables");
    world.add(&configuration);
    tcp_is_direct(&world, VAULT_INIT);
}
