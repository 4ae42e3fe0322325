//! One packet from where it is sent to where it arrives, through all tables in the kernel's order.
//!
//! One packet through one hook of one table, as the kernel goes (nf_tables_core.c, `nft_do_chain`;
//! targets and actions by their own sources).

use super::evaluation::{meets, meets_native};
use super::packet::{Destination, Origin, Packet, Sender};
use super::rules::{RuleText, Rulebook, TableListing, Words};
use super::terminal::{Cell, Screen, TextReport, Tone};
use crate::firewall::native::rule::NativeAction;
use crate::firewall::rule::{Hook, Table};
use serde::Serialize;
use std::net::{IpAddr, SocketAddr};

/// How many rules that are not understood are named; the rest is counted.
const NAMED: usize = 20;

/// A packet's way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Trace {
    /// Who sends it.
    pub from: Origin,
    /// Where it is sent to.
    pub to: SocketAddr,
    /// `tcp` or `udp`.
    pub protocol: String,
    /// The interface by which it leaves or comes in.
    pub interface: String,
    /// The rules that it met, in their order.
    pub hops: Vec<Hop>,
    /// The rule without which it would arrive elsewhere, or would at least be looked at further;
    /// none where no rule is for it.
    pub decided_by: Option<RulePlace>,
    /// `sidecar:PORT`, `redirected:PORT` (not by Istio's chains), `direct` or `dropped`.
    pub arrives_at: String,
    /// Connection tracking's zone; 0 where no rule names one.
    pub zone: u16,
    /// What on its way is not seen or not understood: with any, it may arrive elsewhere.
    pub caveats: Vec<String>,
}

/// A rule and where it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RulePlace {
    /// `raw`, `mangle`, `nat`, or the same with `detour-` before it.
    pub table: &'static str,
    /// The chain.
    pub chain: String,
    /// The rule as its dialect's tool prints it, without its chain.
    pub rule: String,
}

/// The way of a connection's first packet through `book`. `own` are the pod's addresses: what a
/// process sends there or to loopback goes by lo, everything else by `interface`.
#[must_use]
pub fn trace(book: &Rulebook, from: Sender, to: Destination, own: &[IpAddr], interface: &str) -> Trace {
    let packet = Packet::first(from, to, own, interface);
    let (origin, protocol) = (packet.origin, packet.protocol);
    let link = packet.out_interface.clone().or_else(|| packet.in_interface.clone()).unwrap_or_default();
    let mut walk = Walk { book, packet, hops: Vec::new(), unknown: Vec::new(), steps: 0 };
    let end = through(&mut walk);
    let decided_by = decisive(&walk.hops, end);
    let by_istio = decided_by.as_ref().is_some_and(|place| place.chain.starts_with("ISTIO_"));
    let arrives_at = match end {
        End::PassedOn | End::Settled => "direct".to_owned(),
        End::Dropped => "dropped".to_owned(),
        End::Redirected(port) | End::Tproxied(port) if by_istio => format!("sidecar:{port}"),
        End::Redirected(port) | End::Tproxied(port) => format!("redirected:{port}"),
    };
    let more = walk.unknown.len().saturating_sub(NAMED);
    let unknown = walk.unknown.into_iter().take(NAMED).map(|rule| format!("not understood, and passed over: {rule}"));
    let unknown = unknown.chain((more > 0).then(|| format!("{more} more rules that are not understood")));
    let endless = (walk.steps > STEPS).then(|| format!("not followed further than through {STEPS} rules"));
    Trace {
        from: origin,
        to: to.address,
        protocol: protocol.to_string(),
        interface: link,
        hops: walk.hops,
        decided_by,
        arrives_at,
        zone: walk.packet.zone.unwrap_or_default(),
        caveats: book.caveats.iter().cloned().chain(unknown).chain(endless).collect(),
    }
}

