//! The guard: nothing leaves or enters outside of the mesh, whatever happens to the redirection, and nothing is rejected that
//! a correct mesh lets pass. Each scene goes through four states: the redirection was never made, is in place, is lost, and
//! is made again; in each state, packets of every kind are sent in both families.

use crate::ambient::Format;
use crate::dialect::Dialect;
use crate::example::*;
use crate::exclusions_first::Redirection;
use crate::expectations::*;
use crate::support::background::Running;
use crate::support::cgroup::Cgroup;
use crate::support::new_netns::tool_in;
use crate::world::*;
use detour_cni::firewall::ContainerElement;
use detour_cni::policy::ContainerScope;
use serde_json::{Value, json};

/// Processes that exclusions name, by GID, by UID and port, and by UID for DNS only.
const BY_GROUP: Process = Process { gid: 7, ..APP_PROCESS };
const BY_PORT: Process = Process { uid: 8, gid: 8 };
const DNS_ONLY: Process = Process { uid: 9, gid: 9 };
/// A process in a group that the redirection does not capture.
const OWNER_GROUP: Process = Process { gid: 6, ..APP_PROCESS };
const CONTAINER: &str = "vault-agent-init";
/// A port that the pod excludes from the redirection of inbound traffic.
const EXCLUDED_PORT: u16 = 9000;
/// The addresses of the kubelet's probes in the ambient mesh.
const PROBES: [&str; 2] = ["169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"];

const AMBIENT_POD: &str = "
apiVersion: v1
kind: Pod
metadata: { name: web-0, namespace: shop, labels: { istio.io/dataplane-mode: ambient } }
spec:
  nodeName: node-1
  containers: [{ name: web, image: web }, { name: vault-agent-init, image: vault }]
";

/// What redirects the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Redirector {
    /// detour itself, in an interception mode, `REDIRECT` or `TPROXY`.
    Detour(Dialect, Dns, &'static str),
    /// Another tool.
    Other(Redirection),
}

struct Scene {
    world: World,
    redirector: Redirector,
    manifests: std::path::PathBuf,
    excluded: Cgroup,
    machine: Option<Machine>,
    _listeners: Vec<Running>,
}

impl Scene {
    fn new(redirector: Redirector) -> Self {
        let is_ambient = matches!(redirector, Redirector::Other(Redirection::Ambient(_)));
        let world = if is_ambient { World::with_ztunnel(Families::Both) } else { World::new(Families::Both) };
        let listen = |any: &str| world.pod_serves(APP_PROCESS, &format!("tcp:{any}:{EXCLUDED_PORT}"));
        let listeners = vec![listen("0.0.0.0"), listen("[::]")];
        let mut machine = None;
        let manifests = match redirector {
            Redirector::Detour(_, dns, mode) => {
                machine = Some(world.start_machine());
                story(
                    &world,
                    dns,
                    &[
                        ("sidecar.istio.io/interceptionMode", mode),
                        ("traffic.sidecar.istio.io/excludeInboundPorts", &EXCLUDED_PORT.to_string()),
                        ("traffic.sidecar.istio.io/excludeOutboundIPRanges", EXCLUDED_RANGES),
                        ("istio.io/reroute-virtual-interfaces", MACHINE_INTERFACE),
                    ],
                )
            }
            Redirector::Other(Redirection::Ambient(_)) => {
                probes_come_from_their_address(&world);
                world.manifests(&[NAMESPACE, AMBIENT_POD])
            }
            Redirector::Other(_) => story(&world, Dns::Captured, &[]),
        };
        Self { world, redirector, manifests, excluded: Cgroup::new(), machine, _listeners: listeners }
    }

    fn is_ambient(&self) -> bool {
        matches!(self.redirector, Redirector::Other(redirection) if redirection.is_ambient())
    }

    fn dns(&self) -> Dns {
        if let Redirector::Detour(_, dns, _) = self.redirector { dns } else { Dns::Captured }
    }

