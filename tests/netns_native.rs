//! Native rules in a real kernel: what is committed over netlink is what `nft` itself makes of
//! the same rules in words, and is read back as it was meant.

mod support;

use detour_cni::firewall::native::{self, NativeTables, text, translate};
use detour_cni::firewall::nfnetlink::NfSocket;
use detour_cni::firewall::rule::Family;
use detour_cni::firewall::{CreatedTables, LiveRuleset, RuleFormat, Ruleset, Transaction};
use detour_cni::policy::{
    DnsCapture, Exclusion, IdRange, Policy, PortRange, Ports, Protocol, Ranges, Redirect, TrafficOwner,
};
use policies::{on, policies};
use scratch::{in_new_netns, tool};
use support::{new_netns as scratch, policies};

fn live() -> LiveRuleset {
    LiveRuleset::read(&mut NfSocket::open().expect("nfnetlink")).expect("readable")
}

fn plan(live: &LiveRuleset, desired: &Ruleset) -> Transaction {
    RuleFormat::Nftables.plan(live, &Ruleset::default(), desired, &CreatedTables::default())
}

fn converge(desired: &Ruleset) {
    let mut socket = NfSocket::open().expect("nfnetlink");
    let live = LiveRuleset::read(&mut socket).expect("readable");
    let plan = plan(&live, desired);
    plan.commit(&mut socket, &live).unwrap_or_else(|e| panic!("{e}: {plan:#?}"));
}

/// What is in the kernel, as the values that were meant.
fn found(live: &LiveRuleset) -> NativeTables {
    let chain = |chain: &native::NativeLiveChain| native::rule::NativeChain {
        hook: chain.hook.expect("a hook of ours"),
        rules: chain.rules.iter().map(|rule| rule.clone().expect("a rule of ours")).collect(),
    };
    let table = |(table, chains): (_, &std::collections::BTreeMap<_, _>)| {
        let chains = chains.iter().map(|(name, c): (&String, _)| (name.clone(), chain(c)));
        (table, chains.collect())
    };
    live.native.iter().map(|(t, chains)| table((*t, chains))).collect()
}

fn listed() -> String {
    tool("nft", &["--stateless", "--numeric", "list", "ruleset"], "")
}

#[test]
fn the_kernel_holds_what_nft_makes_of_the_same_rules() {
    for families in [&Family::ALL[..], &[Family::Ip]] {
        for (name, policy) in policies() {
            let ruleset = Ruleset::of(&policy, families);
            let tables = translate(&ruleset);
            let words = text(&tables);
            let by_nft = in_new_netns(move || {
                tool("nft", &["-f", "-"], &words);
                (found(&live()), listed())
            });
            let by_us = in_new_netns(move || {
                converge(&ruleset);
                let live = live();
                assert!(plan(&live, &ruleset).is_empty(), "what is there is final");
                assert!(RuleFormat::Nftables.drift(&live, &ruleset).is_empty());
                let listed = listed();
                tool("nft", &["--check", "-f", "-"], &listed);
                (found(&live), listed)
            });
            assert_eq!(by_us.0, tables, "{name}");
            assert_eq!(by_nft.0, tables, "{name}");
            assert_eq!(by_us.1, by_nft.1, "{name}");
        }
    }
}

#[test]
fn any_policy_turns_into_any_other_and_back_to_nothing() {
    in_new_netns(|| {
        let rulesets: Vec<Ruleset> = policies().iter().map(|(_, p)| Ruleset::of(p, &Family::ALL)).collect();
        for step in 0..rulesets.len() * 3 {
            let next = &rulesets[(step * 7) % rulesets.len()];
            converge(next);
            assert_eq!(found(&live()), translate(next));
        }
        converge(&Ruleset::default());
        assert_eq!(listed(), "");
    });
}

/// Istio's native rules lack this: there, IPv6 is caught in a pod where it should pass.
#[test]
fn rules_for_ipv4_only_catch_no_ipv6() {
    for (name, policy) in policies() {
        for chains in translate(&Ruleset::of(&policy, &[Family::Ip])).values() {
            let entered = chains.values().filter(|chain| chain.hook.is_some()).flat_map(|chain| &chain.rules);
            entered.for_each(|rule| assert_eq!(rule.family, Some(Family::Ip), "{name}: {rule}"));
            assert!(
                chains
                    .values()
                    .flat_map(|c| &c.rules)
                    .all(|r| r.action == native::rule::NativeAction::KeepDestination || r.family != Some(Family::Ip6))
            );
        }
    }
}

