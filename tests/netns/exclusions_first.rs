//! Exclusions hold beside every redirection of the pod, whatever tool made it in whatever format, and whether it was
//! added before or after them, or written again later.

use crate::ambient::Format;
use crate::configuration::excludedns;
use crate::expectations::*;
use crate::istio::{Dns, rules};
use crate::pod::{APP_PROCESS, PROXY, VAULT_INIT};
use crate::world::*;
use detour_cni::firewall::{Destination, Sender};
use detour_cni::inspect::{LiveRules, Trace, trace};
use detour_cni::{policy, state};
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
        let [direct, other] = [VAULT_INIT, APP_PROCESS].map(|process| traced(world, process, family));
        assert_eq!(
            (direct.arrives_at.as_str(), other.arrives_at.as_str()),
            ("direct", captured),
            "{direct:#?} {other:#?}"
        );
        assert!(direct.caveats.is_empty(), "{direct:#?}");
    }
}

/// Returns the trace of an HTTPS connection through the live rules.
fn traced(world: &World, process: Process, family: Family) -> Trace {
    let rules = LiveRules::read(&world.netns(), &state::Store::new(state::ROOT)).expect("readable");
    let from = Sender::Process { uid: process.uid, gid: Some(process.gid), set: None };
    let to = Destination { address: SERVER.at(family, HTTPS), protocol: policy::Protocol::Tcp };
    trace(&rules.view(), from, to, &rules.addresses, "eth0")
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

/// A chain of another tool with a lower priority sees connections first.
#[test]
fn check_fails_and_add_warns_if_another_chain_can_redirect_before_the_exclusions() {
    let world = World::new(Families::V4);
    world.add(&exclusions());
    world
        .nft("table ip early { chain out { type nat hook output priority -102; tcp dport 443 redirect to :15001; }; }");
    let output = world.call("CHECK", &exclusions()).run();
    assert_eq!(output.refused().0, 103);
    let expected = "not first: inet detour-exclusions: chain out of table ip early with priority -102";
    assert!(output.stdout["details"].as_str().is_some_and(|text| text.starts_with(expected)), "{}", output.stdout);
    let output = world.call("ADD", &exclusions()).run().done();
    assert!(output.stderr.contains("chain out of table ip early"), "{}", output.stderr);
    let trace = traced(&world, VAULT_INIT, Family::V4);
    assert!(trace.caveats[0].starts_with("chain out of table ip early with priority -102 can redirect"), "{trace:#?}");
    world.nft("delete table ip early");
    world.call("CHECK", &exclusions()).run().done();
    world.nft("table ip late { chain out { type nat hook output priority -101; tcp dport 443 redirect to :15001; }; }");
    world.call("CHECK", &exclusions()).run().done();
    tcp_is_direct(&world, VAULT_INIT);
}
