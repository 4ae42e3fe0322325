//! The rules that istio-cni makes for a pod without annotations (istio 86c9f01fd735, `iptables`
//! backend), as iptables-save prints them.

use crate::pod::PROXY;
use crate::world::{Families, Family, Ruleset, World};

/// Istio's own proxy UID and GID, where the injector says nothing else.
pub(crate) const DEFAULT_OWNER: u32 = 1337;

/// Whether Istio captures the pod's DNS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dns {
    Captured,
    Left,
}

/// The rules of one family for a proxy whose UID and GID are both `owner`.
pub(crate) fn rules(family: Family, dns: Dns, owner: u32) -> String {
    let golden = match (family, dns) {
        (Family::V4, Dns::Left) => include_str!("../golden/istio.v4.rules"),
        (Family::V6, Dns::Left) => include_str!("../golden/istio.v6.rules"),
        (Family::V4, Dns::Captured) => include_str!("../golden/istio-dns.v4.rules"),
        (Family::V6, Dns::Captured) => include_str!("../golden/istio-dns.v6.rules"),
    };
    golden.replace(&format!("-owner {DEFAULT_OWNER}"), &format!("-owner {owner}"))
}

/// The same, to compare with what is in a pod.
pub(crate) fn ruleset(family: Family, dns: Dns, owner: u32) -> Ruleset {
    Ruleset::parse(&rules(family, dns, owner))
}

/// A world whose pod somebody else has redirected as istio-cni does, to an OpenShift proxy.
pub(crate) fn redirected_world(dns: Dns) -> World {
    let world = World::new(Families::Both);
    for &family in world.families() {
        world.iptables_restore(family, &rules(family, dns, PROXY.uid));
    }
    world
}
