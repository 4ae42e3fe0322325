//! One native rule as a value: conditions on sets of numbers, and what follows.

use super::spans::Spans;
use crate::firewall::rule::{Family, Hook, Table, Target};
use std::collections::BTreeMap;

/// What a condition looks at, in the order in which conditions are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// `iifname`: sixteen bytes, filled with zeros, as a number; a wildcard is a span.
    InInterface,
    /// `oifname`.
    OutInterface,
    /// `ip saddr`, `ip6 saddr`.
    Source(Family),
    /// `ip daddr`, `ip6 daddr`.
    Destination(Family),
    /// `meta l4proto`.
    Protocol,
    /// `tcp sport`, `udp sport`, `th sport`.
    SourcePort,
    /// `tcp dport`, `udp dport`, `th dport`.
    DestinationPort,
    /// `meta skuid`: as the user namespace that owns the network namespace counts, which is how
    /// the pod itself counts (`nft_meta_get_eval_skugid`).
    Uid,
    /// `meta skgid`.
    Gid,
    /// `ct state`: bits, one of which must be set (`NF_CT_STATE_…`).
    CtState,
    /// `meta mark`.
    Mark,
    /// `ct mark`.
    CtMark,
}

/// A condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// What it looks at.
    pub key: Key,
    /// Whether the value must not be among `values`.
    pub not: bool,
    /// The values.
    pub values: Spans,
}

/// What happens to a packet that meets all conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NativeAction {
    /// `accept`: nothing more in this base chain.
    Accept,
    /// `return`.
    Return,
    /// `drop`.
    Drop,
    /// `jump`.
    Jump(String),
    /// `redirect to :PORT`.
    Redirect(u16),
    /// `ct zone set`.
    Zone(u16),
    /// `tproxy to :PORT meta mark set MARK accept`: goes on where nobody listens.
    Tproxy {
        /// The proxy's port.
        port: u16,
        /// The mark that routes the packet to lo.
        mark: u32,
    },
    /// `meta mark set`.
    SetMark(u32),
    /// `ct mark set meta mark`.
    SaveMark,
    /// `meta mark set ct mark`.
    RestoreMark,
    /// `dnat ip to ip daddr`: where it goes to anyway, and that is settled, for all tables.
    KeepDestination,
}

impl From<&Target> for NativeAction {
    /// The action of the same name; where the two differ in what follows, [`super::translate()`] knows.
    fn from(target: &Target) -> Self {
        match target {
            Target::Accept => Self::Accept,
            Target::Return => Self::Return,
            Target::Drop => Self::Drop,
            Target::Jump(chain) => Self::Jump(chain.clone()),
            Target::Redirect(port) => Self::Redirect(*port),
            Target::Zone(zone) => Self::Zone(*zone),
            Target::Tproxy { port, mark } => Self::Tproxy { port: *port, mark: *mark },
            Target::SetMark(mark) => Self::SetMark(*mark),
            Target::SaveMark => Self::SaveMark,
            Target::RestoreMark => Self::RestoreMark,
        }
    }
}

/// A rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NativeRule {
    /// The one family that it is for; a rule that looks at addresses has one.
    pub family: Option<Family>,
    /// Sorted by key; a key twice means both.
    pub conditions: Vec<Condition>,
    /// What follows.
    pub action: NativeAction,
}

impl NativeRule {
    /// What it looks at of `key`, where that is one condition.
    #[must_use]
    pub fn condition(&self, key: Key) -> Option<&Condition> {
        let mut found = self.conditions.iter().filter(|condition| condition.key == key);
        found.next().filter(|_| found.next().is_none())
    }
}

/// A chain: the rules in order, and the hook that it is entered from, as a base chain is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NativeChain {
    /// `None` for a chain that only rules go to.
    pub hook: Option<Hook>,
    /// In order.
    pub rules: Vec<NativeRule>,
}

/// The tables of one pod, by what they are called in iptables, each with its chains by name.
pub type NativeTables = BTreeMap<Table, BTreeMap<String, NativeChain>>;

/// The name of a table, in family `inet`.
#[must_use]
pub const fn table_name(table: Table) -> &'static str {
    match table {
        Table::Raw => "detour-raw",
        Table::Mangle => "detour-mangle",
        Table::Nat => "detour-nat",
    }
}

/// The type of a base chain.
pub(in crate::firewall) const fn chain_type(table: Table, hook: Hook) -> &'static str {
    match (table, hook) {
        (Table::Nat, _) => "nat",
        (Table::Mangle, Hook::Output) => "route",
        _ => "filter",
    }
}

/// The priority of a base chain: in raw and nat just before iptables' own, for there the first
/// that sets a zone or a destination settles it.
pub(super) const fn priority(table: Table) -> i32 {
    match table {
        Table::Raw => -301,
        Table::Mangle => -150,
        Table::Nat => -101,
    }
}
