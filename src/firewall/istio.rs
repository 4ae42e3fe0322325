//! From a policy to rules, and an upper bound of their number before they are built, since the lists of a policy multiply.
//!
//! The rules of the redirection are chain for chain and rule for rule what Istio's own tool writes (istio/istio,
//! `tools/istio-iptables/pkg/capture`), so that people who know Istio's rules recognize them. Deviations, each of
//! which corrects an error of the original:
//!
//! * Several proxy UIDs or GIDs: the original's `not the first UID → RETURN` on lo makes the rules of all other UIDs
//!   unreachable. With more than one UID or GID, detour writes one rule that checks all of them.
//! * TPROXY: the original exempts the tunnel port in a nat chain to which no rule jumps in this mode; detour exempts
//!   it in mangle.
//! * `*` as an excluded port or range is a rule without that condition; the original fails.

use super::containers::SCOPES;
use super::rule::{Condition, ESTABLISHED_OR_RELATED, Family, Hook, INVALID, Key, Rule, Table, Target};
use super::ruleset::{ExcludedTraffic, GuardedTraffic, Ruleset};
use super::set::Spans;
use crate::policy::{
    ContainerScope, DnsCapture, Groups, Guard, IdRange, Interception, InterceptionMode, Ipv6, Policy, PortRange, Ports,
    Ranges, Redirect,
};
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

/// The maximum number of rules that an ADD writes for a pod, both families together.
pub const MAX_RULES: usize = 16_000;
/// The number of a redirection's rules that don't depend on its lists.
const FIXED_RULES: usize = 30;
/// The limit of rules that lead to the exclusions, fix destinations and set zones, and of those for excluded containers:
/// two sets at each level, in raw and nat.
const EXCLUDED_RULES: usize = 60;
/// The rules of an exclusion, in raw and nat.
const RULES_PER_EXCLUSION: usize = 2;

impl Ruleset {
    /// Builds the rules that `policy` needs: its redirection in `families`, and its exclusions.
    #[must_use]
    pub fn of(policy: &Policy, families: &[Family]) -> Self {
        if policy.is_empty() {
            return Self::default();
        }
        let excluded = excluded(policy).filter(|_| policy.interception != Interception::Off);
        Self { excluded, guarded: guarded(policy), ..Self::of_redirection(policy, families) }
    }

    /// Builds the rules of the redirection of `policy` in `families`.
    #[must_use]
    pub fn of_redirection(policy: &Policy, families: &[Family]) -> Self {
        let mut ruleset = Self::default();
        if let Some(redirect) = policy.redirect() {
            families.iter().for_each(|family| write(redirect, *family, &mut ruleset));
        }
        ruleset
    }
}

fn guarded(policy: &Policy) -> Option<GuardedTraffic> {
    Some(match policy.guard.as_ref()? {
        Guard::Ambient(guard) => GuardedTraffic::Ambient(guard.clone()),
        Guard::Sidecar(redirect) => {
            let redirect = policy.redirect().unwrap_or(redirect);
            // A family whose addresses appear later is rejected until it is redirected.
            let families = if redirect.ipv6 == Ipv6::Off { &Family::ALL[..1] } else { &Family::ALL };
            let mut ruleset = Ruleset::default();
            families.iter().for_each(|family| write(redirect, *family, &mut ruleset));
            GuardedTraffic::Sidecar { rules: ruleset.tables, redirect: Box::new(redirect.clone()) }
        }
    })
}

fn excluded(policy: &Policy) -> Option<ExcludedTraffic> {
    let is_used = |scope: &ContainerScope| policy.containers.iter().any(|container| container.scope == *scope);
    let scopes: Vec<ContainerScope> = SCOPES.into_iter().filter(is_used).collect();
    let exclusions = policy.exclusions_in_effect();
    let captures_ip6 = policy.redirect().is_none_or(|redirect| redirect.ipv6 != Ipv6::Off);
    let is_any = !scopes.is_empty() || !exclusions.is_empty();
    let (capture, ambient) = (captured(policy).clone(), policy.ambient);
    is_any.then_some(ExcludedTraffic { exclusions, scopes, capture, captures_ip6, ambient })
}

/// Returns which DNS queries the pod's redirection captures, which may be another tool's. If that is unknown,
/// assumes all: istio-init runs after every attachment, and only captured queries are ever excluded.
fn captured(policy: &Policy) -> &DnsCapture {
    match (policy.redirect(), policy.dns_captured_elsewhere) {
        (Some(redirect), _) => &redirect.dns,
        (None, Some(false)) => &DnsCapture::Off,
        (None, Some(true) | None) => &DnsCapture::All,
    }
}

