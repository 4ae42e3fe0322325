//! Evaluates the first packet of a connection in all tables of a pod, in the order of the kernel (nf_tables_core.c,
//! `nft_do_chain`), and finds where it arrives.

use super::native::GUARD_PREFIX;
use super::native::rule::{BaseHook, NativeTable, TableId};
use super::packet::{Packet, Sender};
use super::redirections::CAPTURED_BY_ISTIO_CNI;
use super::rule::{Hook, Table, Target, is_redirection_chain};
use super::view::{RuleView, RulesetView};
use serde::Serialize;
use std::fmt;

/// Limit for the unsupported rules that are listed; the rest is counted.
const MAX_LISTED: usize = 20;
/// Limit for the rules that a packet passes. Chains that jump to others several times multiply rules.
const MAX_RULES: usize = 100_000;

/// The way of a packet through the rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evaluation {
    /// The rules that the packet matches, in order, up to the one that decides.
    pub hops: Vec<Hop>,
    /// The rule that decides where the packet arrives, the last one of `hops`; `None` if no rule decides.
    pub decided_by: Option<RulePlace>,
    /// Where the packet arrives.
    pub arrival: Arrival,
    /// The connection tracking zone; 0 if no rule sets one.
    pub zone: u16,
    /// Rules that were not evaluated; because of them, the packet may arrive elsewhere.
    pub caveats: Vec<String>,
}

/// Where a packet arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// At its destination.
    Direct,
    /// Nowhere.
    Dropped,
    /// Nowhere: the guard rejects it.
    Rejected,
    /// At this port of the sidecar, by a rule of Istio's chains.
    Sidecar(u16),
    /// At this port of ztunnel, by a rule of istio-cni for the ambient mesh.
    Ztunnel(u16),
    /// At this port, by another rule.
    Redirected(u16),
    /// No rule decides but those of a redirection that is not in the view.
    Unknown,
}

impl fmt::Display for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct => f.write_str("direct"),
            Self::Dropped => f.write_str("dropped"),
            Self::Rejected => f.write_str("rejected"),
            Self::Sidecar(port) => write!(f, "sidecar:{port}"),
            Self::Ztunnel(port) => write!(f, "ztunnel:{port}"),
            Self::Redirected(port) => write!(f, "redirected:{port}"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

/// A rule and its position.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RulePlace {
    /// `raw`, `mangle` or `nat`, with prefix `detour-` or `istio-ambient-` for nftables; `detour-exclusions`.
    pub table: &'static str,
    /// The netfilter chain.
    pub chain: String,
    /// The rule as `iptables-save` or `nft` prints it, without the chain.
    pub rule: String,
}

impl RulePlace {
    fn of(Hop { table, chain, rule, .. }: &Hop) -> Self {
        Self { table, chain: chain.clone(), rule: rule.clone() }
    }
}

/// A rule that the packet matched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hop {
    /// `raw`, `mangle` or `nat`, with prefix `detour-` or `istio-ambient-` for nftables; `detour-exclusions`.
    pub table: &'static str,
    /// `OUTPUT` or `PREROUTING`: the hook at which the packet entered the table.
    pub hook: &'static str,
    /// The netfilter chain of the rule.
    pub chain: String,
    /// The rule as `iptables-save` or `nft` prints it, without the chain.
    pub rule: String,
    /// The action: `jumps to CHAIN`, `returns`, `accepts`, `redirects to port 15001`, ….
    pub then: String,
    /// How the packet leaves the table or the chain because of the rule; `None` if it does not.
    #[serde(skip)]
    end: Option<End>,
}

/// How a packet left a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// To the next table.
    Continue,
    /// To its destination: no later NAT applies.
    Direct,
    /// Dropped.
    Dropped,
    /// Rejected with an answer.
    Rejected,
    /// Redirected to this port by NAT.
    Redirected(u16),
    /// Delivered unchanged to the listener on this port.
    Tproxied(u16),
}

/// The effect of a rule or a chain on the evaluation.
enum RuleEffect {
    /// Continue with the next rule.
    Continue,
    /// Return to the calling chain.
    Return,
    /// Evaluate this chain, and continue behind the rule if it does not decide.
    Jump(String),
    /// Evaluate this chain, and return to the calling chain if it does not decide.
    Goto(String),
    /// Leave the table.
    End(End),
}

