//! Exclusions of pods in the ambient mesh, beside the rules that Istio's own code writes (`hack/record-ambient.sh`).

use crate::example::*;
use crate::expectations::*;
use crate::support::cgroup::Cgroup;
use crate::world::*;
use detour_cni::firewall::{ContainerElement, Sender};
use detour_cni::policy::ContainerScope;
use serde_json::{Value, json};

/// Istio's ambient rules as iptables-save prints them, and as native tables.
const IPTABLES: [&str; 2] = [include_str!("../golden/ambient.v4.rules"), include_str!("../golden/ambient.v6.rules")];
const NATIVE: &str = include_str!("../golden/ambient.nft");

/// The formats of istio-cni.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Iptables,
    Native,
}

impl Format {
    /// Redirects the pod to ztunnel.
    pub(crate) fn enroll(self, world: &World) {
        match self {
            Self::Iptables => {
                let rules = |family: Family| if family == Family::V4 { IPTABLES[0] } else { IPTABLES[1] };
                world.families().iter().for_each(|family| world.iptables_restore(*family, rules(*family)));
            }
            Self::Native => world.nft(NATIVE),
        }
    }

    /// Removes the redirection.
    pub(crate) fn leave(self, world: &World) {
        match self {
            Self::Iptables => {
                for &family in world.families() {
                    for table in ["raw", "mangle", "nat"] {
                        assert!(world.iptables(family, &["-t", table, "-F"]).0);
                        assert!(world.iptables(family, &["-t", table, "-X"]).0);
                    }
                }
            }
            Self::Native => {
                for table in ["nat", "mangle", "raw"] {
                    world.nft(&format!("delete table inet istio-ambient-{table}"));
                }
            }
        }
    }
}

const EXCLUDED_UID: Process = Process { uid: 7, gid: 100 };
const EXCLUDED_GID: Process = Process { uid: 100, gid: 8 };
const DNS_ONLY: Process = Process { uid: 9, gid: 100 };
const CONTAINER: &str = "vault";

/// Returns the exclusions of every kind, for a pod that its namespace enrolls. UID 0 is ztunnel's, too.
fn exclusions(world: &World) -> Value {
    let namespace = "
apiVersion: v1
kind: Namespace
metadata: { name: shop, labels: { istio.io/dataplane-mode: ambient } }";
    let pod = format!(
        "
apiVersion: v1
kind: Pod
metadata:
  name: web-0
  namespace: shop
  uid: {UID}
  annotations: {{ detour.io/exclude-outbound-ports: '{}' }}
spec:
  nodeName: node-1
  containers: [{{ name: web, image: web }}, {{ name: {CONTAINER}, image: vault }}]",
        STATUS[0]
    );
    let ranges: Vec<&str> = EXCLUDED_RANGES.split(',').collect();
    chain(
        &world.manifests(&[namespace, &pod]),
        json!([
            { "type": "istio-redirect" },
            { "type": "uid-exclude", "uids": [0, EXCLUDED_UID.uid], "gids": [EXCLUDED_GID.gid] },
            { "type": "dns-exclude", "uids": [DNS_ONLY.uid] },
            { "type": "container-exclude", "containers": [CONTAINER] },
            { "type": "destination-exclude", "ip_ranges": ranges },
        ]),
    )
}

/// Asserts where the traffic of each kind ends up.
#[track_caller]
fn exclusions_hold(world: &World, excluded: &Cgroup) {
    let a_query_is_direct = |process| {
        dns_is_direct(world, process, RESOLVER);
        a_query_leaves_one_replied_entry(world, process, OTHER_RESOLVER);
    };
    for process in [EXCLUDED_UID, EXCLUDED_GID, ROOT] {
        tcp_is_direct(world, process);
        a_query_is_direct(process);
    }
    tcp_is_captured(world, DNS_ONLY);
    a_query_is_direct(DNS_ONLY);
    world.within(excluded, || {
        tcp_is_direct(world, APP_PROCESS);
        a_query_is_direct(APP_PROCESS);
    });
    for &family in world.families() {
        for to in [SERVER.at(family, STATUS[0]), VAULT.at(family, HTTPS), VAULT.at(family, DNS)] {
            let arrival = world.pod_sends(APP_PROCESS, Protocol::Tcp, to);
            assert_eq!(arrival, Arrival::direct(to, POD.ip(family)), "{to}");
        }
    }
    a_query_leaves_one_replied_entry(world, APP_PROCESS, VAULT);
    traces_predict_it(world);
    tcp_is_captured(world, APP_PROCESS);
    dns_is_captured(world, APP_PROCESS, RESOLVER);
    ztunnel_is_undisturbed(world);
}

