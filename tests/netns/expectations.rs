//! What must be seen on the wire of a redirected pod, said once for everyone who redirects.

use crate::world::*;

/// `process`'s TCP connections arrive at the sidecar with their original destination.
#[track_caller]
pub(crate) fn tcp_is_captured(world: &World, process: Process) {
    for &family in world.families() {
        let to = SERVER.at(family, HTTPS);
        assert_eq!(world.pod_sends(process, Protocol::Tcp, to), Arrival::captured(OUTBOUND, to));
    }
}

/// `process`'s TCP connections leave untouched.
#[track_caller]
pub(crate) fn tcp_is_direct(world: &World, process: Process) {
    for &family in world.families() {
        let to = SERVER.at(family, HTTPS);
        assert_eq!(world.pod_sends(process, Protocol::Tcp, to), Arrival::direct(to, POD.ip(family)));
    }
}

/// `process`'s queries to `resolver` arrive at the sidecar's resolver, over UDP and TCP.
#[track_caller]
pub(crate) fn dns_is_captured(world: &World, process: Process, resolver: Host) {
    for &family in world.families() {
        let to = resolver.at(family, DNS);
        assert_eq!(world.pod_sends(process, Protocol::Udp, to), Arrival::captured_datagram(DNS_PROXY));
        assert_eq!(world.pod_sends(process, Protocol::Tcp, to), Arrival::captured(DNS_PROXY, to));
    }
}

/// `process`'s queries reach `resolver` itself, over UDP and TCP.
#[track_caller]
pub(crate) fn dns_is_direct(world: &World, process: Process, resolver: Host) {
    for &family in world.families() {
        let to = resolver.at(family, DNS);
        for protocol in [Protocol::Udp, Protocol::Tcp] {
            assert_eq!(world.pod_sends(process, protocol, to), Arrival::direct(to, POD.ip(family)), "{protocol:?}");
        }
    }
}

/// One query leaves one conntrack entry for `resolver`, and that one has seen the answer.
#[track_caller]
pub(crate) fn a_query_leaves_one_replied_entry(world: &World, process: Process, resolver: Host) {
    for &family in world.families() {
        let to = resolver.at(family, DNS);
        assert_eq!(world.pod_sends(process, Protocol::Udp, to), Arrival::direct(to, POD.ip(family)));
        let entries = world.datagrams_to(to);
        assert!(entries.len() == 1 && entries[0].replied, "{entries:#?}");
        assert_eq!(entries[0].zone, entries[0].reply_zone, "{entries:#?}");
    }
}

/// What comes in arrives at the sidecar, except at the ports that Istio leaves alone.
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

/// What is neither TCP nor DNS leaves untouched, and so does TCP to the port that Istio excludes.
#[track_caller]
pub(crate) fn the_rest_is_direct(world: &World, process: Process) {
    for &family in world.families() {
        for (protocol, port) in [(Protocol::Udp, SYSLOG), (Protocol::Tcp, STATUS[0])] {
            let to = SERVER.at(family, port);
            assert_eq!(world.pod_sends(process, protocol, to), Arrival::direct(to, POD.ip(family)));
        }
    }
}

/// On loopback, an app reaches the pod's own address directly, and the proxy comes back to itself
/// as inbound traffic, so that an app's call to its own service is seen.
#[track_caller]
pub(crate) fn loopback_is_as_istio_has_it(world: &World, app: Process, proxy: Process) {
    for &family in world.families() {
        let own = POD.at(family, APP);
        assert_eq!(world.pod_sends(app, Protocol::Tcp, own), Arrival::direct(own, POD.ip(family)));
        assert_eq!(world.pod_sends(proxy, Protocol::Tcp, own), Arrival::captured(INBOUND, own));
    }
}
