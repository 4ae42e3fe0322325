//! The rule format `nftables` in a real kernel: committed rules equal those that `nft` writes for the same text, and
//! are read back as the same values.

use crate::support::{new_netns as scratch, policies};
use detour_cni::cni::Code;
use detour_cni::firewall::native::rule::NativeTable;
use detour_cni::firewall::native::{self, NativeTables, text};
use detour_cni::firewall::nfnetlink::{NfError, NfSocket};
use detour_cni::firewall::rule::Family;
use detour_cni::firewall::{
    ContainerElement, CreatedTables, LiveRuleset, RuleFormat, Ruleset, Transaction, change_container_elements,
    container_elements,
};
use detour_cni::policy::ContainerScope::{self, All, Dns};
use detour_cni::policy::{
    DnsCapture, Exclusion, IdRange, Interception, Policy, PortRange, Ports, Protocol, Ranges, Redirect, TrafficOwner,
};
use policies::{on, policies};
use scratch::{in_new_netns, tool};

fn translate(ruleset: &Ruleset) -> NativeTables {
    RuleFormat::Nftables.native(ruleset)
}

fn live() -> LiveRuleset {
    LiveRuleset::read(&mut NfSocket::open().expect("nfnetlink")).expect("readable")
}

fn plan<'a>(live: &'a LiveRuleset, desired: &'a Ruleset) -> Transaction<'a> {
    RuleFormat::Nftables.plan(live, &Ruleset::default(), desired, &CreatedTables::default())
}

fn commit(desired: &Ruleset) {
    let mut socket = NfSocket::open().expect("nfnetlink");
    let live = LiveRuleset::read(&mut socket).expect("readable");
    let plan = plan(&live, desired);
    plan.commit(&mut socket, &live).unwrap_or_else(|e| panic!("{e}: {plan:#?}"));
}

/// Returns the live native tables as values.
fn found(live: &LiveRuleset) -> NativeTables {
    let chain = |chain: &native::NativeLiveChain| native::rule::NativeChain {
        hook: chain.hook.expect("a hook of ours"),
        rules: chain.rules.iter().map(|rule| rule.rule.clone().expect("a rule of ours")).collect(),
    };
    let table = |(table, chains): (_, &std::collections::BTreeMap<_, _>)| {
        let chains = chains.iter().map(|(name, c): (&String, _)| (name.clone().into(), chain(c)));
        (table, chains.collect())
    };
    live.native.iter().map(|(t, chains)| table((*t, chains))).collect()
}

fn listed() -> String {
    tool("nft", &["--stateless", "--numeric", "list", "ruleset"], "")
}

