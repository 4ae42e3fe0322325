//! `trace`: evaluates the first packet of a connection in all tables, in the order of the kernel (nf_tables_core.c,
//! `nft_do_chain`).

use super::packet::{Destination, Origin, Packet, Sender, matches_iptables, matches_native};
use super::rulebook::{RuleBody, RuleText, Rulebook, TableListing};
use crate::firewall::native::rule::{NativeAction, NativeTable};
use crate::firewall::rule::{Hook, Table};
use crate::inspect::container_bypass::ContainerSender;
use crate::inspect::subject::ConfigurationOrigin;
use crate::inspect::terminal::{Cell, Screen, TextReport, Tone};
use serde::Serialize;
use std::net::{IpAddr, SocketAddr};

/// Limit for the unsupported rules that are listed; the rest is counted.
const MAX_LISTED: usize = 20;
/// Limit for the rules that a packet passes. Chains that jump to others several times multiply rules.
const MAX_RULES: usize = 100_000;

/// The report about a packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Trace {
    /// The sender.
    pub from: Origin,
    /// The container of the sender, if the user named one.
    pub container: Option<ContainerSender>,
    /// The destination.
    pub to: SocketAddr,
    /// `tcp` or `udp`.
    pub protocol: String,
    /// The interface that the packet leaves or enters.
    pub interface: String,
    /// The rules that the packet matches, in order.
    pub hops: Vec<Hop>,
    /// The rule that decides where the packet arrives; `None` if no rule decides.
    pub decided_by: Option<RulePlace>,
    /// `sidecar:PORT`, `redirected:PORT` (by a rule outside of Istio's chains), `direct` or `dropped`.
    pub arrives_at: String,
    /// The connection tracking zone; 0 if no rule sets one.
    pub zone: u16,
    /// Rules that were not evaluated; because of them, the packet may arrive elsewhere.
    pub caveats: Vec<String>,
    /// Where the configuration of the rules comes from; `None` for live rules.
    pub configuration: Option<ConfigurationOrigin>,
}

/// A rule and its position.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RulePlace {
    /// `raw`, `mangle` or `nat`, with prefix `detour-` for nftables; `detour-exclusions`.
    pub table: &'static str,
    /// The netfilter chain.
    pub chain: String,
    /// The rule as `iptables-save` or `nft` prints it, without the chain.
    pub rule: String,
}

/// Traces the first packet of a connection through `book`.
///
/// A process's traffic to loopback and to the addresses in `pod_addresses` uses lo, all other traffic `interface`.
#[must_use]
pub fn trace(book: &Rulebook, from: Sender, to: Destination, pod_addresses: &[IpAddr], interface: &str) -> Trace {
    let packet = Packet::first(from, to, pod_addresses, interface);
    let (origin, protocol) = (packet.origin, packet.protocol);
    let link = packet.out_interface.clone().or_else(|| packet.in_interface.clone()).unwrap_or_default();
    let mut walk = Walk { book, packet, hops: Vec::new(), unsupported: Vec::new(), rules: 0 };
    let end = walk.run();
    let decided_by = decisive_rule(&walk.hops, end);
    let by_istio = decided_by.as_ref().is_some_and(|place| place.chain.starts_with("ISTIO_"));
    let arrives_at = match end {
        End::Continue | End::Direct => "direct".to_owned(),
        End::Dropped => "dropped".to_owned(),
        End::Redirected(port) | End::Tproxied(port) if by_istio => format!("sidecar:{port}"),
        End::Redirected(port) | End::Tproxied(port) => format!("redirected:{port}"),
    };
    let more = walk.unsupported.len().saturating_sub(MAX_LISTED);
    let skipped = walk.unsupported.into_iter().take(MAX_LISTED).map(|rule| format!("skipped unsupported rule: {rule}"));
    let skipped = skipped.chain((more > 0).then(|| format!("skipped {more} more unsupported rules")));
    let stopped = (walk.rules > MAX_RULES).then(|| format!("stopped after {MAX_RULES} rules"));
    Trace {
        from: origin,
        container: None,
        to: to.address,
        protocol: protocol.to_string(),
        interface: link,
        hops: walk.hops,
        decided_by,
        arrives_at,
        zone: walk.packet.zone.unwrap_or_default(),
        caveats: book.caveats.iter().cloned().chain(skipped).chain(stopped).collect(),
        configuration: None,
    }
}

