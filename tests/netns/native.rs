//! The rule format `nftables`: drift and repair.

use crate::configuration::{exclude_1337, excludedns, istio_cni, story};
use crate::dialect::Dialect;
use crate::istio::Dns;
use crate::world::*;

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
