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
