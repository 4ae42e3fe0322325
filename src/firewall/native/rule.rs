//! Native tables and chains, and their text as `nft list ruleset` prints it without counters, which `nft -f` reads.

use crate::firewall::containers::{MAX_ELEMENTS, SCOPES, TABLE as EXCLUSIONS, set_name};
use crate::firewall::rule::{Condition, Family, Hook, InCgroup, Key, LOCAL, Name, Rule, SYN, Table, Target};
use crate::firewall::set::Span;
use crate::policy::ContainerScope;
use std::collections::BTreeMap;
use std::fmt;
use std::fmt::{Display, Formatter};
use std::net::{Ipv4Addr, Ipv6Addr};

/// Where a base chain is attached: at the hook and beside the chain of this iptables table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BaseHook {
    /// The iptables table with a chain of the same type and nearly the same priority.
    pub like: Table,
    /// The hook.
    pub hook: Hook,
}

/// A native chain: the rules in order, and the hook of a base chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NativeChain {
    /// The hook; `None` for a chain that is entered by jumps only.
    pub hook: Option<BaseHook>,
    /// The rules in order.
    pub rules: Vec<Rule>,
}

/// A native table of detour, in family `inet`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NativeTable {
    /// The exclusions, in both rule formats. All its base chains come before those of other tables.
    Exclusions,
    /// The counterpart of an iptables table, for the redirection in the rule format `nftables`.
    Of(Table),
}

impl NativeTable {
    /// All native tables.
    pub const ALL: [Self; 4] = [Self::Exclusions, Self::Of(Table::Raw), Self::Of(Table::Mangle), Self::Of(Table::Nat)];

    /// Returns the name of the table.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exclusions => EXCLUSIONS,
            Self::Of(Table::Raw) => "detour-raw",
            Self::Of(Table::Mangle) => "detour-mangle",
            Self::Of(Table::Nat) => "detour-nat",
            // Only the table of exclusions has chains there.
            Self::Of(Table::Filter) => "detour-filter",
        }
    }

    /// Returns the priority of a base chain. In raw and nat it comes just before iptables', because the first rule that
    /// sets a zone or a destination is final.
    pub(in crate::firewall) const fn priority(self, like: Table) -> i32 {
        let own = match like {
            Table::Raw => -301,
            Table::Mangle => -150,
            Table::Nat => EXCLUSIONS_NAT_PRIORITY + 1,
            Table::Filter => GUARD_PRIORITY + 1,
        };
        match self {
            Self::Of(_) => own,
            Self::Exclusions => own - 1,
        }
    }
}

/// The priority at which the exclusions fix the destination of a connection. A chain that translates destinations at
/// this priority or a lower one can redirect excluded traffic.
pub(crate) const EXCLUSIONS_NAT_PRIORITY: i32 = -102;

/// The priority of the guard: after all NAT and after the usual filters.
const GUARD_PRIORITY: i32 = 10;

/// A table of iptables, or a native one of both families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TableId {
    /// A table of iptables.
    Iptables(Family, Table),
    /// A table of detour in family `inet`.
    Native(NativeTable),
}

impl TableId {
    /// Returns the table's name in the kernel.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Iptables(_, table) => table.name(),
            Self::Native(table) => table.name(),
        }
    }

    /// Returns the table's name with its family: `ip nat`, `inet detour-nat`.
    #[must_use]
    pub fn place(self) -> String {
        let family = match self {
            Self::Iptables(family, _) => family.name(),
            Self::Native(_) => "inet",
        };
        format!("{family} {}", self.name())
    }

    /// Returns a rule of the table as `iptables-save` or `nft` prints it, without the chain.
    pub(in crate::firewall) fn text_of(self, rule: &Rule) -> String {
        match self {
            Self::Iptables(..) => rule.iptables_text(),
            Self::Native(_) => rule.to_string(),
        }
    }

    /// Returns the text of a rule with its table and its chain.
    pub(in crate::firewall) fn rule_text(self, chain: &str, text: &str) -> String {
        let add = if matches!(self, Self::Iptables(..)) { "-A " } else { "" };
        format!("{} {add}{chain} {text}", self.place())
    }
}

/// The native tables of a pod, each with its chains by name.
pub type NativeTables = BTreeMap<NativeTable, BTreeMap<Name, NativeChain>>;

