//! One rule of the `iptables` dialect as a value, in the vocabulary of iptables itself.
//!
//! All rules of one pod as a value: what [`super::istio`] and [`super::detour`] write a policy as.

use super::{exclusions, istio};
use crate::policy::{IdRange, Policy, PortRange, Protocol};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};

/// The two families, each with its own tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Family {
    /// IPv4.
    Ip,
    /// IPv6.
    Ip6,
}

impl Family {
    /// Both, in the order in which they are written.
    pub const ALL: [Self; 2] = [Self::Ip, Self::Ip6];

    /// The name in the kernel.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
        }
    }

    /// How many bits an address has.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::Ip => 32,
            Self::Ip6 => 128,
        }
    }

    /// Whether `net` belongs to it.
    #[must_use]
    pub const fn has(self, net: &IpNet) -> bool {
        matches!((self, net), (Self::Ip, IpNet::V4(_)) | (Self::Ip6, IpNet::V6(_)))
    }
}

/// The tables that are written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Table {
    /// Before connection tracking.
    Raw,
    /// Marks.
    Mangle,
    /// Where connections go to.
    Nat,
}

impl Table {
    /// All three, in the order in which the kernel passes them.
    pub const ALL: [Self; 3] = [Self::Raw, Self::Mangle, Self::Nat];

    /// The name in the kernel.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Mangle => "mangle",
            Self::Nat => "nat",
        }
    }
}

/// The hooks that are used, as iptables' built-in chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Hook {
    /// What comes in.
    Prerouting,
    /// What the pod's own processes send.
    Output,
}

impl Hook {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Prerouting, Self::Output];

    /// The built-in chain's name.
    #[must_use]
    pub const fn chain(self) -> &'static str {
        match self {
            Self::Prerouting => "PREROUTING",
            Self::Output => "OUTPUT",
        }
    }
}

/// A condition's value, or what it must not be (`!`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Is<T> {
    /// Whether the condition is turned round.
    pub not: bool,
    /// The value.
    pub value: T,
}

/// What it must be.
pub const fn is<T>(value: T) -> Is<T> {
    Is { not: false, value }
}

/// What it must not be.
pub const fn not<T>(value: T) -> Is<T> {
    Is { not: true, value }
}

/// States of connection tracking that rules ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CtState {
    /// `INVALID`.
    Invalid,
    /// `RELATED,ESTABLISHED`.
    RelatedOrEstablished,
}

/// A condition that an iptables extension checks, in the order in which they were written.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Match {
    /// `--dport`; needs a protocol.
    DestinationPort(Is<PortRange>),
    /// `--sport`; needs a protocol.
    SourcePort(Is<PortRange>),
    /// `-m multiport --dports`; needs a protocol; 15 places, a range takes two.
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

/// What happens to a packet that meets all conditions.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Target {
    /// `ACCEPT`: nothing more in this table's hook.
    Accept,
    /// `RETURN`: back to the calling chain.
    Return,
    /// `DROP`.
    Drop,
    /// To a chain and, if that does not decide, back.
    Jump(String),
    /// `REDIRECT --to-ports`.
    Redirect(u16),
    /// `CT --zone`.
    Zone(u16),
    /// `TPROXY --on-port … --tproxy-mark …/0xffffffff`.
    Tproxy {
        /// The proxy's port.
        port: u16,
        /// The mark that routes the packet to lo.
        mark: u32,
    },
    /// `MARK --set-mark`.
    SetMark(u32),
    /// `CONNMARK --save-mark`.
    SaveMark,
    /// `CONNMARK --restore-mark`.
    RestoreMark,
}

/// A rule: conditions and what follows.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    /// `-s`.
    pub source: Option<Is<IpNet>>,
    /// `-d`.
    pub destination: Option<Is<IpNet>>,
    /// `-i`.
    pub in_interface: Option<Is<String>>,
    /// `-o`.
    pub out_interface: Option<Is<String>>,
    /// `-p`.
    pub protocol: Option<Protocol>,
    /// `-m`.
    pub matches: Vec<Match>,
    /// `-j`.
    pub target: Target,
}

impl Rule {
    /// A rule without conditions.
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

    /// A rule without conditions that goes to a chain.
    #[must_use]
    pub fn jump(chain: &str) -> Self {
        Self::new(Target::Jump(chain.to_owned()))
    }

    /// The chain that it goes to, where it goes to one.
    #[must_use]
    pub fn goes_to(&self) -> Option<&str> {
        match &self.target {
            Target::Jump(chain) => Some(chain),
            _ => None,
        }
    }

    /// Whether it goes to a chain of an Istio redirection, whoever made that.
    #[must_use]
    pub fn enters_redirection(&self) -> bool {
        self.goes_to().is_some_and(|chain| chain.starts_with("ISTIO_"))
    }

    /// Leaves out addresses that are every address: iptables prints none, the kernel checks none.
    pub fn drop_empty_conditions(&mut self) {
        let every = |net: &mut Is<IpNet>| !net.not && net.value.prefix_len() == 0;
        self.source.take_if(every);
        self.destination.take_if(every);
    }