/// Returns the rule that redirected, dropped or excluded the packet, or else the last rule that ended its evaluation in a
/// table.
fn decisive_rule(hops: &[Hop], end: End) -> Option<RulePlace> {
    let last = |effect: HopEffect| hops.iter().rposition(|hop| hop.effect == effect);
    let hop = match end {
        // A packet that is accepted in raw still passes nat.
        End::Continue => {
            hops.iter().rfind(|hop| hop.effect == HopEffect::Accepted && !hop.table.ends_with(Table::Raw.name()))?
        }
        // The rule that selected the packet for the chain that fixes its destination.
        End::Direct => &hops[last(HopEffect::Fixed)?.saturating_sub(1)],
        End::Dropped | End::Redirected(_) | End::Tproxied(_) => &hops[last(HopEffect::Diverted)?],
    };
    Some(RulePlace { table: hop.table, chain: hop.chain.clone(), rule: hop.rule.clone() })
}

impl TextReport for Trace {
    fn write(&self, screen: &mut Screen) {
        let sender = match self.from {
            Origin::Process { uid, gid } => format!("uid {uid}, gid {gid}"),
            Origin::Outside => "outside".to_owned(),
        };
        let sender = match &self.container {
            Some(container) => format!("container {} ({sender})", container.name),
            None => sender,
        };
        let tone = if self.arrives_at == "dropped" { Tone::Bad } else { Tone::Good };
        screen.line(&[
            Cell::of(format!("{}/{} from {sender} via {} →", self.to, self.protocol, self.interface)),
            Cell::of(&self.arrives_at).tone(tone),
        ]);
        if let Some(origin) = self.configuration.as_ref().and_then(ConfigurationOrigin::text) {
            screen.line(&[Cell::of("Configuration:"), Cell::of(origin).tone(Tone::Faint)]);
        }
        if let Some(container) = &self.container {
            let tone = if container.bypasses.is_some() { Tone::Notable } else { Tone::Faint };
            screen.line(&[Cell::of(format!("Container {}:", container.name)), Cell::of(container.text()).tone(tone)]);
        }
        let mut rows: Vec<Vec<Cell>> = Vec::new();
        let decides = |hop: &Hop| {
            let place = self.decided_by.as_ref();
            place.is_some_and(|p| p.table == hop.table && p.chain == hop.chain && p.rule == hop.rule)
        };
        for (index, hop) in self.hops.iter().enumerate() {
            let is_first =
                index == 0 || (hop.table, hop.hook) != (self.hops[index - 1].table, self.hops[index - 1].hook);
            let table = if is_first { format!("{} {}", hop.table, hop.hook) } else { String::new() };
            let tone = if decides(hop) { Tone::Strong } else { Tone::Plain };
            rows.push(vec![
                Cell::of(table).tone(Tone::Faint),
                Cell::of(if decides(hop) { "»" } else { " " }).tone(Tone::Good),
                Cell::of(&hop.chain),
                Cell::of(&hop.rule).tone(tone),
                Cell::of(&hop.then).tone(Tone::Faint),
            ]);
        }
        if rows.is_empty() {
            screen.line(&[Cell::of("  no rule matches").tone(Tone::Faint)]);
        }
        screen.table(&rows);
        if self.zone != 0 {
            screen.line(&[Cell::of(format!("  connection tracking zone {}", self.zone)).tone(Tone::Faint)]);
        }
        for caveat in &self.caveats {
            screen.line(&[Cell::of(format!("  ! {caveat}")).tone(Tone::Notable)]);
        }
    }
}

/// A rule that the packet matched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hop {
    /// `raw`, `mangle` or `nat`, with prefix `detour-` for nftables; `detour-exclusions`.
    pub table: &'static str,
    /// `OUTPUT` or `PREROUTING`: the hook at which the packet entered the table.
    pub hook: &'static str,
    /// The netfilter chain of the rule.
    pub chain: String,
    /// The rule as `iptables-save` or `nft` prints it, without the chain.
    pub rule: String,
    /// The action: `jumps to CHAIN`, `returns`, `accepts`, `redirects to port 15001`, ….
    pub then: String,
    #[serde(skip)]
    effect: HopEffect,
}

