//! The first packet of a connection, and whether it meets the conditions of a rule.

use super::rule::{Condition, Family, InCgroup, Key, LOCAL, NEW, Rule, SYN, protocol_number};
use crate::policy::{ContainerScope, Protocol};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The sender of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sender {
    /// A process of the pod.
    Process {
        /// Its effective UID.
        uid: u32,
        /// Its effective GID; with an unknown one, no condition on the GID is met.
        gid: Option<u32>,
        /// The set that has the control group of its container; `None` if it is in no excluded container.
        set: Option<ContainerScope>,
    },
    /// A client outside of the pod, at this address if it is known.
    Inbound(Option<IpAddr>),
}

/// The destination of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// The address and port.
    pub address: SocketAddr,
    /// The transport protocol.
    pub protocol: Protocol,
}

/// The first packet of a connection in transit: the properties that rules match and change. Its connection tracking
/// state is NEW, and its connection mark is 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    pub(super) sender: Sender,
    source: SocketAddr,
    pub(super) destination: SocketAddr,
    pub(super) protocol: Protocol,
    /// The interface at which it arrived; `None` while it is outgoing.
    in_interface: Option<String>,
    /// The outgoing interface; `None` for an incoming packet.
    out_interface: Option<String>,
    /// The packet mark.
    pub(super) mark: u32,
    /// The connection tracking zone; the first rule that sets one takes effect.
    pub(super) zone: Option<u16>,
}

/// The source port of all packets: one that no rule matches.
const EPHEMERAL_PORT: u16 = 40000;

impl Packet {
    /// Returns the first packet of a connection.
    ///
    /// A process's traffic to loopback and to the addresses in `pod_addresses` uses lo, all other traffic `interface`.
    #[must_use]
    pub fn first(sender: Sender, to: Destination, pod_addresses: &[IpAddr], interface: &str) -> Self {
        let address = to.address.ip();
        let of_family = |ip: &&IpAddr| ip.is_ipv4() == address.is_ipv4();
        let unspecified: IpAddr =
            if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let own_address = pod_addresses.iter().find(of_family).copied().unwrap_or(unspecified);
        let over_lo = address.is_loopback() || pod_addresses.contains(&address);
        let link = Some(if over_lo { "lo" } else { interface }.to_owned());
        let (source, in_interface, out_interface) = match sender {
            Sender::Process { .. } => (if over_lo { address } else { own_address }, None, link),
            Sender::Inbound(client) => (client.unwrap_or(unspecified), Some(interface.to_owned()), None),
        };
        let source = SocketAddr::new(source, EPHEMERAL_PORT);
        let (destination, protocol) = (to.address, to.protocol);
        Self { sender, source, destination, protocol, in_interface, out_interface, mark: 0, zone: None }
    }

    /// Returns the interface that the packet leaves or enters.
    #[must_use]
    pub fn interface(&self) -> &str {
        self.out_interface.as_deref().or(self.in_interface.as_deref()).unwrap_or_default()
    }

    pub(super) const fn family(&self) -> Family {
        if self.destination.is_ipv4() { Family::Ip } else { Family::Ip6 }
    }

    /// Applies `REDIRECT` (nf_nat_redirect.c): an outgoing packet goes to the port at loopback, an incoming packet to
    /// the port at its destination address.
    pub(super) fn redirect(&mut self, port: u16) {
        let address = match (self.sender, self.destination) {
            (Sender::Inbound(_), destination) => destination.ip(),
            (_, SocketAddr::V4(_)) => Ipv4Addr::LOCALHOST.into(),
            (_, SocketAddr::V6(_)) => Ipv6Addr::LOCALHOST.into(),
        };
        self.destination = SocketAddr::new(address, port);
        if self.out_interface.is_some() {
            self.out_interface = Some("lo".to_owned());
        }
    }

    /// Returns whether the packet stays in the pod.
    pub(super) fn is_over_lo(&self) -> bool {
        self.out_interface.as_deref() == Some("lo")
    }

