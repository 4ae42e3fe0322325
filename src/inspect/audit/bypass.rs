//! Finds the live rules that let traffic bypass the sidecar, with their counters: those of detour, and those of
//! istio-init and Istio's CNI plugin, which have the same netfilter chains.
//!
//! Traffic that the sidecar never handles is not part of it: the sidecar's own connections, its status ports
//! and HBONE, and what a pod sends to itself over `lo`.

use super::report::{CountedUnit, Direction, traffic};
use crate::firewall::native::EXCLUSIONS;
use crate::firewall::native::rule::{Condition, Key, NativeAction, NativeTable};
use crate::firewall::native::set::{Span, Spans};
use crate::firewall::rule::{Family, Hook, Table};
use crate::firewall::{Counter, RuleView, RulesetView, TableId};
use crate::policy::{PROXY_PORTS, Redirect};
use std::collections::BTreeMap;

/// The netfilter chain that Istio's and detour's rules enter first, at the hook `OUTPUT`.
const OUTPUT: &str = "ISTIO_OUTPUT";
/// … and at the hook `PREROUTING`.
const INBOUND: &str = "ISTIO_INBOUND";
/// The chains that redirect to the sidecar.
const TO_SIDECAR: [&str; 3] = ["ISTIO_REDIRECT", "ISTIO_IN_REDIRECT", "ISTIO_TPROXY"];
/// The chain that sends the sidecar's connections to its own pod back to it.
const IN_REDIRECT: &str = "ISTIO_IN_REDIRECT";
/// The sidecar's port for HBONE.
const TUNNEL: u16 = 15008;

/// Limit for the redirected parts that are listed if a direction is not redirected as a whole.
const MAX_CAPTURED: usize = 10;

const WITH_PROXY: &str = "the numbers contain the sidecar's own connections";
const WITH_LOOPBACK: &str = "the numbers contain connections to loopback addresses";
const WITH_SIDECAR_PORTS: &str = "the numbers contain connections to the sidecar's own ports";

/// Why a rule lets traffic bypass the sidecar.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cause {
    /// An exclusion of `uid-exclude` or `dns-exclude`.
    Exclusion,
    /// A setting of the redirection, by its key.
    Setting(&'static str),
    /// A rule of another program, with its text.
    OtherProgram(String),
    /// The rules of one family are missing.
    NoRules,
}

/// Traffic that bypasses the sidecar.
#[derive(Debug, Clone)]
pub(super) struct FoundBypass {
    pub cause: Cause,
    pub traffic: String,
    /// The conditions of the rule, to find out what requested it.
    pub conditions: Vec<Condition>,
    /// What the rules counted; `None` if no rule counts the traffic.
    pub counter: Option<Counter>,
    pub counts: CountedUnit,
    pub note: Option<&'static str>,
    /// Whether a rule of another program before the redirection lets it bypass the sidecar.
    pub by_other_program: bool,
}

/// A live table, and the table of iptables to which it corresponds.
#[derive(Debug, Clone, Copy)]
struct LiveTable<'a> {
    table: Table,
    id: TableId,
    view: &'a RulesetView,
}

impl<'a> LiveTable<'a> {
    fn all(view: &'a RulesetView) -> impl Iterator<Item = Self> {
        view.tables().map(move |(id, _)| {
            let table = match id {
                TableId::Iptables(_, table) | TableId::Native(NativeTable::Of(table)) => table,
                TableId::Native(NativeTable::Exclusions) => Table::Nat,
            };
            Self { table, id, view }
        })
    }

    fn chain(self, name: &str) -> &'a [RuleView] {
        self.view.chain(self.id, name)
    }
}

/// Returns whether the rule has a condition on `key`.
fn checks(rule: &RuleView, key: Key) -> bool {
    rule.conditions().iter().any(|condition| condition.key == key)
}

/// Returns whether the rule applies only to traffic over `lo`.
fn is_local(rule: &RuleView) -> bool {
    let is_interface = |condition: &Condition| matches!(condition.key, Key::OutInterface | Key::InInterface);
    rule.conditions().iter().any(|c| is_interface(c) && !c.not && c.value_texts() == ["lo"])
}

/// Returns whether the rule can apply to packets of a family. One that detour would not write may apply to both.
fn applies_to(rule: &RuleView, table: TableId, family: Family) -> bool {
    let of_table = match table {
        TableId::Iptables(own, _) => Some(own),
        TableId::Native(_) => None,
    };
    rule.rule.as_ref().and_then(|rule| rule.family).or(of_table).is_none_or(|own| own == family)
}

