//! The rule model: a pod's firewall rules as values, in the vocabulary of iptables. Both rule formats write it into
//! the kernel and decode the kernel's rules back into it. Exclusions are native rules in both rule formats. In
//! `firewall`, a chain is a netfilter chain.

use super::target::Target;
use crate::policy::{AmbientGuard, ContainerScope, DnsCapture, Exclusion, IdRange, PortRange, Protocol, Redirect};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};

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

/// A value in a condition, possibly negated (`!`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Is<T> {
    /// Whether the condition is negated.
    pub not: bool,
    /// The value.
    pub value: T,
}

/// Returns a condition on this value.
pub const fn is<T>(value: T) -> Is<T> {
    Is { not: false, value }
}

/// Returns a negated condition on this value.
pub const fn not<T>(value: T) -> Is<T> {
    Is { not: true, value }
}

/// The connection tracking states that rules match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CtState {
    /// `INVALID`.
    Invalid,
    /// `RELATED,ESTABLISHED`.
    RelatedOrEstablished,
}

/// A condition that an iptables extension checks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Match {
    /// `--dport`; needs a protocol.
    DestinationPort(Is<PortRange>),
    /// `--sport`; needs a protocol.
    SourcePort(Is<PortRange>),
    /// `-m multiport --dports`; needs a protocol; has 15 slots, and a range takes two.
    DestinationPorts(Is<Vec<PortRange>>),
    /// `-m owner --uid-owner`.
    Uid(Is<IdRange>),
    /// `-m owner --gid-owner`.
    Gid(Is<IdRange>),
    /// `-m conntrack --ctstate`.
    CtState(CtState),
    /// `-m mark --mark`.
    Mark(Is<u32>),
    /// `-m connmark --mark`.
    Connmark(u32),
}

/// A rule: conditions and a target.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    /// `-s`.
    pub source: Option<Is<IpNet>>,
    /// `-d`.
    pub destination: Option<Is<IpNet>>,
    /// `-i`.
    pub in_interface: Option<Is<Name>>,
    /// `-o`.
    pub out_interface: Option<Is<Name>>,
    /// `-p`.
    pub protocol: Option<Protocol>,
    /// `-m`.
    pub matches: Vec<Match>,
    /// `-j`.
    pub target: Target,
}

impl Rule {
    /// Returns a rule without conditions.
    #[must_use]
    pub const fn new(target: Target) -> Self {
        Self {
            source: None,
            destination: None,
            in_interface: None,
            out_interface: None,
            protocol: None,
            matches: Vec::new(),
            target,
        }
    }

    /// Returns a rule without conditions that jumps to a chain.
    #[must_use]
    pub fn jump(chain: impl Into<Name>) -> Self {
        Self::new(Target::Jump(chain.into()))
    }

    /// Returns the chain that the rule jumps to, if its target is a chain.
    #[must_use]
    pub fn jump_target(&self) -> Option<&str> {
        self.target.jump()
    }

    /// Removes conditions on addresses that match every address (`/0`), as iptables does.
    pub fn drop_empty_conditions(&mut self) {
        let matches_all = |net: &mut Is<IpNet>| !net.not && net.value.prefix_len() == 0;
        self.source.take_if(matches_all);
        self.destination.take_if(matches_all);
    }

    /// Adds `-s`.
    #[must_use]
    pub fn source(mut self, net: Is<IpNet>) -> Self {
        self.source = Some(net);
        self
    }

    /// Adds `-d`.
    #[must_use]
    pub fn destination(mut self, net: Is<IpNet>) -> Self {
        self.destination = Some(net);
        self
    }

    /// Adds `-i`.
    #[must_use]
    pub fn in_interface(mut self, name: impl Into<Name>) -> Self {
        self.in_interface = Some(is(name.into()));
        self
    }

    /// Adds `-o`.
    #[must_use]
    pub fn out_interface(mut self, name: Is<impl Into<Name>>) -> Self {
        self.out_interface = Some(Is { not: name.not, value: name.value.into() });
        self
    }

    /// Adds `-p`.
    #[must_use]
    pub const fn protocol(mut self, protocol: Protocol) -> Self {
        self.protocol = Some(protocol);
        self
    }

    /// Adds an `-m`.
    #[must_use]
    pub fn matching(mut self, condition: Match) -> Self {
        self.matches.push(condition);
        self
    }

    /// Adds `-p tcp`.
    #[must_use]
    pub const fn tcp(self) -> Self {
        self.protocol(Protocol::Tcp)
    }

    /// Adds `-p udp`.
    #[must_use]
    pub const fn udp(self) -> Self {
        self.protocol(Protocol::Udp)
    }

    /// Adds `--dport`.
    #[must_use]
    pub fn to_port(self, ports: PortRange) -> Self {
        self.matching(Match::DestinationPort(is(ports)))
    }
}

