//! Resolvers whose queries bypass the sidecar, for every process.

use crate::configuration::{chain, story};
use crate::dialect::Dialect;
use crate::expectations::*;
use crate::istio::Dns;
use crate::pod::{APP_PROCESS, PROXY};
use crate::world::*;
use serde_json::{Value, json};

const RANGES: (&str, &str) = ("traffic.sidecar.istio.io/excludeOutboundIPRanges", EXCLUDED_RANGES);

fn world(dialect: Dialect, annotations: &[(&str, &str)], dns_exclude: Value) -> World {
    let world = World::new(Families::Both);
    let sub_plugins = json!([{ "type": "istio-redirect" }, dns_exclude]);
    world.add(&dialect.of(chain(&story(&world, Dns::Captured, annotations), sub_plugins)));
    world
}

fn addresses(host: Host) -> [String; 2] {
    [Family::V4, Family::V6].map(|family| host.ip(family).to_string())
}

in_both_dialects! {
    fn a_resolver_is_excluded_by_address(dialect) {
        let world = world(dialect, &[], json!({ "type": "dns-exclude", "resolvers": addresses(OTHER_RESOLVER) }));
        dns_is_direct(&world, APP_PROCESS, OTHER_RESOLVER);
        dns_is_direct(&world, PROXY, OTHER_RESOLVER);
        a_query_leaves_one_replied_entry(&world, APP_PROCESS, OTHER_RESOLVER);
        dns_is_captured(&world, APP_PROCESS, RESOLVER);
        tcp_is_captured(&world, APP_PROCESS);
    }

    fn resolvers_in_istios_excluded_ranges_are_excluded(dialect) {
        let world = world(dialect, &[RANGES], json!({ "type": "dns-exclude", "resolvers": "excluded-ranges" }));
        dns_is_direct(&world, APP_PROCESS, VAULT);
        a_query_leaves_one_replied_entry(&world, APP_PROCESS, VAULT);
        dns_is_captured(&world, APP_PROCESS, RESOLVER);
        for &family in world.families() {
            let to = VAULT.at(family, HTTPS);
            assert_eq!(world.pod_sends(APP_PROCESS, Protocol::Tcp, to), Arrival::direct(to, POD.ip(family)));
        }
    }
}
