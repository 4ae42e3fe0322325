//! The rules for a policy's redirection: chain for chain and rule for rule what Istio's own tool writes (istio/istio,
//! `tools/istio-iptables/pkg/capture`), so that people who know Istio's rules recognize them. Deviations, each of
//! which corrects an error of the original:
//!
//! * Several proxy UIDs or GIDs: the original's `not the first UID → RETURN` on lo makes the rules of all other UIDs
//!   unreachable. With more than one UID or GID, detour writes one rule that checks all of them.
//! * TPROXY: the original exempts the tunnel port in a nat chain to which no rule jumps in this mode; detour exempts
//!   it in mangle.
//! * `*` as an excluded port or range is a rule without that condition; the original fails.

use super::rule::{CtState, Family, Hook, Is, Match, Rule, Ruleset, Table, is, not};
use super::target::Target;
use crate::policy::{DnsCapture, Groups, IdRange, InterceptionMode, PortRange, Ports, Ranges, Redirect};
use ipnet::IpNet;
use std::net::IpAddr;

const INBOUND: &str = "ISTIO_INBOUND";
const OUTPUT: &str = "ISTIO_OUTPUT";
const OUTPUT_DNS: &str = "ISTIO_OUTPUT_DNS";
const REDIRECT: &str = "ISTIO_REDIRECT";
const IN_REDIRECT: &str = "ISTIO_IN_REDIRECT";
const DIVERT: &str = "ISTIO_DIVERT";
const TPROXY: &str = "ISTIO_TPROXY";
const DROP: &str = "ISTIO_DROP";

/// The port of the sidecar, or of ztunnel, for captured DNS queries (pilot-agent, `DNS_PROXY_ADDR`).
pub const DNS_PROXY_PORT: u16 = 15053;
/// The port of DNS resolvers.
pub(super) const DNS_PORT: PortRange = PortRange::one(53);
/// The connection tracking zone of the proxy's own queries and of the resolvers' answers.
pub(super) const PROXY_ZONE: u16 = 1;
/// The mark of the packets that ztunnel sends (istio/ztunnel, `PACKET_MARK`).
pub(super) const ZTUNNEL_MARK: u32 = 0x539;
/// The connection tracking zone of captured queries and of the proxy's answers.
const CAPTURED_ZONE: u16 = 2;
/// TPROXY: the mark of packets that the proxy sends to its own pod.
const OUTBOUND_MARK: u32 = 1338;

/// Adds the rules for `redirect` for one family.
pub(super) fn write(redirect: &Redirect, family: Family, ruleset: &mut Ruleset) {
    let writer = Writer { redirect, family };
    writer.interfaces(ruleset);
    writer.drop_invalid(ruleset);
    writer.inbound(ruleset);
    writer.outbound(ruleset);
    writer.dns_zones(ruleset);
    if writer.tproxy() {
        writer.tproxy_marks(ruleset);
    }
}

/// Returns a network of one address.
fn host(address: impl Into<IpAddr>) -> IpNet {
    IpNet::from(address.into())
}

struct Writer<'a> {
    redirect: &'a Redirect,
    family: Family,
}

