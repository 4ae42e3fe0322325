//! Istio's init container redirects the pod after all attachments have been added.

use crate::configuration::{chain, excludedns, story};
use crate::expectations::*;
use crate::istio::{Dns, rules};
use crate::pod::{APP_PROCESS, PROXY, VAULT_INIT};
use crate::world::*;
use serde_json::{Value, json};

fn redirected_after(world: &World, dns: Dns, attachment: &Value) {
    world.add(attachment);
    for &family in world.families() {
        world.iptables_restore(family, &rules(family, dns, PROXY.uid));
    }
}

#[track_caller]
fn captured_queries_of_1337_are_excluded(world: &World) {
    a_query_leaves_one_replied_entry(world, VAULT_INIT, RESOLVER);
    dns_is_direct(world, VAULT_INIT, OTHER_RESOLVER);
    tcp_is_direct(world, VAULT_INIT);
    dns_is_captured(world, APP_PROCESS, RESOLVER);
    tcp_is_captured(world, APP_PROCESS);
}

/// It is unknown whether DNS will be captured; an exclusion of DNS implies it.
#[test]
fn exclusions_without_facts_work() {
    let world = World::new(Families::Both);
    redirected_after(&world, Dns::Captured, &excludedns());
    captured_queries_of_1337_are_excluded(&world);
}

#[test]
fn exclusions_with_facts_work() {
    let world = World::new(Families::Both);
    let sub_plugins = json!([{ "type": "uid-exclude", "uids": 1337 }]);
    redirected_after(&world, Dns::Captured, &chain(&story(&world, Dns::Captured, &[]), sub_plugins));
    captured_queries_of_1337_are_excluded(&world);
}

#[test]
fn exclusions_with_facts_work_without_dns_capture() {
    let world = World::new(Families::Both);
    let sub_plugins = json!([{ "type": "uid-exclude", "uids": 1337 }]);
    redirected_after(&world, Dns::Left, &chain(&story(&world, Dns::Left, &[]), sub_plugins));
    tcp_is_direct(&world, VAULT_INIT);
    a_query_leaves_one_replied_entry(&world, VAULT_INIT, RESOLVER);
}
