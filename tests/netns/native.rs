//! The rule format `nftables`: drift, repair, and redirections of other tools.

use crate::configuration::{chain, exclude_1337, excludedns, story};
use crate::dialect::Dialect;
use crate::expectations::*;
use crate::istio::{Dns, redirected_world, rules};
use crate::pod::{APP_PROCESS, PROXY, VAULT_INIT};
use crate::world::*;
use serde_json::json;

#[test]
fn check_reports_drift_as_nft_writes_it() {
    let world = World::new(Families::Both);
    let configuration = Dialect::Nftables.of(exclude_1337(&story(&world, Dns::Captured, &[])));
    world.add(&configuration);
    world.call("CHECK", &configuration).run().expect_success();
    world.nft("flush chain inet detour-nat ISTIO_REDIRECT");
    let output = world.call("CHECK", &configuration).run();
    assert_eq!(output.expect_code(), 103);
    let missing = "missing: inet detour-nat ISTIO_REDIRECT meta l4proto tcp counter redirect to :15001";
    assert_eq!(output.stdout["details"], missing);
}

/// Each rule is deleted, doubled, and preceded by another one; each chain is flushed.
#[test]
fn check_finds_any_damage_and_add_repairs_it() {
    let world = World::new(Families::Both);
    let configuration = Dialect::Nftables.of(exclude_1337(&story(&world, Dns::Captured, &[])));
    world.add(&configuration);
    let whole = world.native_tables();
    let damages = world.native_rules().len();
    assert!(damages > 20, "{whole:?}");
    for index in 0..damages {
        for kind in 0..4 {
            let (place, handle) = world.native_rules()[index].clone();
            world.nft(&match kind {
                0 => format!("delete rule inet {place} handle {handle}"),
                1 => format!("add rule inet {place} handle {handle} counter"),
                2 => format!("insert rule inet {place} handle {handle} meta l4proto icmp counter drop"),
                _ => format!("flush chain inet {place}"),
            });
            assert_eq!(world.call("CHECK", &configuration).run().expect_code(), 103, "{kind}: {place} {handle}");
            world.call("ADD", &configuration).run().expect_success();
            assert_eq!(world.native_tables(), whole, "{kind}: {place} {handle}");
            world.call("CHECK", &configuration).run().expect_success();
        }
    }
}

#[test]
fn del_removes_all_tables() {
    let world = World::new(Families::Both);
    let configuration = Dialect::Nftables.of(exclude_1337(&story(&world, Dns::Captured, &[])));
    world.add(&configuration);
    world.call("DEL", &configuration).run().expect_success();
    assert!(world.native_tables().is_empty());
}

#[test]
fn ipv6_passes_if_only_ipv4_is_redirected() {
    let world = World::new(Families::Both);
    let off = json!([{ "type": "istio-redirect", "enable_ipv6": false }, { "type": "uid-exclude", "uids": [1337] }]);
    world.add(&Dialect::Nftables.of(chain(&story(&world, Dns::Captured, &[]), off)));
    let to = SERVER.at(Family::V6, HTTPS);
    assert_eq!(world.pod_sends(APP_PROCESS, Protocol::Tcp, to), Arrival::direct(to, POD.ip(Family::V6)));
    let to = SERVER.at(Family::V4, HTTPS);
    assert_eq!(world.pod_sends(APP_PROCESS, Protocol::Tcp, to), Arrival::captured(OUTBOUND, to));
}

/// A pod keeps its rule format: `auto` uses the live one, and an ADD that requires the other one fails.
#[test]
fn rule_formats_are_never_mixed() {
    for (first, other) in [(Dialect::Iptables, Dialect::Nftables), (Dialect::Nftables, Dialect::Iptables)] {
        let world = World::new(Families::Both);
        let manifests = story(&world, Dns::Captured, &[]);
        world.add(&first.of(exclude_1337(&manifests)));
        let before = (world.native_tables(), world.iptables_save(Family::V4));
        let output = world.call("ADD", &other.of(excludedns())).interface("net2").run();
        assert_eq!(output.expect_code(), 7);
        assert_eq!((world.native_tables(), world.iptables_save(Family::V4)), before);
        world.call("ADD", &excludedns()).interface("net2").run().expect_success();
        assert_eq!(world.native_tables().is_empty(), first == Dialect::Iptables);
        assert_eq!(world.iptables_save(Family::V4).is_empty(), first == Dialect::Nftables);
    }
}

/// The essence of Istio's own native rules with DNS capture (istio/istio,
/// `tools/istio-nftables`), for OpenShift's proxy.
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

#[track_caller]
fn exclusions_hold(world: &World) {
    tcp_is_direct(world, VAULT_INIT);
    dns_is_direct(world, VAULT_INIT, RESOLVER);
    tcp_is_captured(world, APP_PROCESS);
    dns_is_captured(world, APP_PROCESS, RESOLVER);
    dns_is_direct(world, PROXY, RESOLVER);
    inbound_is_captured(world);
}

#[test]
fn exclusions_work_with_istios_native_rules() {
    let world = World::new(Families::Both);
    world.nft(ISTIO);
    let before = world.native_tables();
    dns_is_captured(&world, VAULT_INIT, RESOLVER);
    world.add(&excludedns());
    exclusions_hold(&world);
    world.call("DEL", &excludedns()).run().expect_success();
    assert_eq!(world.native_tables(), before);
}

#[test]
fn exclusions_with_istios_native_rules_leave_one_replied_entry() {
    let world = World::new(Families::Both);
    world.nft(ISTIO);
    world.add(&excludedns());
    a_query_leaves_one_replied_entry(&world, VAULT_INIT, RESOLVER);
}

/// A destination that is fixed can't be changed by rules added later.
#[test]
fn exclusions_work_with_istios_native_rules_added_later() {
    let world = World::new(Families::Both);
    world.add(&Dialect::Nftables.of(excludedns()));
    world.nft(ISTIO);
    tcp_is_direct(&world, VAULT_INIT);
    tcp_is_captured(&world, APP_PROCESS);
}

#[test]
fn dialect_iptables_is_refused_with_istios_native_rules() {
    let world = World::new(Families::Both);
    world.nft(ISTIO);
    let output = world.call("ADD", &Dialect::Iptables.of(excludedns())).run();
    assert_eq!(output.expect_code(), 107);
}

#[test]
fn exclusions_work_with_a_redirection_by_iptables() {
    let world = redirected_world(Dns::Captured);
    world.add(&Dialect::Nftables.of(excludedns()));
    exclusions_hold(&world);
    a_query_leaves_one_replied_entry(&world, VAULT_INIT, OTHER_RESOLVER);
}

/// The rules of istio-cni on a node with iptables-legacy.
#[test]
fn exclusions_work_with_a_redirection_by_iptables_legacy() {
    let world = World::new(Families::Both);
    for &family in world.families() {
        world.legacy_restore(family, &rules(family, Dns::Captured, PROXY.uid));
    }
    dns_is_captured(&world, VAULT_INIT, RESOLVER);
    world.add(&excludedns());
    exclusions_hold(&world);
    a_query_leaves_one_replied_entry(&world, VAULT_INIT, OTHER_RESOLVER);
}