/// The effect of a rule on where the packet arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HopEffect {
    /// No effect by itself.
    None,
    /// The evaluation of the table or the chain ends, and the destination stays the same.
    Accepted,
    /// The destination can't change any more.
    Fixed,
    /// The packet is dropped, or arrives elsewhere.
    Diverted,
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

/// The evaluation of a packet in several tables.
struct Walk<'a> {
    book: &'a Rulebook,
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
        if self.packet.origin == Origin::Outside {
            return self.tables(&Table::ALL, Hook::Prerouting);
        }
        let out = self.tables(&Table::ALL, Hook::Output);
        if out == End::Dropped || !self.packet.is_over_lo() {
            return out;
        }
        self.packet.zone.get_or_insert(0);
        self.packet.receive_over_lo();
        match self.tables(&[Table::Raw, Table::Mangle], Hook::Prerouting) {
            End::Continue | End::Direct => out,
            end => end,
        }
    }

    fn tables(&mut self, tables: &[Table], hook: Hook) -> End {
        let family = self.packet.family();
        let listings = tables.iter().flat_map(|table| {
            let native = [NativeTable::Exclusions, NativeTable::Of(*table)].map(TableListing::Native);
            native.into_iter().chain([TableListing::Iptables(*table, family)]).map(move |listing| (*table, listing))
        });
        for (like, table) in listings {
            match self.table(table, like, hook) {
                End::Continue => {}
                End::Redirected(port) => {
                    self.packet.redirect(port);
                    return End::Redirected(port);
                }
                end => return end,
            }
        }
        End::Continue
    }

    fn table(&mut self, table: TableListing, like: Table, hook: Hook) -> End {
        for base in self.book.base_chains(table, like, hook) {
            match self.chain((table, hook), &base) {
                RuleEffect::End(End::Continue)
                | RuleEffect::Continue
                | RuleEffect::Return
                | RuleEffect::Jump(_)
                | RuleEffect::Goto(_) => {}
                RuleEffect::End(end) => return end,
            }
        }
        End::Continue
    }

    fn chain(&mut self, at: (TableListing, Hook), name: &str) -> RuleEffect {
        let book = self.book;
        for rule in book.chain(at.0, name) {
            match self.rule(at, name, rule) {
                RuleEffect::Continue => {}
                // The calling chain continues behind the rule that jumped here.
                RuleEffect::Return => return RuleEffect::Continue,
                RuleEffect::Jump(to) => match self.chain(at, &to) {
                    end @ RuleEffect::End(_) => return end,
                    RuleEffect::Continue | RuleEffect::Return | RuleEffect::Jump(_) | RuleEffect::Goto(_) => {}
                },
                // The calling chain continues behind its rule.
                RuleEffect::Goto(to) => return self.chain(at, &to),
                end @ RuleEffect::End(_) => return end,
            }
        }
        RuleEffect::Continue
    }

    fn rule(&mut self, (table, hook): (TableListing, Hook), chain: &str, rule: &RuleText) -> RuleEffect {
        self.rules += 1;
        if self.rules > MAX_RULES {
            return RuleEffect::End(End::Continue);
        }
        let action = match &rule.body {
            RuleBody::Iptables(rule) => matches_iptables(&self.packet, rule).then(|| NativeAction::from(&rule.target)),
            RuleBody::Native(rule) => matches_native(&self.packet, rule).then(|| rule.action.clone()),
            RuleBody::Unknown => {
                self.unsupported.push(format!("{chain} {}", rule.text));
                None
            }
        };
        let Some(action) = action else { return RuleEffect::Continue };
        let (then, verdict) = self.packet.apply(action);
        let effect = match verdict {
            RuleEffect::Continue | RuleEffect::Jump(_) | RuleEffect::Goto(_) => HopEffect::None,
            RuleEffect::Return | RuleEffect::End(End::Continue) => HopEffect::Accepted,
            RuleEffect::End(End::Direct) => HopEffect::Fixed,
            RuleEffect::End(End::Dropped | End::Redirected(_) | End::Tproxied(_)) => HopEffect::Diverted,
        };
        let (chain, rule) = (chain.to_owned(), rule.text.clone());
        self.hops.push(Hop { table: table.name(), hook: hook.chain(), chain, rule, then, effect });
        verdict
    }
}

