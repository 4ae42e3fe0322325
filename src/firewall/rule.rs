//! The rule model: a pod's firewall rules as values, with one vocabulary for both rule formats. Both write it into the
//! kernel and decode the kernel's rules back into it. Exclusions are native rules in both rule formats. In `firewall`,
//! a chain is a netfilter chain.

use super::set::{Span, Spans};
use crate::policy::{ContainerScope, PortRange, Protocol};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::ops::Not;

/// The prefix of the netfilter chains of an Istio redirection, made by detour or another tool.
const REDIRECTION_PREFIX: &str = "ISTIO_";
/// `NFPROTO_INET` (linux/netfilter.h), the family of native tables.
pub(super) const NFPROTO_INET: u8 = 1;

/// The number of slots in `-m multiport` (linux/netfilter/xt_multiport.h, `XT_MULTI_PORTS`); a range takes two.
pub(super) const MULTIPORT_SLOTS: usize = 15;

/// The name of a netfilter chain or of an interface. Most of those that detour writes are constants.
pub type Name = Cow<'static, str>;

/// An IP family; iptables has separate tables for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Family {
    /// IPv4.
    Ip,
    /// IPv6.
    Ip6,
}

impl Family {
    /// Both families, in the order in which rules are written.
    pub const ALL: [Self; 2] = [Self::Ip, Self::Ip6];

    /// Returns `NFPROTO_…` (linux/netfilter.h).
    pub(super) const fn number(self) -> u8 {
        match self {
            Self::Ip => 2,
            Self::Ip6 => 10,
        }
    }

    /// Returns the name of the family in nftables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
        }
    }

    /// Returns the family of a network.
    #[must_use]
    pub const fn of(net: &IpNet) -> Self {
        match net {
            IpNet::V4(_) => Self::Ip,
            IpNet::V6(_) => Self::Ip6,
        }
    }

    /// Returns the number of bits of an address.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::Ip => 32,
            Self::Ip6 => 128,
        }
    }

    /// Reports whether `net` is of this family.
    #[must_use]
    pub const fn has(self, net: &IpNet) -> bool {
        matches!((self, net), (Self::Ip, IpNet::V4(_)) | (Self::Ip6, IpNet::V6(_)))
    }
}

/// A table that detour writes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Table {
    /// `raw`: before connection tracking; sets zones.
    Raw,
    /// `mangle`: sets marks.
    Mangle,
    /// `nat`: redirects connections.
    Nat,
    /// After `nat`: only the guard has chains there, in detour's own table.
    Filter,
}

impl Table {
    /// The tables of a redirection, in the order in which the kernel evaluates them.
    pub const ALL: [Self; 3] = [Self::Raw, Self::Mangle, Self::Nat];

    /// Returns the name of the table in iptables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Mangle => "mangle",
            Self::Nat => "nat",
            Self::Filter => "filter",
        }
    }
}

/// A netfilter hook that detour uses, as a built-in chain of iptables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Hook {
    /// Incoming packets.
    Prerouting,
    /// Packets that the pod's processes send.
    Output,
    /// Incoming packets for the pod's processes; only the guard has a chain there.
    Input,
    /// Packets of virtual machines in the pod; only the guard has a chain there.
    Forward,
}

impl Hook {
    /// The hooks of a redirection.
    pub const ALL: [Self; 2] = [Self::Prerouting, Self::Output];
    /// All hooks.
    pub(super) const EVERY: [Self; 4] = [Self::Prerouting, Self::Output, Self::Input, Self::Forward];

    /// Returns the name of the built-in chain.
    #[must_use]
    pub const fn chain(self) -> &'static str {
        match self {
            Self::Prerouting => "PREROUTING",
            Self::Output => "OUTPUT",
            Self::Input => "INPUT",
            Self::Forward => "FORWARD",
        }
    }

    /// Returns the hook whose built-in chain has this name.
    pub(super) fn of_chain(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|hook| hook.chain() == name)
    }

    /// Returns `NF_INET_…` (linux/netfilter.h).
    pub(super) const fn number(self) -> u32 {
        match self {
            Self::Prerouting => 0,
            Self::Input => 1,
            Self::Forward => 2,
            Self::Output => 3,
        }
    }
}

/// Reports whether a chain belongs to an Istio redirection, made by detour or another tool.
pub(super) fn is_redirection_chain(name: &str) -> bool {
    name.starts_with(REDIRECTION_PREFIX)
}

/// Returns the IP protocol number.
#[must_use]
pub const fn protocol_number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
    }
}