/// Returns the sets of excluded containers that the rules look up.
pub(super) fn container_sets(chains: &BTreeMap<Name, NativeChain>) -> Vec<ContainerScope> {
    let in_cgroups = chains.values().flat_map(|chain| &chain.rules).filter_map(|rule| rule.cgroup);
    let is_used = |scope: &ContainerScope| in_cgroups.clone().any(|cgroup| cgroup.set == *scope);
    SCOPES.into_iter().filter(is_used).collect()
}

/// Returns the type of a base chain.
pub(crate) const fn chain_type(table: Table, hook: Hook) -> &'static str {
    match (table, hook) {
        (Table::Nat, _) => "nat",
        (Table::Mangle, Hook::Output) => "route",
        _ => "filter",
    }
}

/// Returns the tables as text for `nft -f`.
#[must_use]
pub fn text(tables: &NativeTables) -> String {
    tables
        .iter()
        .map(|(table, chains)| {
            let (base, others): (Vec<_>, Vec<_>) = chains.iter().partition(|(_, chain)| chain.hook.is_some());
            let sets = container_sets(chains).into_iter().map(set_text);
            let chains = base.into_iter().chain(others).map(|(name, chain)| chain_text(*table, name, chain));
            format!("table inet {} {{\n{}}}\n", table.name(), sets.chain(chains).collect::<Vec<_>>().join("\n"))
        })
        .collect()
}

/// Returns the text of a set. Its elements are not part of the desired state.
fn set_text(scope: ContainerScope) -> String {
    format!("\tset {} {{\n\t\ttype cgroupsv2\n\t\tsize {MAX_ELEMENTS}\n\t}}\n", set_name(scope))
}

fn chain_text(table: NativeTable, name: &str, chain: &NativeChain) -> String {
    let hook = chain.hook.map(|BaseHook { like, hook }| {
        let (kind, priority) = (chain_type(like, hook), table.priority(like));
        let point = match hook {
            Hook::Prerouting => "prerouting",
            Hook::Output => "output",
            Hook::Input => "input",
            Hook::Forward => "forward",
        };
        format!("\t\ttype {kind} hook {point} priority {priority}; policy accept;\n")
    });
    let rules: String = chain.rules.iter().map(|rule| format!("\t\t{rule}\n")).collect();
    format!("\tchain {name} {{\n{}{rules}\t}}\n", hook.unwrap_or_default())
}

impl Display for Rule {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        // A condition on an address implies the family.
        if let Some(family) = self.family.filter(|_| !self.has_address()) {
            write!(f, "meta nfproto {} ", family_name(family))?;
        }
        let protocol = self.protocol().and_then(protocol_name);
        let checks_port = |c: &Condition| matches!(c.key, Key::SourcePort | Key::DestinationPort | Key::TcpFlags);
        let implied = protocol.is_some() && self.conditions.iter().any(checks_port);
        for condition in self.conditions.iter().filter(|c| !(implied && c.key == Key::Protocol)) {
            write!(f, "{} ", condition_text(condition, protocol))?;
        }
        if let Some(InCgroup { level, set }) = self.cgroup {
            write!(f, "socket cgroupv2 level {level} @{} ", set_name(set))?;
        }
        write!(f, "counter {}", target_text(self))
    }
}

const fn family_name(family: Family) -> &'static str {
    match family {
        Family::Ip => "ipv4",
        Family::Ip6 => "ipv6",
    }
}

fn target_text(rule: &Rule) -> String {
    let family = rule.family.map_or("", Family::name);
    match &rule.target {
        Target::Accept => "accept".to_owned(),
        Target::Return => "return".to_owned(),
        Target::Drop => "drop".to_owned(),
        Target::Jump(chain) => format!("jump {chain}"),
        Target::Goto(chain) => format!("goto {chain}"),
        Target::Redirect(port) => format!("redirect to :{port}"),
        Target::Zone(zone) => format!("ct zone set {zone}"),
        Target::Tproxy { port, mark } if family.is_empty() => {
            format!("tproxy to :{port} meta mark set {mark:#x} accept")
        }
        Target::Tproxy { port, mark } => format!("tproxy {family} to :{port} meta mark set {mark:#x} accept"),
        Target::SetMark(mark) => format!("meta mark set {mark:#x}"),
        Target::SaveMark => "ct mark set meta mark".to_owned(),
        Target::RestoreMark => "meta mark set ct mark".to_owned(),
        Target::KeepDestination => format!("dnat {family} to {family} daddr"),
        Target::Reset => "reject with tcp reset".to_owned(),
        Target::Reject => "reject with icmpx port-unreachable".to_owned(),
    }
}

