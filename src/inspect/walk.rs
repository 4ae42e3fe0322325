//! One packet through one hook of one table, as the kernel goes (nf_tables_core.c, `nft_do_chain`;
//! targets and actions by their own sources).

use super::conditions::{meets, meets_native};
use super::packet::Packet;
use super::rule_listing::{TableListing, RuleText, Rulebook, Words};
use crate::firewall::native::rule::NativeAction;
use crate::firewall::rule::Hook;
use serde::Serialize;

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
