//! The rule format `iptables` in a real kernel: committed rules equal those that iptables itself writes for the same
//! text, and are read back as the same values.

use crate::support::{new_netns as scratch, policies};
use crate::{Choices, drawn};
use detour_cni::firewall::nfnetlink::{NfError, NfSocket};
use detour_cni::firewall::rule::{Family, Name, Table};
use detour_cni::firewall::{CreatedTables, LiveRule, LiveRuleset, Outline, RuleFormat, Ruleset, Transaction};
use detour_cni::netlink::DumpLimit;
use detour_cni::policy::Policy;
use policies::policies;
use proptest::prelude::*;
use scratch::{in_new_netns, tool};
use std::fmt::Write as _;

fn restore_text(ruleset: &Ruleset, family: Family) -> String {
    let mut text = String::new();
    for ((_, table), rules) in ruleset.tables.iter().filter(|((f, _), _)| *f == family) {
        writeln!(text, "*{}", table.name()).expect("text");
        for (chain, _) in &rules.chains {
            writeln!(text, ":{chain} - [0:0]").expect("text");
        }
        for (hook, rules) in &rules.hooks {
            rules.iter().for_each(|rule| writeln!(text, "-A {} {}", hook.chain(), rule.iptables_text()).expect("text"));
        }
        for (chain, rules) in &rules.chains {
            rules.iter().for_each(|rule| writeln!(text, "-A {chain} {}", rule.iptables_text()).expect("text"));
        }
        writeln!(text, "COMMIT").expect("text");
    }
    text
}

/// Returns rules only, without comments, counters, and built-in chains that the tool creates as a side effect.
fn saved(v6: bool) -> Vec<String> {
    let text = tool(if v6 { "ip6tables-save" } else { "iptables-save" }, &[], "");
    text.lines().filter(|l| !l.starts_with('#') && !l.contains(" ACCEPT [")).map(str::to_owned).collect()
}

fn commit(previous: &Ruleset, desired: &Ruleset, made: &CreatedTables) {
    let mut socket = NfSocket::open().expect("nfnetlink");
    let live = LiveRuleset::read(&mut socket).expect("readable");
    plan(&live, previous, desired, made).commit(&mut socket, &live).expect("accepted");
}

fn plan<'a>(live: &'a LiveRuleset, previous: &Ruleset, desired: &'a Ruleset, made: &CreatedTables) -> Transaction<'a> {
    RuleFormat::Iptables.plan(live, previous, desired, made)
}

fn live() -> LiveRuleset {
    LiveRuleset::read(&mut NfSocket::open().expect("nfnetlink")).expect("readable")
}

type Chains = Vec<(Family, Table, String, Vec<Result<detour_cni::firewall::rule::Rule, Outline>>)>;

fn chains(live: &LiveRuleset) -> Chains {
    let rules = |rules: &[LiveRule]| rules.iter().map(|r| r.rule.clone()).collect::<Vec<_>>();
    let all = live.chains().map(|(f, t, name, chain)| (f, t, name.to_owned(), rules(&chain.rules)));
    all.filter(|(_, _, name, rules)| !rules.is_empty() || name.contains('_')).collect()
}

fn assert_equals_iptables(name: &str, policy: &Policy) {
    let ruleset = Ruleset::of(policy, &Family::ALL);
    let [v4, v6] = Family::ALL.map(|family| restore_text(&ruleset, family));
    let expected = in_new_netns(move || {
        tool("iptables-restore", &[], &v4);
        tool("ip6tables-restore", &[], &v6);
        (chains(&live()), saved(false), saved(true))
    });
    let found = in_new_netns(move || {
        commit(&Ruleset::default(), &ruleset, &CreatedTables::default());
        (chains(&live()), saved(false), saved(true))
    });
    assert_eq!(found.1, expected.1, "{name}");
    assert_eq!(found.2, expected.2, "{name}");
    assert_eq!(found.0, expected.0, "{name}");
    assert!(found.0.iter().all(|(_, _, _, rules)| rules.iter().all(Result::is_ok)), "{name}: {:?}", found.0);
}

#[test]
fn committed_rules_equal_those_that_iptables_writes() {
    policies().iter().for_each(|(name, policy)| assert_equals_iptables(name, policy));
}

/// iptables compares the bytes of matches and targets, of which iptables-save shows only the meaning.
#[test]
fn iptables_finds_every_committed_rule() {
    for (_, policy) in policies() {
        let ruleset = Ruleset::of(&policy, &Family::ALL);
        in_new_netns(move || {
            commit(&Ruleset::default(), &ruleset, &CreatedTables::default());
            for ((family, table), rules) in &ruleset.tables {
                let program = if *family == Family::Ip { "iptables" } else { "ip6tables" };
                let hooks = rules.hooks.iter().map(|(hook, rules)| (hook.chain(), rules));
                let chains = rules.chains.iter().map(|(chain, rules)| (&**chain, rules));
                for (chain, rule) in
                    hooks.chain(chains).flat_map(|(chain, rules)| rules.iter().map(move |r| (chain, r)))
                {
                    let arguments = format!("-t {} -C {chain} {}", table.name(), rule.iptables_text());
                    tool(program, &arguments.split(' ').collect::<Vec<_>>(), "");
                }
            }
        });
    }
}

