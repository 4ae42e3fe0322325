//! Rules in a real kernel: what is committed over netlink is what iptables itself would have made
//! of the same rules, and is read back as it was meant.

use detour_cni::firewall::nfnetlink::Socket;
use detour_cni::firewall::rule::{Family, Table};
use detour_cni::firewall::{Live, LiveRule, Made, Ruleset, changes, commit};
use detour_cni::policy::{
    DnsCapture, Exclusion, Groups, IdRange, Interception, InterceptionMode, Owner, Policy, PortRange, Ports, Protocol,
    Ranges, Redirect,
};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

/// Runs `work` in a network namespace that goes with the thread.
fn in_new_netns<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
        work()
    });
    thread.join().expect("the work in the namespace succeeds")
}

fn tool(name: &str, args: &[&str], input: &str) -> String {
    let mut child = Command::new(name)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{name} is needed: {e}"));
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("writable");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{name} {args:?}: {}\n{input}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn restore_text(ruleset: &Ruleset, family: Family) -> String {
    let mut text = String::new();
    for ((_, table), rules) in ruleset.tables.iter().filter(|((f, _), _)| *f == family) {
        writeln!(text, "*{}", table.name()).expect("text");
        for (chain, _) in &rules.chains {
            writeln!(text, ":{chain} - [0:0]").expect("text");
        }
        for (hook, rules) in &rules.hooks {
            rules.iter().for_each(|rule| writeln!(text, "-A {} {rule}", hook.chain()).expect("text"));
        }
        for (chain, rules) in &rules.chains {
            rules.iter().for_each(|rule| writeln!(text, "-A {chain} {rule}").expect("text"));
        }
        writeln!(text, "COMMIT").expect("text");
    }
    text
}

/// Rules only, without comments, counters and built-in chains that the tool makes in passing.
fn saved(v6: bool) -> Vec<String> {
    let text = tool(if v6 { "ip6tables-save" } else { "iptables-save" }, &[], "");
    text.lines().filter(|l| !l.starts_with('#') && !l.contains(" ACCEPT [")).map(str::to_owned).collect()
}

fn converge(previous: &Ruleset, desired: &Ruleset, made: &Made) {
    let mut socket = Socket::open().expect("nfnetlink");
    let live = Live::read(&mut socket).expect("readable");
    commit(&mut socket, &live, &changes(&live, previous, desired, made)).expect("accepted");
}

fn live() -> Live {
    Live::read(&mut Socket::open().expect("nfnetlink")).expect("readable")
}

type Chains = Vec<(Family, Table, String, Vec<Result<detour_cni::firewall::rule::Rule, Option<String>>>)>;

fn chains(live: &Live) -> Chains {
    let rules = |rules: &[LiveRule]| rules.iter().map(|r| r.rule.clone()).collect::<Vec<_>>();
    let all = live.chains().map(|(f, t, name, chain)| (f, t, name.to_owned(), rules(&chain.rules)));
    all.filter(|(_, _, name, rules)| !rules.is_empty() || name.contains('_')).collect()
}

fn on(redirect: Redirect) -> Policy {
    Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() }
}

fn nets(list: &[&str]) -> Ranges {
    Ranges::List(list.iter().map(|n| n.parse().expect("a CIDR")).collect())
}

fn range(first: u16, last: u16) -> PortRange {
    PortRange { first, last }
}

fn excluding(policy: Policy) -> Policy {
    let any = Exclusion { owner: Owner::Any, destination: None, protocol: None, ports: Vec::new() };
    let uid = |first, last| Owner::Uid(IdRange { first, last });
    let exclusions = [
        Exclusion { owner: uid(1337, 1337), ..any.clone() },
        Exclusion {
            owner: uid(1_000_650_000, 4_000_000_000),
            protocol: Some(Protocol::Tcp),
            ports: vec![range(443, 443)],
            ..any.clone()
        },
        Exclusion {
            owner: Owner::Gid(IdRange::one(7)),
            ports: (1..20).map(|p| range(p * 100, p * 100 + p % 2)).collect(),
            ..any.clone()
        },
        Exclusion {
            destination: Some("10.96.0.0/12".parse().expect("a CIDR")),
            ports: vec![range(53, 53)],
            ..any.clone()
        },
        Exclusion { destination: Some("fd96::a/128".parse().expect("a CIDR")), ports: vec![range(53, 53)], ..any },
    ];
    Policy { exclusions: exclusions.into(), ..policy }
}