impl RulesetView {
    /// Evaluates a packet in all tables.
    #[must_use]
    pub fn evaluate(&self, packet: Packet) -> Evaluation {
        let mut walk = Walk { view: self, packet, hops: Vec::new(), unsupported: Vec::new(), rules: 0 };
        let end = walk.run();
        let decisive = decisive_hop(&walk.hops, end);
        walk.hops.truncate(decisive.map_or(walk.hops.len(), |index| index + 1));
        let decided_by = decisive.and(walk.hops.last()).map(RulePlace::of);
        let to_ztunnel = decided_by.as_ref().is_some_and(|place| place.rule == CAPTURED_BY_ISTIO_CNI);
        let by_istio = decided_by.as_ref().is_some_and(|place| is_redirection_chain(&place.chain));
        let arrival = match end {
            End::Continue if !self.unread_redirections.is_empty() => Arrival::Unknown,
            End::Continue | End::Direct => Arrival::Direct,
            End::Dropped => Arrival::Dropped,
            End::Rejected => Arrival::Rejected,
            End::Redirected(port) if to_ztunnel => Arrival::Ztunnel(port),
            End::Redirected(port) | End::Tproxied(port) if by_istio => Arrival::Sidecar(port),
            End::Redirected(port) | End::Tproxied(port) => Arrival::Redirected(port),
        };
        let mut caveats = self.caveats.clone();
        if !matches!(end, End::Direct | End::Dropped | End::Rejected) {
            caveats.extend_from_slice(&self.unread_redirections);
        }
        let more = walk.unsupported.len().saturating_sub(MAX_LISTED);
        let listed = walk.unsupported.iter().take(MAX_LISTED);
        caveats.extend(listed.map(|rule| format!("skipped unsupported rule: {rule}")));
        if more > 0 {
            caveats.push(format!("skipped {more} more unsupported rules"));
        }
        if walk.rules > MAX_RULES {
            caveats.push(format!("stopped after {MAX_RULES} rules"));
        }
        Evaluation { hops: walk.hops, decided_by, arrival, zone: walk.packet.zone.unwrap_or_default(), caveats }
    }
}

/// Returns the index of the rule that redirected, dropped or excluded the packet, or else of the last rule that ended its
/// evaluation in a table.
fn decisive_hop(hops: &[Hop], end: End) -> Option<usize> {
    let ends = |hop: &Hop| hop.end == Some(end);
    match end {
        // A packet that is accepted in raw still passes nat.
        End::Continue => {
            let decides = |hop: &&Hop| !hop.table.ends_with(Table::Raw.name()) && !hop.chain.starts_with(GUARD_PREFIX);
            hops.iter().rposition(|hop| ends(hop) && decides(&hop))
        }
        // The rule that selected the packet for the chain that fixes its destination.
        End::Direct => hops.iter().rposition(ends).map(|index| index.saturating_sub(1)),
        End::Dropped | End::Rejected | End::Redirected(_) | End::Tproxied(_) => hops.iter().rposition(ends),
    }
}

/// The evaluation of a packet in several tables.
struct Walk<'a> {
    view: &'a RulesetView,
    packet: Packet,
    /// The rules that the packet matched, in order.
    hops: Vec<Hop>,
    /// The foreign rules that can't be evaluated, as `CHAIN rule`.
    unsupported: Vec<String>,
    /// The number of rules that the packet passed.
    rules: usize,
}

