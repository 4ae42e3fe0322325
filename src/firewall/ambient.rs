//! istio-cni's rules for a pod in Istio's ambient mesh, which redirect its traffic to ztunnel (istio/istio,
//! `cni/pkg/iptables` and `cni/pkg/nftables`). detour never writes them. They are recognized, and not evaluated one by one.

use super::istio::DNS_PROXY_PORT;
use super::live::LiveRuleset;
use super::packet::Packet;
use super::redirections::{INBOUND_PORT, NativeIstio, OUTBOUND_PORT};
use super::rule::{Hook, Table};
use crate::cni::RuleFormat;
use crate::policy::Protocol;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The chain that only these rules have, in the tables of iptables.
pub(super) const PREROUTING: &str = "ISTIO_PRERT";
/// What a trace shows in place of the rules.
pub(super) const CAPTURED: &str = "captured by istio-cni's rules (ztunnel)";
const TUNNEL: u16 = 15008;
const DNS: u16 = 53;

/// A redirection to ztunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AmbientRedirection {
    /// The format of istio-cni's rules.
    pub format: RuleFormat,
    /// Whether it captures DNS.
    pub captures_dns: bool,
    /// Whether it captures inbound connections.
    pub captures_inbound: bool,
}

impl AmbientRedirection {
    /// Finds the redirection in the kernel.
    #[must_use]
    pub fn of(live: &LiveRuleset) -> Option<Self> {
        if let Some(istio) = live.native_istio().filter(|istio| istio.ambient) {
            let NativeIstio { captures_dns, captures_inbound, .. } = istio;
            return Some(Self { format: RuleFormat::Nftables, captures_dns, captures_inbound });
        }
        let has_chain = |wanted: Table, has_rules: bool| {
            let mut chains = live.chains().filter(|(_, table, name, _)| *table == wanted && *name == PREROUTING);
            chains.any(|(.., chain)| !has_rules || !chain.rules.is_empty())
        };
        // The name only tells which tool made the redirection.
        (has_chain(Table::Nat, false) && live.captures_for_ztunnel_in_iptables()).then(|| Self {
            format: RuleFormat::Iptables,
            captures_dns: has_chain(Table::Raw, true),
            captures_inbound: has_chain(Table::Nat, true),
        })
    }

    /// Returns where the redirection is, for messages.
    #[must_use]
    pub const fn place(self) -> &'static str {
        match self.format {
            RuleFormat::Iptables => "chains ISTIO_PRERT and ISTIO_OUTPUT of iptables",
            RuleFormat::Nftables => "tables inet istio-ambient-*",
        }
    }

    /// Returns the table and the chain that capture packets at a hook.
    pub(super) const fn chain(self, hook: Hook) -> (&'static str, &'static str) {
        match (self.format, hook) {
            (RuleFormat::Iptables, Hook::Prerouting) => ("nat", PREROUTING),
            (RuleFormat::Iptables, _) => ("nat", "ISTIO_OUTPUT"),
            (RuleFormat::Nftables, Hook::Prerouting) => ("istio-ambient-nat", "istio-prerouting"),
            (RuleFormat::Nftables, _) => ("istio-ambient-nat", "istio-output"),
        }
    }

    /// Returns the port of ztunnel to which a packet goes that no rule before has accepted; `None` if it is not captured.
    pub(super) fn captures(self, packet: &Packet, hook: Hook) -> Option<u16> {
        let Packet { destination, protocol, .. } = packet;
        let is_loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()].contains(&destination.ip());
        let is_query = destination.port() == DNS && self.captures_dns;
        match (hook, protocol) {
            (Hook::Prerouting, Protocol::Tcp) => {
                (self.captures_inbound && !is_loopback && destination.port() != TUNNEL).then_some(INBOUND_PORT)
            }
            (Hook::Output, Protocol::Tcp) if is_loopback => None,
            (Hook::Output, Protocol::Tcp) if is_query => Some(DNS_PROXY_PORT),
            (Hook::Output, Protocol::Tcp) => (!packet.is_over_lo()).then_some(OUTBOUND_PORT),
            (Hook::Output, Protocol::Udp) => (is_query && !packet.is_over_lo()).then_some(DNS_PROXY_PORT),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::packet::{Destination, Packet, Sender};
    use crate::firewall::rule::{Family, Ruleset};
    use crate::firewall::view::RulesetView;
    use crate::policy::Policy;
    use crate::policy::{Exclusion, IdRange, Protocol, TrafficOwner};

    fn arrives(policy: &Policy, format: RuleFormat, captures_dns: bool, from: Sender, to: &str) -> String {
        let (address, protocol) = to.split_once('/').expect(to);
        let protocol = if protocol == "udp" { Protocol::Udp } else { Protocol::Tcp };
        let to = Destination { address: address.parse().expect(to), protocol };
        let view = RulesetView::desired(&Ruleset::of(policy, &Family::ALL), RuleFormat::Iptables);
        let view = view.with_ambient(AmbientRedirection { format, captures_dns, captures_inbound: true });
        view.evaluate(Packet::first(from, to, &[], "eth0")).arrival.to_string()
    }

    #[test]
    fn captured_traffic_arrives_at_ztunnel_and_excluded_traffic_at_its_destination() {
        let owner = TrafficOwner::Uid(IdRange::one(7));
        let exclusion = Exclusion { owner, destination: None, protocol: None, ports: Vec::new() };
        let policy = Policy { exclusions: [exclusion].into(), ambient: true, ..Policy::default() };
        let process = |uid| Sender::Process { uid, gid: Some(0), set: None };
        for format in [RuleFormat::Iptables, RuleFormat::Nftables] {
            let arrives = |from, to: &str| arrives(&policy, format, true, from, to);
            for (server, resolver) in [("192.0.2.1:80", "10.96.0.10:53"), ("[2001:db8::1]:80", "[fd96::a]:53")] {
                assert_eq!(arrives(process(1000), &format!("{server}/tcp")), "ztunnel:15001", "{format:?}");
                assert_eq!(arrives(process(1000), &format!("{resolver}/udp")), "ztunnel:15053", "{format:?}");
                assert_eq!(arrives(process(1000), &format!("{resolver}/tcp")), "ztunnel:15053", "{format:?}");
                assert_eq!(arrives(process(7), &format!("{server}/tcp")), "direct", "{format:?}");
                assert_eq!(arrives(process(7), &format!("{resolver}/udp")), "direct", "{format:?}");
                assert_eq!(arrives(Sender::Inbound(None), &format!("{server}/tcp")), "ztunnel:15006", "{format:?}");
            }
            assert_eq!(arrives(Sender::Inbound(None), "10.88.0.2:15008/tcp"), "direct");
            assert_eq!(arrives(process(1000), "127.0.0.1:80/tcp"), "direct");
            assert_eq!(arrives(process(1000), "192.0.2.1:514/udp"), "direct");
        }
        assert_eq!(arrives(&policy, RuleFormat::Iptables, false, process(1000), "10.96.0.10:53/udp"), "direct");
    }
}