    /// Returns a configuration with the guard, exclusions of each kind and, with `redirects`, detour's redirection.
    fn configuration(&self, redirects: bool) -> Value {
        let redirect = json!({ "type": "istio-redirect", "owner_groups_exclude": [OWNER_GROUP.gid] });
        let ranges: Vec<&str> = EXCLUDED_RANGES.split(',').collect();
        let mut blocks = vec![
            json!({
                "type": "uid-exclude", "uids": [VAULT_INIT.uid], "gids": [BY_GROUP.gid],
                "rules": [format!("tcp:{HTTPS}:{}", BY_PORT.uid)],
            }),
            json!({ "type": "dns-exclude", "uids": [DNS_ONLY.uid] }),
            json!({ "type": "container-exclude", "containers": [CONTAINER] }),
            if self.is_ambient() {
                json!({ "type": "mesh-guard", "dns": true })
            } else {
                json!({ "type": "mesh-guard" })
            },
        ];
        match self.redirector {
            Redirector::Detour(..) => blocks.extend(redirects.then_some(redirect)),
            Redirector::Other(_) => blocks.push(json!({ "type": "destination-exclude", "ip_ranges": ranges })),
        }
        let configuration = chain(&self.manifests, Value::from(blocks));
        if let Redirector::Detour(dialect, ..) = self.redirector { dialect.of(configuration) } else { configuration }
    }

    /// Writes the guard, before any redirection.
    fn guard(&self) {
        self.world.add(&self.configuration(false));
        let element = ContainerElement::new(ContainerScope::All, self.excluded.id(), CONTAINER, "0123456789abcdef0123");
        self.world.change_containers(&[], &[element]);
    }

    fn redirect(&self) {
        match self.redirector {
            Redirector::Detour(..) => self.world.add(&self.configuration(true)),
            Redirector::Other(redirection) => redirection.make(&self.world),
        }
    }

    fn lose(&self) {
        match self.redirector {
            Redirector::Detour(..) => flush(&self.world),
            Redirector::Other(redirection) => redirection.remove(&self.world),
        }
    }

    /// Sends packets of every kind.
    #[track_caller]
    fn sends(&self, is_redirected: bool) {
        let world = &self.world;
        println!("{:?}, redirected: {is_redirected}", self.redirector);
        if is_redirected {
            tcp_is_captured(world, APP_PROCESS);
            tcp_is_captured(world, DNS_ONLY);
        } else {
            rejects(world, self.dns());
        }
        match (self.dns(), is_redirected) {
            (Dns::Captured, true) => dns_is_captured(world, APP_PROCESS, RESOLVER),
            (Dns::Left, true) => {}
            (_, false) => assert!(matches!(
                world.pod_sends(DNS_ONLY, Protocol::Tcp, SERVER.at(Family::V4, HTTPS)),
                Arrival::Lost(_)
            )),
        }
        dns_is_direct(world, DNS_ONLY, RESOLVER);
        for process in [VAULT_INIT, BY_GROUP] {
            tcp_is_direct(world, process);
            dns_is_direct(world, process, RESOLVER);
        }
        world.within(&self.excluded, || {
            tcp_is_direct(world, APP_PROCESS);
            dns_is_direct(world, APP_PROCESS, RESOLVER);
        });
        for &family in world.families() {
            let direct = |process, protocol, to| {
                assert_eq!(world.pod_sends(process, protocol, to), Arrival::direct(to, POD.ip(family)), "{to}");
            };
            direct(BY_PORT, Protocol::Tcp, SERVER.at(family, HTTPS));
            direct(APP_PROCESS, Protocol::Tcp, VAULT.at(family, HTTPS));
            direct(APP_PROCESS, Protocol::Tcp, POD.at(family, APP));
            direct(APP_PROCESS, Protocol::Udp, SERVER.at(family, SYSLOG));
            assert!(world.pod_pings(SERVER.ip(family)) && world.outside_pings(POD.ip(family)), "{family:?}");
            let enters = |port| world.outside_sends(Protocol::Tcp, POD.at(family, port));
            let passes = |port| Arrival::direct(POD.at(family, port), GATEWAY.ip(family));
            assert_eq!(enters(TUNNEL), passes(TUNNEL));
            if is_redirected {
                assert_eq!(enters(APP), Arrival::captured(INBOUND, POD.at(family, APP)));
            }
        }
        if self.is_ambient() {
            self.sends_as_in_ambient(is_redirected)
        } else {
            self.sends_as_with_sidecar(is_redirected)
        }
    }

