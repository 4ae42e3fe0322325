//! Both dialects say the same: whatever the policy, a packet fares alike under the rules as iptables
//! knows them and under the native ones. No kernel is asked; rules and packets are values.

mod as_iptables;
mod as_nftables;
mod packet;
#[path = "../support/mod.rs"]
mod support;

use support::drawn_policies as policy;

use detour_cni::firewall::native::{text, translate};
use detour_cni::firewall::rule::Family;
use detour_cni::firewall::{Ruleset, native::NativeTables};
use detour_cni::policy::{DnsCapture, Exclusion, IdRange, Interception, Policy, Redirect, TrafficOwner};
use packet::{Fate, Packet};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use std::collections::BTreeMap;

fn fares_alike(ruleset: &Ruleset, tables: &NativeTables, packet: &Packet) -> (Fate, Fate) {
    (as_iptables::fate(ruleset, packet), as_nftables::fate(tables, packet))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_packet_fares_alike_in_both(
        policy in policy::any(),
        packets in prop::collection::vec(packet::any(), 1..100),
        both in any::<bool>(),
    ) {
        let ruleset = Ruleset::of(&policy, if both { &Family::ALL } else { &[Family::Ip] });
        let tables = translate(&ruleset);
        for packet in &packets {
            let (iptables, nftables) = fares_alike(&ruleset, &tables, packet);
            prop_assert_eq!(iptables, nftables, "{:?}\n{}", packet, text(&tables));
        }
    }
}

/// The packets that are drawn do meet rules: every fate is met.
#[test]
fn every_fate_is_met() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut met: BTreeMap<&str, u32> = BTreeMap::new();
    for _ in 0..200 {
        let tree = policy::any().new_tree(&mut runner).expect("a policy");
        let ruleset = Ruleset::of(&tree.current(), &Family::ALL);
        for _ in 0..50 {
            let packet = packet::any().new_tree(&mut runner).expect("a packet").current();
            let fate = as_iptables::fate(&ruleset, &packet);
            for (name, is_met) in fate.names() {
                *met.entry(name).or_default() += u32::from(is_met);
            }
        }
    }
    assert!(met.values().all(|count| *count > 5), "{met:?}");
}

/// How the story's rules read: the proxy is 1000659999, and 1337 goes around it.
#[test]
fn the_storys_rules_read_as_they_should() {
    let redirect = Redirect {
        proxy_uid: vec![1_000_659_999],
        proxy_gid: vec![1_000_659_999],
        dns: DnsCapture::All,
        ..Redirect::default()
    };
    let owner = TrafficOwner::Uid(IdRange::one(1337));
    let exclusion = Exclusion { owner, destination: None, protocol: None, ports: Vec::new() };
    let policy = Policy {
        interception: Interception::On(Box::new(redirect)),
        exclusions: [exclusion].into(),
        dns_captured_elsewhere: None,
    };
    let tables = translate(&Ruleset::of(&policy, &Family::ALL));
    assert_eq!(text(&tables), include_str!("../golden/story.nft"));
}