/// What a process sends over lo comes in there: with the NAT that it got on its way out, for it is
/// one connection, so that nat is not asked twice (nf_nat_core.c, `nf_nat_inet_fn`).
fn through(walk: &mut Walk<'_>) -> End {
    if walk.packet.origin == Origin::Outside {
        return tables(walk, &Table::ALL, Hook::Prerouting);
    }
    let out = tables(walk, &Table::ALL, Hook::Output);
    if out == End::Dropped || !walk.packet.is_over_lo() {
        return out;
    }
    walk.packet.zone.get_or_insert(0);
    walk.packet.comes_in();
    match tables(walk, &[Table::Raw, Table::Mangle], Hook::Prerouting) {
        End::PassedOn | End::Settled => out,
        end => end,
    }
}

fn tables(walk: &mut Walk<'_>, tables: &[Table], hook: Hook) -> End {
    let family = walk.packet.family();
    let books = tables.iter().flat_map(|table| [TableListing::Native(*table), TableListing::Iptables(*table, family)]);
    for book in books {
        match walk.pass(book, hook) {
            End::PassedOn => {}
            End::Redirected(port) => {
                walk.packet.redirect(port);
                return End::Redirected(port);
            }
            end => return end,
        }
    }
    End::PassedOn
}

/// The rule that sent it elsewhere, else the last one that had it looked at no further.
fn decisive(hops: &[Hop], end: End) -> Option<RulePlace> {
    let decides = |hop: &&Hop| match end {
        // What is let go in raw goes on to where connections are made.
        End::PassedOn | End::Settled => hop.weight == Weight::LetGo && !hop.table.ends_with(Table::Raw.name()),
        End::Dropped | End::Redirected(_) | End::Tproxied(_) => hop.weight == Weight::SentElsewhere,
    };
    let hop = hops.iter().rfind(decides)?;
    Some(RulePlace { table: hop.table, chain: hop.chain.clone(), rule: hop.rule.clone() })
}

impl TextReport for Trace {
    fn write(&self, page: &mut Screen) {
        let who = match self.from {
            Origin::Process { uid, gid } => format!("uid {uid}, gid {gid}, by {}", self.interface),
            Origin::Outside => format!("from outside, by {}", self.interface),
        };
        let at = if self.arrives_at == "direct" || self.arrives_at == "dropped" { "" } else { " at" };
        let tone = if self.arrives_at == "dropped" { Tone::Bad } else { Tone::Good };
        page.line(&[
            Cell::of(format!("{}/{} {who}: arrives{at}", self.to, self.protocol)),
            Cell::of(&self.arrives_at).tone(tone),
        ]);
        let mut rows: Vec<Vec<Cell>> = Vec::new();
        let decides = |hop: &Hop| {
            let place = self.decided_by.as_ref();
            place.is_some_and(|p| p.table == hop.table && p.chain == hop.chain && p.rule == hop.rule)
        };
        for (index, hop) in self.hops.iter().enumerate() {
            let entered =
                index == 0 || (hop.table, hop.hook) != (self.hops[index - 1].table, self.hops[index - 1].hook);
            let at = if entered { format!("{} {}", hop.table, hop.hook) } else { String::new() };
            let tone = if decides(hop) { Tone::Strong } else { Tone::Plain };
            rows.push(vec![
                Cell::of(at).tone(Tone::Faint),
                Cell::of(if decides(hop) { "»" } else { " " }).tone(Tone::Good),
                Cell::of(&hop.chain),
                Cell::of(&hop.rule).tone(tone),
                Cell::of(&hop.then).tone(Tone::Faint),
            ]);
        }
        if rows.is_empty() {
            page.line(&[Cell::of("  no rule is for it").tone(Tone::Faint)]);
        }
        page.table(&rows);
        if self.zone != 0 {
            page.line(&[Cell::of(format!("  tracked in zone {}", self.zone)).tone(Tone::Faint)]);
        }
        for caveat in &self.caveats {
            page.line(&[Cell::of(format!("  ! {caveat}")).tone(Tone::Notable)]);
        }
    }
}