impl Packet {
    /// Applies an action to the packet, and returns the action in words and its effect.
    fn apply(&mut self, action: NativeAction) -> (String, RuleEffect) {
        match action {
            NativeAction::Accept => ("accepts".to_owned(), RuleEffect::End(End::Continue)),
            NativeAction::Return => ("returns".to_owned(), RuleEffect::Return),
            NativeAction::Drop => ("drops".to_owned(), RuleEffect::End(End::Dropped)),
            NativeAction::Jump(chain) => (format!("jumps to {chain}"), RuleEffect::Jump(chain.into_owned())),
            NativeAction::Goto(chain) => (format!("goes to {chain}"), RuleEffect::Goto(chain.into_owned())),
            NativeAction::Redirect(port) => {
                (format!("redirects to port {port}"), RuleEffect::End(End::Redirected(port)))
            }
            NativeAction::KeepDestination => ("keeps the destination".to_owned(), RuleEffect::End(End::Direct)),
            NativeAction::Tproxy { port, mark } => {
                self.mark = mark;
                (format!("delivers to port {port} unchanged"), RuleEffect::End(End::Tproxied(port)))
            }
            // The zone can't change once it is set or, over lo, once the packet is tracked (xt_CT.c, nft_ct.c).
            NativeAction::Zone(_) if self.zone.is_some() => ("keeps the zone".to_owned(), RuleEffect::Continue),
            NativeAction::Zone(zone) => {
                self.zone = Some(zone);
                (format!("sets zone {zone}"), RuleEffect::Continue)
            }
            NativeAction::SetMark(mark) => {
                self.mark = mark;
                (format!("sets mark {mark:#x}"), RuleEffect::Continue)
            }
            NativeAction::SaveMark => ("saves the mark in the connection".to_owned(), RuleEffect::Continue),
            NativeAction::RestoreMark => ("restores the connection's mark".to_owned(), RuleEffect::Continue),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::packet::SenderArgument;
    use super::*;
    use crate::firewall::RuleFormat;
    use crate::policy::{
        DnsCapture, Exclusion, IdRange, Interception, InterceptionMode, Policy, PortRange, Redirect, TrafficOwner,
    };

    fn sender(text: &str) -> Sender {
        text.parse::<SenderArgument>().and_then(|sender| sender.resolve(None)).expect(text)
    }

    fn arrives(policy: &Policy, from: &str, to: &str) -> String {
        let own: [IpAddr; 2] = ["10.0.0.2".parse().expect("v4"), "fd00::2".parse().expect("v6")];
        let [iptables, native] = [RuleFormat::Iptables, RuleFormat::Nftables].map(|format| {
            let book = Rulebook::of_policy(policy, format);
            trace(&book, sender(from), to.parse().expect(to), &own, "eth0").arrives_at
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
            let book = Rulebook::of_policy(&policy, format);
            let traced = |from: &str| {
                let to = "10.96.0.10:53/udp".parse().expect("a destination");
                trace(&book, sender(from), to, &[], "eth0")
            };
            let (excluded, captured) = (traced("uid=7"), traced("uid=8"));
            assert_eq!((excluded.arrives_at.as_str(), excluded.zone), ("direct", 1));
            let place = excluded.decided_by.expect("a rule");
            assert_eq!((place.table, place.chain.as_str()), ("detour-exclusions", "DETOUR_OUTPUT"));
            assert!(place.rule.ends_with("meta skuid 7 counter goto DETOUR_DIRECT"), "{place:?}");
            assert_eq!((captured.arrives_at.as_str(), captured.zone), ("sidecar:15053", 2));
            let place = captured.decided_by.expect("a rule");
            assert_eq!((place.table, place.chain.as_str(), place.rule.as_str()), (table, "ISTIO_OUTPUT_DNS", rule));
        }
    }

    #[test]
    fn without_rules_packets_arrive_directly() {
        let trace = trace(
            &Rulebook::default(),
            Sender::Inbound(None),
            "10.0.0.2:80/tcp".parse().expect("a destination"),
            &[],
            "eth0",
        );
        assert_eq!((trace.arrives_at.as_str(), trace.decided_by), ("direct", None));
    }
}