    /// With `-s`.
    #[must_use]
    pub fn source(mut self, net: Is<IpNet>) -> Self {
        self.source = Some(net);
        self
    }

    /// With `-d`.
    #[must_use]
    pub fn destination(mut self, net: Is<IpNet>) -> Self {
        self.destination = Some(net);
        self
    }

    /// With `-i`.
    #[must_use]
    pub fn in_interface(mut self, name: &str) -> Self {
        self.in_interface = Some(is(name.to_owned()));
        self
    }

    /// With `-o`.
    #[must_use]
    pub fn out_interface(mut self, name: Is<&str>) -> Self {
        self.out_interface = Some(Is { not: name.not, value: name.value.to_owned() });
        self
    }

    /// With `-p`.
    #[must_use]
    pub const fn protocol(mut self, protocol: Protocol) -> Self {
        self.protocol = Some(protocol);
        self
    }

    /// With another `-m`.
    #[must_use]
    pub fn matching(mut self, condition: Match) -> Self {
        self.matches.push(condition);
        self
    }

    /// With `-p tcp`.
    #[must_use]
    pub const fn tcp(self) -> Self {
        self.protocol(Protocol::Tcp)
    }

    /// With `-p udp`.
    #[must_use]
    pub const fn udp(self) -> Self {
        self.protocol(Protocol::Udp)
    }

    /// With `--dport`.
    #[must_use]
    pub fn to_port(self, ports: PortRange) -> Self {
        self.matching(Match::DestinationPort(is(ports)))
    }
}

/// The rules in one table of one family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableRules {
    /// Chains of our own, in the order in which they are made.
    pub chains: Vec<(String, Vec<Rule>)>,
    /// Our rules in the built-in chains.
    pub hooks: BTreeMap<Hook, Vec<Rule>>,
}

impl TableRules {
    /// Adds a rule to a chain of our own.
    pub fn append(&mut self, chain: &str, rule: Rule) {
        self.rules_of(chain).push(rule);
    }

    /// A chain of our own, made where it isn't there yet.
    pub fn rules_of(&mut self, chain: &str) -> &mut Vec<Rule> {
        let index = self.chains.iter().position(|(name, _)| name == chain).unwrap_or_else(|| {
            self.chains.push((chain.to_owned(), Vec::new()));
            self.chains.len() - 1
        });
        &mut self.chains[index].1
    }

    /// Adds a rule to a built-in chain.
    pub fn hook(&mut self, hook: Hook, rule: Rule) {
        self.hooks.entry(hook).or_default().push(rule);
    }
}

/// All rules of one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ruleset {
    /// By family and table; one that needs nothing is absent.
    pub tables: BTreeMap<(Family, Table), TableRules>,
}

impl Ruleset {
    /// The rules that `policy` needs in `families`.
    #[must_use]
    pub fn of(policy: &Policy, families: &[Family]) -> Self {
        let mut ruleset = Self::default();
        if !policy.is_empty() {
            let exclusions = policy.exclusions_in_effect();
            for &family in families {
                if let Some(redirect) = policy.redirect() {
                    istio::write(redirect, family, &mut ruleset);
                }
                exclusions::write(policy, &exclusions, family, &mut ruleset);
            }
        }
        ruleset.rules_mut().for_each(Rule::drop_empty_conditions);
        ruleset
    }

    fn rules_mut(&mut self) -> impl Iterator<Item = &mut Rule> {
        self.tables.values_mut().flat_map(|table| {
            let chains = table.chains.iter_mut().map(|(_, rules)| rules);
            chains.chain(table.hooks.values_mut()).flatten()
        })
    }

    /// Adds the chains and built-in rules of `other`, to know them as ours by; the rules of a
    /// chain that both have stay those of `self`.
    pub fn know_also(&mut self, other: &Self) {
        for (key, theirs) in &other.tables {
            let ours = self.tables.entry(*key).or_default();
            for (chain, rules) in &theirs.chains {
                if !ours.chains.iter().any(|(name, _)| name == chain) {
                    ours.chains.push((chain.clone(), rules.clone()));
                }
            }
            for (hook, rules) in &theirs.hooks {
                let known = ours.hooks.entry(*hook).or_default();
                let there: HashSet<&Rule> = known.iter().collect();
                let new: Vec<Rule> = rules.iter().filter(|rule| !there.contains(rule)).cloned().collect();
                known.extend(new);
            }
        }
    }

    /// A table's rules, made where they aren't there yet.
    pub fn table(&mut self, family: Family, table: Table) -> &mut TableRules {
        self.tables.entry((family, table)).or_default()
    }

    /// Whether a chain of this name is among them.
    #[must_use]
    pub fn has_chain(&self, family: Family, table: Table, chain: &str) -> bool {
        self.tables.get(&(family, table)).is_some_and(|t| t.chains.iter().any(|(name, _)| name == chain))
    }

    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }
}