/// Asserts that traces of the live rules say the same, and name the rules of the format in the kernel.
#[track_caller]
fn traces_predict_it(world: &World) {
    let is_native = world.native_redirection().iter().any(|table| table.contains("istio-ambient-nat"));
    for &family in world.families() {
        let (server, resolver) = (SERVER.at(family, HTTPS), RESOLVER.at(family, DNS));
        for (process, to, protocol, expected) in [
            (APP_PROCESS, server, Protocol::Tcp, "ztunnel:15001"),
            (APP_PROCESS, resolver, Protocol::Udp, "ztunnel:15053"),
            (APP_PROCESS, SERVER.at(family, STATUS[0]), Protocol::Tcp, "direct"),
            (EXCLUDED_UID, server, Protocol::Tcp, "direct"),
            (DNS_ONLY, server, Protocol::Tcp, "ztunnel:15001"),
            (DNS_ONLY, resolver, Protocol::Udp, "direct"),
        ] {
            let trace = world.traced(process, protocol, to);
            assert_eq!(trace.arrives_at, expected, "{trace:#?}");
            let table = match (expected, is_native) {
                ("direct", _) => "detour-exclusions",
                (_, true) => "istio-ambient-nat",
                (_, false) => "nat",
            };
            assert_eq!(trace.decided_by.map(|place| place.table), Some(table));
        }
    }
    let report = world.live_rules().report();
    let place =
        if is_native { "tables inet istio-ambient-*" } else { "chains ISTIO_PRERT and ISTIO_OUTPUT of iptables" };
    assert_eq!((report.as_asked, report.ambient), (Some(true), Some(place)));
}

/// Asserts that ztunnel's own packets and inbound traffic are as Istio has them.
#[track_caller]
fn ztunnel_is_undisturbed(world: &World) {
    let matched = world.matched_exclusions();
    world.as_ztunnel(|| {
        tcp_is_direct(world, ROOT);
        dns_is_direct(world, ROOT, RESOLVER);
        a_query_leaves_one_replied_entry(world, ROOT, OTHER_RESOLVER);
    });
    assert_eq!(world.matched_exclusions(), matched, "a packet of ztunnel matched an exclusion");
    for &family in world.families() {
        let to = POD.at(family, APP);
        assert_eq!(world.outside_sends(Protocol::Tcp, to), Arrival::captured(INBOUND, to));
        let trace = world.traced(Sender::Inbound(None), Protocol::Tcp, to);
        assert_eq!(trace.arrives_at, "ztunnel:15006", "{trace:#?}");
        let tunnel = POD.at(family, TUNNEL);
        assert_eq!(world.outside_sends(Protocol::Tcp, tunnel), Arrival::direct(tunnel, GATEWAY.ip(family)));
    }
}

/// A pod with ztunnel, whose exclusions are `configuration`.
struct Scene {
    world: World,
    configuration: Value,
    excluded: Cgroup,
}

impl Scene {
    fn new() -> Self {
        let world = World::with_ztunnel(Families::Both);
        // What Istio's node agent sets besides the rules: answers to ztunnel's connections return to it over lo.
        for family in ["-4", "-6"] {
            let any = if family == "-4" { "0.0.0.0/0" } else { "::/0" };
            world.ip(&[family, "route", "add", "local", any, "dev", "lo", "table", "100"]);
            world.ip(&[family, "rule", "add", "fwmark", "0x111/0xfff", "pref", "32764", "lookup", "100"]);
        }
        let configuration = exclusions(&world);
        Self { world, configuration, excluded: Cgroup::new() }
    }