/// Returns an upper bound of the rules that `policy` needs, both families together, counted as iptables rules.
#[must_use]
pub fn max_rules(policy: &Policy) -> usize {
    let redirect = policy.redirect().map_or(0, |redirect| 2 * of_redirect(redirect));
    let guard = policy.guard.as_ref().map_or(0, |guard| match guard {
        Guard::Sidecar(own) => 2 * of_redirect(policy.redirect().unwrap_or(own)) + EXCLUDED_RULES,
        Guard::Ambient(_) => EXCLUDED_RULES,
    });
    let per_exclusion = RULES_PER_EXCLUSION + usize::from(policy.guard.is_some());
    redirect
        .saturating_add(guard)
        .saturating_add(EXCLUDED_RULES)
        .saturating_add(per_exclusion * policy.exclusions.len())
}

/// Returns the number of destinations to which queries are captured, in the family that has more of them.
fn captured_servers(capture: &DnsCapture) -> usize {
    match capture {
        DnsCapture::Off => 0,
        DnsCapture::All => 1,
        DnsCapture::Servers { v4, v6 } => v4.len().max(v6.len()),
    }
}

/// Returns an upper bound of a redirection's rules in one family.
fn of_redirect(redirect: &Redirect) -> usize {
    let ports = |ports: &Ports| match ports {
        Ports::All => 1,
        Ports::List(list) => list.len(),
    };
    let ranges = |ranges: &Ranges| match ranges {
        Ranges::All => 1,
        Ranges::List(list) => list.len(),
    };
    let included = ranges(&redirect.outbound_ip_ranges_include);
    let groups = match &redirect.owner_groups_include {
        Groups::All => redirect.owner_groups_exclude.len(),
        Groups::List(_) => 1,
    };
    let per_interface = 4 * redirect.exclude_interfaces.len();
    let per_owner = 6 * (redirect.proxy_uid.len() + redirect.proxy_gid.len());
    let per_port = ports(&redirect.inbound_ports_exclude)
        + 2 * ports(&redirect.inbound_ports_include)
        + 2 * ports(&redirect.outbound_ports_exclude)
        + ports(&redirect.outbound_ports_include);
    let rerouted = redirect.reroute_virtual_interfaces.len().saturating_mul(included + 1);
    let per_range = included + ranges(&redirect.outbound_ip_ranges_exclude);
    let per_server = 4 * captured_servers(&redirect.dns);
    FIXED_RULES.saturating_add(rerouted) + per_interface + per_owner + per_port + per_range + per_server + groups
}

