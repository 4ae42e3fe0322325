//! The guard: nothing leaves or enters outside of the mesh, whatever happens to the redirection, and nothing is rejected that
//! a correct mesh lets pass.

use crate::ambient::Format;
use crate::configuration::{chain, story};
use crate::exclusions_first::ISTIO;
use crate::expectations::*;
use crate::istio::{Dns, rules};
use crate::pod::{APP_PROCESS, NAMESPACE, PROXY, VAULT_INIT, manifest};
use crate::support::cgroup::Cgroup;
use crate::support::new_netns::tool_in;
use crate::world::*;
use detour_cni::firewall::{ContainerElement, Destination, Sender};
use detour_cni::inspect::{LiveRules, trace};
use detour_cni::policy::ContainerScope;
use detour_cni::{policy, state};
use serde_json::{Value, json};

const EXCLUSIONS: [&str; 2] = ["uid-exclude", "dns-exclude"];

/// Returns a configuration with the guard, exclusions of UID 1337 and, with `redirects`, the redirection.
fn guarded(world: &World, dns: Dns, redirects: bool, annotations: &[(&str, &str)]) -> Value {
    let mut blocks: Vec<Value> = EXCLUSIONS.map(|kind| json!({ "type": kind, "uids": [VAULT_INIT.uid] })).into();
    blocks.push(json!({ "type": "mesh-guard" }));
    if redirects {
        blocks.push(json!({ "type": "istio-redirect" }));
    }
    chain(&story(world, dns, annotations), Value::from(blocks))
}

/// Asserts that the guard rejects the application's traffic in both directions at once.
#[track_caller]
fn rejects(world: &World, dns: Dns) {
    for &family in world.families() {
        is_rejected(&world.pod_sends(APP_PROCESS, Protocol::Tcp, SERVER.at(family, HTTPS)));
        if dns == Dns::Captured {
            for protocol in [Protocol::Udp, Protocol::Tcp] {
                is_rejected(&world.pod_sends(APP_PROCESS, protocol, RESOLVER.at(family, DNS)));
            }
        }
        is_rejected(&world.outside_sends(Protocol::Tcp, POD.at(family, APP)));
        assert_eq!(traced(world, APP_PROCESS, family), "rejected");
    }
}

#[track_caller]
fn is_rejected(arrival: &Arrival) {
    assert!(matches!(arrival, Arrival::Lost(_)), "{arrival:?}");
}

fn traced(world: &World, process: Process, family: Family) -> String {
    let rules = LiveRules::read(&world.netns(), &state::Store::new(state::ROOT)).expect("readable");
    let from = Sender::Process { uid: process.uid, gid: Some(process.gid), set: None };
    let to = Destination { address: SERVER.at(family, HTTPS), protocol: policy::Protocol::Tcp };
    trace(&rules.view(), from, to, &rules.addresses, "eth0").arrives_at
}

/// Asserts that traffic which the mesh does not capture passes, with and without the redirection.
#[track_caller]
fn passes_outside_the_mesh(world: &World) {
    tcp_is_direct(world, PROXY);
    dns_is_direct(world, PROXY, RESOLVER);
    tcp_is_direct(world, VAULT_INIT);
    dns_is_direct(world, VAULT_INIT, RESOLVER);
    the_rest_is_direct(world, APP_PROCESS);
    for &family in world.families() {
        let own = POD.at(family, APP);
        assert_eq!(world.pod_sends(APP_PROCESS, Protocol::Tcp, own), Arrival::direct(own, POD.ip(family)));
        for port in STATUS.into_iter().chain([TUNNEL]) {
            let to = POD.at(family, port);
            assert_eq!(world.outside_sends(Protocol::Tcp, to), Arrival::direct(to, GATEWAY.ip(family)));
        }
    }
}

#[track_caller]
fn captures(world: &World, dns: Dns) {
    tcp_is_captured(world, APP_PROCESS);
    if dns == Dns::Captured {
        dns_is_captured(world, APP_PROCESS, RESOLVER);
    }
    inbound_is_captured(world);
    passes_outside_the_mesh(world);
}

