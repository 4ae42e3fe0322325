//! Connections that are older than the rules. NAT decides at the first packet of a connection, so a connection that the
//! kernel tracked without the rules keeps bypassing the sidecar until it closes.
//!
//! Deleting its conntrack entry would not help: the kernel treats the next packet as a new connection and redirects it
//! (`nf_conntrack_tcp_loose`), the proxy does not know the connection, and both ends get a reset (observed with 6.18).
//! It does help for DNS queries over UDP.

use crate::cni::{Code, DEFAULT_INTERFACE, Error};
use crate::firewall::nfnetlink::{Connection, NfSocket};
use crate::firewall::{Arrival, Destination, Packet, RulesetView, Sender};
use crate::netns::{LockMode, OpenConnection, open_connections};
use crate::plugin::netns_state::NetnsState;
use crate::plugin::open_netns;
use crate::policy::{DnsCapture, InterceptionMode, Protocol, Redirect};
use crate::state::{ROOT, Store};
use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

/// The maximum number of connections that are compared with the exclusions, and so counted.
const MAX_CONNECTIONS: usize = 1000;
/// The maximum number of DNS flows whose conntrack entries are deleted.
const MAX_DNS_FLOWS: usize = 5000;
const TCP: u8 = 6;
const UDP: u8 = 17;
const DNS_PORT: u16 = 53;

/// Counts the container's established TCP connections that bypass the sidecar although its policy redirects them. If
/// DNS is captured, also deletes the conntrack entries of DNS queries over UDP that bypass it. Connections that are
/// excluded by GID, by interface or by container are counted too: the kernel does not list these properties.
///
/// # Errors
/// [`Code::TryAgain`]: another call locks the network namespace longer than `timeout`. The network namespace is gone,
/// or its connections can't be listed or are too many.
pub fn bypassing(container_id: &str, netns: &Path, timeout: Duration) -> Result<usize, Error> {
    let (store, netns) = (Store::new(ROOT), open_netns::at(netns)?);
    netns.enter_to(LockMode::Change, timeout, || {
        let NetnsState { policy, rules, rule_format, .. } = NetnsState::read(&store, container_id, &netns)?;
        let Some(redirect) = policy.redirect() else { return Ok(0) };
        let dns_captured = redirect.dns != DnsCapture::Off;
        let view = RulesetView::desired(&rules, rule_format);
        let open = open_connections()?;
        let by_ends: HashMap<_, _> = open
            .iter()
            .filter(|open| may_be_redirected(redirect, open))
            .map(|open| ((open.local, open.remote), open))
            .collect();
        let find = |c: &Connection| {
            let outbound = by_ends.get(&(c.source, c.destination)).map(|open| (**open, true));
            outbound.or_else(|| by_ends.get(&(c.destination, c.source)).map(|open| (**open, false)))
        };
        let (connections, flows) = (Cell::new(MAX_CONNECTIONS), Cell::new(MAX_DNS_FLOWS));
        let take_one = |left: &Cell<usize>| left.replace(left.get().saturating_sub(1)) > 0;
        let is_relevant = |c: &Connection| {
            c.replies_from == c.destination
                && match c.protocol {
                    TCP => find(c).is_some() && take_one(&connections),
                    UDP => dns_captured && c.destination.port() == DNS_PORT && take_one(&flows),
                    _ => false,
                }
        };
        let failed = |error| {
            let msg = format!("can't read connection tracking: {}: {error}", netns.path().display());
            Error::new(Code::KernelRefused, msg)
        };
        let mut socket = NfSocket::open().map_err(failed)?;
        let tracked = socket.connections(is_relevant).map_err(failed)?;
        for query in tracked.iter().filter(|c| c.protocol == UDP) {
            socket.forget(query).map_err(failed)?;
        }
        let found = tracked.iter().filter(|c| c.protocol == TCP).filter_map(find);
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