    fn add(&self) {
        self.world.add(&self.configuration);
        let element = ContainerElement::new(ContainerScope::All, self.excluded.id(), CONTAINER, "0123456789abcdef");
        if !self.world.containers().contains(&element) {
            self.world.change_containers(&[], &[element]);
        }
    }

    #[track_caller]
    fn holds(&self) {
        self.world.call("CHECK", &self.configuration).run().done();
        exclusions_hold(&self.world, &self.excluded);
    }
}

/// istio-cni comes first in the configuration list.
fn added_to(format: Format) {
    let scene = Scene::new();
    format.enroll(&scene.world);
    tcp_is_captured(&scene.world, EXCLUDED_UID);
    dns_is_captured(&scene.world, EXCLUDED_UID, RESOLVER);
    let before = (scene.world.native_tables(), Family::BOTH.map(|family| scene.world.iptables_save(family)));
    scene.add();
    scene.holds();
    scene.world.call("DEL", &scene.configuration).run().done();
    assert_eq!((scene.world.native_tables(), Family::BOTH.map(|family| scene.world.iptables_save(family))), before);
    tcp_is_captured(&scene.world, EXCLUDED_UID);
}

/// The pod is enrolled after detour's ADD, leaves the mesh and enters it again. An established connection that is
/// excluded continues.
fn enrolled_later_and_again(format: Format) {
    let scene = Scene::new();
    scene.add();
    let mut connection = scene.world.pod_connects(EXCLUDED_UID, SERVER.at(Family::V4, HTTPS));
    let direct = Arrival::direct(SERVER.at(Family::V4, HTTPS), POD.ip(Family::V4));
    assert_eq!(connection.send(), direct);
    format.enroll(&scene.world);
    scene.holds();
    format.leave(&scene.world);
    assert_eq!(connection.send(), direct);
    tcp_is_direct(&scene.world, APP_PROCESS);
    format.enroll(&scene.world);
    scene.holds();
    scene.add();
    scene.holds();
    assert_eq!(connection.send(), direct);
}

/// A pod whose inbound connections bypass ztunnel (annotation `ambient.istio.io/bypass-inbound-capture`): istio-cni writes
/// the rules without those for inbound connections.
fn inbound_bypasses(format: Format) {
    let world = World::with_ztunnel(Families::Both);
    let is_capture = |line: &&str| line.contains("15006") || line.starts_with("-A ISTIO_PRERT -s");
    match format {
        Format::Iptables => {
            for &family in world.families() {
                let rules = IPTABLES[usize::from(family == Family::V6)];
                let kept: Vec<&str> = rules.lines().filter(|line| !is_capture(line)).collect();
                world.iptables_restore(family, &(kept.join("\n") + "\n"));
            }
        }
        Format::Native => {
            world.nft("table inet other { }");
            world.nft(NATIVE);
            world.nft("flush chain inet istio-ambient-nat istio-prerouting");
        }
    }
    for &family in world.families() {
        let to = POD.at(family, APP);
        assert_eq!(world.outside_sends(Protocol::Tcp, to), Arrival::direct(to, GATEWAY.ip(family)));
        let trace = world.traced(Sender::Inbound(None), Protocol::Tcp, to);
        assert_eq!(trace.arrives_at, "direct", "{trace:#?}");
    }
    tcp_is_captured(&world, APP_PROCESS);
}

#[test]
fn traces_know_pods_whose_inbound_connections_bypass_ztunnel() {
    inbound_bypasses(Format::Iptables);
    inbound_bypasses(Format::Native);
}

#[test]
fn exclusions_added_to_ambient_iptables_rules_hold() {
    added_to(Format::Iptables);
}

#[test]
fn exclusions_added_to_ambient_native_rules_hold() {
    added_to(Format::Native);
}

#[test]
fn exclusions_hold_if_a_pod_is_enrolled_with_iptables_later_and_again() {
    enrolled_later_and_again(Format::Iptables);
}

#[test]
fn exclusions_hold_if_a_pod_is_enrolled_with_native_rules_later_and_again() {
    enrolled_later_and_again(Format::Native);
}
