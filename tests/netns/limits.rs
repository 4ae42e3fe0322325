//! A pod with CAP_NET_ADMIN fills its network namespace: calls read a limited part and end with a clear error.

use crate::dialect::Dialect;
use crate::example::*;
use crate::support::new_netns::in_netns;
use crate::world::*;
use detour_cni::firewall::nfnetlink::{Batch, NfSocket, Verb};
use detour_cni::inspect::{LiveRules, Mark};
use detour_cni::netlink::Attributes;
use detour_cni::state::{ROOT, Store};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;

const ADDRESS: &str = "{address}";

fn attached() -> (World, Value) {
    let world = World::new(Families::V4);
    let configuration = exclude_1337(&story(&world, Dns::Left, &[]));
    world.add(&configuration);
    (world, configuration)
}

/// Adds this many rules to table nat, each for another address.
fn fill(world: &World, rule: &str, count: u32) {
    let mut text = "*nat\n".to_owned();
    for number in 0..count {
        let [_, b, c, d] = number.to_be_bytes();
        writeln!(text, "{}", rule.replace(ADDRESS, &format!("10.{b}.{c}.{d}/32"))).expect("text");
    }
    world.iptables_restore(Family::V4, &(text + "COMMIT\n"));
}

/// Makes a call, whose log must be short.
#[track_caller]
fn call(world: &World, verb: &str, configuration: &Value) -> Called {
    let output = world.call(verb, configuration).run();
    assert!(output.stderr.len() < 20_000, "{verb} logged {} bytes", output.stderr.len());
    output
}

#[track_caller]
fn holds_too_much(output: &Called) {
    assert_eq!(output.refused().0, 107);
    let msg = output.stdout["msg"].as_str().expect("text");
    assert!(
        msg.contains("expected at most 20000 objects and 16 MiB") && msg.contains(", got more; remove rules"),
        "{msg}"
    );
}

fn rules_of(world: &World) -> (usize, usize) {
    let saved = world.iptables_save(Family::V4).to_string();
    let ours = saved.lines().filter(|line| line.contains("ISTIO_")).count();
    (ours, saved.lines().filter(|line| line.contains(" 10.")).count())
}

fn state_of(world: &World) -> bool {
    Path::new("/run/detour/attachments").join(&world.name).exists()
}

#[test]
fn check_logs_some_foreign_rules_and_counts_the_rest() {
    let (world, configuration) = attached();
    fill(&world, "-A OUTPUT -d {address} -j ACCEPT", 1000);
    let output = call(&world, "CHECK", &configuration).done();
    assert_eq!(output.stderr.matches("foreign rule: ").count(), 20, "{}", output.stderr);
    assert!(output.stderr.contains("980 more foreign rules"), "{}", output.stderr);
    let report = world.live_rules().report();
    assert_eq!(report.rules.iter().filter(|line| line.mark == Mark::Foreign).count(), 1000);
    assert!(report.rules.iter().any(|line| line.chain == "OUTPUT" && line.rule == "-j ISTIO_OUTPUT"));
}

#[test]
fn add_and_check_refuse_too_many_foreign_rules_and_del_keeps_them() {
    let (world, configuration) = attached();
    fill(&world, "-A OUTPUT -p tcp -d {address} --dport 80 -j ACCEPT", 21_000);
    holds_too_much(&call(&world, "CHECK", &configuration));
    holds_too_much(&call(&world, "ADD", &configuration));
    let read = LiveRules::read(&world.netns(), &Store::new(ROOT)).expect_err("too many");
    assert_eq!(read.number(), 107);
    call(&world, "DEL", &configuration).done();
    assert_eq!(rules_of(&world), (0, 21_000));
    assert!(!state_of(&world));
}

#[test]
fn del_disables_the_redirection_if_its_rules_cannot_be_found() {
    let (world, configuration) = attached();
    fill(&world, "-I OUTPUT -d {address} -j ACCEPT", 21_000);
    let output = call(&world, "DEL", &configuration).done();
    assert!(output.stderr.contains("DEL removes only the rules that it can find"), "{}", output.stderr);
    let saved = world.iptables_save(Family::V4);
    for chain in ["ISTIO_OUTPUT", "ISTIO_INBOUND", "ISTIO_REDIRECT"] {
        assert_eq!(saved.chain("nat", chain), [""; 0], "{chain}");
    }
    assert_eq!(world.native_tables(), [""; 0]);
    assert!(!state_of(&world));
}

#[test]
fn foreign_jumps_to_detours_chains_are_limited() {
    let (world, configuration) = attached();
    world.iptables_restore(Family::V4, "*nat\n-I OUTPUT -p icmp -j ACCEPT\nCOMMIT\n");
    fill(&world, "-A OUTPUT -d {address} -j ISTIO_OUTPUT", 15_000);
    assert_eq!(call(&world, "CHECK", &configuration).refused().0, 103);
    let output = call(&world, "ADD", &configuration);
    assert_eq!(output.refused().0, 107);
    let msg = output.stdout["msg"].as_str().expect("text");
    assert!(msg.contains("expected at most 256 rules of another tool that jump to detour's chains"), "{msg}");
    call(&world, "DEL", &configuration).done();
    assert_eq!(world.iptables_save(Family::V4).chain("nat", "ISTIO_OUTPUT"), [""; 0]);
    assert!(!state_of(&world));
}