/// What a condition checks, in the order in which native rules have their conditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// `-i`, `iifname`: sixteen bytes, padded with zeros, as a number; a name with a wildcard is a span.
    InInterface,
    /// `-o`, `oifname`.
    OutInterface,
    /// `-s`, `ip saddr`, `ip6 saddr`.
    Source(Family),
    /// `-d`, `ip daddr`, `ip6 daddr`.
    Destination(Family),
    /// `-p`, `meta l4proto`.
    Protocol,
    /// `--sport`, `tcp sport`, `udp sport`, `th sport`.
    SourcePort,
    /// `--dport`, `tcp dport`, `udp dport`, `th dport`; several are `-m multiport --dports` in iptables.
    DestinationPort,
    /// `-m owner --uid-owner`, `meta skuid`: the UID in the user namespace that owns the network namespace, as the pod
    /// itself sees it (`nft_meta_get_eval_skugid`).
    Uid,
    /// `-m owner --gid-owner`, `meta skgid`.
    Gid,
    /// `-m conntrack --ctstate`, `ct state`: bits, at least one of which must be set (`NF_CT_STATE_…`).
    CtState,
    /// `-m mark`, `meta mark`.
    Mark,
    /// `-m connmark`, `ct mark`.
    CtMark,
    /// `tcp flags & (fin|syn|rst|ack)`, only native: those of the first packet of a connection are `syn`.
    TcpFlags,
    /// `fib daddr type`, only native: where the pod's routes lead (`RTN_…`, linux/rtnetlink.h).
    DestinationType,
}

impl Key {
    /// Returns the place of the condition in a rule of iptables, which has all others behind these.
    const fn place(self) -> u8 {
        match self {
            Self::InInterface => 0,
            Self::OutInterface => 1,
            Self::Protocol => 2,
            Self::Source(_) => 3,
            Self::Destination(_) => 4,
            _ => 5,
        }
    }

    /// Reports whether the key is an address, so that a rule with it applies to one family only.
    pub(super) const fn is_address(self) -> bool {
        matches!(self, Self::Source(_) | Self::Destination(_))
    }
}

/// `NF_CT_STATE_BIT`s (linux/netfilter/nf_conntrack_common.h).
pub(super) const INVALID: u128 = 1;
pub(super) const ESTABLISHED_OR_RELATED: u128 = 2 | 4;
pub(super) const NEW: u128 = 8;
/// `RTN_LOCAL`.
pub(super) const LOCAL: u128 = 2;
/// The flag `syn`.
pub(super) const SYN: u128 = 2;

/// A condition of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Condition {
    /// The packet property that it checks.
    pub key: Key,
    /// Whether it is negated.
    pub not: bool,
    /// The accepted values.
    pub values: Spans,
}

impl Condition {
    /// Returns a condition on these values.
    pub fn is(key: Key, values: impl Into<Spans>) -> Self {
        Self { key, not: false, values: values.into() }
    }

    /// Returns a condition on the name of an interface; a name that ends in `+` is a prefix.
    #[must_use]
    pub fn interface(key: Key, name: &str) -> Self {
        let padded = |text: &str, with: u8| {
            let mut bytes = [with; 16];
            bytes.iter_mut().zip(text.bytes()).for_each(|(padding, byte)| *padding = byte);
            u128::from_be_bytes(bytes)
        };
        Self::is(
            key,
            match name.strip_suffix('+') {
                Some(prefix) => Spans::of(padded(prefix, 0), padded(prefix, u8::MAX)),
                None => Spans::one(padded(name, 0)),
            },
        )
    }

    /// Returns the condition that a packet comes from a network.
    #[must_use]
    pub fn from(net: IpNet) -> Self {
        Self::is(Key::Source(Family::of(&net)), net)
    }

    /// Returns the condition that a packet goes to a network.
    #[must_use]
    pub fn to(net: IpNet) -> Self {
        Self::is(Key::Destination(Family::of(&net)), net)
    }

    /// Returns the condition that the protocol is one of these.
    #[must_use]
    pub fn protocols(protocols: &[Protocol]) -> Self {
        let numbers = protocols.iter().map(|protocol| Span::one(protocol_number(*protocol).into()));
        Self::is(Key::Protocol, numbers.collect::<Spans>())
    }

    fn is_met_by_all(&self) -> bool {
        match (self.key, self.values.single()) {
            (Key::Source(family) | Key::Destination(family), Some(span)) => {
                !self.not && span.prefix(family.bits()) == Some(0)
            }
            _ => false,
        }
    }

    /// Sorts the conditions of a native rule.
    pub(super) fn sort(conditions: &mut [Self]) {
        conditions.sort_by_key(|condition| condition.key);
    }
}

impl Not for Condition {
    type Output = Self;

    fn not(self) -> Self {
        Self { not: !self.not, ..self }
    }
}

/// `socket cgroupv2 level`: the control group of the sending socket, or its ancestor at this level, is in a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct InCgroup {
    /// The level of the compared control group; a child of the root has level 1.
    pub level: u8,
    /// The set of excluded containers.
    pub set: ContainerScope,
}

