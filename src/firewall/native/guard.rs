//! The rules of the guard: a new connection or a captured DNS query that no redirection has turned into local traffic, and
//! that no exclusion explains, is rejected if the redirection would capture it.
//!
//! * The chains come after all NAT. `fib daddr type local` is what a redirection has turned into local traffic; the name of
//!   the outgoing interface does not change. A nat status would not tell: another tool's translation to the outside has
//!   it, and an exclusion, which translates to its own destination, has it too.
//! * A connection is new by its TCP flags. Connection tracking would call packets new that belong to connections from
//!   before the rules, and untracked packets have no state.
//! * The rules of the redirection are used as they are, with `reject` where it redirects.
//! * With TPROXY, inbound packets keep their port; the mark tells that they were captured.

use super::exclusions::{dns, exclusions, goto, not_of_ztunnel};
use super::live::NativeLiveTables;
use super::rule::{BaseHook, NativeChain, NativeTable};
use super::translate::redirection;
use crate::firewall::istio::ZTUNNEL_MARK;
use crate::firewall::rule::{Condition, Family, Hook, Key, LOCAL, Name, Rule, SYN, Table, Target};
use crate::firewall::ruleset::{ExcludedTraffic, GuardedTraffic, Ruleset};
use crate::firewall::set::{Span, Spans};
use crate::policy::{AmbientGuard, DnsCapture, InterceptionMode, PortRange, Protocol, Redirect};
use ipnet::IpNet;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// The beginning of the chains' names.
pub(in crate::firewall) const PREFIX: &str = "GUARD_";
const OUTPUT: &str = "GUARD_OUTPUT";
const INPUT: &str = "GUARD_INPUT";
const FORWARD: &str = "GUARD_FORWARD";
/// The rules of the redirection for outbound and inbound traffic.
const OUTBOUND: &str = "GUARD_OUTBOUND";
const INBOUND: &str = "GUARD_INBOUND";
/// The exclusions, and where excluded traffic continues.
const EXCLUDED: &str = "GUARD_EXCLUDED";
const ACCEPT: &str = "GUARD_ACCEPT";
/// The chains that reject, one for each direction: their counters tell how much.
const REJECT_OUTBOUND: &str = "GUARD_REJECT_OUTBOUND";
const REJECT_INBOUND: &str = "GUARD_REJECT_INBOUND";
/// The ports at which ztunnel receives inbound connections (istio/ztunnel, ARCHITECTURE.md).
const ZTUNNEL_INBOUND: [u16; 2] = [15006, 15008];

/// The numbers of packets that the guard has rejected since its rules were written last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Rejected {
    /// First packets of outbound connections, and DNS queries.
    pub outbound: u64,
    /// First packets of inbound connections.
    pub inbound: u64,
}

impl Rejected {
    /// Reads the counters of the guard's rules; `None` without a guard.
    pub(in crate::firewall) fn of(live: &NativeLiveTables) -> Option<Self> {
        let chains = live.get(&NativeTable::Exclusions)?;
        let count = |name| {
            let rules = chains.get(name)?.rules.iter();
            Some(rules.map(|rule| rule.counter.packets).fold(0, u64::saturating_add))
        };
        Some(Self { outbound: count(REJECT_OUTBOUND)?, inbound: count(REJECT_INBOUND)? })
    }

    /// Returns whether a packet was rejected.
    #[must_use]
    pub fn is_any(self) -> bool {
        self != Self::default()
    }

    /// Returns the packets since `earlier`. Rules that were written again count from zero.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        let is_reset = self.outbound < earlier.outbound || self.inbound < earlier.inbound;
        let earlier = if is_reset { Self { outbound: 0, inbound: 0 } } else { earlier };
        Self { outbound: self.outbound - earlier.outbound, inbound: self.inbound - earlier.inbound }
    }
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [(self.outbound, "outbound"), (self.inbound, "inbound")].into_iter();
        let counts: Vec<String> =
            counts.filter(|(count, _)| *count > 0).map(|(count, kind)| format!("{count} {kind}")).collect();
        write!(f, "{} packets", if counts.is_empty() { "no".to_owned() } else { counts.join(" and ") })
    }
}

/// Returns the chains of the guard by name. The base chains select new connections and DNS queries, so that packets of
/// established connections pass no further rule.
pub(super) fn chains(guarded: &GuardedTraffic, excluded: Option<&ExcludedTraffic>) -> BTreeMap<Name, NativeChain> {
    let local = Condition::is(Key::DestinationType, Spans::one(LOCAL));
    let mut plain = BTreeMap::<Name, Vec<Rule>>::from([
        (OUTBOUND.into(), vec![accept().with([local])]),
        (INBOUND.into(), vec![accept().with([from("lo")])]),
    ]);
    let mut add = |chain: &'static str, rules: Vec<Rule>| plain.entry(chain.into()).or_default().extend(rules);
    if let Some(excluded) = excluded {
        add(OUTBOUND, vec![Rule::jump(EXCLUDED).with(not_of_ztunnel(excluded.ambient))]);
        add(EXCLUDED, exclusions(excluded, ACCEPT));
        add(ACCEPT, vec![accept()]);
    }
    for chain in [REJECT_OUTBOUND, REJECT_INBOUND] {
        add(chain, vec![Rule::new(Target::Reset).tcp(), Rule::new(Target::Reject)]);
    }
    // The first packet of a TCP connection.
    let new = |chain| Rule::jump(chain).tcp().with([Condition::is(Key::TcpFlags, Spans::one(SYN))]);
    let mut output = vec![new(OUTBOUND)];
    let (captures_dns, is_forwarding) = match guarded {
        GuardedTraffic::Sidecar { rules, redirect } => {
            let ruleset = Ruleset { tables: rules.clone(), ..Ruleset::default() };
            of_sidecar(&ruleset, redirect, &mut plain);
            (redirect.dns != DnsCapture::Off, !redirect.reroute_virtual_interfaces.is_empty())
        }
        GuardedTraffic::Ambient(guard) => {
            add(OUTBOUND, ambient_outbound(guard));
            add(INBOUND, if guard.inbound { ambient_inbound(guard) } else { Vec::new() });
            (guard.dns, false)
        }
    };
    output.extend(captures_dns.then(|| Rule::jump(OUTBOUND).with(dns(&[Protocol::Udp]))));
    let base = |hook, rules| NativeChain { hook: Some(BaseHook { like: Table::Filter, hook }), rules };
    let named = plain.into_iter().map(|(name, rules)| (name, NativeChain { hook: None, rules }));
    let hooks = [
        Some((OUTPUT.into(), base(Hook::Output, output))),
        Some((INPUT.into(), base(Hook::Input, vec![new(INBOUND)]))),
        // What a virtual machine sends is forwarded, unless it is redirected.
        is_forwarding.then(|| (FORWARD.into(), base(Hook::Forward, vec![new(INBOUND)]))),
    ];
    named.chain(hooks.into_iter().flatten()).collect()
}