fn policies() -> Vec<(&'static str, Policy)> {
    let default = Redirect::default;
    let dns = || Redirect { dns: DnsCapture::All, ..default() };
    vec![
        ("default", on(default())),
        ("dns", on(dns())),
        (
            "dns to servers",
            on(Redirect { dns: DnsCapture::Servers { v4: vec![[10, 96, 0, 10].into()], v6: vec![] }, ..default() }),
        ),
        (
            "lists",
            on(Redirect {
                inbound_ports_include: Ports::List(vec![range(80, 80), range(8000, 8010)]),
                outbound_ports_include: Ports::List(vec![range(9000, 9000)]),
                outbound_ports_exclude: Ports::List(vec![range(22, 22), range(6000, 6010)]),
                outbound_ip_ranges_include: nets(&[
                    "10.0.0.0/8",
                    "10.64.0.0/10",
                    "fc00::/7",
                    "0.0.0.0/0",
                    "1.2.3.4/32",
                ]),
                outbound_ip_ranges_exclude: nets(&["10.1.2.0/23", "fd96::/64", "fd97::/63"]),
                reroute_virtual_interfaces: vec!["net1".into(), "net2".into()],
                exclude_interfaces: vec!["eth1".into(), "veth+".into()],
                drop_invalid: true,
                ..dns()
            }),
        ),
        (
            "all excluded",
            on(Redirect {
                inbound_ports_exclude: Ports::All,
                outbound_ports_exclude: Ports::All,
                outbound_ip_ranges_exclude: Ranges::All,
                outbound_ip_ranges_include: nets(&["127.0.0.0/8"]),
                ..default()
            }),
        ),
        (
            "owners",
            on(Redirect {
                proxy_uid: vec![1337, 1_000_659_999],
                owner_groups_include: Groups::List(vec![1, 2, 3]),
                ..dns()
            }),
        ),
        (
            "tproxy",
            on(Redirect {
                inbound_interception_mode: InterceptionMode::Tproxy,
                exclude_interfaces: vec!["eth1".into()],
                drop_invalid: true,
                owner_groups_exclude: vec![5],
                ..default()
            }),
        ),
        (
            "tproxy of ports",
            on(Redirect {
                inbound_interception_mode: InterceptionMode::Tproxy,
                inbound_ports_include: Ports::List(vec![range(80, 80)]),
                ..default()
            }),
        ),
        ("exclusions alone", excluding(Policy { dns_captured_elsewhere: Some(true), ..Policy::default() })),
        ("exclusions", excluding(on(dns()))),
        ("exclusions without dns", excluding(on(default()))),
    ]
}

#[test]
fn the_kernel_holds_what_iptables_would_have_made_of_the_same_rules() {
    for (name, policy) in policies() {
        let ruleset = Ruleset::of(&policy, &Family::ALL);
        let expected = {
            let ruleset = ruleset.clone();
            in_new_netns(move || {
                tool("iptables-restore", &[], &restore_text(&ruleset, Family::Ip));
                tool("ip6tables-restore", &[], &restore_text(&ruleset, Family::Ip6));
                (chains(&live()), saved(false), saved(true))
            })
        };
        let found = in_new_netns(move || {
            converge(&Ruleset::default(), &ruleset, &Made::default());
            (chains(&live()), saved(false), saved(true))
        });
        assert_eq!(found.1, expected.1, "{name}");
        assert_eq!(found.2, expected.2, "{name}");
        assert_eq!(found.0, expected.0, "{name}");
        assert!(found.0.iter().all(|(_, _, _, rules)| rules.iter().all(Result::is_ok)), "{name}: {:?}", found.0);
    }
}

#[test]
fn any_policy_turns_into_any_other_and_back_to_nothing() {
    let all = policies();
    in_new_netns(move || {
        let rulesets: Vec<Ruleset> = all.iter().map(|(_, p)| Ruleset::of(p, &Family::ALL)).collect();
        let fresh: Vec<Chains> = rulesets
            .iter()
            .map(|ruleset| {
                let ruleset = ruleset.clone();
                in_new_netns(move || {
                    converge(&Ruleset::default(), &ruleset, &Made::default());
                    chains(&live())
                })
            })
            .collect();
        let nothing = Ruleset::default();
        let mut previous = nothing.clone();
        let mut made = Made::default();
        for step in 0..rulesets.len() * 3 {
            let next = (step * 7) % rulesets.len();
            made.add(&Made::by(&rulesets[next], &live()));
            converge(&previous, &rulesets[next], &made);
            assert_eq!(chains(&live()), fresh[next], "to {}", all[next].0);
            let again = live();
            let left = changes(&again, &previous, &rulesets[next], &made);
            assert!(left.is_empty(), "{} is final: {left:?}", all[next].0);
            previous = rulesets[next].clone();
        }
        converge(&previous, &nothing, &made);
        assert!(live().tables.is_empty(), "{:?}", live());
    });
}