/// A rule that the packet met.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hop {
    /// `raw`, `mangle`, `nat`, or the same with `detour-` before it.
    pub table: &'static str,
    /// `OUTPUT` or `PREROUTING`: where the kernel entered the table.
    pub hook: &'static str,
    /// The chain that the rule stands in.
    pub chain: String,
    /// The rule as its dialect's tool prints it, without its chain.
    pub rule: String,
    /// What it did: `goes to CHAIN`, `returns`, `accepted`, `to port 15001`, ….
    pub then: String,
    #[serde(skip)]
    pub(super) weight: Weight,
}

/// What a rule means for where the packet arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weight {
    /// Nothing by itself.
    None,
    /// It is looked at no further, in this table or chain at least.
    LetGo,
    /// It goes elsewhere than it was sent to.
    SentElsewhere,
}

/// How the packet left the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// On to the next table.
    PassedOn,
    /// It keeps its destination, whatever later NAT says.
    Settled,
    /// It is dropped.
    Dropped,
    /// NAT to this port.
    Redirected(u16),
    /// As it is, to whoever listens on this port.
    Tproxied(u16),
}

/// A walk through several tables.
pub(super) struct Walk<'a> {
    pub book: &'a Rulebook,
    pub packet: Packet,
    /// The rules that it met, in their order.
    pub hops: Vec<Hop>,
    /// Foreign rules that it came by and that are not understood, as `CHAIN rule`.
    pub unknown: Vec<String>,
    /// How many rules it has come by.
    pub steps: usize,
}

/// How many rules a packet comes by at the most. Chains that go to others several times multiply them.
pub(super) const STEPS: usize = 100_000;

/// What a rule, or a chain, means for the packet.
enum RuleEffect {
    /// The next rule.
    Continue,
    /// Back to the chain that jumped here.
    Return,
    /// To this chain and, if that does not decide, on.
    Jump(String),
    /// Out of the table.
    End(End),
}

impl Walk<'_> {
    /// Through one hook of one table.
    pub(super) fn pass(&mut self, book: TableListing, hook: Hook) -> End {
        match self.chain((book, hook), hook.chain()) {
            RuleEffect::End(end) => end,
            RuleEffect::Continue | RuleEffect::Return | RuleEffect::Jump(_) => End::PassedOn,
        }
    }

    fn chain(&mut self, at: (TableListing, Hook), name: &str) -> RuleEffect {
        let book = self.book;
        for line in book.chain(at.0, name) {
            match self.line(at, name, line) {
                RuleEffect::Continue => {}
                // The caller goes on behind the rule that jumped here.
                RuleEffect::Return => return RuleEffect::Continue,
                RuleEffect::Jump(to) => match self.chain(at, &to) {
                    end @ RuleEffect::End(_) => return end,
                    RuleEffect::Continue | RuleEffect::Return | RuleEffect::Jump(_) => {}
                },
                end @ RuleEffect::End(_) => return end,
            }
        }
        RuleEffect::Continue
    }

    fn line(&mut self, (book, hook): (TableListing, Hook), chain: &str, line: &RuleText) -> RuleEffect {
        self.steps += 1;
        if self.steps > STEPS {
            return RuleEffect::End(End::PassedOn);
        }
        let action = match &line.words {
            Words::Iptables(rule) => meets(&self.packet, rule).then(|| NativeAction::from(&rule.target)),
            Words::Native(rule) => meets_native(&self.packet, rule).then(|| rule.action.clone()),
            Words::Unknown => {
                self.unknown.push(format!("{chain} {}", line.text));
                None
            }
        };
        let Some(action) = action else { return RuleEffect::Continue };
        let (then, verdict) = self.packet.undergo(action);
        let weight = match verdict {
            RuleEffect::Continue | RuleEffect::Jump(_) => Weight::None,
            RuleEffect::Return | RuleEffect::End(End::PassedOn | End::Settled) => Weight::LetGo,
            RuleEffect::End(End::Dropped | End::Redirected(_) | End::Tproxied(_)) => Weight::SentElsewhere,
        };
        self.hops.push(Hop {
            table: book.name(),
            hook: hook.chain(),
            chain: chain.to_owned(),
            rule: line.text.clone(),
            then,
            weight,
        });
        verdict
    }
}

