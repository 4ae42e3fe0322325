//! The rule format `nftables`: drift and repair.

use crate::configuration::{chain, exclude_1337, excludedns, istio_cni, story};
use crate::dialect::Dialect;
use crate::istio::Dns;
use crate::pod::APP_PROCESS;
use crate::world::*;
use serde_json::json;

#[test]
fn check_reports_drift_as_nft_writes_it() {
    let world = World::new(Families::Both);
    let configuration = Dialect::Nftables.of(exclude_1337(&story(&world, Dns::Captured, &[])));
    world.add(&configuration);
    world.call("CHECK", &configuration).run().done();
    world.nft("flush chain inet detour-nat ISTIO_REDIRECT");
    let output = world.call("CHECK", &configuration).run();
    assert_eq!(output.refused().0, 103);
    let missing = "missing: inet detour-nat ISTIO_REDIRECT meta l4proto tcp counter redirect to :15001";
    assert_eq!(output.stdout["details"], missing);
}

/// A rule is deleted, doubled, or preceded by another one, or its netfilter chain is flushed: one of them for each rule.
#[test]
fn check_finds_any_damage_and_add_repairs_it() {
    let world = World::new(Families::Both);
    let configuration = Dialect::Nftables.of(exclude_1337(&story(&world, Dns::Captured, &[])));
    world.add(&configuration);
    let whole = world.native_tables();
    let damages = world.native_rules().len();
    assert!(damages > 20, "{whole:?}");
    for index in 0..damages {
        let (place, handle) = world.native_rules()[index].clone();
        let damage = match index % 4 {
            0 => format!("delete rule inet {place} handle {handle}"),
            1 => format!("add rule inet {place} handle {handle} counter"),
            2 => format!("insert rule inet {place} handle {handle} meta l4proto icmp counter drop"),
            _ => format!("flush chain inet {place}"),
        };
        world.nft(&damage);
        assert_eq!(world.call("CHECK", &configuration).run().refused().0, 103, "{damage}");
        world.add(&configuration);
        assert_eq!(world.native_tables(), whole, "{damage}");
    }
    world.call("CHECK", &configuration).run().done();
}

#[test]
fn del_removes_all_tables() {
    let world = World::new(Families::Both);
    let configuration = Dialect::Nftables.of(exclude_1337(&story(&world, Dns::Captured, &[])));
    world.add(&configuration);
    world.call("DEL", &configuration).run().done();
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

/// A pod keeps the rule format of its redirection: `auto` uses the live one, and an ADD that requires the other one fails.
/// Exclusions have no rule format.
#[test]
fn rule_formats_are_never_mixed() {
    for (first, other) in [(Dialect::Iptables, Dialect::Nftables), (Dialect::Nftables, Dialect::Iptables)] {
        let world = World::new(Families::Both);
        let manifests = story(&world, Dns::Captured, &[]);
        world.add(&first.of(exclude_1337(&manifests)));
        let before = (world.native_tables(), world.iptables_save(Family::V4));
        let output = world.call("ADD", &other.of(istio_cni(&manifests))).interface("net2").run();
        assert_eq!(output.refused().0, 7);
        assert_eq!((world.native_tables(), world.iptables_save(Family::V4)), before);
        world.call("ADD", &other.of(excludedns())).interface("net2").run().done();
        world.call("ADD", &istio_cni(&manifests)).interface("net3").run().done();
        assert_eq!((world.native_tables(), world.iptables_save(Family::V4)), before);
        assert_eq!(world.native_redirection().is_empty(), first == Dialect::Iptables);
        assert_eq!(world.iptables_save(Family::V4).is_empty(), first == Dialect::Nftables);
    }
}