#[test]
fn rules_in_other_tables_do_not_count_toward_the_limit() {
    let (world, configuration) = attached();
    world.nft(&format!("table inet mine {{ chain c {{ }}\n}}\n{}", "add rule inet mine c accept\n".repeat(21_000)));
    for verb in ["CHECK", "ADD", "DEL"] {
        call(&world, verb, &configuration).done();
    }
    assert_eq!(rules_of(&world), (0, 0));
}

#[test]
fn del_succeeds_with_more_policy_rules_than_are_read() {
    let world = World::new(Families::V4);
    let configuration = exclude_1337(&story(&world, Dns::Left, &[("sidecar.istio.io/interceptionMode", "TPROXY")]));
    world.add(&configuration);
    let rules = (0..21_000).map(|n| format!("rule add pref {} fwmark {} lookup 100\n", 32_000 - n, n + 10));
    let file = world.manifests(&[&rules.collect::<String>()]).join("0.yaml");
    world.ip(&["-batch", file.to_str().expect("text")]);
    for verb in ["CHECK", "ADD"] {
        let output = call(&world, verb, &configuration);
        assert_eq!(output.refused().0, 107);
        let msg = output.stdout["msg"].as_str().expect("text");
        assert!(msg.contains("policy rules") && msg.contains("expected at most 20000 objects and 16 MiB"), "{msg}");
    }
    call(&world, "DEL", &configuration).done();
    assert_eq!(rules_of(&world), (0, 0));
    assert!(!state_of(&world));
}

/// Anonymous sets are read; named sets are not.
#[test]
fn sets_in_detours_tables_are_limited() {
    let world = World::new(Families::V4);
    let configuration = Dialect::Nftables.of(exclude_1337(&story(&world, Dns::Left, &[])));
    world.add(&configuration);
    let ports: Vec<String> =
        (0..120_000).map(|n| format!("10.{}.{}.1 . {}", n / 65_536, n / 256 % 256, n % 256)).collect();
    let elements = ports.join(", ");
    let declared = "add set inet detour-nat many { type ipv4_addr . inet_service; }";
    world.nft(&format!("{declared}\nadd element inet detour-nat many {{ {elements} }}\n"));
    call(&world, "CHECK", &configuration).done();
    world.nft(&format!("add rule inet detour-nat ISTIO_OUTPUT ip daddr . tcp dport {{ {elements} }} accept\n"));
    let output = call(&world, "CHECK", &configuration);
    assert_eq!(output.refused().0, 107);
    assert!(
        output.stdout["msg"].as_str().is_some_and(|msg| msg.contains("at most 100000 objects")),
        "{}",
        output.stdout
    );
    call(&world, "DEL", &configuration).done();
    assert!(world.native_tables().is_empty());
}

/// Each netfilter chain jumps to the next one several times, which multiplies the rules that a packet passes.
#[test]
fn trace_ends_for_chains_that_multiply() {
    let world = World::new(Families::V4);
    let mut text = "*nat\n".to_owned();
    (0..10).for_each(|n| writeln!(text, ":C{n} - [0:0]").expect("text"));
    for n in 0..9 {
        (0..4).for_each(|_| writeln!(text, "-A C{n} -j C{}", n + 1).expect("text"));
    }
    world.iptables_restore(Family::V4, &(text + "-A OUTPUT -j C0\nCOMMIT\n"));
    let trace = world.traced(Process { uid: 1000, gid: 1000 }, Protocol::Tcp, SERVER.at(Family::V4, HTTPS));
    assert!(trace.caveats.iter().any(|caveat| caveat.contains("stopped after 100000 rules")), "{:?}", trace.caveats);
}

/// A process can reserve a table for itself (`flags owner`): only it can change or delete the table.
#[test]
fn a_table_that_a_process_owns_is_not_blamed_on_the_kernel() {
    const NLM_F_CREATE: u16 = 0x400;
    let (world, configuration) = attached();
    let own = || {
        let mut socket = NfSocket::open().expect("nf_tables");
        let generation = socket.generation().expect("a generation");
        let table = |list: &mut Attributes| _ = list.text(1, "detour-nat").be32(2, 2);
        let create = |batch: &mut Batch<'_>| {
            batch.message(Verb::NewTable, NLM_F_CREATE, 1, |list| {
                table(list);
                list
            });
        };
        socket.transact(generation, create).expect("accepted");
        socket
    };
    let owner = in_netns(&world.netns(), own);
    let output = world.call("DEL", &configuration).run();
    assert_eq!(output.refused().0, 107);
    let msg = output.stdout["msg"].as_str().expect("text");
    assert!(msg.contains("owns the table") && !msg.contains("kernel has"), "{msg}");
    drop(owner);
    world.call("DEL", &configuration).run().done();
    assert_eq!(rules_of(&world), (0, 0));
}
