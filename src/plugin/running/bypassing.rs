//! Connections that are older than the rules. NAT decides at the first packet of a connection, so a connection that the
//! kernel tracked without the rules keeps bypassing the sidecar until it closes.
//!
//! Deleting its conntrack entry would not help: the kernel treats the next packet as a new connection and redirects it
//! (`nf_conntrack_tcp_loose`), the proxy does not know the connection, and both ends get a reset (observed with 6.18).

use crate::cni::{Code, DEFAULT_INTERFACE, Error};
use crate::firewall::nfnetlink::{Connection, NfSocket};
use crate::firewall::{Arrival, Destination, Packet, RulesetView, Sender};
use crate::netns::{OpenConnection, open_connections};
use crate::plugin::netns_state::{self, NetnsState};
use crate::policy::{InterceptionMode, Protocol, Redirect};
use crate::state::{ROOT, Store};
use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

/// The maximum number of connections that are compared with the exclusions, and so counted.
const MAX_CONNECTIONS: usize = 1000;
const TCP: u8 = 6;

/// Counts the container's established TCP connections that bypass the sidecar although its policy redirects them.
/// Connections that are excluded by GID, by interface or by container are counted too: the kernel does not list these
/// properties.
///
/// # Errors
/// [`Code::TryAgain`]: another call locks the network namespace longer than `timeout`. The network namespace is gone,
/// or its connections can't be listed or are too many.
pub fn bypassing(container_id: &str, netns: &Path, timeout: Duration) -> Result<usize, Error> {
    let (store, netns) = (Store::new(ROOT), netns_state::open_at(netns)?);
    netns.enter(timeout, || {
        let NetnsState { policy, rules, rule_format, .. } = NetnsState::read(&store, container_id, &netns)?;
        let Some(redirect) = policy.redirect() else { return Ok(0) };
        let open: HashMap<_, _> =
            open_connections()?.into_iter().map(|open| ((open.local, open.remote), open)).collect();
        let find = |c: &Connection| {
            let outbound = open.get(&(c.source, c.destination)).map(|open| (open, true));
            let found = outbound.or_else(|| open.get(&(c.destination, c.source)).map(|open| (open, false)));
            found.filter(|(open, _)| may_be_redirected(redirect, open))
        };
        let is_tracked_without_rules = |c: &Connection| c.protocol == TCP && c.replies_from == c.destination;
        let socket = NfSocket::open();
        let tracked = socket
            .and_then(|mut socket| socket.connections(|c| is_tracked_without_rules(c) && find(c).is_some()))
            .map_err(|error| {
                let msg = format!("can't read connection tracking: {}: {error}", netns.path().display());
                Error::new(Code::KernelRefused, msg)
            })?;
        let view = RulesetView::desired(&rules, rule_format);
        let found = tracked.iter().take(MAX_CONNECTIONS).filter_map(find);
        Ok(found.filter(|(open, outbound)| is_redirected(&view, redirect, open, *outbound)).count())
    })
}

/// Returns whether a redirection may apply to the connection: it is not the proxy's own, and not within the pod.
fn may_be_redirected(redirect: &Redirect, open: &OpenConnection) -> bool {
    let OpenConnection { local, remote, uid } = open;
    !redirect.proxy_uid.contains(uid) && !remote.ip().is_loopback() && local.ip() != remote.ip()
}

/// Returns whether the rules redirect such a connection at its first packet.
fn is_redirected(view: &RulesetView, redirect: &Redirect, open: &OpenConnection, outbound: bool) -> bool {
    let OpenConnection { local, remote, uid } = *open;
    // TPROXY uses no NAT: its connections look the same as bypassing ones.
    let is_nat = outbound || redirect.inbound_interception_mode == InterceptionMode::Redirect;
    if !is_nat || !may_be_redirected(redirect, open) {
        return false;
    }
    let (sender, address) = match outbound {
        true => (Sender::Process { uid, gid: None, set: None }, remote),
        false => (Sender::Inbound(Some(remote.ip())), local),
    };
    let to = Destination { address, protocol: Protocol::Tcp };
    let packet = Packet::first(sender, to, &[], DEFAULT_INTERFACE);
    matches!(view.evaluate(packet).arrival, Arrival::Sidecar(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::RuleFormat;
    use crate::policy::{Exclusion, IdRange, Interception, Policy, PortRange, Ports, Ranges, TrafficOwner};
    use std::net::SocketAddr;

    fn policy(change: impl FnOnce(&mut Redirect)) -> Policy {
        let mut redirect = Redirect::default();
        change(&mut redirect);
        let excluded = Exclusion {
            owner: TrafficOwner::Uid(IdRange { first: 10, last: 20 }),
            destination: None,
            protocol: None,
            ports: Vec::new(),
        };
        Policy {
            interception: Interception::On(Box::new(redirect)),
            exclusions: [excluded].into(),
            ..Policy::default()
        }
    }

    fn end(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn excluded_connections_are_not_counted() {
        let plain = || policy(|_| {});
        let narrow = || {
            policy(|r| {
                r.outbound_ip_ranges_include = Ranges::List(vec!["192.0.2.0/24".parse().expect("a range")]);
                r.outbound_ip_ranges_exclude = Ranges::List(vec!["192.0.2.128/25".parse().expect("a range")]);
                r.inbound_ports_include = Ports::List(vec![PortRange::one(80)]);
            })
        };
        let pod = "10.0.0.2:8080";
        let rows = [
            (plain(), pod, "192.0.2.9:443", 0, true, true),
            (plain(), "[fd00::2]:9", "[2001:db8::1]:443", 0, true, true),
            (plain(), pod, "192.0.2.9:443", 1337, true, false),
            (plain(), pod, "192.0.2.9:443", 15, true, false),
            (plain(), pod, "192.0.2.9:15020", 0, true, false),
            (plain(), pod, "127.0.0.1:443", 0, true, false),
            (plain(), pod, "10.0.0.2:443", 0, true, false),
            (plain(), pod, "192.0.2.9:4000", 15, false, true),
            (plain(), "10.0.0.2:15021", "192.0.2.9:4000", 0, false, false),
            (plain(), "10.0.0.2:15008", "192.0.2.9:4000", 0, false, false),
            (
                policy(|r| r.inbound_interception_mode = InterceptionMode::Tproxy),
                pod,
                "192.0.2.9:4000",
                0,
                false,
                false,
            ),
            (narrow(), pod, "192.0.2.9:443", 0, true, true),
            (narrow(), pod, "192.0.2.200:443", 0, true, false),
            (narrow(), pod, "198.51.100.1:443", 0, true, false),
            (narrow(), pod, "192.0.2.9:4000", 0, false, false),
            (narrow(), "10.0.0.2:80", "192.0.2.9:4000", 0, false, true),
            (Policy::default(), pod, "192.0.2.9:443", 0, true, false),
        ];
        for (policy, local, remote, uid, outbound, expected) in rows {
            let open = OpenConnection { local: end(local), remote: end(remote), uid };
            let redirect = policy.redirect().cloned().unwrap_or_default();
            for format in [RuleFormat::Iptables, RuleFormat::Nftables] {
                let view = RulesetView::of_policy(&policy, format);
                assert_eq!(is_redirected(&view, &redirect, &open, outbound), expected, "{open:?} {outbound}");
            }
        }
    }
}