/// The target of a rule, as iptables and as nft call it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Target {
    /// `ACCEPT`, `accept`: ends the evaluation of this table, or of this base chain, in this hook.
    Accept,
    /// `RETURN`, `return`: continues in the calling chain.
    Return,
    /// `DROP`, `drop`.
    Drop,
    /// `-j CHAIN`, `jump`: evaluates a chain, which may return.
    Jump(Name),
    /// `goto`, only native: evaluates a chain, which returns to the chain that called this one.
    Goto(Name),
    /// `REDIRECT --to-ports`, `redirect to :PORT`.
    Redirect(u16),
    /// `CT --zone`, `ct zone set`.
    Zone(u16),
    /// `TPROXY --on-port … --tproxy-mark …/0xffffffff`, `tproxy to :PORT meta mark set MARK accept`. Without a listener,
    /// iptables drops the packet, and the evaluation of native rules continues.
    Tproxy {
        /// The proxy's port.
        port: u16,
        /// The mark that routes the packet to lo.
        mark: u32,
    },
    /// `MARK --set-mark`, `meta mark set`.
    SetMark(u32),
    /// `CONNMARK --save-mark`, `ct mark set meta mark`.
    SaveMark,
    /// `CONNMARK --restore-mark`, `meta mark set ct mark`.
    RestoreMark,
    /// `dnat ip to ip daddr`, only native: fixes the destination, so that no other table can change it.
    KeepDestination,
    /// `reject with tcp reset`, only native.
    Reset,
    /// `reject with icmpx port-unreachable`, only native.
    Reject,
}

/// A rule of either format.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The family to which a native rule applies; `None` for both. A native rule that checks addresses has a family.
    pub family: Option<Family>,
    /// The conditions; all must be met, including several on one key. Those of a native rule are sorted by key.
    pub conditions: Vec<Condition>,
    /// The condition on the sender's control group, only native.
    pub cgroup: Option<InCgroup>,
    /// What it does with a packet that meets all conditions.
    pub target: Target,
}

impl Rule {
    /// Returns a rule without conditions.
    #[must_use]
    pub const fn new(target: Target) -> Self {
        Self { family: None, conditions: Vec::new(), cgroup: None, target }
    }

    /// Returns a rule without conditions that jumps to a chain.
    #[must_use]
    pub fn jump(chain: impl Into<Name>) -> Self {
        Self::new(Target::Jump(chain.into()))
    }

    /// Adds a condition in the place that iptables gives it, unless every address meets it (`/0`).
    #[must_use]
    pub fn on(mut self, condition: Condition) -> Self {
        if condition.is_met_by_all() {
            return self;
        }
        let at = self.conditions.partition_point(|other| other.key.place() <= condition.key.place());
        self.conditions.insert(at, condition);
        self
    }

    /// Adds conditions as [`Self::on`].
    #[must_use]
    pub fn on_all(self, conditions: impl IntoIterator<Item = Condition>) -> Self {
        conditions.into_iter().fold(self, Self::on)
    }

    /// Adds conditions, and sorts all of them as native rules have them.
    pub(super) fn with(mut self, conditions: impl IntoIterator<Item = Condition>) -> Self {
        self.conditions.extend(conditions);
        Condition::sort(&mut self.conditions);
        self
    }

    /// Adds `-p tcp`.
    #[must_use]
    pub fn tcp(self) -> Self {
        self.on(Condition::protocols(&[Protocol::Tcp]))
    }

    /// Adds `-p udp`.
    #[must_use]
    pub fn udp(self) -> Self {
        self.on(Condition::protocols(&[Protocol::Udp]))
    }

    /// Adds `--dport`.
    #[must_use]
    pub fn to_port(self, ports: PortRange) -> Self {
        self.on(Condition::is(Key::DestinationPort, ports))
    }

    /// Returns the condition on `key`, if there is exactly one.
    #[must_use]
    pub fn condition(&self, key: Key) -> Option<&Condition> {
        let mut found = self.conditions.iter().filter(|condition| condition.key == key);
        found.next().filter(|_| found.next().is_none())
    }

    /// Returns the number of the protocol, if the rule requires exactly one.
    pub(super) fn protocol(&self) -> Option<u128> {
        let span = self.condition(Key::Protocol).filter(|c| !c.not)?.values.single()?;
        span.is_one().then_some(span.first)
    }

    /// Reports whether the rule checks an address.
    pub(super) fn has_address(&self) -> bool {
        self.conditions.iter().any(|condition| condition.key.is_address())
    }

    /// Returns the chain that the rule jumps to and that returns to it.
    #[must_use]
    pub fn jump_target(&self) -> Option<&str> {
        if let Target::Jump(chain) = &self.target { Some(chain) } else { None }
    }
}
