//! Both rule formats are equivalent: for any policy, a packet has the same outcome under the iptables rules and the
//! native ones. Rules and packets are values here; the kernel is not involved.

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
use packet::{Outcome, Packet};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use std::collections::BTreeMap;

fn outcomes(ruleset: &Ruleset, tables: &NativeTables, packet: &Packet) -> (Outcome, Outcome) {
    (as_iptables::outcome(ruleset, packet), as_nftables::outcome(tables, packet))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_packet_has_the_same_outcome_in_both_formats(
        policy in policy::any(),
        packets in prop::collection::vec(packet::any(), 1..100),
        both in any::<bool>(),
    ) {
        let ruleset = Ruleset::of(&policy, if both { &Family::ALL } else { &[Family::Ip] });
        let tables = translate(&ruleset);
        for packet in &packets {
            let (iptables, nftables) = outcomes(&ruleset, &tables, packet);
            prop_assert_eq!(iptables, nftables, "{:?}\n{}", packet, text(&tables));
        }
    }
}

/// The random packets do match rules.
#[test]
fn every_kind_of_outcome_occurs() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut met: BTreeMap<&str, u32> = BTreeMap::new();
    for _ in 0..200 {
        let tree = policy::any().new_tree(&mut runner).expect("a policy");
        let ruleset = Ruleset::of(&tree.current(), &Family::ALL);
        for _ in 0..50 {
            let packet = packet::any().new_tree(&mut runner).expect("a packet").current();
            let outcome = as_iptables::outcome(&ruleset, &packet);
            for (name, is_met) in outcome.names() {
                *met.entry(name).or_default() += u32::from(is_met);
            }
        }
    }
    assert!(met.values().all(|count| *count > 5), "{met:?}");
}

/// The proxy has UID 1000659999, and UID 1337 is excluded.
#[test]
fn the_rules_of_the_readme_example_match_the_golden_file() {
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
        ..Policy::default()
    };
    let tables = translate(&Ruleset::of(&policy, &Family::ALL));
    assert_eq!(text(&tables), include_str!("../golden/story.nft"));
}