    #[track_caller]
    fn sends_as_with_sidecar(&self, is_redirected: bool) {
        let world = &self.world;
        let is_native = self.redirector == Redirector::Other(Redirection::Native);
        // The native rules of the test are for the UID.
        let by_gid = (!is_native).then_some(Process { uid: 5, ..PROXY });
        for proxy in [PROXY, Process { gid: 5, ..PROXY }].into_iter().chain(by_gid) {
            tcp_is_direct(world, proxy);
            dns_is_direct(world, proxy, RESOLVER);
        }
        for &family in world.families() {
            for port in STATUS {
                let to = POD.at(family, port);
                assert_eq!(world.outside_sends(Protocol::Tcp, to), Arrival::direct(to, GATEWAY.ip(family)), "a probe");
            }
        }
        if let Redirector::Detour(..) = self.redirector {
            the_rest_is_direct(world, APP_PROCESS);
            for &family in world.families() {
                let to = POD.at(family, EXCLUDED_PORT);
                assert_eq!(world.outside_sends(Protocol::Tcp, to), Arrival::direct(to, GATEWAY.ip(family)));
            }
        }
        for &family in self.machine.iter().flat_map(|_| world.families()) {
            let machine = self.machine.as_ref().expect("a machine");
            let (server, syslog) = (SERVER.at(family, HTTPS), SERVER.at(family, SYSLOG));
            let arrival = machine.sends(Protocol::Tcp, server);
            match is_redirected {
                true => assert!(matches!(arrival, Arrival::Sidecar { .. }), "{arrival:?}"),
                false => is_rejected(&arrival),
            }
            assert_eq!(machine.sends(Protocol::Udp, syslog), Machine::direct(syslog));
        }
    }

    #[track_caller]
    fn sends_as_in_ambient(&self, is_redirected: bool) {
        let world = &self.world;
        world.as_ztunnel(|| {
            tcp_is_direct(world, ROOT);
            dns_is_direct(world, ROOT, RESOLVER);
        });
        for (&family, probes) in world.families().iter().zip(PROBES) {
            let (probes, probed) = (probes.parse().expect("an address"), POD.at(family, STATUS[2]));
            assert_eq!(world.outside_sends(Protocol::Tcp, probed), Arrival::direct(probed, probes), "a probe");
            let to = std::net::SocketAddr::new(probes, HTTPS);
            assert_eq!(world.pod_sends(APP_PROCESS, Protocol::Tcp, to), Arrival::direct(to, POD.ip(family)));
            // In the ambient mesh, these ports are captured.
            let status = POD.at(family, STATUS[1]);
            let arrival = world.outside_sends(Protocol::Tcp, status);
            match is_redirected {
                true => assert_eq!(arrival, Arrival::captured(INBOUND, status)),
                false => is_rejected(&arrival),
            }
        }
    }

    /// Goes through all states.
    fn play(&self) {
        let world = &self.world;
        let all = |connect: &dyn Fn(Family) -> Connection| -> Vec<(Family, Connection)> {
            let open = |&family: &Family| {
                let mut connection = connect(family);
                assert!(!matches!(connection.send(), Arrival::Lost(_)), "it is open");
                (family, connection)
            };
            world.families().iter().map(open).collect()
        };
        let before = all(&|family| world.pod_connects(APP_PROCESS, SERVER.at(family, HTTPS)));
        self.guard();
        for (family, mut connection) in before {
            let direct = Arrival::direct(SERVER.at(family, HTTPS), POD.ip(family));
            assert_eq!(connection.send(), direct, "a connection from before the rules");
        }
        self.sends(false);
        self.redirect();
        world.call("CHECK", &self.configuration(true)).run().done();
        self.sends(true);
        let outbound = all(&|family| world.pod_connects(APP_PROCESS, SERVER.at(family, HTTPS)));
        let inbound = all(&|family| world.outside_connects(POD.at(family, APP)));
        self.lose();
        self.sends(false);
        if let Redirector::Detour(..) = self.redirector {
            tcp_is_direct(world, OWNER_GROUP);
        }
        for (family, mut connection) in outbound {
            assert_eq!(connection.send(), Arrival::captured(OUTBOUND, SERVER.at(family, HTTPS)), "an open connection");
        }
        for (family, mut connection) in inbound {
            assert_eq!(connection.send(), Arrival::captured(INBOUND, POD.at(family, APP)), "an open connection");
        }
        self.redirect();
        self.sends(true);
        world.call("DEL", &self.configuration(true)).run().done();
        assert!(!world.native_tables().iter().any(|table| table.contains("detour")));
    }
}