/// The IDs that identify the sidecar's own traffic.
#[derive(Debug, Clone, Default)]
pub(super) struct ProxyIds {
    pub uids: Spans,
    pub gids: Spans,
}

impl ProxyIds {
    /// Returns the IDs in the live rules and, if detour redirects the pod, those of the desired state.
    pub(super) fn of(view: &RulesetView, redirect: Option<&Redirect>) -> Self {
        let mut ids = Self::default();
        if let Some(redirect) = redirect {
            redirect.proxy_uid.iter().for_each(|id| ids.uids.insert(Span::one((*id).into())));
            redirect.proxy_gid.iter().for_each(|id| ids.gids.insert(Span::one((*id).into())));
        }
        let rules = LiveTable::all(view).flat_map(|table| table.chain(OUTPUT));
        for condition in rules.filter(|rule| rule.jump_target() == Some(IN_REDIRECT)).flat_map(RuleView::conditions) {
            match condition.key {
                Key::Uid if !condition.not => ids.uids.extend(&condition.values),
                Key::Gid if !condition.not => ids.gids.extend(&condition.values),
                _ => {}
            }
        }
        ids
    }

    /// Returns the conditions without the sidecar's own IDs, as [`rest_of`].
    fn without(&self, conditions: &[Condition]) -> Option<(Vec<Condition>, bool)> {
        rest_of(conditions, |condition| match condition.key {
            Key::Uid => Some(&self.uids),
            Key::Gid => Some(&self.gids),
            _ => None,
        })
    }
}

/// How much of one direction's TCP is redirected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Capture {
    #[default]
    Nothing,
    /// Only what matches one of these.
    Some(Vec<Vec<Condition>>),
    All,
}

/// The result of a scan of all live rules.
#[derive(Debug, Default)]
pub(super) struct Scan {
    pub found: Vec<FoundBypass>,
    captured: BTreeMap<(Family, Direction), Capture>,
}

/// Scans the live rules. `redirect` has the settings of detour's redirection, if it redirects the pod.
pub(super) fn scan(view: &RulesetView, proxy: &ProxyIds, redirect: Option<&Redirect>) -> Scan {
    let mut sidecar_ports: Spans =
        PROXY_PORTS.iter().map(|ports| ports.first).chain([TUNNEL]).map(|port| Span::one(port.into())).collect();
    redirect.iter().for_each(|redirect| sidecar_ports.insert(Span::one(redirect.inbound_tunnel_port.into())));
    let mut scan = Scan::default();
    for table in LiveTable::all(view).filter(|table| table.table != Table::Raw) {
        if table.table == Table::Nat {
            scan.hook(table, Hook::Output, OUTPUT, proxy);
            scan.exclusions(table, proxy);
            scan.outbound(table, proxy);
        }
        scan.hook(table, Hook::Prerouting, INBOUND, proxy);
        scan.inbound(table, &sidecar_ports);
    }
    scan
}

impl Scan {
    /// Returns whether traffic of a family is redirected, in at least one direction.
    pub(super) fn redirects(&self, family: Family) -> bool {
        [Direction::Outbound, Direction::Inbound].into_iter().any(|d| *self.capture(family, d) != Capture::Nothing)
    }

    fn capture(&self, family: Family, direction: Direction) -> &Capture {
        self.captured.get(&(family, direction)).unwrap_or(&Capture::Nothing)
    }

    /// Adds the traffic that no rule redirects, for the families of the pod's addresses. Call it for redirected pods
    /// only.
    pub(super) fn add_uncaptured(&mut self, families: &[Family]) {
        let uncounted = |cause, traffic| FoundBypass {
            cause,
            traffic,
            conditions: Vec::new(),
            counter: None,
            counts: CountedUnit::Connections,
            note: Some("no rule counts it"),
            by_other_program: false,
        };
        for &family in families {
            let version = match family {
                Family::Ip => "IPv4",
                Family::Ip6 => "IPv6",
            };
            if !self.redirects(family) {
                self.found.push(uncounted(Cause::NoRules, format!("all {version} traffic")));
                continue;
            }
            for (direction, key) in
                [(Direction::Outbound, "outbound_ip_ranges_include"), (Direction::Inbound, "inbound_ports_include")]
            {
                let what = match self.capture(family, direction) {
                    Capture::All => continue,
                    Capture::Nothing => format!("{direction} {version} tcp"),
                    Capture::Some(captured) => {
                        let more = captured.len().saturating_sub(MAX_CAPTURED);
                        let listed = captured.iter().take(MAX_CAPTURED).map(|c| traffic(direction, c));
                        let more = (more > 0).then(|| format!("{more} more"));
                        let listed: Vec<String> = listed.chain(more).collect();
                        format!("{direction} {version} tcp, except {}", listed.join(", "))
                    }
                };
                self.found.push(uncounted(Cause::Setting(key), what));
            }
        }
    }