/// Random policies from few ports, addresses and owners, so that their parts overlap.
fn any_policy() -> impl Strategy<Value = Policy> {
    prop::collection::vec(any::<u8>(), 0..400).prop_map(|choices| drawn::policy(&mut Choices::new(&choices)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn committed_rules_equal_those_that_iptables_writes_for_any_policy(policy in any_policy()) {
        assert_equals_iptables("random", &policy);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10))]

    #[test]
    fn any_policy_can_replace_any_other_in_both_formats(policies in prop::collection::vec(any_policy(), 2..4)) {
        for format in [RuleFormat::Iptables, RuleFormat::Nftables] {
            let policies = policies.clone();
            in_new_netns(move || change_all(format, &policies));
        }
    }
}

/// Commits one policy after the other, and then none.
fn change_all(format: RuleFormat, policies: &[Policy]) {
    let (mut previous, mut made) = (Ruleset::default(), CreatedTables::default());
    for policy in policies.iter().chain([&Policy::default()]) {
        let (before, desired) = (live(), Ruleset::of(policy, &Family::ALL));
        if format == RuleFormat::Iptables {
            made.add(&CreatedTables::missing_in(&desired, &before));
        }
        let changes = format.plan(&before, &previous, &desired, &made);
        changes.commit(&mut NfSocket::open().expect("nfnetlink"), &before).expect("accepted");
        let after = live();
        assert_eq!(format.drift(&after, &desired), []);
        assert!(format.plan(&after, &desired, &desired, &made).is_empty(), "{policy:?} is final");
        previous = desired;
    }
    assert!(live().tables.is_empty() && live().native.is_empty(), "{:?}", live());
}

#[test]
fn rules_of_other_tables_are_not_read() {
    let (_, policy) = policies().into_iter().next_back().expect("a policy");
    let ruleset = Ruleset::of(&policy, &Family::ALL);
    in_new_netns(move || {
        commit(&Ruleset::default(), &ruleset, &CreatedTables::default());
        let alone = chains(&live());
        let rules: String = (0..500).map(|_| "add rule inet mine c accept\n").collect();
        tool("nft", &["-f", "-"], &format!("table inet mine {{ chain c {{ }}\n}}\n{rules}"));
        let few = DumpLimit { objects: 400, ..DumpLimit::USUAL };
        let live = LiveRuleset::read_within(few, &mut NfSocket::open().expect("nfnetlink")).expect("readable");
        assert_eq!(chains(&live), alone);
    });
}

#[test]
fn a_socket_can_be_used_after_a_dump_exceeded_its_limit() {
    in_new_netns(|| {
        let rules: String = (0..5000).map(|_| "add rule ip nat OUTPUT accept\n").collect();
        tool("nft", &["-f", "-"], &format!("table ip nat {{ chain OUTPUT {{ }}\n}}\n{rules}"));
        let mut socket = NfSocket::open().expect("nfnetlink");
        for few in [DumpLimit { objects: 100, ..DumpLimit::USUAL }, DumpLimit { bytes: 10_000, ..DumpLimit::USUAL }] {
            assert_eq!(LiveRuleset::read_within(few, &mut socket), Err(NfError::TooMany(few)));
        }
        assert_eq!(
            LiveRuleset::read(&mut socket).expect("readable").rules(Family::Ip, Table::Nat, "OUTPUT").len(),
            5000
        );
    });
}

/// A chain of detour with many extra rules is flushed and written again.
#[test]
fn chains_with_many_extra_rules_are_corrected() {
    let (_, policy) = policies().into_iter().next_back().expect("a policy");
    let ruleset = Ruleset::of(&policy, &Family::ALL);
    in_new_netns(move || {
        commit(&Ruleset::default(), &ruleset, &CreatedTables::default());
        let fresh = chains(&live());
        for ((family, table), rules) in &ruleset.tables {
            let extra = |(name, _): &(Name, _)| format!("add rule {} {} {name} drop\n", family.name(), table.name());
            let extra: String = rules.chains.iter().map(|chain| extra(chain).repeat(300)).collect();
            tool("nft", &["-f", "-"], &extra);
        }
        assert_ne!(chains(&live()), fresh);
        let steps = plan(&live(), &ruleset, &ruleset, &CreatedTables::default()).len();
        assert!(steps < 300, "{steps} steps");
        commit(&ruleset, &ruleset, &CreatedTables::default());
        assert_eq!(chains(&live()), fresh);
    });
}