/// Returns the name of a protocol by its number.
pub(in crate::firewall) fn protocol_name(number: u128) -> Option<&'static str> {
    match number {
        6 => Some("tcp"),
        17 => Some("udp"),
        _ => None,
    }
}

fn condition_text(condition: &Condition, protocol: Option<&str>) -> String {
    let transport = protocol.unwrap_or("th");
    let key = match condition.key {
        Key::InInterface => "iifname".to_owned(),
        Key::OutInterface => "oifname".to_owned(),
        Key::Source(family) => format!("{} saddr", family.name()),
        Key::Destination(family) => format!("{} daddr", family.name()),
        Key::Protocol => "meta l4proto".to_owned(),
        Key::SourcePort => format!("{transport} sport"),
        Key::DestinationPort => format!("{transport} dport"),
        Key::Uid => "meta skuid".to_owned(),
        Key::Gid => "meta skgid".to_owned(),
        Key::CtState => "ct state".to_owned(),
        Key::Mark => "meta mark".to_owned(),
        Key::CtMark => "ct mark".to_owned(),
        Key::TcpFlags => "tcp flags & (fin|syn|rst|ack)".to_owned(),
        Key::DestinationType => "fib daddr type".to_owned(),
    };
    let values: Vec<String> = condition.values.as_slice().iter().map(|span| span_text(condition.key, *span)).collect();
    let values = match values.as_slice() {
        [one] => one.clone(),
        several => format!("{{ {} }}", several.join(", ")),
    };
    let equals = match (condition.not, condition.key) {
        (true, _) => "!= ",
        (false, Key::TcpFlags) => "== ",
        (false, _) => "",
    };
    format!("{key} {equals}{values}")
}

/// Returns the text of one of a condition's values.
pub(in crate::firewall) fn span_text(key: Key, span: Span) -> String {
    let one = |number: u128| match key {
        Key::Source(family) | Key::Destination(family) => address(family, number),
        Key::Protocol => protocol_name(number).map_or_else(|| number.to_string(), str::to_owned),
        Key::Mark | Key::CtMark => format!("{number:#x}"),
        _ => number.to_string(),
    };
    match key {
        Key::InInterface | Key::OutInterface => {
            format!("\"{}{}\"", interface(span), if span.is_one() { "" } else { "*" })
        }
        Key::CtState => state(span.first),
        Key::TcpFlags if span == (Span { first: SYN, last: SYN }) => "syn".to_owned(),
        Key::DestinationType if span == (Span { first: LOCAL, last: LOCAL }) => "local".to_owned(),
        Key::Source(family) | Key::Destination(family) => match span.prefix(family.bits()) {
            Some(length) if !span.is_one() => format!("{}/{length}", one(span.first)),
            _ => range(span, one),
        },
        _ => range(span, one),
    }
}

fn range(span: Span, one: impl Fn(u128) -> String) -> String {
    if span.is_one() { one(span.first) } else { format!("{}-{}", one(span.first), one(span.last)) }
}

/// Returns the text of an address.
pub(in crate::firewall) fn address(family: Family, number: u128) -> String {
    match family {
        Family::Ip => Ipv4Addr::from(u32::try_from(number).unwrap_or_default()).to_string(),
        Family::Ip6 => Ipv6Addr::from(number).to_string(),
    }
}

/// Returns the name of an interface, or the beginning of the names in a span, without the padding.
pub(in crate::firewall) fn interface(span: Span) -> String {
    let name: Vec<u8> = span.first.to_be_bytes().into_iter().take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&name).into_owned()
}

/// Returns nft's names of `NF_CT_STATE_BIT`s, in the order in which it prints them.
fn state(bits: u128) -> String {
    let names = [(1, "invalid"), (2, "established"), (4, "related"), (8, "new"), (64, "untracked")];
    let set: Vec<&str> = names.into_iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| name).collect();
    set.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel pads names with zeros; a name with `+` in iptables has none at its end.
    #[test]
    fn the_name_of_an_interface_is_printed_without_its_padding() {
        let first = u128::from_be_bytes(*b"eth0\0\0\0\0\0\0\0\0\0\0\0\0");
        let text = |span| span_text(Key::InInterface, span);
        assert_eq!(text(Span::one(first)), "\"eth0\"");
        assert_eq!(text(Span { first, last: first | (u128::MAX >> 32) }), "\"eth0*\"");
    }
}
