//! Bounds: a pod that requests more than the administrator permits gets no rules at all, or those without the request.

use crate::configuration::{chain, story};
use crate::dialect::Dialect;
use crate::expectations::*;
use crate::istio::Dns;
use crate::pod::APP_PROCESS;
use crate::world::*;
use serde_json::{Value, json};

const UIDS: &str = "detour.io/exclude-uids";

/// Returns a configuration with these bounds for a pod that excludes UIDs.
fn bounded(world: &World, dialect: Dialect, uids: &str, bounds: Value) -> Value {
    let manifests = story(world, Dns::Captured, &[(UIDS, uids)]);
    let mut conf = dialect.of(chain(&manifests, json!([{ "type": "istio-redirect" }, { "type": "uid-exclude" }])));
    conf.as_object_mut().expect("an object").extend(bounds.as_object().expect("an object").clone());
    conf
}

in_both_dialects! {
    fn a_request_outside_the_bounds_fails_the_add_and_leaves_nothing_behind(dialect) {
        let world = World::new(Families::Both);
        for (uids, bounds, bound) in [
            ("1337,*", json!({}), "\"*\" is outside the bounds: not permitted by the default bounds"),
            ("1337,1000-1999", json!({"allow": {"uids": 1337}}), "not permitted by allow.uids (configuration \"istio-cni\")"),
        ] {
            let (code, text) = world.call("ADD", &bounded(&world, dialect, uids, bounds)).run().refused();
            assert_eq!(code, 7, "{text}");
            assert!(text.contains(UIDS) && text.contains("web-0") && text.contains(bound), "{text}");
            assert_eq!(world.native_tables(), [""; 0]);
            world.families().iter().for_each(|&family| assert!(world.iptables_save(family).is_empty()));
            tcp_is_direct(&world, APP_PROCESS);
        }
    }
}
