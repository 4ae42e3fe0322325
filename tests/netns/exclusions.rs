//! What excluded traffic does: of an init container (the README's example), of resolvers, and beside the redirection of
//! another tool.

use crate::dialect::Dialect;
use crate::example::*;
use crate::expectations::*;
use crate::world::*;
use serde_json::{Value, json};

fn world(families: Families, dns: Dns, dialect: Dialect) -> World {
    let world = World::new(families);
    world.add(&dialect.of(exclude_1337(&story(&world, dns, &[]))));
    world
}

#[track_caller]
fn traffic_is_redirected_except_excluded(world: &World) {
    tcp_is_captured(world, APP_PROCESS);
    dns_is_captured(world, APP_PROCESS, RESOLVER);
    tcp_is_direct(world, PROXY);
    dns_is_direct(world, PROXY, RESOLVER);
    tcp_is_direct(world, VAULT_INIT);
    dns_is_direct(world, VAULT_INIT, RESOLVER);
    dns_is_direct(world, VAULT_INIT, OTHER_RESOLVER);
    for process in [APP_PROCESS, PROXY, VAULT_INIT] {
        the_rest_is_direct(world, process);
    }
    inbound_is_captured(world);
    loopback_is_as_istio_has_it(world, APP_PROCESS, PROXY);
}

in_both_dialects! {
    fn exclusions_work_in_a_dual_stack_pod(dialect) {
        traffic_is_redirected_except_excluded(&world(Families::Both, Dns::Captured, dialect));
    }

    fn exclusions_work_in_an_ipv6_pod(dialect) {
        traffic_is_redirected_except_excluded(&world(Families::V6, Dns::Captured, dialect));
    }

    fn exclusions_work_without_dns_capture(dialect) {
        let world = world(Families::Both, Dns::Left, dialect);
        tcp_is_captured(&world, APP_PROCESS);
        tcp_is_direct(&world, VAULT_INIT);
        dns_is_direct(&world, VAULT_INIT, RESOLVER);
        a_query_leaves_one_replied_entry(&world, APP_PROCESS, OTHER_RESOLVER);
    }
}

const RANGES: (&str, &str) = ("traffic.sidecar.istio.io/excludeOutboundIPRanges", EXCLUDED_RANGES);

fn excluding_dns(dialect: Dialect, annotations: &[(&str, &str)], dns_exclude: Value) -> World {
    let world = World::new(Families::Both);
    let sub_plugins = json!([{ "type": "istio-redirect" }, dns_exclude]);
    world.add(&dialect.of(chain(&story(&world, Dns::Captured, annotations), sub_plugins)));
    world
}

fn addresses(host: Host) -> [String; 2] {
    [Family::V4, Family::V6].map(|family| host.ip(family).to_string())
}

in_both_dialects! {
    fn a_resolver_is_excluded_by_address(dialect) {
        let world = excluding_dns(dialect, &[], json!({ "type": "dns-exclude", "resolvers": addresses(OTHER_RESOLVER) }));
        dns_is_direct(&world, APP_PROCESS, OTHER_RESOLVER);
        dns_is_direct(&world, PROXY, OTHER_RESOLVER);
        a_query_leaves_one_replied_entry(&world, APP_PROCESS, OTHER_RESOLVER);
        dns_is_captured(&world, APP_PROCESS, RESOLVER);
        tcp_is_captured(&world, APP_PROCESS);
    }

    fn resolvers_in_istios_excluded_ranges_are_excluded(dialect) {
        let world = excluding_dns(dialect, &[RANGES], json!({ "type": "dns-exclude", "resolvers": "excluded-ranges" }));
        dns_is_direct(&world, APP_PROCESS, VAULT);
        a_query_leaves_one_replied_entry(&world, APP_PROCESS, VAULT);
        dns_is_captured(&world, APP_PROCESS, RESOLVER);
        for &family in world.families() {
            let to = VAULT.at(family, HTTPS);
            assert_eq!(world.pod_sends(APP_PROCESS, Protocol::Tcp, to), Arrival::direct(to, POD.ip(family)));
        }
    }
}

/// Returns a configuration with exclusions only, and with facts about the pod.
fn exclusions(world: &World, dns: Dns) -> Value {
    let sub_plugins = json!([{ "type": "uid-exclude", "uids": [1337] }, { "type": "dns-exclude", "uids": [1337] }]);
    chain(&story(world, dns, &[]), sub_plugins)
}

fn redirect(world: &World, dns: Dns) {
    for &family in world.families() {
        world.iptables_restore(family, &rules(family, dns, PROXY.uid));
    }
}

fn saved(world: &World) -> Vec<Ruleset> {
    world.families().iter().map(|&family| world.iptables_save(family)).collect()
}

#[track_caller]
fn is_excluded(world: &World) {
    tcp_is_direct(world, VAULT_INIT);
    dns_is_direct(world, VAULT_INIT, RESOLVER);
    tcp_is_captured(world, APP_PROCESS);
    dns_is_captured(world, APP_PROCESS, RESOLVER);
    tcp_is_direct(world, PROXY);
    dns_is_direct(world, PROXY, RESOLVER);
    inbound_is_captured(world);
}

/// The other tool's redirection stays, and detour does not add a second one.
#[test]
fn an_existing_redirection_is_not_duplicated() {
    let world = redirected_world(Dns::Captured);
    let before = saved(&world);
    let configuration = exclude_1337(&story(&world, Dns::Captured, &[]));
    for _ in 0..2 {
        world.add(&configuration);
        assert_eq!(saved(&world), before);
        assert_eq!((world.native_tables().len(), world.native_redirection()), (1, Vec::new()));
        a_query_leaves_one_replied_entry(&world, VAULT_INIT, RESOLVER);
        is_excluded(&world);
    }
    world.call("DEL", &configuration).run().done();
    assert_eq!(saved(&world), before);
}