/// Adds the rules for `redirect` for one family.
fn write(redirect: &Redirect, family: Family, ruleset: &mut Ruleset) {
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

    /// Returns the conditions that the proxy sends a packet, by its UIDs, then by its GIDs.
    fn owners(&self) -> impl Iterator<Item = Condition> + '_ {
        let uids = self.redirect.proxy_uid.iter().map(|id| Condition::is(Key::Uid, IdRange::one(*id)));
        uids.chain(self.redirect.proxy_gid.iter().map(|id| gid(*id)))
    }

    /// Adds rules for excluded interfaces and for interfaces of virtual machines.
    fn interfaces(&self, ruleset: &mut Ruleset) {
        let nat = ruleset.table(self.family, Table::Nat);
        let virtual_interfaces = || self.redirect.reroute_virtual_interfaces.iter().rev();
        let mut reroute = |destination: Option<IpNet>| {
            for name in virtual_interfaces() {
                let rule = Rule::jump(REDIRECT).on(enters(name)).on_all(destination.map(Condition::to));
                nat.hook(Hook::Prerouting, rule);
            }
        };
        match &self.redirect.outbound_ip_ranges_include {
            Ranges::All => reroute(None),
            Ranges::List(list) => self.of_family(list).rev().for_each(|net| reroute(Some(net))),
        }
        for name in virtual_interfaces() {
            nat.hook(Hook::Prerouting, back().on(enters(name)));
        }
        let tables: &[Table] = if self.tproxy() { &[Table::Nat, Table::Mangle] } else { &[Table::Nat] };
        for &table in tables {
            let rules = ruleset.table(self.family, table);
            for name in &self.redirect.exclude_interfaces {
                rules.hook(Hook::Prerouting, back().on(enters(name)));
                rules.hook(Hook::Output, back().on(leaves(name)));
            }
        }
    }

    fn drop_invalid(&self, ruleset: &mut Ruleset) {
        if self.redirect.drop_invalid {
            let mangle = ruleset.table(self.family, Table::Mangle);
            mangle.hook(Hook::Prerouting, Rule::jump(DROP).on(in_state(INVALID)));
            mangle.append(DROP, Rule::new(Target::Drop));
        }
    }

    fn inbound(&self, ruleset: &mut Ruleset) {
        let tunnel = || back().tcp().to_port(PortRange::one(self.redirect.inbound_tunnel_port));
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
            mangle.append(TPROXY, Rule::new(target).on(!Condition::to(self.loopback())).tcp());
            self.tproxy_loops(mangle.rules_of(INBOUND));
            mangle.append(INBOUND, tunnel());
            mangle
        } else {
            nat
        };
        rules.hook(Hook::Prerouting, Rule::jump(INBOUND).tcp());
        let capture = |port: Option<Condition>| {
            let jump = |chain| Rule::jump(chain).tcp().on_all(port.clone());
            if self.tproxy() {
                vec![jump(DIVERT).on(in_state(ESTABLISHED_OR_RELATED)), jump(TPROXY)]
            } else {
                vec![jump(IN_REDIRECT)]
            }
        };
        let inbound = rules.rules_of(INBOUND);
        if self.redirect.inbound_ports_include == Ports::All {
            inbound.extend(to_each_port(&self.redirect.inbound_ports_exclude, &back().tcp()));
        }
        inbound.extend(each_port(&self.redirect.inbound_ports_include).into_iter().flat_map(capture));
    }

    /// TPROXY: adds rules that prevent a packet from being captured twice.
    fn tproxy_loops(&self, inbound: &mut Vec<Rule>) {
        inbound.push(back().tcp().on(marked(self.redirect.inbound_tproxy_mark)));
        inbound.push(back().tcp().on(Condition::from(self.passthrough())).on(enters("lo")));
        inbound.push(back().tcp().on(enters("lo")).on(!marked(OUTBOUND_MARK)));
    }

    fn outbound(&self, ruleset: &mut Ruleset) {
        let nat = ruleset.table(self.family, Table::Nat);
        nat.hook(Hook::Output, Rule::jump(OUTPUT));
        let mut output = Vec::new();
        for port in each_port(&self.redirect.outbound_ports_exclude) {
            output.extend([back().tcp(), back().udp()].map(|rule| rule.on_all(port.clone())));
        }
        output.push(back().on(Condition::from(self.passthrough())).on(leaves("lo")));
        self.proxy_traffic(&mut output);
        self.owner_groups(&mut output);
        if let Some(resolvers) = self.captured_resolvers().filter(|r| !r.is_empty()) {
            output.push(Rule::jump(OUTPUT_DNS));
            let capture = || Rule::new(Target::Redirect(DNS_PROXY_PORT));
            for rule in [capture().tcp(), capture().udp()] {
                for resolver in &resolvers {
                    nat.append(OUTPUT_DNS, rule.clone().to_port(DNS_PORT).on_all(resolver.map(Condition::to)));
                }
            }
        }
        output.push(back().on(Condition::to(self.loopback())));
        match &self.redirect.outbound_ip_ranges_exclude {
            Ranges::All => output.push(back()),
            Ranges::List(list) => output.extend(self.of_family(list).map(|net| back().on(Condition::to(net)))),
        }
        output.extend(to_each_port(&self.redirect.outbound_ports_include, &Rule::jump(REDIRECT).tcp()));
        match &self.redirect.outbound_ip_ranges_include {
            Ranges::All => output.push(Rule::jump(REDIRECT)),
            Ranges::List(list) => {
                output.extend(self.of_family(list).map(|net| Rule::jump(REDIRECT).on(Condition::to(net))));
            }
        }
        nat.rules_of(OUTPUT).extend(output);
    }

    /// Adds rules for the proxy's own traffic: it leaves the pod; if it is sent to the pod itself, it enters the
    /// proxy as inbound traffic. Other processes' traffic over lo is not redirected.
    fn proxy_traffic(&self, output: &mut Vec<Rule>) {
        if self.redirect.proxy_uid.len() <= 1 && self.redirect.proxy_gid.len() <= 1 {
            for owner in self.owners() {
                output.push(self.back_to_inbound(owner.clone()));
                output.extend(self.local_traffic([!owner.clone()]));
                output.push(back().on(owner));
            }
            return;
        }
        output.extend(self.owners().map(|owner| self.back_to_inbound(owner)));
        output.extend(self.local_traffic(self.owners().map(|owner| !owner)));
        output.extend(self.owners().map(|owner| back().on(owner)));
    }

    fn back_to_inbound(&self, owner: Condition) -> Rule {
        let mut ports = Spans::from(PortRange::one(self.redirect.inbound_tunnel_port));
        // With DNS capture, the proxy's own queries are excepted; the original does so by UID only.
        if owner.key == Key::Uid && self.redirect.dns != DnsCapture::Off {
            ports.insert(DNS_PORT.into());
        }
        let rule = Rule::jump(IN_REDIRECT).on(leaves("lo")).on(!Condition::to(self.loopback()));
        rule.tcp().on(!Condition::is(Key::DestinationPort, ports)).on(owner)
    }

    /// Returns the rule that lets traffic over lo of processes other than the proxy pass; `None` if the captured ranges
    /// include a loopback address.
    fn local_traffic(&self, not_the_proxy: impl IntoIterator<Item = Condition>) -> Option<Rule> {
        let captured = match &self.redirect.outbound_ip_ranges_include {
            Ranges::All => false,
            Ranges::List(list) => list.iter().any(|net| net.addr().is_loopback()),
        };
        let mut rule = back().on(leaves("lo"));
        if self.redirect.dns != DnsCapture::Off {
            rule = rule.tcp().on(!Condition::is(Key::DestinationPort, DNS_PORT));
        }
        (!captured).then(|| rule.on_all(not_the_proxy))
    }

    fn owner_groups(&self, output: &mut Vec<Rule>) {
        match &self.redirect.owner_groups_include {
            Groups::All => output.extend(self.redirect.owner_groups_exclude.iter().map(|id| back().on(gid(*id)))),
            Groups::List(list) => output.push(back().on_all(list.iter().map(|id| !gid(*id)))),
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
        let from_port = |ports: PortRange| Condition::is(Key::SourcePort, ports);
        for owner in self.owners() {
            raw.append(OUTPUT_DNS, zone(PROXY_ZONE).to_port(DNS_PORT).on(owner.clone()));
            raw.append(OUTPUT_DNS, zone(CAPTURED_ZONE).on(from_port(PortRange::one(DNS_PROXY_PORT))).on(owner));
        }
        if !resolvers.is_empty() {
            raw.hook(Hook::Prerouting, Rule::jump(INBOUND));
        }
        for resolver in resolvers {
            let query = zone(CAPTURED_ZONE).to_port(DNS_PORT).on_all(resolver.map(Condition::to));
            raw.append(OUTPUT_DNS, query);
            let answer = zone(PROXY_ZONE).on(from_port(DNS_PORT)).on_all(resolver.map(Condition::from));
            raw.append(INBOUND, answer);
        }
    }

    fn tproxy_marks(&self, ruleset: &mut Ruleset) {
        let mark = self.redirect.inbound_tproxy_mark;
        let mangle = ruleset.table(self.family, Table::Mangle);
        mangle.hook(Hook::Prerouting, Rule::new(Target::SaveMark).tcp().on(marked(mark)));
        let own = |target| Rule::new(target).on(leaves("lo")).tcp();
        mangle.hook(Hook::Output, own(Target::Return).on(marked(mark)));
        for owner in self.owners() {
            let rule = own(Target::SetMark(OUTBOUND_MARK)).on(!Condition::to(self.loopback()));
            mangle.hook(Hook::Output, rule.on(owner));
        }
        let restore = Rule::new(Target::RestoreMark).tcp();
        mangle.hook(Hook::Output, restore.on(Condition::is(Key::CtMark, Spans::one(mark))));
        if self.redirect.inbound_ports_include == Ports::List(Vec::new()) {
            self.tproxy_loops(mangle.rules_of(INBOUND));
        }
    }
}

fn back() -> Rule {
    Rule::new(Target::Return)
}

fn enters(interface: &str) -> Condition {
    Condition::interface(Key::InInterface, interface)
}

fn leaves(interface: &str) -> Condition {
    Condition::interface(Key::OutInterface, interface)
}

fn marked(mark: u32) -> Condition {
    Condition::is(Key::Mark, Spans::one(mark))
}

fn in_state(state: u128) -> Condition {
    Condition::is(Key::CtState, Spans::one(state))
}

fn gid(id: u32) -> Condition {
    Condition::is(Key::Gid, IdRange::one(id))
}

/// Returns `--dport` for each port of a list; one `None` for `*`.
fn each_port(ports: &Ports) -> Vec<Option<Condition>> {
    match ports {
        Ports::All => vec![None],
        Ports::List(list) => list.iter().map(|p| Some(Condition::is(Key::DestinationPort, *p))).collect(),
    }
}

fn to_each_port<'a>(ports: &Ports, rule: &'a Rule) -> impl Iterator<Item = Rule> + use<'a> {
    each_port(ports).into_iter().map(|port| rule.clone().on_all(port))
}
