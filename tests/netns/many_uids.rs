//! Many excluded UIDs: the UIDs between them stay captured.

use crate::configuration::{chain, story};
use crate::expectations::*;
use crate::istio::Dns;
use crate::pod::{APP_PROCESS, PROXY, VAULT_INIT};
use crate::world::*;
use serde_json::json;

const UIDS: &str = "detour.io/exclude-uids";

in_both_dialects! {
    fn only_the_excluded_uids_bypass_the_sidecar(dialect) {
        let world = World::new(Families::Both);
        let sparse: String = (0..500).map(|i| format!(",{}", 2 * i + 5000)).collect();
        let manifests = story(&world, Dns::Captured, &[(UIDS, &format!("1330-1336,1338,1337{sparse}"))]);
        world.add(&dialect.of(chain(&manifests, json!([{ "type": "istio-redirect" }, { "type": "uid-exclude" }]))));
        let process = |uid| Process { uid, gid: 7 };
        for process in [VAULT_INIT, process(1330), process(1338), process(5000), process(5998), PROXY] {
            tcp_is_direct(&world, process);
            dns_is_direct(&world, process, RESOLVER);
        }
        for process in [APP_PROCESS, process(1329), process(1339), process(5001), process(5999)] {
            tcp_is_captured(&world, process);
            dns_is_captured(&world, process, RESOLVER);
        }
    }
}
