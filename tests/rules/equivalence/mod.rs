//! Both rule formats are equivalent: for any policy, a packet has the same outcome under the iptables rules and the
//! native ones. Rules and packets are values here; the kernel is not involved.

mod as_iptables;
mod as_nftables;
mod packet;

use crate::support::drawn_policies as policy;

use detour_cni::firewall::native::text;
use detour_cni::firewall::rule::{Family, Hook, protocol_number};
use detour_cni::firewall::{RuleFormat, Ruleset, native::NativeTables};
use detour_cni::policy::{DnsCapture, Exclusion, IdRange, Interception, Policy, PortRange, Redirect, TrafficOwner};
use packet::{Outcome, Packet};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use std::collections::{BTreeMap, BTreeSet};

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
        let tables = RuleFormat::Nftables.native(&ruleset);
        for packet in &packets {
            let (iptables, nftables) = outcomes(&ruleset, &tables, packet);
            prop_assert_eq!(iptables, nftables, "{:?}\n{}", packet, text(&tables));
        }
    }
}

/// The mark of ztunnel's own packets.
const ZTUNNEL_MARK: u32 = 0x539;

/// Returns whether an exclusion of the policy applies to a packet that leaves through another interface than lo.
fn is_excluded(policy: &Policy, packet: &Packet) -> bool {
    if policy.ambient && packet.mark == ZTUNNEL_MARK {
        return false;
    }
    let has_ports = [6, 17].contains(&packet.protocol);
    policy.exclusions.iter().any(|Exclusion { owner, destination, protocol, ports }| {
        let within = |ids: &IdRange, id: u32| ids.first <= id && id <= ids.last;
        let by_owner = match owner {
            TrafficOwner::Any => true,
            TrafficOwner::Uid(ids) => within(ids, packet.uid),
            TrafficOwner::Gid(ids) => within(ids, packet.gid),
        };
        let port = |range: &PortRange| range.first <= packet.destination_port && packet.destination_port <= range.last;
        by_owner
            && destination.is_none_or(|net| net.contains(&packet.destination))
            && protocol.is_none_or(|protocol| protocol_number(protocol) == packet.protocol)
            && (ports.is_empty() || (has_ports && ports.iter().any(port)))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Exclusions exclude what they say, and change nothing else.
    #[test]
    fn an_excluded_packet_keeps_its_destination_and_all_others_have_the_outcome_without_exclusions(
        policy in policy::any(),
        packets in prop::collection::vec(packet::any(), 1..100),
    ) {
        let without = Ruleset::of(&Policy { exclusions: BTreeSet::new(), ..policy.clone() }, &Family::ALL);
        let with = Ruleset::of(&policy, &Family::ALL);
        let outgoing = |packet: &&Packet| packet.hook == Hook::Output && packet.interface != "lo";
        for packet in packets.iter().filter(outgoing) {
            let (before, after) = (as_iptables::outcome(&without, packet), as_iptables::outcome(&with, packet));
            if is_excluded(&policy, packet) && !policy.is_empty() {
                prop_assert_eq!(after.redirected_to, None, "{:?}", packet);
                let in_proxys_zone = before.zone.is_some() && packet.destination_port == 53;
                prop_assert!(!in_proxys_zone || after.zone == Some(1), "{:?}: {:?}", packet, after);
            } else {
                prop_assert_eq!(after, before, "{:?}", packet);
            }
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
    let tables = RuleFormat::Nftables.native(&Ruleset::of(&policy, &Family::ALL));
    assert_eq!(text(&tables), include_str!("../../golden/story.nft"));
}
