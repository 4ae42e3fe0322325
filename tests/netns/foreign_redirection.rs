//! Exclusions for pods that istio-init or the real istio-cni redirects, before or after detour's call; removing the
//! exclusions leaves the redirection unchanged.

use crate::configuration::{chain, exclude_1337, story};
use crate::expectations::*;
use crate::istio::{Dns, redirected_world, rules};
use crate::pod::{APP_PROCESS, PROXY, VAULT_INIT};
use crate::world::*;
use serde_json::{Value, json};

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
fn is_excluded(world: &World, dns: Dns) {
    tcp_is_direct(world, VAULT_INIT);
    dns_is_direct(world, VAULT_INIT, RESOLVER);
    tcp_is_captured(world, APP_PROCESS);
    match dns {
        Dns::Captured => dns_is_captured(world, APP_PROCESS, RESOLVER),
        Dns::Left => the_rest_is_direct(world, APP_PROCESS),
    }
    tcp_is_direct(world, PROXY);
    dns_is_direct(world, PROXY, RESOLVER);
    inbound_is_captured(world);
}

/// Asserts that the other tool's rules are as before, and that detour only added its exclusions.
#[track_caller]
fn only_exclusions_are_added(world: &World, before: &[Ruleset]) {
    assert_eq!(saved(world), before);
    assert_eq!(world.native_tables().len(), 1);
    assert_eq!(world.native_redirection(), [""; 0]);
}

fn added_to_a_redirected_world(dns: Dns, configuration: impl Fn(&World) -> Value) {
    let world = redirected_world(dns);
    let before = saved(&world);
    let configuration = configuration(&world);
    world.add(&configuration);
    only_exclusions_are_added(&world, &before);
    a_query_leaves_one_replied_entry(&world, VAULT_INIT, RESOLVER);
    is_excluded(&world, dns);
    world.add(&configuration);
    only_exclusions_are_added(&world, &before);
    world.call("DEL", &configuration).run().done();
    assert_eq!(saved(&world), before);
}

/// The other tool's redirection stays, and detour does not add a second one.
#[test]
fn an_existing_redirection_is_not_duplicated() {
    added_to_a_redirected_world(Dns::Captured, |world| exclude_1337(&story(world, Dns::Captured, &[])));
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
    is_excluded(&world, Dns::Captured);
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