impl Packet {
    /// What an action does to it, in words and for the way that it goes on.
    fn undergo(&mut self, action: NativeAction) -> (String, RuleEffect) {
        match action {
            NativeAction::Accept => ("accepted".to_owned(), RuleEffect::End(End::PassedOn)),
            NativeAction::Return => ("returns".to_owned(), RuleEffect::Return),
            NativeAction::Drop => ("dropped".to_owned(), RuleEffect::End(End::Dropped)),
            NativeAction::Jump(chain) => (format!("goes to {chain}"), RuleEffect::Jump(chain)),
            NativeAction::Redirect(port) => (format!("to port {port}"), RuleEffect::End(End::Redirected(port))),
            NativeAction::KeepDestination => ("keeps its destination".to_owned(), RuleEffect::End(End::Settled)),
            NativeAction::Tproxy { port, mark } => {
                self.mark = mark;
                (format!("to port {port} as it is"), RuleEffect::End(End::Tproxied(port)))
            }
            // What has a zone, or came over lo and so has been tracked, keeps it (xt_CT.c, nft_ct.c).
            NativeAction::Zone(_) if self.zone.is_some() => ("has a zone already".to_owned(), RuleEffect::Continue),
            NativeAction::Zone(zone) => {
                self.zone = Some(zone);
                (format!("zone {zone}"), RuleEffect::Continue)
            }
            NativeAction::SetMark(mark) => {
                self.mark = mark;
                (format!("mark {mark:#x}"), RuleEffect::Continue)
            }
            NativeAction::SaveMark => ("the connection keeps the mark".to_owned(), RuleEffect::Continue),
            NativeAction::RestoreMark => ("the connection's mark".to_owned(), RuleEffect::Continue),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{
        DnsCapture, Exclusion, IdRange, Interception, InterceptionMode, Policy, PortRange, Redirect, TrafficOwner,
    };

    fn arrives(policy: &Policy, from: &str, to: &str) -> String {
        let book = Rulebook::of_policy(policy);
        let own: [IpAddr; 2] = ["10.0.0.2".parse().expect("v4"), "fd00::2".parse().expect("v6")];
        let trace = trace(&book, from.parse().expect(from), to.parse().expect(to), &own, "eth0");
        trace.arrives_at
    }

    fn on(redirect: Redirect) -> Policy {
        Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() }
    }

    #[test]
    fn istios_defaults() {
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
    fn tproxy_takes_inbound_and_what_the_proxy_sends_to_its_own_pod_once() {
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
    fn the_deciding_rule_and_the_zone_are_told() {
        let excluded = Exclusion {
            owner: TrafficOwner::Uid(IdRange::one(7)),
            destination: None,
            protocol: None,
            ports: vec![PortRange::one(53)],
        };
        let mut policy = on(Redirect { dns: DnsCapture::All, ..Redirect::default() });
        policy.exclusions.insert(excluded);
        let book = Rulebook::of_policy(&policy);
        let of = |from: &str| {
            let to = "10.96.0.10:53/udp".parse().expect("a destination");
            trace(&book, from.parse().expect(from), to, &[], "eth0")
        };
        let (exempt, captured) = (of("uid=7"), of("uid=8"));
        assert_eq!((exempt.arrives_at.as_str(), exempt.zone), ("direct", 1));
        assert_eq!(exempt.decided_by.expect("a rule").chain, "DETOUR_OUTPUT");
        assert_eq!((captured.arrives_at.as_str(), captured.zone), ("sidecar:15053", 2));
        let place = captured.decided_by.expect("a rule");
        assert_eq!((place.table, place.chain.as_str()), ("nat", "ISTIO_OUTPUT_DNS"));
        assert_eq!(place.rule, "-p udp -m udp --dport 53 -j REDIRECT --to-ports 15053");
    }

    #[test]
    fn without_rules_everything_is_direct() {
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