impl Writer<'_> {
    fn tproxy(&self) -> bool {
        self.redirect.inbound_interception_mode == InterceptionMode::Tproxy
    }

    fn loopback(&self) -> IpNet {
        match self.family {
            Family::Ip => self.redirect.host_ipv4_loopback_cidr.trunc().into(),
            Family::Ip6 => host([0, 0, 0, 0, 0, 0, 0, 1]),
        }
    }

    /// Returns the source address of inbound connections that the proxy forwards unchanged.
    fn passthrough(&self) -> IpNet {
        match self.family {
            Family::Ip => host([127, 0, 0, 6]),
            Family::Ip6 => host([0, 0, 0, 0, 0, 0, 0, 6]),
        }
    }

    fn of_family<'a>(&self, ranges: &'a [IpNet]) -> impl DoubleEndedIterator<Item = IpNet> + use<'a> {
        let family = self.family;
        ranges.iter().copied().filter(move |net| family.has(net))
    }

    /// Returns the resolvers whose queries are captured, of this family: `Some([None])` for all, `None` if no query
    /// is captured.
    fn captured_resolvers(&self) -> Option<Vec<Option<IpNet>>> {
        let hosts: Vec<IpNet> = match (&self.redirect.dns, self.family) {
            (DnsCapture::Off, _) => return None,
            (DnsCapture::All, _) => return Some(vec![None]),
            (DnsCapture::Servers { v4, .. }, Family::Ip) => v4.iter().map(|a| host(*a)).collect(),
            (DnsCapture::Servers { v6, .. }, Family::Ip6) => v6.iter().map(|a| host(*a)).collect(),
        };
        Some(hosts.into_iter().map(Some).collect())
    }

    fn uids(&self) -> impl Iterator<Item = Match> + '_ {
        self.redirect.proxy_uid.iter().map(|id| Match::Uid(is(IdRange::one(*id))))
    }

    fn gids(&self) -> impl Iterator<Item = Match> + '_ {
        self.redirect.proxy_gid.iter().map(|id| Match::Gid(is(IdRange::one(*id))))
    }

    /// Adds rules for excluded interfaces and for interfaces of virtual machines.
    fn interfaces(&self, ruleset: &mut Ruleset) {
        let nat = ruleset.table(self.family, Table::Nat);
        let virtual_interfaces = || self.redirect.reroute_virtual_interfaces.iter().rev();
        let mut reroute = |destination: Option<IpNet>| {
            for name in virtual_interfaces() {
                let mut rule = Rule::jump(REDIRECT).in_interface(name.clone());
                rule.destination = destination.map(is);
                nat.hook(Hook::Prerouting, rule);
            }
        };
        match &self.redirect.outbound_ip_ranges_include {
            Ranges::All => reroute(None),
            Ranges::List(list) => self.of_family(list).rev().for_each(|net| reroute(Some(net))),
        }
        for name in virtual_interfaces() {
            nat.hook(Hook::Prerouting, Rule::new(Target::Return).in_interface(name.clone()));
        }
        let tables: &[Table] = if self.tproxy() { &[Table::Nat, Table::Mangle] } else { &[Table::Nat] };
        for &table in tables {
            let rules = ruleset.table(self.family, table);
            for name in &self.redirect.exclude_interfaces {
                rules.hook(Hook::Prerouting, Rule::new(Target::Return).in_interface(name.clone()));
                rules.hook(Hook::Output, Rule::new(Target::Return).out_interface(is(name.clone())));
            }
        }
    }

    fn drop_invalid(&self, ruleset: &mut Ruleset) {
        if self.redirect.drop_invalid {
            let mangle = ruleset.table(self.family, Table::Mangle);
            mangle.hook(Hook::Prerouting, Rule::jump(DROP).matching(Match::CtState(CtState::Invalid)));
            mangle.append(DROP, Rule::new(Target::Drop));
        }
    }

    fn inbound(&self, ruleset: &mut Ruleset) {
        let tunnel = || Rule::new(Target::Return).tcp().to_port(PortRange::one(self.redirect.inbound_tunnel_port));
        let nat = ruleset.table(self.family, Table::Nat);
        nat.append(INBOUND, tunnel());
        nat.append(REDIRECT, Rule::new(Target::Redirect(self.redirect.proxy_port)).tcp());
        nat.append(IN_REDIRECT, Rule::new(Target::Redirect(self.redirect.inbound_capture_port)).tcp());
        if self.redirect.inbound_ports_include == Ports::List(Vec::new()) {
            return;
        }
        let rules = if self.tproxy() {
            let mangle = ruleset.table(self.family, Table::Mangle);
            let mark = self.redirect.inbound_tproxy_mark;
            mangle.append(DIVERT, Rule::new(Target::SetMark(mark)));
            mangle.append(DIVERT, Rule::new(Target::Accept));
            let target = Target::Tproxy { port: self.redirect.inbound_capture_port, mark };
            mangle.append(TPROXY, Rule::new(target).destination(not(self.loopback())).tcp());
            self.tproxy_loops(mangle.rules_of(INBOUND));
            mangle.append(INBOUND, tunnel());
            mangle
        } else {
            nat
        };
        rules.hook(Hook::Prerouting, Rule::jump(INBOUND).tcp());
        let capture: Vec<Rule> = if self.tproxy() {
            let established = Match::CtState(CtState::RelatedOrEstablished);
            vec![Rule::jump(DIVERT).tcp().matching(established), Rule::jump(TPROXY).tcp()]
        } else {
            vec![Rule::jump(IN_REDIRECT).tcp()]
        };
        let inbound = rules.rules_of(INBOUND);
        match &self.redirect.inbound_ports_include {
            Ports::All => {
                inbound.extend(to_each_port(&self.redirect.inbound_ports_exclude, &Rule::new(Target::Return).tcp()));
                inbound.extend(capture);
            }
            Ports::List(ports) => {
                for port in ports {
                    inbound.extend(capture.iter().map(|rule| with_port_first(rule, *port)));
                }
            }
        }
    }

    /// TPROXY: adds rules that prevent a packet from being captured twice.
    fn tproxy_loops(&self, inbound: &mut Vec<Rule>) {
        let back = || Rule::new(Target::Return).tcp();
        inbound.push(back().matching(Match::Mark(is(self.redirect.inbound_tproxy_mark))));
        inbound.push(back().source(is(self.passthrough())).in_interface("lo"));
        inbound.push(back().in_interface("lo").matching(Match::Mark(not(OUTBOUND_MARK))));
    }

    fn outbound(&self, ruleset: &mut Ruleset) {
        let nat = ruleset.table(self.family, Table::Nat);
        nat.hook(Hook::Output, Rule::jump(OUTPUT));
        let mut output = Vec::new();
        let back = || Rule::new(Target::Return);
        for port in each_port(&self.redirect.outbound_ports_exclude) {
            for rule in [back().tcp(), back().udp()] {
                output.push(Rule { matches: port.iter().cloned().collect(), ..rule });
            }
        }
        output.push(back().source(is(self.passthrough())).out_interface(is("lo")));
        self.proxy_traffic(&mut output);
        self.owner_groups(&mut output);
        if let Some(resolvers) = self.captured_resolvers().filter(|r| !r.is_empty()) {
            output.push(Rule::jump(OUTPUT_DNS));
            let capture = || Rule::new(Target::Redirect(DNS_PROXY_PORT));
            for rule in [capture().tcp(), capture().udp()] {
                for resolver in &resolvers {
                    let mut rule = rule.clone().to_port(DNS_PORT);
                    rule.destination = resolver.map(is);
                    nat.append(OUTPUT_DNS, rule);
                }
            }
        }
        output.push(back().destination(is(self.loopback())));
        match &self.redirect.outbound_ip_ranges_exclude {
            Ranges::All => output.push(back()),
            Ranges::List(list) => output.extend(self.of_family(list).map(|net| back().destination(is(net)))),
        }
        output.extend(to_each_port(&self.redirect.outbound_ports_include, &Rule::jump(REDIRECT).tcp()));
        match &self.redirect.outbound_ip_ranges_include {
            Ranges::All => output.push(Rule::jump(REDIRECT)),
            Ranges::List(list) => {
                output.extend(self.of_family(list).map(|net| Rule::jump(REDIRECT).destination(is(net))));
            }
        }
        nat.rules_of(OUTPUT).extend(output);
    }

    /// Adds rules for the proxy's own traffic: it leaves the pod; if it is sent to the pod itself, it enters the
    /// proxy as inbound traffic. Other processes' traffic over lo is not redirected.
    fn proxy_traffic(&self, output: &mut Vec<Rule>) {
        if self.redirect.proxy_uid.len() <= 1 && self.redirect.proxy_gid.len() <= 1 {
            for (owner, by_uid) in self.uids().map(|m| (m, true)).chain(self.gids().map(|m| (m, false))) {
                output.push(self.back_to_inbound(owner.clone(), by_uid));
                output.extend(self.local_traffic(vec![negated(&owner)]));
                output.push(Rule::new(Target::Return).matching(owner));
            }
            return;
        }
        output.extend(self.uids().map(|owner| self.back_to_inbound(owner, true)));
        output.extend(self.gids().map(|owner| self.back_to_inbound(owner, false)));
        output.extend(self.local_traffic(self.uids().chain(self.gids()).map(|owner| negated(&owner)).collect()));
        output.extend(self.uids().chain(self.gids()).map(|owner| Rule::new(Target::Return).matching(owner)));
    }

    fn back_to_inbound(&self, owner: Match, by_uid: bool) -> Rule {
        let tunnel = PortRange::one(self.redirect.inbound_tunnel_port);
        // With DNS capture, the proxy's own queries are excepted; the original does so by UID only.
        let ports = if by_uid && self.redirect.dns != DnsCapture::Off {
            Match::DestinationPorts(not(vec![DNS_PORT, tunnel]))
        } else {
            Match::DestinationPort(not(tunnel))
        };
        let rule = Rule::jump(IN_REDIRECT).out_interface(is("lo")).destination(not(self.loopback()));
        rule.tcp().matching(ports).matching(owner)
    }

    /// Returns the rule that lets traffic over lo of processes other than the proxy pass; `None` if the captured ranges
    /// include a loopback address.
    fn local_traffic(&self, not_the_proxy: Vec<Match>) -> Option<Rule> {
        let captured = match &self.redirect.outbound_ip_ranges_include {
            Ranges::All => false,
            Ranges::List(list) => list.iter().any(|net| net.addr().is_loopback()),
        };
        let mut rule = Rule::new(Target::Return).out_interface(is("lo"));
        if self.redirect.dns != DnsCapture::Off {
            rule = rule.tcp().matching(Match::DestinationPort(not(DNS_PORT)));
        }
        rule.matches.extend(not_the_proxy);
        (!captured).then_some(rule)
    }

    fn owner_groups(&self, output: &mut Vec<Rule>) {
        let back = || Rule::new(Target::Return);
        match &self.redirect.owner_groups_include {
            Groups::All => {
                let excluded = self.redirect.owner_groups_exclude.iter();
                output.extend(excluded.map(|gid| back().matching(Match::Gid(is(IdRange::one(*gid))))));
            }
            Groups::List(list) => {
                let not_included = list.iter().map(|gid| Match::Gid(not(IdRange::one(*gid)))).collect();
                output.push(Rule { matches: not_included, ..back() });
            }
        }
    }

    /// Adds rules that put captured queries and the proxy's own into different zones: without zones, connection
    /// tracking would take them for the same connection.
    fn dns_zones(&self, ruleset: &mut Ruleset) {
        let Some(resolvers) = self.captured_resolvers() else { return };
        let raw = ruleset.table(self.family, Table::Raw);
        raw.hook(Hook::Output, Rule::jump(OUTPUT_DNS));
        raw.rules_of(OUTPUT_DNS);
        let zone = |zone: u16| Rule::new(Target::Zone(zone)).udp();
        let answers = || Match::SourcePort(is(PortRange::one(DNS_PROXY_PORT)));
        for owner in self.uids().chain(self.gids()) {
            raw.append(OUTPUT_DNS, zone(PROXY_ZONE).to_port(DNS_PORT).matching(owner.clone()));
            raw.append(OUTPUT_DNS, zone(CAPTURED_ZONE).matching(answers()).matching(owner));
        }
        if !resolvers.is_empty() {
            raw.hook(Hook::Prerouting, Rule::jump(INBOUND));
        }
        for resolver in resolvers {
            let mut query = zone(CAPTURED_ZONE).to_port(DNS_PORT);
            query.destination = resolver.map(is);
            raw.append(OUTPUT_DNS, query);
            let mut answer = zone(PROXY_ZONE).matching(Match::SourcePort(is(DNS_PORT)));
            answer.source = resolver.map(is);
            raw.append(INBOUND, answer);
        }
    }

    fn tproxy_marks(&self, ruleset: &mut Ruleset) {
        let mark = self.redirect.inbound_tproxy_mark;
        let mangle = ruleset.table(self.family, Table::Mangle);
        mangle.hook(Hook::Prerouting, Rule::new(Target::SaveMark).tcp().matching(Match::Mark(is(mark))));
        let own = || Rule::new(Target::Return).out_interface(is("lo")).tcp();
        mangle.hook(Hook::Output, own().matching(Match::Mark(is(mark))));
        for owner in self.uids().chain(self.gids()) {
            let rule = Rule { target: Target::SetMark(OUTBOUND_MARK), ..own().destination(not(self.loopback())) };
            mangle.hook(Hook::Output, rule.matching(owner));
        }
        mangle.hook(Hook::Output, Rule::new(Target::RestoreMark).tcp().matching(Match::Connmark(mark)));
        if self.redirect.inbound_ports_include == Ports::List(Vec::new()) {
            self.tproxy_loops(mangle.rules_of(INBOUND));
        }
    }
}

/// Returns `--dport` for each port of a list; one `None` for `*`.
fn each_port(ports: &Ports) -> Vec<Option<Match>> {
    match ports {
        Ports::All => vec![None],
        Ports::List(list) => list.iter().map(|p| Some(Match::DestinationPort(is(*p)))).collect(),
    }
}

fn to_each_port<'a>(ports: &Ports, rule: &'a Rule) -> impl Iterator<Item = Rule> + use<'a> {
    each_port(ports).into_iter().map(|port| Rule { matches: port.into_iter().collect(), ..rule.clone() })
}

fn with_port_first(rule: &Rule, port: PortRange) -> Rule {
    let mut rule = rule.clone();
    rule.matches.insert(0, Match::DestinationPort(is(port)));
    rule
}

fn negated(owner: &Match) -> Match {
    match owner {
        Match::Uid(Is { not, value }) => Match::Uid(Is { not: !not, value: *value }),
        Match::Gid(Is { not, value }) => Match::Gid(Is { not: !not, value: *value }),
        other => other.clone(),
    }
}