impl Walk<'_> {
    /// Evaluates all tables.
    ///
    /// A packet that a process sends over lo also arrives there. It then keeps the NAT of its connection and does not
    /// pass nat again (nf_nat_core.c, `nf_nat_inet_fn`).
    fn run(&mut self) -> End {
        if matches!(self.packet.sender, Sender::Inbound(_)) {
            let end = self.tables(&Table::ALL, Hook::Prerouting);
            return self.guarded(end, Hook::Input);
        }
        let out = self.tables(&Table::ALL, Hook::Output);
        let out = self.guarded(out, Hook::Output);
        if matches!(out, End::Dropped | End::Rejected) || !self.packet.is_over_lo() {
            return out;
        }
        self.packet.zone.get_or_insert(0);
        self.packet.receive_over_lo();
        match self.tables(&[Table::Raw, Table::Mangle], Hook::Prerouting) {
            End::Continue | End::Direct => out,
            end => end,
        }
    }

    /// Evaluates the guard, which comes after all other rules.
    fn guarded(&mut self, end: End, hook: Hook) -> End {
        match end {
            End::Dropped => end,
            _ if self.tables(&[Table::Filter], hook) == End::Rejected => End::Rejected,
            _ => end,
        }
    }

    /// Evaluates the base chains that are attached like those of `tables` at a hook, in the order of their priorities.
    fn tables(&mut self, tables: &[Table], hook: Hook) -> End {
        let (view, family) = (self.view, self.packet.family());
        for like in tables {
            let native = [NativeTable::Exclusions, NativeTable::Of(*like)].map(TableId::Native);
            for table in native.into_iter().chain([TableId::Iptables(family, *like)]) {
                for base in view.base_chains(table, BaseHook { like: *like, hook }) {
                    match self.chain((table, hook), base) {
                        RuleEffect::End(End::Continue) => {}
                        RuleEffect::End(End::Redirected(port)) => {
                            self.packet.redirect(port);
                            return End::Redirected(port);
                        }
                        RuleEffect::End(end) => return end,
                        _ => {}
                    }
                }
            }
            if let Some(port) = self.captured_by_ztunnel(*like, hook) {
                return End::Redirected(port);
            }
        }
        End::Continue
    }

    /// Evaluates istio-cni's redirection to ztunnel, which is in table nat.
    fn captured_by_ztunnel(&mut self, like: Table, hook: Hook) -> Option<u16> {
        let redirection = self.view.to_ztunnel.filter(|_| like == Table::Nat)?;
        let port = redirection.captures(&self.packet, hook)?;
        self.packet.redirect(port);
        let (table, chain) = redirection.chain(hook);
        let (rule, then) = (CAPTURED_BY_ISTIO_CNI.to_owned(), format!("redirects to port {port}"));
        let (hook, end) = (hook.chain(), Some(End::Redirected(port)));
        self.hops.push(Hop { table, hook, chain: chain.to_owned(), rule, then, end });
        Some(port)
    }

    fn chain(&mut self, at: (TableId, Hook), name: &str) -> RuleEffect {
        let view = self.view;
        for rule in view.chain(at.0, name) {
            match self.rule(at, name, rule) {
                RuleEffect::Continue => {}
                // The calling chain continues behind the rule that jumped here.
                RuleEffect::Return => return RuleEffect::Continue,
                RuleEffect::Jump(to) => {
                    let effect = self.chain(at, &to);
                    if matches!(effect, RuleEffect::End(_)) {
                        return effect;
                    }
                }
                // The calling chain continues behind its rule.
                RuleEffect::Goto(to) => return self.chain(at, &to),
                end @ RuleEffect::End(_) => return end,
            }
        }
        RuleEffect::Continue
    }

    fn rule(&mut self, (table, hook): (TableId, Hook), chain: &str, rule: &RuleView) -> RuleEffect {
        self.rules += 1;
        if self.rules > MAX_RULES {
            return RuleEffect::End(End::Continue);
        }
        let Some(native) = &rule.rule else {
            self.unsupported.push(format!("{chain} {}", rule.text));
            return RuleEffect::Continue;
        };
        if !self.packet.matches(native) {
            return RuleEffect::Continue;
        }
        let (then, verdict) = self.packet.apply(&native.target);
        let end = match verdict {
            RuleEffect::Continue | RuleEffect::Jump(_) | RuleEffect::Goto(_) => None,
            RuleEffect::Return => Some(End::Continue),
            RuleEffect::End(end) => Some(end),
        };
        let table = table.name();
        let (chain, rule) = (chain.to_owned(), rule.text.clone());
        self.hops.push(Hop { table, hook: hook.chain(), chain, rule, then, end });
        verdict
    }
}