/// A policy with lists of `size` items each.
fn long(size: u16) -> Policy {
    let nets = |second: u8| {
        (0..size).map(move |i| format!("{}.{second}.{}.0/25", 20 + i / 200, i % 200 + 1).parse().expect("a CIDR"))
    };
    let nets6 = |first: u16| (0..size).map(move |i| format!("fd{first:x}:{i:x}:7::/48").parse().expect("a CIDR"));
    let ports = |first: u16| Ports::List((0..size).map(|i| PortRange::one(first + 2 * i)).collect());
    let exclusions = (0..u32::from(size)).flat_map(|i| {
        let of = |owner| Exclusion { owner, destination: None, protocol: None, ports: Vec::new() };
        let resolver = format!("10.{}.{}.{}", 100 + i / 65536, i / 256 % 256, i % 256).parse().expect("an address");
        let dns = Exclusion {
            destination: Some(std::net::IpAddr::V4(resolver).into()),
            ports: vec![PortRange::one(53)],
            ..of(TrafficOwner::Any)
        };
        let https = Exclusion {
            protocol: Some(Protocol::Tcp),
            ports: vec![PortRange::one(443)],
            ..of(TrafficOwner::Uid(IdRange::one(2_000_000 + 3 * i)))
        };
        [
            of(TrafficOwner::Uid(IdRange::one(1_000 + 3 * i))),
            of(TrafficOwner::Gid(IdRange::one(1_000 + 3 * i))),
            dns,
            https,
        ]
    });
    let policy = on(Redirect {
        dns: DnsCapture::All,
        outbound_ip_ranges_exclude: Ranges::List(nets(1).chain(nets6(1)).collect()),
        outbound_ip_ranges_include: Ranges::List(nets(3).chain(nets6(2)).collect()),
        outbound_ports_exclude: ports(30_000),
        outbound_ports_include: ports(40_000),
        inbound_ports_exclude: ports(50_000),
        ..Redirect::default()
    });
    Policy { exclusions: exclusions.collect(), ..policy }
}

#[test]
fn the_number_of_rules_does_not_grow_with_the_lists() {
    let rules = |size| {
        translate(&Ruleset::of(&long(size), &Family::ALL))
            .values()
            .flat_map(|t| t.values())
            .map(|c| c.rules.len())
            .sum::<usize>()
    };
    assert_eq!(rules(1000), rules(2));
}

#[test]
fn the_kernel_takes_long_lists_and_gives_them_back() {
    in_new_netns(|| {
        let ruleset = Ruleset::of(&long(3000), &Family::ALL);
        converge(&ruleset);
        assert_eq!(found(&live()), translate(&ruleset));
    });
}

#[test]
fn drift_names_the_rule_as_nft_writes_it() {
    in_new_netns(|| {
        let ruleset = Ruleset::of(&on(Redirect::default()), &Family::ALL);
        converge(&ruleset);
        tool(
            "nft",
            &["-f", "-"],
            "flush chain inet detour-nat ISTIO_REDIRECT\nadd rule inet detour-nat ISTIO_IN_REDIRECT counter accept\nadd rule inet detour-nat OUTPUT ip ttl 5 accept\nadd chain inet detour-nat mine",
        );
        let drift = RuleFormat::Nftables.drift(&live(), &ruleset);
        let mut lines: Vec<String> = drift.iter().map(ToString::to_string).collect();
        lines.sort();
        let expected = [
            "extra: inet detour-nat ISTIO_IN_REDIRECT counter accept",
            "extra: inet detour-nat OUTPUT (a foreign rule)",
            "extra: inet detour-nat chain mine",
            "missing: inet detour-nat ISTIO_REDIRECT meta l4proto tcp counter redirect to :15001",
        ];
        assert_eq!(lines, expected);
        converge(&ruleset);
        assert!(RuleFormat::Nftables.drift(&live(), &ruleset).is_empty());
    });
}
