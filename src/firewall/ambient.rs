//! The rules that istio-cni writes for a pod in Istio's ambient mesh (istio/istio, `cni/pkg/iptables` and
//! `cni/pkg/nftables`). detour never writes them. To find where a packet arrives, they are evaluated as istio-cni writes
//! them: in the kernel, they compare marks with a mask, and in the format `nftables` they are in Istio's own tables.

use super::istio::{DNS_PROXY_PORT, PROXY_ZONE, ZTUNNEL_MARK};
use super::live::LiveRuleset;
use super::native::rule::{BaseHook, Condition, Key, NativeAction, NativeRule};
use super::native::set::Spans;
use super::native::{addresses, interface};
use super::redirections::NativeIstio;
use super::rule::{Family, Hook, Ruleset, Table};
use super::view::{RuleView, RulesetView, TableId};
use crate::cni::RuleFormat;
use crate::firewall::expression::Counter;
use crate::policy::{Interception, Policy};
use ipnet::IpNet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The mark of connections to ztunnel.
const TPROXY_MARK: u32 = 0x111;
/// The chain that only these rules have, in the tables of iptables.
const PREROUTING: &str = "ISTIO_PRERT";
const OUTBOUND: u16 = 15001;
const INBOUND: u16 = 15006;
const TUNNEL: u16 = 15008;
const TCP: u8 = 6;
const UDP: u8 = 17;

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
        (has_chain(Table::Nat, false) && live.redirects_in_iptables(Hook::Output)).then(|| Self {
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
}

/// Returns whether a chain is one of istio-cni's for the ambient mesh, in either format.
pub(super) fn is_chain(name: &str) -> bool {
    [PREROUTING, "ISTIO_OUTPUT", "istio-prerouting", "istio-output"].contains(&name)
}

/// Returns the name of the native table of istio-cni that has this chain, if its rules are in the format `to_ztunnel`.
pub(super) fn table_name(to_ztunnel: Option<RuleFormat>, table: TableId, chain: &str) -> Option<&'static str> {
    let TableId::Iptables(_, table) = table else { return None };
    let is_native = ["prerouting", "output", "istio-prerouting", "istio-output"].contains(&chain);
    (to_ztunnel == Some(RuleFormat::Nftables) && is_native).then_some(match table {
        Table::Raw => "istio-ambient-raw",
        Table::Mangle => "istio-ambient-mangle",
        Table::Nat | Table::Filter => "istio-ambient-nat",
    })
}

/// A rule: its conditions and action, and its texts as `iptables-save` and `nft` print them.
struct AmbientRule {
    rule: NativeRule,
    iptables: String,
    native: String,
}

impl RulesetView {
    /// Returns the rules of a policy, for both families, with the redirection in `format`.
    #[must_use]
    pub fn of_policy(policy: &Policy, format: RuleFormat) -> Self {
        let mut view = Self::desired(&Ruleset::of(policy, &Family::ALL), format);
        if policy.ambient {
            // istio-cni's default format; its rules have the same effect in both.
            let captures_dns = policy.dns_captured_elsewhere.unwrap_or(true);
            let format = RuleFormat::Iptables;
            view = view.with_ambient(AmbientRedirection { format, captures_dns, captures_inbound: true });
        } else if policy.interception == Interception::Unset {
            let caveat = "this configuration does not redirect the pod; rules of other programs are not evaluated";
            view.caveats.push(caveat.to_owned());
        }
        view
    }

    /// Replaces istio-cni's rules for the ambient mesh by those that it writes.
    #[must_use]
    pub fn with_ambient(mut self, redirection: AmbientRedirection) -> Self {
        self.to_ztunnel = Some(redirection.format);
        for family in Family::ALL {
            for (table, hook) in [Table::Raw, Table::Nat]
                .into_iter()
                .flat_map(|table| [Hook::Prerouting, Hook::Output].map(|hook| (table, hook)))
            {
                let rules = rules(family, table, hook, redirection.captures_dns);
                if !rules.is_empty() {
                    self.add_ambient(redirection.format, (family, table, hook), rules);
                }
            }
        }
        if !redirection.captures_inbound {
            self = self.without_ambient_inbound();
        }
        self.unread_redirections.retain(|caveat| !caveat.contains("istio-ambient-"));
        let place = redirection.place();
        self.caveats.push(format!("the rules of istio-cni ({place}) are evaluated as istio-cni writes them"));
        self
    }

    /// Removes the capture of inbound connections, which istio-cni does not write for a pod whose annotation
    /// `ambient.istio.io/bypass-inbound-capture` is true.
    #[must_use]
    pub fn without_ambient_inbound(mut self) -> Self {
        let is_capture = |name: &str| [PREROUTING, "istio-prerouting"].contains(&name);
        self.retain_chains(|table, name| !(matches!(table, TableId::Iptables(_, Table::Nat)) && is_capture(name)));
        self
    }

