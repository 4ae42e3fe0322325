//! The rules that istio-cni writes for a pod without annotations (istio 86c9f01fd735, backend `iptables`), as
//! iptables-save prints them.

use crate::pod::PROXY;
use crate::world::{Families, Family, Ruleset, World};

/// Istio's default proxy UID and GID.
pub(crate) const DEFAULT_OWNER: u32 = 1337;

/// Whether Istio captures the pod's DNS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dns {
    Captured,
    Left,
}

/// Returns the rules of one family for a proxy whose UID and GID are both `owner`.
pub(crate) fn rules(family: Family, dns: Dns, owner: u32) -> String {
    let golden = match (family, dns) {
        (Family::V4, Dns::Left) => include_str!("../golden/istio.v4.rules"),
        (Family::V6, Dns::Left) => include_str!("../golden/istio.v6.rules"),
        (Family::V4, Dns::Captured) => include_str!("../golden/istio-dns.v4.rules"),
        (Family::V6, Dns::Captured) => include_str!("../golden/istio-dns.v6.rules"),
    };
    golden.replace(&format!("-owner {DEFAULT_OWNER}"), &format!("-owner {owner}"))
}

/// Returns the same rules, for comparison with a pod's.
pub(crate) fn ruleset(family: Family, dns: Dns, owner: u32) -> Ruleset {
    Ruleset::parse(&rules(family, dns, owner))
}

/// Creates a world whose pod another tool has redirected like istio-cni, to an OpenShift proxy.
pub(crate) fn redirected_world(dns: Dns) -> World {
    let world = World::new(Families::Both);
    for &family in world.families() {
        world.iptables_restore(family, &rules(family, dns, PROXY.uid));
    }
    world
}