    /// Scans a built-in chain up to the jump to `redirection`: rules before it decide first.
    fn hook(&mut self, table: LiveTable<'_>, hook: Hook, redirection: &str, proxy: &ProxyIds) {
        let rules = table.chain(hook.chain());
        let direction = if hook == Hook::Output { Direction::Outbound } else { Direction::Inbound };
        let Some(jump) = rules.iter().position(|rule| rule.jump_target() == Some(redirection)) else { return };
        let (key, before) = match hook {
            Hook::Output => (Key::OutInterface, &rules[..jump]),
            _ => (Key::InInterface, &rules[..jump]),
        };
        // Interfaces of virtual machines have a rule that returns what their other rules do not redirect.
        let mut rerouted = Spans::default();
        for rule in before.iter().filter(|rule| rule.jump_target().is_some_and(|chain| TO_SIDECAR.contains(&chain))) {
            let interfaces = rule.conditions().iter().filter(|condition| condition.key == key && !condition.not);
            interfaces.for_each(|condition| rerouted.extend(&condition.values));
        }
        for rule in before.iter().filter(|rule| !is_local(rule)) {
            let (cause, conditions) = match rule.action() {
                Some(NativeAction::Return) if rule.conditions().iter().all(|c| c.key == key) && checks(rule, key) => {
                    let others = rest_of(rule.conditions(), |condition| (condition.key == key).then_some(&rerouted));
                    let Some((conditions, _)) = others else { continue };
                    (Cause::Setting("exclude_interfaces"), conditions)
                }
                Some(NativeAction::Jump(chain)) if chain.starts_with("ISTIO_") => continue,
                Some(
                    NativeAction::Drop | NativeAction::SetMark(_) | NativeAction::SaveMark | NativeAction::RestoreMark,
                ) => continue,
                _ => (Cause::OtherProgram(rule_in(hook.chain(), rule)), rule.conditions().to_vec()),
            };
            let by_other_program = matches!(cause, Cause::OtherProgram(_)) && proxy.without(&conditions).is_some();
            self.add(table, cause, direction, rule, conditions, None);
            self.found.last_mut().into_iter().for_each(|found| found.by_other_program = by_other_program);
        }
    }

    /// Scans the chain of detour's exclusions, except those of containers.
    fn exclusions(&mut self, table: LiveTable<'_>, proxy: &ProxyIds) {
        for rule in
            table.chain(EXCLUSIONS).iter().filter(|rule| rule.rule.as_ref().is_none_or(|rule| rule.cgroup.is_none()))
        {
            if let Some((conditions, is_shared)) = proxy.without(rule.conditions()) {
                let note = is_shared.then_some(WITH_PROXY);
                self.add(table, Cause::Exclusion, Direction::Outbound, rule, conditions, note);
            }
        }
    }

    /// Scans Istio's chain for outbound traffic.
    fn outbound(&mut self, table: LiveTable<'_>, proxy: &ProxyIds) {
        let loopback = |family| match family {
            Family::Ip => Spans::of(0x7f00_0000_u32, 0x7fff_ffff_u32),
            Family::Ip6 => Spans::one(1_u8),
        };
        let loopback = [loopback(Family::Ip), loopback(Family::Ip6)];
        for rule in table.chain(OUTPUT).iter().filter(|rule| !is_local(rule)) {
            if rule.action() != Some(&NativeAction::Return) {
                continue;
            }
            let of = |keys: &[Key]| rule.conditions().iter().all(|c| keys.contains(&c.key) || c.key == Key::Protocol);
            let has = |key: Key| checks(rule, key);
            let addresses = [Key::Destination(Family::Ip), Key::Destination(Family::Ip6)];
            let (key, note) = if of(&[Key::DestinationPort]) && (has(Key::DestinationPort) || has(Key::Protocol)) {
                ("outbound_ports_exclude", None)
            } else if of(&[Key::Uid]) && has(Key::Uid) {
                // Only the sidecar's UIDs have such rules.
                continue;
            } else if of(&[Key::Gid]) && rule.conditions().iter().any(|c| c.key == Key::Gid && c.not) {
                ("owner_groups_include", None)
            } else if of(&[Key::Gid]) && has(Key::Gid) {
                ("owner_groups_exclude", Some(WITH_PROXY))
            } else if of(&addresses) {
                ("outbound_ip_ranges_exclude", Some(WITH_LOOPBACK))
            } else {
                self.add(
                    table,
                    Cause::OtherProgram(rule_in(OUTPUT, rule)),
                    Direction::Outbound,
                    rule,
                    rule.conditions().to_vec(),
                    None,
                );
                continue;
            };
            let others = rest_of(rule.conditions(), |condition| match condition.key {
                Key::Gid => Some(&proxy.gids),
                Key::Destination(Family::Ip) => Some(&loopback[0]),
                Key::Destination(Family::Ip6) => Some(&loopback[1]),
                _ => None,
            });
            if let Some((conditions, is_shared)) = others {
                let note = note.filter(|_| is_shared);
                self.add(table, Cause::Setting(key), Direction::Outbound, rule, conditions, note);
            }
        }
        self.add_captured(table, Hook::Output, OUTPUT, Direction::Outbound);
    }