    /// Removes istio-cni's rules for the ambient mesh in the tables of iptables.
    #[must_use]
    pub fn without_ambient(mut self) -> Self {
        self.retain_chains(|table, name| !(matches!(table, TableId::Iptables(..)) && is_chain(name)));
        self
    }

    fn add_ambient(
        &mut self,
        format: RuleFormat,
        (family, table, hook): (Family, Table, Hook),
        rules: Vec<AmbientRule>,
    ) {
        let base = BaseHook { like: table, hook };
        let (base_name, chain) = match (format, hook) {
            (RuleFormat::Iptables, Hook::Prerouting) => (hook.chain(), PREROUTING),
            (RuleFormat::Iptables, _) => (hook.chain(), "ISTIO_OUTPUT"),
            (RuleFormat::Nftables, Hook::Prerouting) => ("prerouting", "istio-prerouting"),
            (RuleFormat::Nftables, _) => ("output", "istio-output"),
        };
        // The native tables have the same priorities as those of iptables.
        let id = TableId::Iptables(family, table);
        let jump = NativeRule::new(NativeAction::Jump(chain.into()));
        let text = match format {
            RuleFormat::Iptables => format!("-j {chain}"),
            RuleFormat::Nftables => format!("jump {chain}"),
        };
        let text_of = |rule: &AmbientRule| match format {
            RuleFormat::Iptables => rule.iptables.clone(),
            RuleFormat::Nftables => rule.native.clone(),
        };
        let view = |rule: NativeRule, text: String| RuleView { rule: Some(rule), counter: Counter::default(), text };
        let rules: Vec<RuleView> = rules.into_iter().map(|rule| view(rule.rule.clone(), text_of(&rule))).collect();
        self.extend_chain(id, base_name, Some(base), vec![view(jump, text)]);
        self.extend_chain(id, chain, None, rules);
    }
}