impl Packet {
    /// Applies a target to the packet, and returns it in words and its effect.
    fn apply(&mut self, target: &Target) -> (String, RuleEffect) {
        match target {
            Target::Accept => ("accepts".to_owned(), RuleEffect::End(End::Continue)),
            Target::Return => ("returns".to_owned(), RuleEffect::Return),
            Target::Drop => ("drops".to_owned(), RuleEffect::End(End::Dropped)),
            Target::Reset | Target::Reject => ("rejects".to_owned(), RuleEffect::End(End::Rejected)),
            Target::Jump(chain) => (format!("jumps to {chain}"), RuleEffect::Jump(chain.to_string())),
            Target::Goto(chain) => (format!("goes to {chain}"), RuleEffect::Goto(chain.to_string())),
            Target::Redirect(port) => (format!("redirects to port {port}"), RuleEffect::End(End::Redirected(*port))),
            Target::KeepDestination => ("keeps the destination".to_owned(), RuleEffect::End(End::Direct)),
            Target::Tproxy { port, mark } => {
                self.mark = *mark;
                (format!("delivers to port {port} unchanged"), RuleEffect::End(End::Tproxied(*port)))
            }
            // The zone can't change once it is set or, over lo, once the packet is tracked (xt_CT.c, nft_ct.c).
            Target::Zone(_) if self.zone.is_some() => ("keeps the zone".to_owned(), RuleEffect::Continue),
            Target::Zone(zone) => {
                self.zone = Some(*zone);
                (format!("sets zone {zone}"), RuleEffect::Continue)
            }
            Target::SetMark(mark) => {
                self.mark = *mark;
                (format!("sets mark {mark:#x}"), RuleEffect::Continue)
            }
            Target::SaveMark => ("saves the mark in the connection".to_owned(), RuleEffect::Continue),
            Target::RestoreMark => ("restores the connection's mark".to_owned(), RuleEffect::Continue),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::RuleFormat;
    use crate::firewall::packet::Destination;
    use crate::policy::{
        DnsCapture, Exclusion, IdRange, Interception, InterceptionMode, Policy, PortRange, Protocol, Redirect,
        TrafficOwner,
    };
    use std::net::IpAddr;

    /// `uid=UID`, `uid=UID,gid=GID`, `inbound` or `inbound:ADDRESS`.
    fn sender(text: &str) -> Sender {
        if let Some(client) = text.strip_prefix("inbound") {
            return Sender::Inbound(client.strip_prefix(':').map(|client| client.parse().expect("an address")));
        }
        let (uid, gid) = text.split_once(',').unwrap_or((text, "gid=0"));
        let id = |text: &str| text[4..].parse().expect("an ID");
        Sender::Process { uid: id(uid), gid: Some(id(gid)), set: None }
    }

    fn destination(text: &str) -> Destination {
        let (address, protocol) = text.split_once('/').expect(text);
        let protocol = if protocol == "udp" { Protocol::Udp } else { Protocol::Tcp };
        Destination { address: address.parse().expect(text), protocol }
    }

    fn arrives(policy: &Policy, from: &str, to: &str) -> String {
        let own: [IpAddr; 2] = ["10.0.0.2".parse().expect("v4"), "fd00::2".parse().expect("v6")];
        let [iptables, native] = [RuleFormat::Iptables, RuleFormat::Nftables].map(|format| {
            let packet = Packet::first(sender(from), destination(to), &own, "eth0");
            RulesetView::of_policy(policy, format).evaluate(packet).arrival.to_string()
        });
        assert_eq!(iptables, native, "{from} to {to}");
        iptables
    }

    fn on(redirect: Redirect) -> Policy {
        Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() }
    }

    #[test]
    fn istios_default_rules_capture_and_bypass_as_documented() {
        let policy = on(Redirect { dns: DnsCapture::All, ..Redirect::default() });
        for (from, to, at) in [
            ("uid=1000", "1.2.3.4:443/tcp", "sidecar:15001"),
            ("uid=1000", "[2001:db8::1]:443/tcp", "sidecar:15001"),
            ("uid=1000", "1.2.3.4:53/udp", "sidecar:15053"),
            ("uid=1000", "1.2.3.4:54/udp", "direct"),
            ("uid=1000", "1.2.3.4:15020/tcp", "direct"),
            ("uid=1000", "10.0.0.2:8080/tcp", "direct"),
            ("uid=1337", "1.2.3.4:443/tcp", "direct"),
            ("uid=1,gid=1337", "1.2.3.4:53/udp", "direct"),
            ("uid=1337", "10.0.0.2:8080/tcp", "sidecar:15006"),
            ("uid=1337", "[fd00::2]:8080/tcp", "sidecar:15006"),
            ("uid=1337", "127.0.0.1:8080/tcp", "direct"),
            ("inbound", "10.0.0.2:8080/tcp", "sidecar:15006"),
            ("inbound:10.0.0.9", "[fd00::2]:15021/tcp", "direct"),
            ("inbound", "10.0.0.2:15008/tcp", "direct"),
            ("inbound", "10.0.0.2:53/udp", "direct"),
        ] {
            assert_eq!(arrives(&policy, from, to), at, "{from} → {to}");
        }
    }

    #[test]
    fn tproxy_captures_inbound_traffic_and_the_proxys_traffic_to_its_own_pod() {
        let policy = on(Redirect { inbound_interception_mode: InterceptionMode::Tproxy, ..Redirect::default() });
        for (from, to, at) in [
            ("inbound", "10.0.0.2:8080/tcp", "sidecar:15006"),
            ("inbound", "10.0.0.2:15090/tcp", "direct"),
            ("uid=1000", "1.2.3.4:443/tcp", "sidecar:15001"),
            ("uid=1000", "10.0.0.2:8080/tcp", "direct"),
            ("uid=1337", "10.0.0.2:8080/tcp", "sidecar:15006"),
        ] {
            assert_eq!(arrives(&policy, from, to), at, "{from} → {to}");
        }
    }

    #[test]
    fn the_deciding_rule_and_the_zone_are_reported() {
        let excluded = Exclusion {
            owner: TrafficOwner::Uid(IdRange::one(7)),
            destination: None,
            protocol: None,
            ports: vec![PortRange::one(53)],
        };
        let mut policy = on(Redirect { dns: DnsCapture::All, ..Redirect::default() });
        policy.exclusions.insert(excluded);
        let formats = [
            (RuleFormat::Iptables, "nat", "-p udp -m udp --dport 53 -j REDIRECT --to-ports 15053"),
            (RuleFormat::Nftables, "detour-nat", "meta l4proto { tcp, udp } th dport 53 counter redirect to :15053"),
        ];
        for (format, table, rule) in formats {
            let view = RulesetView::of_policy(&policy, format);
            let traced =
                |from: &str| view.evaluate(Packet::first(sender(from), destination("10.96.0.10:53/udp"), &[], "eth0"));
            let (excluded, captured) = (traced("uid=7"), traced("uid=8"));
            assert_eq!((excluded.arrival, excluded.zone), (Arrival::Direct, 1));
            let place = excluded.decided_by.expect("a rule");
            assert_eq!((place.table, place.chain.as_str()), ("detour-exclusions", "DETOUR_OUTPUT"));
            assert!(place.rule.ends_with("meta skuid 7 counter goto DETOUR_DIRECT"), "{place:?}");
            assert_eq!((captured.arrival, captured.zone), (Arrival::Sidecar(15053), 2));
            let place = captured.decided_by.expect("a rule");
            assert_eq!((place.table, place.chain.as_str(), place.rule.as_str()), (table, "ISTIO_OUTPUT_DNS", rule));
        }
    }

    #[test]
    fn without_rules_packets_arrive_directly() {
        let packet = Packet::first(Sender::Inbound(None), destination("10.0.0.2:80/tcp"), &[], "eth0");
        let evaluation = RulesetView::default().evaluate(packet);
        assert_eq!((evaluation.arrival, evaluation.decided_by), (Arrival::Direct, None));
    }

    #[test]
    fn no_condition_on_an_unknown_group_is_met() {
        let redirect = Redirect { owner_groups_exclude: vec![7], ..Redirect::default() };
        let own = |gid| Sender::Process { uid: 1, gid, set: None };
        for format in [RuleFormat::Iptables, RuleFormat::Nftables] {
            let view = RulesetView::of_policy(&on(redirect.clone()), format);
            let arrival =
                |gid| view.evaluate(Packet::first(own(gid), destination("192.0.2.1:80/tcp"), &[], "eth0")).arrival;
            assert_eq!((arrival(Some(7)), arrival(None)), (Arrival::Direct, Arrival::Sidecar(15001)));
        }
    }
}
