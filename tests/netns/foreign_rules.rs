//! Tests of the test setup: Istio's own rules, loaded by iptables-restore, have their known effects. No plugin is
//! called here.

use crate::expectations::*;
use crate::istio::{DEFAULT_OWNER, Dns, redirected_world, rules, ruleset};
use crate::pod::{APP_PROCESS, PROXY, VAULT_INIT};
use crate::world::*;

#[test]
fn without_rules_everything_is_direct() {
    let world = World::new(Families::Both);
    tcp_is_direct(&world, APP_PROCESS);
    dns_is_direct(&world, APP_PROCESS, RESOLVER);
    the_rest_is_direct(&world, APP_PROCESS);
    for &family in world.families() {
        assert!(world.iptables_save(family).is_empty());
        let to = POD.at(family, APP);
        assert_eq!(world.outside_sends(Protocol::Tcp, to), Arrival::direct(to, GATEWAY.ip(family)));
    }
}

#[test]
fn packets_of_a_missing_family_are_lost() {
    let world = World::new(Families::V4);
    let to = SERVER.at(Family::V6, HTTPS);
    assert_eq!(world.pod_sends(APP_PROCESS, Protocol::Tcp, to), Arrival::Lost("unreachable".to_owned()));
    let world = World::new(Families::V6);
    tcp_is_direct(&world, APP_PROCESS);
}

#[test]
fn the_golden_rules_equal_the_output_of_iptables_save() {
    for dns in [Dns::Captured, Dns::Left] {
        let world = World::new(Families::Both);
        for &family in world.families() {
            world.iptables_restore(family, &rules(family, dns, DEFAULT_OWNER));
            assert_eq!(world.iptables_save(family), ruleset(family, dns, DEFAULT_OWNER));
            assert_eq!(world.iptables_save(family).to_string(), rules(family, dns, DEFAULT_OWNER));
        }
    }
}

#[test]
fn istio_redirects_tcp_both_ways() {
    let world = redirected_world(Dns::Left);
    tcp_is_captured(&world, APP_PROCESS);
    tcp_is_direct(&world, PROXY);
    inbound_is_captured(&world);
    the_rest_is_direct(&world, APP_PROCESS);
    loopback_is_as_istio_has_it(&world, APP_PROCESS, PROXY);
}

#[test]
fn istio_captures_dns() {
    let world = redirected_world(Dns::Captured);
    dns_is_captured(&world, APP_PROCESS, RESOLVER);
    dns_is_captured(&world, APP_PROCESS, OTHER_RESOLVER);
    dns_is_direct(&world, PROXY, RESOLVER);
    inbound_is_captured(&world);
    loopback_is_as_istio_has_it(&world, APP_PROCESS, PROXY);
}

#[test]
fn the_proxys_own_query_leaves_one_replied_entry() {
    a_query_leaves_one_replied_entry(&redirected_world(Dns::Captured), PROXY, RESOLVER);
}

/// On OpenShift, the proxy has another UID, so UID 1337 is captured.
#[test]
fn istio_captures_uid_1337_if_the_proxy_has_another_uid() {
    let world = redirected_world(Dns::Captured);
    tcp_is_captured(&world, VAULT_INIT);
    dns_is_captured(&world, VAULT_INIT, RESOLVER);
}

/// A RETURN ends its own netfilter chain, not the calling one.
#[test]
fn a_return_in_a_separate_chain_does_not_exclude() {
    let world = redirected_world(Dns::Left);
    for &family in world.families() {
        let owner = format!("-m owner --uid-owner {}", VAULT_INIT.uid);
        world.iptables_restore(
            family,
            &format!("*nat\n:MINE - [0:0]\n-I OUTPUT -j MINE\n-A MINE {owner} -j RETURN\nCOMMIT\n"),
        );
    }
    tcp_is_captured(&world, VAULT_INIT);
    for &family in world.families() {
        world.iptables_restore(family, "*nat\n-A MINE -j ACCEPT\nCOMMIT\n");
    }
    tcp_is_direct(&world, APP_PROCESS);
}

/// An exclusion in nat alone lets the query through, but its two directions are tracked as two connections.
#[test]
fn an_exclusion_in_nat_alone_leaves_two_unreplied_entries() {
    let world = redirected_world(Dns::Captured);
    for &family in world.families() {
        exclude_in_nat(&world, family);
        let to = RESOLVER.at(family, DNS);
        assert_eq!(world.pod_sends(VAULT_INIT, Protocol::Udp, to), Arrival::direct(to, POD.ip(family)));
        let query = world.datagrams_to(to);
        assert!(query.len() == 1 && !query[0].replied && query[0].zone == 2, "{query:#?}");
        let answer: Vec<Entry> = world.conntrack().into_iter().filter(|e| e.source == to.ip()).collect();
        assert!(answer.len() == 1 && !answer[0].replied && answer[0].zone == 1, "{answer:#?}");
    }
}

#[test]
fn an_exclusion_in_nat_and_zone_1_in_raw_leaves_one_replied_entry() {
    let world = redirected_world(Dns::Captured);
    for &family in world.families() {
        exclude_in_nat(&world, family);
        let owner = format!("-m owner --uid-owner {}", VAULT_INIT.uid);
        let zone = format!("*raw\n-I OUTPUT -p udp --dport 53 {owner} -j CT --zone 1\nCOMMIT\n");
        world.iptables_restore(family, &zone);
    }
    a_query_leaves_one_replied_entry(&world, VAULT_INIT, RESOLVER);
    dns_is_captured(&world, APP_PROCESS, RESOLVER);
}

fn exclude_in_nat(world: &World, family: Family) {
    let owner = format!("-m owner --uid-owner {}", VAULT_INIT.uid);
    world.iptables_restore(family, &format!("*nat\n-I OUTPUT {owner} -j RETURN\nCOMMIT\n"));
}