/// Returns the rules of a chain.
fn rules(family: Family, table: Table, hook: Hook, captures_dns: bool) -> Vec<AmbientRule> {
    let (loopback, probe): (IpNet, IpNet) = match family {
        Family::Ip => (IpAddr::V4(Ipv4Addr::LOCALHOST).into(), IpAddr::V4(Ipv4Addr::new(169, 254, 7, 127)).into()),
        Family::Ip6 => (
            IpAddr::V6(Ipv6Addr::LOCALHOST).into(),
            IpAddr::V6(Ipv6Addr::new(0xfd16, 0x9254, 0x7127, 0x1337, 0xffff, 0xffff, 0xffff, 0xffff)).into(),
        ),
    };
    let (ip, own, host) = (if family == Family::Ip { "ip" } else { "ip6" }, loopback.addr(), probe.addr());
    let to = |net: IpNet, not| Condition { key: Key::Destination(family), not, values: addresses(net) };
    let from = |net: IpNet| Condition { key: Key::Source(family), not: false, values: addresses(net) };
    let mark = |mark: u32, not| Condition { key: Key::Mark, not, values: Spans::one(mark) };
    let protocol = |number: u8| Condition { key: Key::Protocol, not: false, values: Spans::one(number) };
    let port = |key, port: u16, not| Condition { key, not, values: Spans::one(port) };
    let lo = |not| Condition { key: Key::OutInterface, not, values: interface("lo") };
    let rule = |conditions: Vec<Condition>, action, iptables: String, native: String| {
        let rule = NativeRule { family: Some(family), conditions, ..NativeRule::new(action) };
        AmbientRule { rule, iptables, native }
    };
    let (unmarked, dns) = ("-m mark ! --mark 0x539/0xfff", Key::DestinationPort);
    let unmarked_native = "meta mark & 0x00000fff != 0x00000539";
    let redirect = |port: u16| (format!("-j REDIRECT --to-ports {port}"), format!("counter redirect to :{port}"));
    match (table, hook) {
        (Table::Nat, Hook::Output) => {
            let ((dns_target, dns_native), (target, native)) = (redirect(DNS_PROXY_PORT), redirect(OUTBOUND));
            let mut all = vec![rule(
                vec![to(probe, false), protocol(TCP)],
                NativeAction::Accept,
                format!("-d {probe} -p tcp -m tcp -j ACCEPT"),
                format!("meta l4proto tcp {ip} daddr {host} counter accept"),
            )];
            if captures_dns {
                all.push(rule(
                    vec![lo(true), protocol(UDP), port(dns, 53, false), mark(ZTUNNEL_MARK, true)],
                    NativeAction::Redirect(DNS_PROXY_PORT),
                    format!("! -o lo -p udp {unmarked} -m udp --dport 53 {dns_target}"),
                    format!("oifname != \"lo\" {unmarked_native} udp dport 53 {dns_native}"),
                ));
                all.push(rule(
                    vec![to(loopback, true), protocol(TCP), port(dns, 53, false), mark(ZTUNNEL_MARK, true)],
                    NativeAction::Redirect(DNS_PROXY_PORT),
                    format!("! -d {loopback} -p tcp -m tcp --dport 53 {unmarked} {dns_target}"),
                    format!("{ip} daddr != {own} tcp dport 53 {unmarked_native} {dns_native}"),
                ));
            }
            all.push(rule(
                vec![protocol(TCP), mark(TPROXY_MARK, false)],
                NativeAction::Accept,
                "-p tcp -m mark --mark 0x111/0xfff -j ACCEPT".to_owned(),
                "meta l4proto tcp meta mark & 0x00000fff == 0x00000111 counter accept".to_owned(),
            ));
            all.push(rule(
                vec![lo(false), to(loopback, true)],
                NativeAction::Accept,
                format!("! -d {loopback} -o lo -j ACCEPT"),
                format!("oifname \"lo\" {ip} daddr != {own} counter accept"),
            ));
            all.push(rule(
                vec![to(loopback, true), protocol(TCP), mark(ZTUNNEL_MARK, true)],
                NativeAction::Redirect(OUTBOUND),
                format!("! -d {loopback} -p tcp {unmarked} {target}"),
                format!("meta l4proto tcp {ip} daddr != {own} {unmarked_native} {native}"),
            ));
            all
        }
        (Table::Nat, Hook::Prerouting) => {
            let (target, native) = redirect(INBOUND);
            vec![
                rule(
                    vec![from(probe), protocol(TCP)],
                    NativeAction::Accept,
                    format!("-s {probe} -p tcp -m tcp -j ACCEPT"),
                    format!("meta l4proto tcp {ip} saddr {host} counter accept"),
                ),
                rule(
                    vec![to(loopback, true), protocol(TCP), port(dns, TUNNEL, true), mark(ZTUNNEL_MARK, true)],
                    NativeAction::Redirect(INBOUND),
                    format!("! -d {loopback} -p tcp -m tcp ! --dport {TUNNEL} {unmarked} {target}"),
                    format!("{ip} daddr != {own} tcp dport != {TUNNEL} {unmarked_native} {native}"),
                ),
            ]
        }
        (Table::Raw, Hook::Output) if captures_dns => vec![rule(
            vec![protocol(UDP), port(dns, 53, false), mark(ZTUNNEL_MARK, false)],
            NativeAction::Zone(PROXY_ZONE),
            "-p udp -m mark --mark 0x539/0xfff -m udp --dport 53 -j CT --zone 1".to_owned(),
            "udp dport 53 meta mark & 0x00000fff == 0x00000539 counter ct zone set 1".to_owned(),
        )],
        (Table::Raw, Hook::Prerouting) if captures_dns => vec![rule(
            vec![protocol(UDP), port(Key::SourcePort, 53, false), mark(ZTUNNEL_MARK, true)],
            NativeAction::Zone(PROXY_ZONE),
            "-p udp -m mark ! --mark 0x539/0xfff -m udp --sport 53 -j CT --zone 1".to_owned(),
            "udp sport 53 meta mark & 0x00000fff != 0x00000539 counter ct zone set 1".to_owned(),
        )],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::packet::{Destination, Packet, Sender};
    use crate::policy::{Exclusion, IdRange, Protocol, TrafficOwner};

    const RECORDED: [(Family, &str); 2] = [
        (Family::Ip, include_str!("../../tests/golden/ambient.v4.rules")),
        (Family::Ip6, include_str!("../../tests/golden/ambient.v6.rules")),
    ];

    /// Returns the rules of a chain of `iptables-save`.
    fn recorded(text: &str, table: Table, chain: &str) -> Vec<String> {
        let start = format!("-A {chain} ");
        let tables = text.split("COMMIT").find(|part| part.contains(&format!("*{}\n", table.name())));
        let lines = tables.into_iter().flat_map(str::lines);
        lines.filter_map(|line| line.strip_prefix(&start)).map(str::to_owned).collect()
    }

    #[test]
    fn the_texts_are_those_of_the_rules_that_istios_code_writes() {
        let native = include_str!("../../tests/golden/ambient.nft");
        let mut count = 0;
        for (family, text) in RECORDED {
            for table in [Table::Raw, Table::Nat] {
                for (hook, chain) in [(Hook::Output, "ISTIO_OUTPUT"), (Hook::Prerouting, PREROUTING)] {
                    let rules = rules(family, table, hook, true);
                    let texts: Vec<String> = rules.iter().map(|rule| rule.iptables.clone()).collect();
                    assert_eq!(texts, recorded(text, table, chain));
                    for rule in rules {
                        assert!(native.contains(&format!("\t\t{}\n", rule.native)), "{}", rule.native);
                        count += 1;
                    }
                }
            }
        }
        assert_eq!(count, 20);
    }

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