/// The rules of a pod in one table of one family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableRules {
    /// Detour's chains, in the order in which they are created.
    pub chains: Vec<(Name, Vec<Rule>)>,
    /// Detour's rules in the built-in chains.
    pub hooks: BTreeMap<Hook, Vec<Rule>>,
}

impl TableRules {
    /// Returns a table without rules.
    #[must_use]
    pub const fn new() -> Self {
        Self { chains: Vec::new(), hooks: BTreeMap::new() }
    }

    /// Reports whether the table has neither chains nor rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty() && self.hooks.is_empty()
    }

    /// Reports whether one of detour's chains has this name.
    #[must_use]
    pub fn has_chain(&self, chain: &str) -> bool {
        self.chains.iter().any(|(name, _)| name == chain)
    }

    /// Appends a rule to one of detour's chains.
    pub fn append(&mut self, chain: impl Into<Name>, rule: Rule) {
        self.rules_of(chain).push(rule);
    }

    /// Returns the rules of one of detour's chains; adds the chain if it is missing.
    pub fn rules_of(&mut self, chain: impl Into<Name>) -> &mut Vec<Rule> {
        let chain = chain.into();
        let index = self.chains.iter().position(|(name, _)| *name == chain).unwrap_or_else(|| {
            self.chains.push((chain, Vec::new()));
            self.chains.len() - 1
        });
        &mut self.chains[index].1
    }

    /// Appends a rule to a built-in chain.
    pub fn hook(&mut self, hook: Hook, rule: Rule) {
        self.hooks.entry(hook).or_default().push(rule);
    }
}

/// The excluded traffic of a pod: the input of the native rules in the table of exclusions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExcludedTraffic {
    /// The excluded traffic by its properties; no exclusion covers another one.
    pub exclusions: BTreeSet<Exclusion>,
    /// The sets of excluded containers, the narrower scope first.
    pub scopes: Vec<ContainerScope>,
    /// The DNS queries that the pod's redirection captures.
    pub capture: DnsCapture,
    /// Whether it captures them over IPv6, too.
    pub captures_ip6: bool,
    /// Whether the pod is in Istio's ambient mesh: ztunnel's own packets are not excluded.
    pub ambient: bool,
}

/// All rules of a pod. [`Ruleset::of`] builds it from a policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ruleset {
    /// The redirection by family and table, in the vocabulary of iptables; tables without rules are absent.
    pub tables: BTreeMap<(Family, Table), TableRules>,
    /// The excluded traffic, whose rules don't depend on the rule format; `None` if the policy excludes nothing.
    pub excluded: Option<ExcludedTraffic>,
    /// The traffic that the guard rejects; `None` without a guard.
    pub guarded: Option<GuardedTraffic>,
}

/// The traffic that the guard rejects, unless it is redirected or excluded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuardedTraffic {
    /// What the rules of a redirection to the sidecar capture.
    Sidecar {
        /// These rules, for each family in which the pod's traffic is captured.
        rules: BTreeMap<(Family, Table), TableRules>,
        /// The settings of the redirection.
        redirect: Box<Redirect>,
    },
    /// What istio-cni's rules for the ambient mesh capture.
    Ambient(AmbientGuard),
}

impl Ruleset {
    /// Returns all rules of all tables.
    pub(super) fn rules_mut(&mut self) -> impl Iterator<Item = &mut Rule> {
        self.tables.values_mut().flat_map(|table| {
            let chains = table.chains.iter_mut().map(|(_, rules)| rules);
            chains.chain(table.hooks.values_mut()).flatten()
        })
    }

    /// Adds the chains and built-in rules of the redirection of `other`, so that they count as detour's. If both have a
    /// chain, its rules are those of `self`.
    pub fn add_owned(&mut self, other: &Self) {
        for (key, theirs) in &other.tables {
            let ours = self.tables.entry(*key).or_default();
            for (chain, rules) in &theirs.chains {
                if !ours.has_chain(chain) {
                    ours.chains.push((chain.clone(), rules.clone()));
                }
            }
            for (hook, rules) in &theirs.hooks {
                let own = ours.hooks.entry(*hook).or_default();
                let present: HashSet<&Rule> = own.iter().collect();
                let new: Vec<Rule> = rules.iter().filter(|rule| !present.contains(rule)).cloned().collect();
                own.extend(new);
            }
        }
    }

    /// Returns the rules of a table; adds the table if it is missing.
    pub fn table(&mut self, family: Family, table: Table) -> &mut TableRules {
        self.tables.entry((family, table)).or_default()
    }

    /// Reports whether the table has a chain of this name.
    #[must_use]
    pub fn has_chain(&self, family: Family, table: Table, chain: &str) -> bool {
        self.tables.get(&(family, table)).is_some_and(|rules| rules.has_chain(chain))
    }

    /// Reports whether there are no rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.excluded.is_none()
    }
}