/// Adds the rules of a redirection to the sidecar, with `reject` where it redirects.
fn of_sidecar(ruleset: &Ruleset, redirect: &Redirect, chains: &mut BTreeMap<Name, Vec<Rule>>) {
    let tables = redirection(ruleset);
    let nat = tables.get(&NativeTable::Of(Table::Nat));
    let inbound = match redirect.inbound_interception_mode {
        InterceptionMode::Redirect => nat,
        InterceptionMode::Tproxy => tables.get(&NativeTable::Of(Table::Mangle)),
    };
    // A direct connection to the sidecar's own port reaches the sidecar, and so does a redirected one of a virtual machine.
    let to_port = |port| Rule::new(Target::Return).to_port(PortRange::one(port));
    let reaches = to_port(redirect.inbound_capture_port);
    let of_machine = |name: &String| to_port(redirect.proxy_port).with([from(name)]);
    let reached = std::iter::once(reaches).chain(redirect.reroute_virtual_interfaces.iter().map(of_machine));
    chains.entry(INBOUND.into()).or_default().extend(reached);
    // With TPROXY, the chain for inbound traffic is the one in mangle, of which nat has a remainder.
    let inbound = (inbound, Hook::Prerouting, INBOUND);
    for (source, hook, chain) in [inbound, (nat, Hook::Prerouting, INBOUND), (nat, Hook::Output, OUTBOUND)] {
        let Some(table) = source else { continue };
        let Some(base) = table.get(hook.chain()) else { continue };
        let rules = chains.entry(chain.into()).or_default();
        for rule in rejecting(&base.rules, redirect) {
            // In mode REDIRECT, both sources are the same.
            if !rules.contains(&rule) {
                rules.push(rule);
            }
        }
        for (name, chain) in table.iter().filter(|(_, chain)| chain.hook.is_none()) {
            let rules = rejecting(&chain.rules, redirect);
            chains.entry(guarded(name)).or_insert(rules);
        }
    }
}

/// Returns the name of the chain with the rules of the redirection's chain `name`.
fn guarded(name: &str) -> Name {
    format!("{PREFIX}{name}").into()
}

/// Returns rules with `reject` where they redirect, without those that do something else.
fn rejecting(rules: &[Rule], redirect: &Redirect) -> Vec<Rule> {
    let rejecting = |rule: &Rule| {
        let target = match &rule.target {
            Target::Return => Target::Return,
            Target::Jump(chain) if !chain.ends_with("_DIVERT") && !chain.ends_with("_DROP") => {
                Target::Jump(guarded(chain))
            }
            Target::Redirect(port) if *port != redirect.inbound_capture_port => Target::Goto(REJECT_OUTBOUND.into()),
            Target::Redirect(_) | Target::Tproxy { .. } => Target::Goto(REJECT_INBOUND.into()),
            _ => return None,
        };
        Some(Rule { target, ..rule.clone() })
    };
    rules.iter().filter_map(rejecting).collect()
}

fn ambient_outbound(guard: &AmbientGuard) -> Vec<Rule> {
    let mark = Condition::is(Key::Mark, Spans::one(ZTUNNEL_MARK));
    let mut rules = vec![accept().with([mark])];
    rules.extend(of_probes(guard, Condition::to));
    rules.push(goto(REJECT_OUTBOUND));
    rules
}

fn ambient_inbound(guard: &AmbientGuard) -> Vec<Rule> {
    let ports: Spans = ZTUNNEL_INBOUND.into_iter().map(|port| Span::one(port.into())).collect();
    let mut rules = vec![accept().with([Condition::is(Key::DestinationPort, ports)])];
    rules.extend(of_probes(guard, Condition::from));
    rules.push(goto(REJECT_INBOUND));
    rules
}

/// Returns the rules that accept connections of the kubelet's probes, with a condition on the address.
fn of_probes(guard: &AmbientGuard, on: impl Fn(IpNet) -> Condition) -> impl Iterator<Item = Rule> {
    guard.probes.iter().map(move |probe| {
        let net = IpNet::from(*probe);
        Rule { family: Some(Family::of(&net)), ..accept() }.with([on(net)])
    })
}

/// Returns the condition that a packet enters through this interface.
fn from(name: &str) -> Condition {
    Condition::interface(Key::InInterface, name)
}

fn accept() -> Rule {
    Rule::new(Target::Accept)
}
