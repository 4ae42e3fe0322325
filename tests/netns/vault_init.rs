//! The README's example: an init container with the fixed UID 1337 must reach its servers and resolvers before the
//! proxy, which has another UID on OpenShift, has started.

use crate::configuration::{chain, exclude_1337, story};
use crate::dialect::Dialect;
use crate::expectations::*;
use crate::istio::Dns;
use crate::pod::{APP_PROCESS, PROXY, VAULT_INIT};
use crate::world::*;
use serde_json::json;

fn world(families: Families, dns: Dns, dialect: Dialect) -> World {
    let world = World::new(families);
    world.add(&dialect.of(exclude_1337(&story(&world, dns, &[]))));
    world
}

#[track_caller]
fn traffic_is_redirected_except_excluded(world: &World) {
    tcp_is_captured(world, APP_PROCESS);
    dns_is_captured(world, APP_PROCESS, RESOLVER);
    tcp_is_direct(world, PROXY);
    dns_is_direct(world, PROXY, RESOLVER);
    tcp_is_direct(world, VAULT_INIT);
    dns_is_direct(world, VAULT_INIT, RESOLVER);
    dns_is_direct(world, VAULT_INIT, OTHER_RESOLVER);
    for process in [APP_PROCESS, PROXY, VAULT_INIT] {
        the_rest_is_direct(world, process);
    }
    inbound_is_captured(world);
    loopback_is_as_istio_has_it(world, APP_PROCESS, PROXY);
}

in_both_dialects! {
    fn exclusions_work_in_a_dual_stack_pod(dialect) {
        traffic_is_redirected_except_excluded(&world(Families::Both, Dns::Captured, dialect));
    }

    fn exclusions_work_in_an_ipv6_pod(dialect) {
        traffic_is_redirected_except_excluded(&world(Families::V6, Dns::Captured, dialect));
    }

    fn exclusions_work_without_dns_capture(dialect) {
        let world = world(Families::Both, Dns::Left, dialect);
        tcp_is_captured(&world, APP_PROCESS);
        tcp_is_direct(&world, VAULT_INIT);
        dns_is_direct(&world, VAULT_INIT, RESOLVER);
        a_query_leaves_one_replied_entry(&world, APP_PROCESS, OTHER_RESOLVER);
    }

    /// Only DNS of UID 1337 is excluded; its connections are captured.
    fn dns_can_be_excluded_alone(dialect) {
        let world = World::new(Families::Both);
        let sub_plugins = json!([{ "type": "istio-redirect" }, { "type": "dns-exclude", "uids": [1337] }]);
        world.add(&dialect.of(chain(&story(&world, Dns::Captured, &[]), sub_plugins)));
        tcp_is_captured(&world, VAULT_INIT);
        dns_is_direct(&world, VAULT_INIT, RESOLVER);
        dns_is_captured(&world, APP_PROCESS, RESOLVER);
    }

    /// The exclusion is configured by the pod, for a range of UIDs.
    fn an_annotation_excludes_a_range_of_uids(dialect) {
        let world = World::new(Families::Both);
        let annotations = [("detour.io/exclude-uids", "1000-1999,1000650000/10")];
        let sub_plugins = json!([{ "type": "istio-redirect" }, { "type": "uid-exclude" }]);
        world.add(&dialect.of(chain(&story(&world, Dns::Captured, &annotations), sub_plugins)));
        let beyond = Process { uid: APP_PROCESS.uid + 10, ..APP_PROCESS };
        for process in [VAULT_INIT, APP_PROCESS, Process { uid: beyond.uid - 1, ..beyond }] {
            tcp_is_direct(&world, process);
            dns_is_direct(&world, process, RESOLVER);
        }
        tcp_is_captured(&world, beyond);
        dns_is_captured(&world, beyond, RESOLVER);
    }
}
