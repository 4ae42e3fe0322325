//! A pod's rules as the iptables tools show them.

use crate::configuration::{chain, exclude_1337, istio_cni, story};
use crate::istio::{DEFAULT_OWNER, Dns, ruleset};
use crate::pod::{self, PROXY};
use crate::world::*;
use serde_json::json;

#[track_caller]
fn the_rules_are_istios(dns: Dns, proxy: Process) {
    let world = World::new(Families::Both);
    let pod = pod::manifest(dns == Dns::Captured, proxy, &[]);
    world.add(&istio_cni(&world.manifests(&[pod::NAMESPACE, &pod])));
    for &family in world.families() {
        assert_eq!(world.iptables_save(family), ruleset(family, dns, proxy.uid), "{family:?}");
    }
}

#[test]
fn rules_equal_those_of_istio_cni() {
    the_rules_are_istios(Dns::Left, Process { uid: DEFAULT_OWNER, gid: DEFAULT_OWNER });
}

#[test]
fn rules_equal_those_of_istio_cni_on_openshift() {
    the_rules_are_istios(Dns::Captured, PROXY);
}

#[test]
fn a_pod_with_ipv4_only_gets_no_ipv6_rules() {
    let world = World::new(Families::V4);
    world.add(&istio_cni(&story(&world, Dns::Captured, &[])));
    assert_eq!(world.iptables_save(Family::V4), ruleset(Family::V4, Dns::Captured, PROXY.uid));
    assert!(world.iptables_save(Family::V6).is_empty(), "{}", world.iptables_save(Family::V6));
}

/// Exclusions are not in the tables of iptables: these look as if istio-cni had made them.
#[test]
fn exclusions_do_not_change_istios_rules() {
    let world = World::new(Families::Both);
    world.add(&exclude_1337(&story(&world, Dns::Captured, &[])));
    for &family in world.families() {
        assert_eq!(world.iptables_save(family), ruleset(family, Dns::Captured, PROXY.uid), "{family:?}");
    }
    let tables = world.native_tables();
    assert!(tables.len() == 1 && tables[0].contains("meta skuid 1337 counter goto DETOUR_DIRECT"), "{tables:?}");
}

#[test]
fn iptables_finds_every_rule() {
    let world = World::new(Families::Both);
    let sub_plugins = json!([
        { "type": "istio-redirect" },
        { "type": "uid-exclude", "uids": ["1337", "2000-2999"], "rules": ["tcp:8000-8010:3000", "udp:53:4000"] },
        { "type": "dns-exclude", "resolvers": ["10.96.0.11", "fd96::b"] },
    ]);
    world.add(&chain(&story(&world, Dns::Captured, &[]), sub_plugins));
    for &family in world.families() {
        let rules = world.iptables_save(family);
        assert!(rules.rules().count() > 20, "{rules}");
        for (table, rule) in rules.rules() {
            let arguments: Vec<&str> = ["-t", table, "-C"].into_iter().chain(rule.split(' ')).collect();
            let (found, printed) = world.iptables(family, &arguments);
            assert!(found, "{family:?} {table}: {rule}: {printed}");
        }
    }
}

#[test]
fn rule_counters_count_packets() {
    let world = World::new(Families::Both);
    world.add(&exclude_1337(&story(&world, Dns::Captured, &[])));
    for &family in world.families() {
        for _ in 0..3 {
            world.pod_sends(pod::APP_PROCESS, Protocol::Tcp, SERVER.at(family, HTTPS));
        }
        let (listed, printed) = world.iptables(family, &["-t", "nat", "-L", "ISTIO_REDIRECT", "-n", "-v", "-x"]);
        assert!(listed, "{printed}");
        let rule = printed.lines().find(|line| line.contains("redir ports 15001")).expect("the rule is listed");
        assert_eq!(rule.split_whitespace().next(), Some("3"), "{printed}");
    }
}