#[test]
fn committed_rules_equal_those_that_nft_writes() {
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
                commit(&ruleset);
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

/// A packet passes either the old or the new rules: base chains are neither detached nor attached by a change.
#[test]
fn a_change_fills_the_same_base_chains_again() {
    in_new_netns(|| {
        let exclusion = |port| Exclusion {
            owner: TrafficOwner::Any,
            destination: None,
            protocol: None,
            ports: vec![PortRange::one(port)],
        };
        let policy = |port: u16, scopes: &[ContainerScope]| {
            let ports = Ports::List(vec![PortRange::one(port)]);
            let redirect = Redirect { dns: DnsCapture::All, outbound_ports_exclude: ports, ..Redirect::default() };
            let policy = Policy { exclusions: [exclusion(port)].into(), ..on(redirect) };
            Ruleset::of(&policies::excluding_containers(scopes, policy), &Family::ALL)
        };
        commit(&policy(443, &[All]));
        change(&[], &[ContainerElement::new(All, 7, "vault", ID)]);
        for next in [policy(444, &[All]), policy(444, &[All, Dns]), policy(53, &[All]), policy(53, &[All])] {
            let live = live();
            let plan = plan(&live, &next);
            let changes: Vec<String> = (0..plan.len()).filter_map(|index| plan.describe(index)).collect();
            let detaches = |change: &&String| {
                change.contains("table inet")
                    || change.contains("create chain")
                        && change.ends_with("OUTPUT")
                        && !change.ends_with("DETOUR_OUTPUT")
                        && !change.ends_with("ISTIO_OUTPUT")
            };
            assert_eq!(changes.iter().find(detaches), None, "{changes:#?}");
            commit(&next);
            assert_eq!(found(&self::live()), translate(&next));
            assert_eq!(elements().len(), 1);
        }
    });
}

/// Istio's native rules capture IPv6 in such a pod by mistake.
#[test]
fn rules_for_ipv4_only_do_not_match_ipv6() {
    for (name, policy) in policies() {
        let mut tables = translate(&Ruleset::of(&policy, &[Family::Ip]));
        // Exclusions apply to both families.
        tables.remove(&NativeTable::Exclusions);
        for chains in tables.values() {
            let entered = chains.values().filter(|chain| chain.hook.is_some()).flat_map(|chain| &chain.rules);
            entered.for_each(|rule| assert_eq!(rule.family, Some(Family::Ip), "{name}: {rule}"));
            assert!(chains.values().flat_map(|c| &c.rules).all(|r| r.family != Some(Family::Ip6)));
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
fn long_lists_are_committed_and_read_back() {
    in_new_netns(|| {
        let ruleset = Ruleset::of(&long(3000), &Family::ALL);
        commit(&ruleset);
        assert_eq!(found(&live()), translate(&ruleset));
    });
}

#[test]
fn drift_names_the_rule_as_nft_writes_it() {
    in_new_netns(|| {
        let ruleset = Ruleset::of(&on(Redirect::default()), &Family::ALL);
        commit(&ruleset);
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
        commit(&ruleset);
        assert!(RuleFormat::Nftables.drift(&live(), &ruleset).is_empty());
    });
}

/// `flags dormant` detaches all chains of a table.
#[test]
fn a_table_that_is_switched_off_has_drifted_and_is_written_again() {
    in_new_netns(|| {
        let policy =
            policies::excluding_containers(&[All], on(Redirect { dns: DnsCapture::All, ..Redirect::default() }));
        let ruleset = Ruleset::of(&policy, &Family::ALL);
        for table in ["detour-exclusions", "detour-nat", "detour-raw"] {
            commit(&ruleset);
            tool("nft", &["add", "table", "inet", table, "{ flags dormant; }"], "");
            let drift = RuleFormat::Nftables.drift(&live(), &ruleset);
            let expected = format!("wrong hook or priority: inet {table} chain ");
            assert!(!drift.is_empty() && drift.iter().all(|d| d.to_string().starts_with(&expected)), "{drift:?}");
        }
        commit(&ruleset);
        assert!(RuleFormat::Nftables.drift(&live(), &ruleset).is_empty());
    });
}

fn with_containers(scopes: &[ContainerScope]) -> Ruleset {
    Ruleset::of(&policies::excluding_containers(scopes, Policy::default()), &Family::ALL)
}

const ID: &str = "0123456789abcdef0123456789abcdef";

fn change(remove: &[ContainerElement], add: &[ContainerElement]) {
    change_container_elements(remove, add).unwrap_or_else(|error| panic!("{error}"));
}

fn elements() -> Vec<ContainerElement> {
    let mut elements = container_elements().unwrap_or_else(|error| panic!("{error}"));
    elements.sort();
    elements
}

#[test]
fn elements_can_be_added_and_removed_repeatedly() {
    in_new_netns(|| {
        commit(&with_containers(&[All, Dns]));
        let [a, b] = [1, 2].map(|cgroup| ContainerElement::new(All, cgroup, "vault", ID));
        let in_dns = ContainerElement::new(Dns, 1, "vault", ID);
        for _ in 0..2 {
            change(&[], &[a.clone(), b.clone(), in_dns.clone()]);
            assert_eq!(elements(), [in_dns.clone(), a.clone(), b.clone()]);
        }
        assert_eq!(live().containers.len(), 3);
        for _ in 0..2 {
            change(std::slice::from_ref(&a), std::slice::from_ref(&b));
            assert_eq!(elements(), [in_dns.clone(), b.clone()]);
        }
        // A control group moves to another set in one transaction.
        change(std::slice::from_ref(&in_dns), std::slice::from_ref(&a));
        assert_eq!(elements(), [a.clone(), b]);
        let other = ContainerElement::new(All, 1, "other", ID);
        change(&[], std::slice::from_ref(&other));
        assert_eq!(elements()[0], other);
        assert_ne!(other, a);
    });
}

/// A process in the pod may add elements with any comment.
#[test]
fn an_element_names_its_container_and_a_foreign_one_has_none() {
    in_new_netns(|| {
        commit(&with_containers(&[All]));
        let own = ContainerElement::new(All, u64::MAX - 1, "vault-agent-init", ID);
        change(&[], std::slice::from_ref(&own));
        let listed = listed();
        assert!(listed.contains("comment \"vault-agent-init 0123456789abcdef\""), "{listed}");
        change(&[own], &[]);
        let foreign = ContainerElement { container: None, ..ContainerElement::new(All, 7, "", "") };
        change(&[], std::slice::from_ref(&foreign));
        assert_eq!(elements(), std::slice::from_ref(&foreign));
        change(&[foreign], &[]);
        assert_eq!(elements(), []);
    });
}

#[test]
fn elements_of_a_missing_table_are_none_and_none_can_be_added() {
    in_new_netns(|| {
        let element = ContainerElement::new(All, 1, "vault", ID);
        assert_eq!(elements(), []);
        change(std::slice::from_ref(&element), &[]);
        let error = change_container_elements(&[], std::slice::from_ref(&element)).expect_err("no table");
        assert_eq!(error.code, Code::Drift);
        assert!(error.msg.contains("table inet detour-exclusions"), "{error}");
        // Another scope: the table exists without the set.
        commit(&with_containers(&[Dns]));
        change_container_elements(&[], &[element]).expect_err("no set");
    });
}

#[test]
fn a_full_set_refuses_another_element() {
    in_new_netns(|| {
        commit(&with_containers(&[All]));
        let all: Vec<_> = (1..=1024).map(|cgroup| ContainerElement::new(All, cgroup, "vault", ID)).collect();
        change(&[], &all);
        let one_more = ContainerElement::new(All, 1025, "vault", ID);
        let error = change_container_elements(&[], std::slice::from_ref(&one_more)).expect_err("it is full");
        assert!(error.msg.contains("full"), "{error}");
        change(&all[..1], &[one_more]);
        assert_eq!(elements().len(), 1024);
        // The table is written again with all of them.
        commit(&with_containers(&[All, Dns]));
        assert_eq!(elements().len(), 1024);
    });
}

/// The agent and the plugin change the table at the same time.
#[test]
fn concurrent_changes_are_all_made() {
    in_new_netns(|| {
        commit(&with_containers(&[All]));
        let netns = std::fs::File::open("/proc/thread-self/ns/net").expect("the namespace of this thread");
        let enter = || nix::sched::setns(&netns, nix::sched::CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
        let element = |cgroup| ContainerElement::new(All, cgroup, "vault", ID);
        std::thread::scope(|scope| {
            for writer in 0..3_u64 {
                scope.spawn(move || {
                    enter();
                    for number in 0..40 {
                        change(&[], &[element(100 * writer + 2 * number + 1), element(100 * writer + 2 * number)]);
                        change(&[element(100 * writer + 2 * number)], &[]);
                    }
                });
            }
            for round in 0..40 {
                commit_retrying(&with_containers(if round % 2 == 0 { &[All, Dns] } else { &[All] }));
            }
        });
        assert_eq!(elements().len(), 120);
    });
}

/// Commits, and reads the rules again if another thread changed them.
fn commit_retrying(desired: &Ruleset) {
    let mut socket = NfSocket::open().expect("nfnetlink");
    for _ in 0..1000 {
        let Ok(live) = LiveRuleset::read(&mut socket) else { continue };
        match plan(&live, desired).commit(&mut socket, &live) {
            Err(NfError::Changed) => {}
            other => return other.unwrap_or_else(|error| panic!("{error}")),
        }
    }
    panic!("the rules keep changing");
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
    assert_eq!(text(&translate(&Ruleset::of(&policy, &Family::ALL))), include_str!("../golden/story.nft"));
}
