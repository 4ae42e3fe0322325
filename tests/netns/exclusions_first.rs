//! Exclusions hold beside every redirection of the pod, whatever tool made it in whatever format, and whether it was
//! added before or after them, or written again later.

use crate::ambient::Format;
use crate::example::*;
use crate::expectations::*;
use crate::world::*;
use serde_json::Value;

/// A redirection that another tool makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redirection {
    /// Istio's sidecar rules with DNS capture in the tables of iptables-nft.
    Iptables,
    /// … in the tables of iptables-legacy.
    Legacy,
    /// … as native rules.
    Native,
    /// Istio's ambient rules.
    Ambient(Format),
}

/// The essence of Istio's own native rules with DNS capture (istio/istio, `tools/istio-nftables`), for OpenShift's proxy.
pub(crate) const ISTIO: &str = "
table inet istio-proxy-nat {
    chain prerouting { type nat hook prerouting priority -100; meta l4proto tcp jump istio-inbound; }
    chain output { type nat hook output priority -100; jump istio-output; }
    chain istio-inbound { tcp dport { 15008, 15020, 15021, 15090 } return; meta l4proto tcp redirect to :15006; }
    chain istio-output {
        oifname \"lo\" ip saddr 127.0.0.6 return
        oifname \"lo\" meta l4proto tcp tcp dport != 53 meta skuid != 1000659999 return
        meta skuid 1000659999 return
        udp dport 53 redirect to :15053
        tcp dport 53 redirect to :15053
        ip daddr 127.0.0.1 return
        meta l4proto tcp redirect to :15001
    }
}
table inet istio-proxy-raw {
    chain prerouting { type filter hook prerouting priority -300; udp sport 53 ct zone set 1; }
    chain output { type filter hook output priority -300; jump istio-output-dns; }
    chain istio-output-dns {
        udp dport 53 meta skuid 1000659999 ct zone set 1
        udp sport 15053 meta skuid 1000659999 ct zone set 2
        udp dport 53 ct zone set 2
    }
}
";

impl Redirection {
    pub(crate) fn make(self, world: &World) {
        for &family in world.families() {
            match self {
                Self::Iptables => world.iptables_restore(family, &rules(family, Dns::Captured, PROXY.uid)),
                Self::Legacy => world.legacy_restore(family, &rules(family, Dns::Captured, PROXY.uid)),
                Self::Native | Self::Ambient(_) => {}
            }
        }
        match self {
            Self::Native => world.nft(ISTIO),
            Self::Ambient(format) => format.enroll(world),
            _ => {}
        }
    }

    /// Removes the tool's rules.
    pub(crate) fn remove(self, world: &World) {
        match self {
            // The chains of both modes are in the same tables.
            Self::Iptables => Format::Iptables.leave(world),
            Self::Ambient(format) => format.leave(world),
            Self::Native => {
                let tables = world.native_redirection();
                let names = tables.iter().filter_map(|table| table.split(' ').nth(2));
                names.for_each(|name| world.nft(&format!("delete table inet {name}")));
            }
            Self::Legacy => {}
        }
    }

    /// Removes the tool's rules and writes them again, as istio-cni does.
    fn write_again(self, world: &World) {
        if self != Self::Legacy {
            self.remove(world);
            self.make(world);
        }
    }

    pub(crate) const fn is_ambient(self) -> bool {
        matches!(self, Self::Ambient(_))
    }
}

/// Returns the configuration of a plugin such as `excludedns`, without a source of facts.
fn exclusions() -> Value {
    let mut configuration = excludedns();
    configuration["cniVersion"] = "1.0.0".into();
    configuration
}

#[track_caller]
fn exclusions_hold(world: &World, redirection: Redirection) {
    tcp_is_direct(world, VAULT_INIT);
    dns_is_direct(world, VAULT_INIT, RESOLVER);
    tcp_is_captured(world, APP_PROCESS);
    dns_is_captured(world, APP_PROCESS, RESOLVER);
    dns_is_direct(world, PROXY, RESOLVER);
    inbound_is_captured(world);
    a_query_leaves_one_replied_entry(world, VAULT_INIT, OTHER_RESOLVER);
    let captured = match redirection {
        Redirection::Iptables => "sidecar:15001",
        // trace does not read these rules.
        Redirection::Legacy | Redirection::Native => "unknown",
        Redirection::Ambient(_) => unreachable!("tests/netns/ambient.rs has these"),
    };
    for &family in world.families() {
        let [direct, other] =
            [VAULT_INIT, APP_PROCESS].map(|process| world.traced(process, Protocol::Tcp, SERVER.at(family, HTTPS)));
        assert_eq!(
            (direct.arrives_at.as_str(), other.arrives_at.as_str()),
            ("direct", captured),
            "{direct:#?} {other:#?}"
        );
        assert!(direct.caveats.is_empty(), "{direct:#?}");
    }
}

fn added_to(redirection: Redirection, configuration: &Value) {
    let world = World::new(Families::Both);
    redirection.make(&world);
    dns_is_captured(&world, VAULT_INIT, RESOLVER);
    let before = (world.native_tables(), world.iptables_save(Family::V4), world.iptables_save(Family::V6));
    world.add(configuration);
    exclusions_hold(&world, redirection);
    world.call("CHECK", configuration).run().done();
    redirection.write_again(&world);
    world.call("CHECK", configuration).run().done();
    exclusions_hold(&world, redirection);
    world.call("DEL", configuration).run().done();
    let after = (world.native_tables(), world.iptables_save(Family::V4), world.iptables_save(Family::V6));
    assert_eq!(after, before);
}

fn followed_by(redirection: Redirection, configuration: &Value) {
    let world = World::new(Families::Both);
    world.add(configuration);
    redirection.make(&world);
    world.call("CHECK", configuration).run().done();
    exclusions_hold(&world, redirection);
    world.add(configuration);
    exclusions_hold(&world, redirection);
}

/// The order that OpenShift produces: the injector appends `default/istio-cni` to the networks of the pod.
macro_rules! beside {
    ($($name:ident: $redirection:expr),+) => { $(
        mod $name {
            use super::*;

            #[test]
            fn exclusions_added_later_hold() {
                added_to($redirection, &exclusions());
            }

            #[test]
            fn exclusions_added_before_hold() {
                followed_by($redirection, &exclusions());
            }
        }
    )+ };
}

beside! {
    istio_with_iptables: Redirection::Iptables,
    istio_with_iptables_legacy: Redirection::Legacy,
    istio_with_native_rules: Redirection::Native
}
