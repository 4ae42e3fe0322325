//! Assertions on the traffic of a redirected pod, for redirections of any tool.

use crate::world::*;

/// Asserts that TCP connections of `process` reach the sidecar with their original destination.
#[track_caller]
pub(crate) fn tcp_is_captured(world: &World, process: Process) {
    for &family in world.families() {
        let to = SERVER.at(family, HTTPS);
        assert_eq!(world.pod_sends(process, Protocol::Tcp, to), Arrival::captured(OUTBOUND, to));
    }
}

/// Asserts that TCP connections of `process` bypass the sidecar.
#[track_caller]
pub(crate) fn tcp_is_direct(world: &World, process: Process) {
    for &family in world.families() {
        let to = SERVER.at(family, HTTPS);
        assert_eq!(world.pod_sends(process, Protocol::Tcp, to), Arrival::direct(to, POD.ip(family)));
    }
}

/// Asserts that queries of `process` to `resolver` reach the sidecar's resolver, over UDP and TCP.
#[track_caller]
pub(crate) fn dns_is_captured(world: &World, process: Process, resolver: Host) {
    for &family in world.families() {
        let to = resolver.at(family, DNS);
        assert_eq!(world.pod_sends(process, Protocol::Udp, to), Arrival::captured_datagram(DNS_PROXY));
        assert_eq!(world.pod_sends(process, Protocol::Tcp, to), Arrival::captured(DNS_PROXY, to));
    }
}

/// Asserts that queries of `process` reach `resolver` itself, over UDP and TCP.
#[track_caller]
pub(crate) fn dns_is_direct(world: &World, process: Process, resolver: Host) {
    for &family in world.families() {
        let to = resolver.at(family, DNS);
        for protocol in [Protocol::Udp, Protocol::Tcp] {
            assert_eq!(world.pod_sends(process, protocol, to), Arrival::direct(to, POD.ip(family)), "{protocol:?}");
        }
    }
}

/// Asserts that a query leaves one more conntrack entry for `resolver`, which has seen the answer.
#[track_caller]
pub(crate) fn a_query_leaves_one_replied_entry(world: &World, process: Process, resolver: Host) {
    for &family in world.families() {
        let to = resolver.at(family, DNS);
        let ports = || -> Vec<u16> { world.datagrams_to(to).iter().map(|entry| entry.source_port).collect() };
        let before = ports();
        // The kernel can choose the source port of an earlier query again. That query has no entry of its own.
        for _ in 0..3 {
            assert_eq!(world.pod_sends(process, Protocol::Udp, to), Arrival::direct(to, POD.ip(family)));
            if ports() != before {
                break;
            }
        }
        let mut entries = world.datagrams_to(to);
        entries.retain(|entry| !before.contains(&entry.source_port));
        assert!(entries.len() == 1 && entries[0].replied, "{entries:#?}");
        assert_eq!(entries[0].zone, entries[0].reply_zone, "{entries:#?}");
    }
}

/// Asserts that inbound connections reach the sidecar, except to the ports that Istio excludes.
#[track_caller]
pub(crate) fn inbound_is_captured(world: &World) {
    for &family in world.families() {
        let to = POD.at(family, APP);
        assert_eq!(world.outside_sends(Protocol::Tcp, to), Arrival::captured(INBOUND, to));
        for port in STATUS.into_iter().chain([TUNNEL]) {
            let to = POD.at(family, port);
            assert_eq!(world.outside_sends(Protocol::Tcp, to), Arrival::direct(to, GATEWAY.ip(family)));
        }
    }
}

/// Asserts that traffic other than TCP and DNS bypasses the sidecar, and so does TCP to the port that Istio excludes.
#[track_caller]
pub(crate) fn the_rest_is_direct(world: &World, process: Process) {
    for &family in world.families() {
        for (protocol, port) in [(Protocol::Udp, SYSLOG), (Protocol::Tcp, STATUS[0])] {
            let to = SERVER.at(family, port);
            assert_eq!(world.pod_sends(process, protocol, to), Arrival::direct(to, POD.ip(family)));
        }
    }
}

/// Asserts that on loopback, an app reaches the pod's own address directly, and the proxy's connections return to it
/// as inbound traffic, so that an app's call to its own service passes the proxy.
#[track_caller]
pub(crate) fn loopback_is_as_istio_has_it(world: &World, app: Process, proxy: Process) {
    for &family in world.families() {
        let own = POD.at(family, APP);
        assert_eq!(world.pod_sends(app, Protocol::Tcp, own), Arrival::direct(own, POD.ip(family)));
        assert_eq!(world.pod_sends(proxy, Protocol::Tcp, own), Arrival::captured(INBOUND, own));
    }
}