    /// Turns a packet that was sent over lo into an incoming one.
    pub(super) fn receive_over_lo(&mut self) {
        self.in_interface = self.out_interface.take();
    }

    /// Returns whether the packet meets all conditions of a rule.
    pub(super) fn matches(&self, rule: &Rule) -> bool {
        rule.family.is_none_or(|family| family == self.family())
            && rule.cgroup.is_none_or(|cgroup| self.is_in(cgroup))
            && rule.conditions.iter().all(|condition| self.meets(condition))
    }

    /// Returns whether the sender's control group is in the set. Its level is unknown: the first rule matches.
    fn is_in(&self, cgroup: InCgroup) -> bool {
        match self.sender {
            Sender::Process { set: Some(set), .. } => self.out_interface.is_some() && set == cgroup.set,
            _ => false,
        }
    }

    /// Evaluates one condition. A key that can't be loaded ends the rule, even if the condition is negated (`NFT_BREAK`,
    /// xt_owner.c).
    fn meets(&self, condition: &Condition) -> bool {
        if condition.key == Key::CtState {
            let is_new = condition.values.as_slice().iter().any(|span| span.first & NEW != 0);
            return is_new != condition.not;
        }
        let is_in = |value: u128| condition.values.as_slice().iter().any(|s| (s.first..=s.last).contains(&value));
        self.load(condition.key).is_some_and(|value| is_in(value) != condition.not)
    }

    fn load(&self, key: Key) -> Option<u128> {
        let address = |family: Family, address: IpAddr| match (family, address) {
            (Family::Ip, IpAddr::V4(address)) => Some(u32::from(address).into()),
            (Family::Ip6, IpAddr::V6(address)) => Some(address.into()),
            _ => None,
        };
        match key {
            // Without an interface, the name is empty (nft_meta.c, `nft_meta_store_ifname`).
            Key::InInterface => Some(padded(self.in_interface.as_deref().unwrap_or_default())),
            Key::OutInterface => Some(padded(self.out_interface.as_deref().unwrap_or_default())),
            Key::Source(family) => address(family, self.source.ip()),
            Key::Destination(family) => address(family, self.destination.ip()),
            Key::Protocol => Some(protocol_number(self.protocol).into()),
            Key::SourcePort => Some(self.source.port().into()),
            Key::DestinationPort => Some(self.destination.port().into()),
            Key::Uid => self.socket_owner().map(|(uid, _)| uid.into()),
            Key::Gid => self.socket_owner().and_then(|(_, gid)| gid).map(Into::into),
            Key::Mark => Some(self.mark.into()),
            Key::CtMark => Some(0),
            Key::CtState => None,
            Key::TcpFlags => (self.protocol == Protocol::Tcp).then_some(SYN),
            Key::DestinationType => Some(if self.is_over_lo() { LOCAL } else { UNICAST }),
        }
    }

    /// Returns the UID and GID of the sending socket; an incoming packet has none.
    fn socket_owner(&self) -> Option<(u32, Option<u32>)> {
        match self.sender {
            Sender::Process { uid, gid, .. } if self.out_interface.is_some() => Some((uid, gid)),
            Sender::Process { .. } | Sender::Inbound(_) => None,
        }
    }
}

/// `RTN_UNICAST`.
const UNICAST: u128 = 1;

/// Returns an interface name as native rules compare it: 16 bytes padded with zeros, as a number.
fn padded(name: &str) -> u128 {
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte);
    u128::from_be_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_to_loopback_and_own_addresses_uses_lo() {
        let own: [IpAddr; 1] = ["10.0.0.2".parse().expect("v4")];
        let from = Sender::Process { uid: 1, gid: None, set: None };
        let link = |to: &str| {
            let to = Destination { address: to.parse().expect(to), protocol: Protocol::Tcp };
            Packet::first(from, to, &own, "eth0").interface().to_owned()
        };
        assert_eq!(link("10.0.0.2:1"), "lo");
        assert_eq!(link("127.8.0.1:1"), "lo");
        assert_eq!(link("[::1]:1"), "lo");
        assert_eq!(link("10.0.0.3:1"), "eth0");
    }
}