fn flush(world: &World) {
    for &family in world.families() {
        for table in ["nat", "mangle"] {
            for chain in ["OUTPUT", "PREROUTING"] {
                world.iptables(family, &["-t", table, "-F", chain]);
            }
        }
    }
    for table in world.native_redirection() {
        let name = table.split(' ').nth(2).expect("a name");
        world.nft(&format!("flush table inet {name}"));
    }
}

in_both_dialects! {
    fn a_pod_whose_redirection_is_flushed_fails_closed_until_it_is_made_again(dialect) {
        for dns in [Dns::Captured, Dns::Left] {
            let world = World::new(Families::Both);
            let configuration = dialect.of(guarded(&world, dns, true, &[]));
            world.add(&configuration);
            captures(&world, dns);
            world.call("CHECK", &configuration).run().done();
            flush(&world);
            rejects(&world, dns);
            passes_outside_the_mesh(&world);
            world.add(&configuration);
            captures(&world, dns);
            world.call("DEL", &configuration).run().done();
            assert_eq!(world.native_tables(), [""; 0]);
            tcp_is_direct(&world, APP_PROCESS);
        }
    }

    fn a_pod_in_mode_tproxy_fails_closed(dialect) {
        let world = World::new(Families::Both);
        let mode = [("sidecar.istio.io/interceptionMode", "TPROXY")];
        let configuration = dialect.of(guarded(&world, Dns::Captured, true, &mode));
        world.add(&configuration);
        tcp_is_captured(&world, APP_PROCESS);
        dns_is_captured(&world, APP_PROCESS, RESOLVER);
        passes_outside_the_mesh(&world);
        flush(&world);
        rejects(&world, Dns::Captured);
        passes_outside_the_mesh(&world);
    }
}

/// Beside the redirection of istio-cni, which is never made, or later.
#[test]
fn a_pod_that_another_tool_redirects_fails_closed_until_it_does() {
    for dns in [Dns::Captured, Dns::Left] {
        let world = World::new(Families::Both);
        let configuration = guarded(&world, dns, false, &[]);
        world.add(&configuration);
        rejects(&world, dns);
        for &family in world.families() {
            world.iptables_restore(family, &rules(family, dns, PROXY.uid));
        }
        captures(&world, dns);
    }
}

/// The same in nftables.
#[test]
fn native_rules_of_istio_cni_are_a_redirection() {
    let world = World::new(Families::Both);
    world.add(&guarded(&world, Dns::Captured, false, &[]));
    rejects(&world, Dns::Captured);
    world.nft(ISTIO);
    tcp_is_captured(&world, APP_PROCESS);
    dns_is_captured(&world, APP_PROCESS, RESOLVER);
    inbound_is_captured(&world);
    tcp_is_direct(&world, PROXY);
    tcp_is_direct(&world, VAULT_INIT);
    dns_is_direct(&world, VAULT_INIT, RESOLVER);
}

#[test]
fn excluded_groups_ports_and_containers_pass_with_and_without_the_redirection() {
    let world = World::new(Families::Both);
    let (by_group, by_port) = (Process { gid: 7, ..APP_PROCESS }, Process { uid: 8, gid: 8 });
    let blocks = json!([
        { "type": "istio-redirect" },
        { "type": "uid-exclude", "gids": [by_group.gid], "rules": [format!("tcp:{HTTPS}:{}", by_port.uid)] },
        { "type": "container-exclude", "containers": ["vault-agent-init"] },
        { "type": "mesh-guard" },
    ]);
    world.add(&chain(&story(&world, Dns::Captured, &[]), blocks));
    let cgroup = Cgroup::new();
    let element = ContainerElement::new(ContainerScope::All, cgroup.id(), "vault-agent-init", "0123456789abcdef0123");
    world.change_containers(&[], &[element]);
    tcp_is_captured(&world, APP_PROCESS);
    for flushes in [false, true] {
        if flushes {
            flush(&world);
            rejects(&world, Dns::Captured);
        }
        tcp_is_direct(&world, by_group);
        dns_is_direct(&world, by_group, RESOLVER);
        for &family in world.families() {
            let to = SERVER.at(family, HTTPS);
            assert_eq!(world.pod_sends(by_port, Protocol::Tcp, to), Arrival::direct(to, POD.ip(family)));
        }
        world.within(&cgroup, || {
            tcp_is_direct(&world, APP_PROCESS);
            dns_is_direct(&world, APP_PROCESS, RESOLVER);
        });
    }
}