    /// Scans Istio's chain for inbound traffic.
    fn inbound(&mut self, table: LiveTable<'_>, sidecar_ports: &Spans) {
        for rule in table.chain(INBOUND).iter().filter(|rule| !is_local(rule) && !checks(rule, Key::Mark)) {
            let is_exclusion = rule.conditions().iter().all(|c| matches!(c.key, Key::Protocol | Key::DestinationPort));
            if rule.action() != Some(&NativeAction::Return) || !is_exclusion {
                continue;
            }
            let others = rest_of(rule.conditions(), |c| (c.key == Key::DestinationPort).then_some(sidecar_ports));
            if let Some((conditions, is_shared)) = others {
                let note = is_shared.then_some(WITH_SIDECAR_PORTS);
                let cause = Cause::Setting("inbound_ports_exclude");
                self.add(table, cause, Direction::Inbound, rule, conditions, note);
            }
        }
        self.add_captured(table, Hook::Prerouting, INBOUND, Direction::Inbound);
    }

    /// Records what the rules of `chain` redirect, if packets enter the chain at `hook`.
    fn add_captured(&mut self, table: LiveTable<'_>, hook: Hook, chain: &str, direction: Direction) {
        for family in Family::ALL {
            let enters = |rule: &RuleView| applies_to(rule, table.id, family) && rule.jump_target() == Some(chain);
            if !table.chain(hook.chain()).iter().any(enters) {
                continue;
            }
            let captured = self.captured.entry((family, direction)).or_default();
            let redirects = |rule: &&RuleView| {
                let to_sidecar = rule.jump_target().is_some_and(|target| TO_SIDECAR.contains(&target));
                let is_redirect =
                    matches!(rule.action(), Some(NativeAction::Redirect(_) | NativeAction::Tproxy { .. }));
                applies_to(rule, table.id, family) && !is_local(rule) && (to_sidecar || is_redirect)
            };
            for rule in table.chain(chain).iter().filter(redirects) {
                let is_all = rule.conditions().iter().all(|condition| condition.key == Key::Protocol);
                match captured {
                    Capture::All => {}
                    _ if is_all => *captured = Capture::All,
                    Capture::Nothing => *captured = Capture::Some(vec![rule.conditions().to_vec()]),
                    Capture::Some(list) => list.push(rule.conditions().to_vec()),
                }
            }
        }
    }

    fn add(
        &mut self,
        table: LiveTable<'_>,
        cause: Cause,
        direction: Direction,
        rule: &RuleView,
        conditions: Vec<Condition>,
        note: Option<&'static str>,
    ) {
        let counts = if table.table == Table::Nat { CountedUnit::Connections } else { CountedUnit::Packets };
        let traffic = traffic(direction, &conditions);
        self.found.push(FoundBypass {
            cause,
            traffic,
            conditions,
            counter: Some(rule.counter),
            counts,
            note,
            by_other_program: false,
        });
    }
}

fn rule_in(chain: &str, rule: &RuleView) -> String {
    format!("{chain} {}", rule.text)
}

/// Returns the conditions without the values that do not bypass the sidecar, and whether any were removed. Returns
/// `None` if no value is left. `removed` returns the values to remove from a condition that is not negated.
fn rest_of<'a>(
    conditions: &[Condition],
    removed: impl Fn(&Condition) -> Option<&'a Spans>,
) -> Option<(Vec<Condition>, bool)> {
    let (mut rest, mut is_shared) = (Vec::new(), false);
    for condition in conditions {
        let mut condition = condition.clone();
        if let Some(removed) = removed(&condition).filter(|_| !condition.not) {
            let values = condition.values.without(removed);
            if values.as_slice().is_empty() {
                return None;
            }
            is_shared |= values != condition.values;
            condition.values = values;
        }
        rest.push(condition);
    }
    Some((rest, is_shared))
}