/// istio-cni's rules on the node give the kubelet's probes this source address. Here, one port is theirs.
fn probes_come_from_their_address(world: &World) {
    let outside = world.outside_netns();
    let [v4, v6] = PROBES;
    let probed = STATUS[2];
    let rules = format!(
        "table inet probes {{\nchain post {{ type nat hook postrouting priority 100;\n\
         ip version 4 tcp dport {probed} snat ip to {v4}\nip6 version 6 tcp dport {probed} snat ip6 to {v6}\n}}\n}}\n"
    );
    tool_in(&outside, "nft", &["-f", "-"], &rules);
    let commands = format!("addr add {v4}/32 dev lo\naddr add {v6}/128 dev lo nodad\n");
    tool_in(&outside, "ip", &["-batch", "-"], &commands);
    for (&family, probes) in world.families().iter().zip(PROBES) {
        world.ip(&["route", "add", probes, "via", &GATEWAY.ip(family).to_string()]);
    }
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
        assert_eq!(world.traced(APP_PROCESS, Protocol::Tcp, SERVER.at(family, HTTPS)).arrives_at, "rejected");
    }
}

#[track_caller]
fn is_rejected(arrival: &Arrival) {
    assert!(matches!(arrival, Arrival::Lost(_)), "{arrival:?}");
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
    fn no_packet_bypasses_detours_redirection(dialect) {
        Scene::new(Redirector::Detour(dialect, Dns::Captured, "REDIRECT")).play();
    }

    fn no_packet_bypasses_detours_redirection_without_dns(dialect) {
        Scene::new(Redirector::Detour(dialect, Dns::Left, "REDIRECT")).play();
    }

    fn no_packet_bypasses_detours_redirection_in_mode_tproxy(dialect) {
        Scene::new(Redirector::Detour(dialect, Dns::Captured, "TPROXY")).play();
    }
}

#[test]
fn no_packet_bypasses_istio_cnis_redirection() {
    for other in [Redirection::Iptables, Redirection::Native] {
        Scene::new(Redirector::Other(other)).play();
    }
}

#[test]
fn no_packet_bypasses_the_ambient_mesh() {
    for format in [Format::Iptables, Format::Native] {
        Scene::new(Redirector::Other(Redirection::Ambient(format))).play();
    }
}

in_both_dialects! {
    /// Istio's included ranges apply to machines, too.
    fn a_virtual_machine_reaches_what_the_redirection_does_not_include(dialect) {
        let world = World::new(Families::Both);
        let machine = world.start_machine();
        let annotations = [
            ("istio.io/reroute-virtual-interfaces", MACHINE_INTERFACE),
            ("traffic.sidecar.istio.io/includeOutboundIPRanges", "198.51.100.0/24,2001:db8:20::/64"),
        ];
        let blocks = json!([{ "type": "istio-redirect" }, { "type": "mesh-guard" }]);
        world.add(&dialect.of(chain(&story(&world, Dns::Left, &annotations), blocks)));
        for is_redirected in [true, false] {
            for &family in world.families() {
                let (server, vault) = (SERVER.at(family, HTTPS), VAULT.at(family, HTTPS));
                let arrival = machine.sends(Protocol::Tcp, server);
                match is_redirected {
                    true => assert_eq!(arrival, Arrival::captured(OUTBOUND, server)),
                    false => is_rejected(&arrival),
                }
                assert_eq!(machine.sends(Protocol::Tcp, vault), Machine::direct(vault));
            }
            flush(&world);
        }
    }
}

/// A pod's author can turn off the redirection, but not the guard.
#[test]
fn interception_mode_none_does_not_switch_the_guard_off() {
    let world = World::new(Families::Both);
    let none = [("sidecar.istio.io/interceptionMode", "NONE")];
    let blocks = json!([{ "type": "istio-redirect" }, { "type": "mesh-guard" }]);
    world.add(&chain(&story(&world, Dns::Left, &none), blocks));
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