/// Connections from before the rules continue.
#[test]
fn established_connections_continue() {
    let world = World::new(Families::V4);
    let mut connection = world.pod_connects(APP_PROCESS, SERVER.at(Family::V4, HTTPS));
    world.add(&guarded(&world, Dns::Left, false, &[]));
    let server = SERVER.at(Family::V4, HTTPS);
    assert_eq!(connection.send(), Arrival::direct(server, POD.ip(Family::V4)), "a reset");
    rejects(&world, Dns::Left);
}

/// A pod's author can turn off the redirection, but not the guard.
#[test]
fn interception_mode_none_does_not_switch_the_guard_off() {
    let world = World::new(Families::Both);
    let none = [("sidecar.istio.io/interceptionMode", "NONE")];
    world.add(&guarded(&world, Dns::Left, true, &none));
    rejects(&world, Dns::Left);
}

#[test]
fn namespaces_that_the_administrator_excludes_get_no_guard() {
    let world = World::new(Families::V4);
    let namespace = NAMESPACE.replace("  name: shop\n", "  name: shop\n  labels: { guard: \"off\" }\n");
    let manifests = world.manifests(&[&namespace, &manifest(false, PROXY, &[])]);
    let block = json!({ "type": "mesh-guard", "exclude_namespace_selector": { "matchLabels": { "guard": "off" } } });
    world.add(&chain(&manifests, json!([block])));
    tcp_is_direct(&world, APP_PROCESS);
    let block = json!({ "type": "mesh-guard", "exclude_namespace_selector": { "matchLabels": { "guard": "other" } } });
    world.add(&chain(&manifests, json!([block])));
    rejects(&world, Dns::Left);
}

const AMBIENT_POD: &str = "
apiVersion: v1
kind: Pod
metadata: { name: web-0, namespace: shop, labels: { istio.io/dataplane-mode: ambient } }
spec:
  nodeName: node-1
  containers: [{ name: web, image: web }]
";

/// istio-cni's rules on the node give them this source address.
#[test]
fn the_probes_of_the_kubelet_reach_a_pod_in_the_ambient_mesh() {
    const PROBES: &str = "169.254.7.127";
    let world = World::with_ztunnel(Families::V4);
    world.add(&chain(&world.manifests(&[NAMESPACE, AMBIENT_POD]), json!([{ "type": "mesh-guard" }])));
    rejects(&world, Dns::Left);
    let outside = world.outside_netns();
    tool_in(
        &outside,
        "nft",
        &["-f", "-"],
        &format!(
            "table ip probes {{\nchain post {{ type nat hook postrouting priority 100; tcp dport {APP} snat to {PROBES}; }}\n}}\n"
        ),
    );
    let gateway = GATEWAY.ip(Family::V4).to_string();
    world.ip(&["route", "add", PROBES, "via", &gateway]);
    let to = POD.at(Family::V4, APP);
    let from = PROBES.parse().expect("an address");
    assert_eq!(world.outside_sends(Protocol::Tcp, to), Arrival::direct(to, from));
}

/// A pod in the ambient mesh waits for the rules of istio-cni's agent.
#[test]
fn a_pod_in_the_ambient_mesh_fails_closed_until_it_is_redirected() {
    for format in [Format::Iptables, Format::Native] {
        let world = World::with_ztunnel(Families::Both);
        let manifests = world.manifests(&[NAMESPACE, AMBIENT_POD]);
        let blocks =
            json!([{ "type": "uid-exclude", "uids": [VAULT_INIT.uid] }, { "type": "mesh-guard", "dns": true }]);
        let configuration = chain(&manifests, blocks);
        world.add(&configuration);
        rejects(&world, Dns::Captured);
        tcp_is_direct(&world, VAULT_INIT);
        format.enroll(&world);
        tcp_is_captured(&world, APP_PROCESS);
        dns_is_captured(&world, APP_PROCESS, RESOLVER);
        tcp_is_direct(&world, VAULT_INIT);
        world.as_ztunnel(|| tcp_is_direct(&world, ROOT));
        world.call("CHECK", &configuration).run().done();
        format.leave(&world);
        rejects(&world, Dns::Captured);
    }
}