/// The pod disables DNS capture, but the other tool captures DNS. Excluded queries get through; the next ADD adds
/// zones so that each is tracked as one connection, and CHECK warns about it.
#[test]
fn exclusions_work_if_dns_is_captured_against_the_pods_annotation() {
    const WARNING: &str = "add this attachment after the redirection";
    let world = World::new(Families::Both);
    let configuration = exclusions(&world, Dns::Left);
    world.add(&configuration);
    redirect(&world, Dns::Captured);
    is_excluded(&world);
    let output = world.call("CHECK", &configuration).run().done();
    assert!(output.stderr.contains(WARNING), "{}", output.stderr);
    world.add(&configuration);
    let output = world.call("CHECK", &configuration).run().done();
    assert!(!output.stderr.contains(WARNING), "{}", output.stderr);
}

/// Rules of other tools that redirect some packets: those of a DNS cache, inbound connections to one port, one
/// application's, one destination's.
const NARROW: [&str; 5] = [
    "table ip other { chain out { type nat hook output priority -100; ip daddr 10.88.0.1 udp dport 53 redirect to :5353; }; }",
    "table ip other { chain in { type nat hook prerouting priority -100; tcp dport 8443 redirect to :10443; }; }",
    "table inet other { chain out { type nat hook output priority -90; meta skuid 4242 tcp dport 1-65535 jump sub; }; \
     chain sub { meta l4proto tcp redirect to :9999; }; }",
    "table ip other { chain out { type nat hook output priority -90; tcp dport 9 redirect to :9999; }; }",
    "table inet istio-proxy-x { chain out { type nat hook output priority -90; oifname lo meta l4proto tcp redirect to :9; }; }",
];

in_both_dialects! {
    fn a_redirection_of_some_packets_does_not_replace_the_sidecars(dialect) {
        for narrow in NARROW {
            let world = World::new(Families::V4);
            world.nft(narrow);
            let redirect = json!([{ "type": "istio-redirect" }]);
            let configuration = dialect.of(chain(&story(&world, Dns::Left, &[]), redirect));
            world.add(&configuration);
            tcp_is_captured(&world, APP_PROCESS);
            inbound_is_captured(&world);
            tcp_is_direct(&world, PROXY);
            world.call("DEL", &configuration).run().done();
        }
    }
}

/// Redirections of a mesh with narrow lists, and one of all TCP to a port that only its tool knows.
const REDIRECTIONS: [&str; 4] = [
    "table ip mesh { chain out { type nat hook output priority -100; ip daddr 10.96.0.1 tcp dport 8080 redirect to :15001; }; }",
    "table inet istio-proxy-nat { chain output { type nat hook output priority -100; jump istio-output; }; \
     chain istio-output { oifname lo meta skuid 1337 tcp dport != 53 redirect to :15006; }; }",
    "table inet mesh { chain out { type nat hook output priority -100; jump mesh; }; \
     chain mesh { meta skuid != 7 meta l4proto tcp redirect to :16001; }; }",
    "table ip mesh { chain out { type nat hook output priority -100; oifname != lo ip daddr != 127.0.0.1 \
     ip protocol tcp redirect to :16001; }; }",
];

/// As istio-init with lists writes it.
const PORT_8080: &str = "*nat\n:ISTIO_REDIRECT - [0:0]\n:ISTIO_OUTPUT - [0:0]\n-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001\n-A ISTIO_OUTPUT -p tcp -m tcp --dport 8080 -j ISTIO_REDIRECT
COMMIT\n";

#[test]
fn a_redirection_with_narrow_lists_or_another_port_is_the_pods() {
    for redirection in REDIRECTIONS.into_iter().chain([PORT_8080]) {
        let world = World::new(Families::V4);
        if redirection == PORT_8080 {
            world.iptables_restore(Family::V4, redirection);
        } else {
            world.nft(redirection);
        }
        let before = saved(&world);
        world.add(&exclude_1337(&story(&world, Dns::Left, &[])));
        let detours = |table: &String| table.contains("detour-") && !table.contains("detour-exclusions");
        assert!(!world.native_tables().iter().any(detours), "{redirection}");
        assert_eq!(saved(&world), before, "{redirection}");
    }
}

const BATCH: Process = Process { uid: 2000, gid: 2000 };
const RULE: &str = "-m owner --uid-owner 2000 -j RETURN";

fn insert_its_rule(world: &World) {
    for &family in world.families() {
        let arguments: Vec<&str> = ["-t", "nat", "-I", "OUTPUT"].into_iter().chain(RULE.split(' ')).collect();
        let (inserted, printed) = world.iptables(family, &arguments);
        assert!(inserted, "{printed}");
    }
}

#[track_caller]
fn its_rule_is_first_and_works(world: &World) {
    for &family in world.families() {
        let rules = world.iptables_save(family);
        assert_eq!(rules.chain("nat", "OUTPUT").first(), Some(&RULE), "{rules}");
    }
    tcp_is_direct(world, BATCH);
    tcp_is_captured(world, APP_PROCESS);
    tcp_is_direct(world, VAULT_INIT);
}

#[test]
fn a_shell_plugin_works_before_and_after_detour() {
    for is_first in [true, false] {
        let world = World::new(Families::Both);
        if is_first {
            insert_its_rule(&world);
        }
        world.add(&exclude_1337(&story(&world, Dns::Captured, &[])));
        if !is_first {
            insert_its_rule(&world);
        }
        its_rule_is_first_and_works(&world);
    }
}
