//! `interceptionMode: TPROXY`: inbound connections reach the proxy without NAT.

use crate::configuration::istio_cni;
use crate::expectations::*;
use crate::pod::{self, APP_PROCESS};
use crate::world::*;
use serde_json::Value;

/// In this mode, the injector runs the proxy as root with a known group.
const ROOT_PROXY: Process = Process { uid: 0, gid: 1337 };

fn world() -> (World, Value) {
    let world = World::new(Families::Both);
    let pod = pod::manifest(false, ROOT_PROXY, &[("sidecar.istio.io/interceptionMode", "TPROXY")]);
    let configuration = istio_cni(&world.manifests(&[pod::NAMESPACE, &pod]));
    (world, configuration)
}

/// Returns the policy rules of both families and the local routes.
fn routing(world: &World) -> Vec<String> {
    let listings: [&[&str]; 3] =
        [&["-4", "rule"], &["-6", "rule"], &["route", "show", "table", "all", "type", "local"]];
    let lines = listings.iter().flat_map(|listing| world.ip(listing).lines().map(str::to_owned).collect::<Vec<_>>());
    lines.collect()
}

in_both_dialects! {
    fn tproxy_redirects_inbound_and_outbound_traffic(dialect) {
        let (world, configuration) = world();
        world.add(&dialect.of(configuration));
        inbound_is_captured(&world);
        tcp_is_captured(&world, APP_PROCESS);
        tcp_is_direct(&world, ROOT_PROXY);
        the_rest_is_direct(&world, APP_PROCESS);
    }
}

#[test]
fn a_repeated_add_adds_the_policy_routing_once() {
    let (world, configuration) = world();
    let before = routing(&world);
    world.add(&configuration);
    let once = routing(&world);
    let marked = once.iter().filter(|line| line.contains("fwmark 0x539 lookup 133"));
    assert_eq!(marked.count(), 2, "{once:#?}");
    world.add(&configuration);
    assert_eq!(routing(&world), once);
    world.call("DEL", &configuration).run().done();
    assert_eq!(routing(&world), before);
}
